"""Measure the bytes that a forward pass saves for backward, by module.

Counts every storage that is alive at the end of forward, once for all operations and views that
saved it. A view counts its whole storage. Parameters and buffers are not counted, since they exist
anyway.

Tensors saved without autograd (codes, outputs saved by selective checkpointing) are reported
through `saved_tensors.report_saved`. Weight casts that layers cache for the step are counted at the
end, even before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError
from narrowgauge.memory.saved_tensors import detached, reporting
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops import rng


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes saved for backward; `print` it for a table.

    total      bytes in total
    by_module  dotted name of the module that saved a storage first -> bytes; "" is the model itself
    """

    total: int
    by_module: Mapping[str, int]

    def below(self, name: str) -> int:
        """Return the bytes of a module and all its submodules."""
        return sum(
            count
            for module, count in self.by_module.items()
            if module == name or module.startswith(f"{name}.")
        )

    def __str__(self) -> str:
        rows = sorted(self.by_module.items(), key=lambda item: -item[1])
        width = max([len(name or "(model)") for name, _ in rows], default=3)
        lines = [f"{name or '(model)':<{width}}  {count:>15,} bytes" for name, count in rows]
        return "\n".join([*lines, f"{'all':<{width}}  {self.total:>15,} bytes"])


@dataclass
class Meter:
    """Storages saved while it is active.

    excluded  storages not to count: parameters, buffers and inputs
    modules   stack of the running modules' names
    storages  storage address -> (weak reference, bytes, module)
    """

    excluded: set[int]
    modules: list[str] = field(default_factory=lambda: [""])
    storages: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The weak reference below prevents the reuse of the address by another storage.
        if storage._cdata not in self.excluded and storage._cdata not in self.storages:
            self.storages[storage._cdata] = (
                StorageWeakRef(storage),
                storage.nbytes(),
                self.modules[-1],
            )

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.add(tensor)

    def result(self) -> SavedBytes:
        by_module: dict[str, int] = {}
        for reference, count, module in self.storages.values():
            # Storages freed during forward are not saved for backward.
            if not reference.expired():
                by_module[module] = by_module.get(module, 0) + count
        return SavedBytes(total=sum(by_module.values()), by_module=by_module)


def saved_bytes(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None
) -> SavedBytes:
    """Measure the bytes that a forward pass of `model` saves for backward.

    batch  keyword arguments as a mapping, positional arguments as a tuple, or one tensor
    loss   function of the model's output, so that tensors saved by the loss (logits) count too;
           None: count the output's graph alone

    Cost: one forward pass. Random generators, buffers (amax histories) and gradients are unchanged.
    Raises ConfigError if the output does not require gradients.
    """
    excluded = {
        tensor.untyped_storage()._cdata
        for tensor in [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
        if isinstance(tensor, Tensor)
    }
    meter, names = Meter(excluded), {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, arguments: Any) -> None:
        # A module outside the model (a loss) counts as its caller.
        meter.modules.append(names.get(module, meter.modules[-1]))

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        meter.modules.pop()

    def pack(tensor: Tensor) -> Tensor:
        meter.add(tensor)
        return detached(tensor)

    with ExitStack() as stack:
        devices = {
            parameter.device.index
            for parameter in model.parameters()
            if parameter.device.type == "cuda"
        }
        stack.enter_context(rng.preserved(sorted(index for index in devices if index is not None)))
        stack.callback(_put_back, [(buffer, buffer.detach().clone()) for buffer in model.buffers()])
        # Casts made here must not stay in the layers' caches. A later training pass would find
        # them, and delayed scaling would miss an amax.
        for layer in model.modules():
            if isinstance(layer, QLinear) and layer.training:
                stack.enter_context(layer.separate_cache())
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(reporting(meter.add))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, tuple):
            output = model(*batch)
        else:
            output = model(batch)

        result = output if loss is None else loss(output)
        # transformers' ModelOutput is a mapping, but no pytree node.
        leaves = tree_leaves(dict(result) if isinstance(result, Mapping) else result)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise ConfigError(
                f"saved_bytes: nothing in the output of {type(model).__name__} requires a gradient. Unfreeze some.",
                code="saved-bytes.no-gradient",
            )
        # With a loss the output may be freed, as it is in a training loop.
        if loss is not None:
            del output
        for name, module in model.named_modules():
            meter.modules = [name]
            for casts in module.cached_casts() if isinstance(module, QLinear) else ():
                meter.add_all(casts.tensors())
        return meter.result()


def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
