"""How many bytes a forward pass keeps for backward, and which module keeps them.

Counted are the storages that are alive when forward has ended, each once however many operations saved it or a view of it;
parameters and buffers, which exist anyway, are not counted. A view keeps its whole storage, so the whole is counted. What the
techniques of this package keep in their own way (codes, selectively kept outputs) reports itself through `note`; casts of weights that
layers keep for the step are counted at the end, also where no step has begun yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """`total`, and the bytes that each module saved first, by dotted name ("" is the model itself). `print` it for a table."""

    total: int
    by_module: Mapping[str, int]

    def below(self, name: str) -> int:
        """Bytes of a module and all modules in it."""
        return sum(count for module, count in self.by_module.items() if module == name or module.startswith(f"{name}."))

    def __str__(self) -> str:
        rows = sorted(self.by_module.items(), key=lambda item: -item[1])
        width = max([len(name or "(model)") for name, _ in rows], default=3)
        lines = [f"{name or '(model)':<{width}}  {count:>15,} bytes" for name, count in rows]
        return "\n".join([*lines, f"{'all':<{width}}  {self.total:>15,} bytes"])


@dataclass
class Meter:
    """Storages seen while it is active, by the module at work."""

    known: set[int]
    modules: list[str] = field(default_factory=lambda: [""])
    seen: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The reference keeps the address from being given to another storage.
        if storage._cdata not in self.known and storage._cdata not in self.seen:
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), self.modules[-1])

    def note_all(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.note(tensor)

    def result(self) -> SavedBytes:
        by_module: dict[str, int] = {}
        for reference, count, module in self.seen.values():
            if not reference.expired():
                by_module[module] = by_module.get(module, 0) + count
        return SavedBytes(total=sum(by_module.values()), by_module=by_module)


_ACTIVE: ContextVar[Callable[[Tensor], None] | None] = ContextVar("narrowgauge_noted", default=None)


@contextmanager
def noting(heard: Callable[[Tensor], None]) -> Iterator[None]:
    """`heard` is called with every tensor that is noted in it."""
    token = _ACTIVE.set(heard)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def note(*tensors: Tensor) -> None:
    """Counts tensors that are kept for backward without autograd's knowledge, if a measurement is active."""
    if (heard := _ACTIVE.get()) is not None:
        for tensor in tensors:
            heard(tensor)


def apart(tensor: Tensor) -> Tensor:
    """The tensor, for a hook to keep: an operation that saves its own result would hold itself, for ever where no backward runs."""
    return tensor if tensor.is_leaf else tensor.detach()


def saved_bytes(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None) -> SavedBytes:
    """Bytes that a forward pass of `model` keeps for backward.

    batch  keyword arguments as a mapping, positional ones as a tuple, or one tensor
    loss   called with the model's output, so that what the loss keeps (logits) is counted; without it the output's graph alone

    One forward pass. Torch's generators, buffers (amax windows) and gradients are left as they were. Raises ConfigError if nothing in
    the output requires a gradient.
    """
    known = {
        tensor.untyped_storage()._cdata
        for tensor in [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
        if isinstance(tensor, Tensor)
    }
    meter, names = Meter(known), {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, arguments: Any) -> None:
        meter.modules.append(names.get(module, meter.modules[-1]))

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        meter.modules.pop()

    def pack(tensor: Tensor) -> Tensor:
        meter.note(tensor)
        return apart(tensor)

    with ExitStack() as stack:
        devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
        stack.enter_context(torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)))
        stack.callback(_put_back, [(buffer, buffer.detach().clone()) for buffer in model.buffers()])
        for layer in model.modules():
            if isinstance(layer, QLinear) and layer.training:
                stack.enter_context(layer.keeping_apart())
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(noting(meter.note))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, tuple):
            output = model(*batch)
        else:
            output = model(batch)
        result = output if loss is None else loss(output)
        # A model output of transformers is a mapping, but no node of pytree.
        leaves = tree_leaves(dict(result) if isinstance(result, Mapping) else result)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise ConfigError(
                f"saved_bytes: nothing in the output of {type(model).__name__} requires a gradient. Unfreeze some."
            )
        if loss is not None:
            del output
        for name, module in model.named_modules():
            meter.modules = [name]
            for casts in module.kept_casts() if isinstance(module, QLinear) else ():
                meter.note_all(casts.tensors())
        return meter.result()


def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
