"""What the techniques for saved activations share: which tensors they may handle, and how a tensor is kept and given back.

Never touched, because they exist anyway or must be exact: parameters, buffers and what shares memory with them; inputs of the block
that need no gradient (masks, rotary tables); parts of larger memory; what the technique itself does not take. A technique that rounds
takes activations alone: not integers and booleans, nor what attention, softmax, dropout and the loss save.

Autograd does not say which operation saves a tensor, so the block runs under a TorchFunctionMode that keeps the name of the
function at work. Under autocast a product casts its weight inside, and the cast is saved: so the operands that are no parameters
are cast beforehand, as autocast would, and of what such a product saves only these count as activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, forward_of
from narrowgauge.memory.measure import apart, note

PRODUCTS: frozenset[Any] = frozenset(
    {
        *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm),
        *(F.conv1d, F.conv2d, torch.conv1d, torch.conv2d),
    }
)
# Their gradients need exact statistics, or combine what they saved with statistics that are exact.
EXACT: frozenset[Any] = frozenset(
    {
        *(F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax, torch.softmax, Tensor.softmax),
        *(F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp),
        *(F.cross_entropy, F.nll_loss, F.embedding, F.dropout, torch.dropout),
    }
)

Restore = Callable[[], Tensor]


class SavedActivations:
    """A technique: keeps what blocks save for backward in another form. `rounds`: what it gives back is not exact."""

    name: ClassVar[str]
    rounds: ClassVar[bool]

    def takes(self, tensor: Tensor) -> bool:
        raise NotImplementedError

    def store(self, tensor: Tensor) -> Restore:
        """Keeps a contiguous tensor; called once for tensors that hold the same memory. -> what gives it back, in any shape."""
        raise NotImplementedError

    @contextmanager
    def around(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        if torch.compiler.is_compiling():
            raise ConfigError(
                f"{self.name}: the compiler fixes what is kept for backward itself and sees no saved tensors. "
                "Do not compile the model, or use checkpoint instead."
            )
        exact = [*block.parameters(), *block.buffers()]
        exact += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.requires_grad]
        with SavedTensorMode(self, {tensor.untyped_storage()._cdata for tensor in exact}) as mode:
            try:
                with torch.autograd.graph.saved_tensors_hooks(mode.pack, _unpack):
                    yield
            finally:
                mode.forget()


def blocks_for(kind: type[SavedActivations], model: nn.Module, names: str | Iterable[str] | None) -> list[nn.Module]:
    """The model's blocks. Raises ConfigError if another kind keeps what one saves: only one kind of hook can have it."""
    found = find_blocks(model, names, kind.name)
    for name, block in found.items():
        forward = forward_of(block)
        if forward and forward.saving is not None and not isinstance(forward.saving, kind):
            raise ConfigError(
                f"{name}: its saved activations are under {forward.saving.name} already. Take that off first, "
                f"{forward.saving.name}(model, None), or give each a part of the model with blocks=."
            )
    return list(found.values())


class SavedTensorMode(TorchFunctionMode):
    """One pass through one block: tracks the running function, and keeps each tensor once."""

    def __init__(self, technique: SavedActivations, exact: set[int]) -> None:
        super().__init__()
        self.technique, self.exact = technique, exact
        self.kept = set(exact)  # storages that some operation keeps as they are: a second form of them saves nothing
        self.stored: dict[Any, Restore] = {}
        self.depth_exact = 0
        self.operands: set[int] | None = None  # storages of a product's operands under autocast that are activations
        # Storage of a cast operand -> of what it was cast from; equal casts are equal.
        self.origins: dict[int, int] = {}
        self.references: list[StorageWeakRef] = []  # keep addresses from being given away

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in EXACT:
            self.depth_exact += 1
            try:
                return func(*args, **kwargs)
            finally:
                self.depth_exact -= 1
        if func in PRODUCTS and self.operands is None:
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = tensors[0].device.type
        if not torch.is_autocast_enabled(kind) or not any(self._is_exact(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        dtype = torch.get_autocast_dtype(kind)
        args = tuple(self._cast(each, dtype) for each in args)
        self.operands = {
            each.untyped_storage()._cdata for each in args if isinstance(each, Tensor) and not self._is_exact(each)
        }
        try:
            return func(*args, **kwargs)
        finally:
            self.operands = None

    def _cast(self, argument: Any, dtype: torch.dtype) -> Any:
        if not isinstance(argument, Tensor) or self._is_exact(argument) or argument.dtype in (torch.float64, dtype):
            return argument
        if not argument.is_floating_point():
            return argument
        cast = argument.to(dtype)
        self.origins[self._held(cast)] = self._held(argument)
        return cast

    def _is_exact(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.exact

    def _held(self, tensor: Tensor) -> int:
        """The tensor's storage, whose address no other gets in this pass."""
        self.references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.untyped_storage()._cdata

    def pack(self, tensor: Tensor) -> Tensor | Restore:
        """What autograd keeps of a tensor that it saves now: the tensor, or what gives it back."""
        storage = tensor.untyped_storage()._cdata
        if not self.technique.takes(tensor) or storage in self.kept:
            note(tensor)
            return apart(tensor)
        if self.technique.rounds and not self._is_activation(tensor):
            self.kept.add(self._held(tensor))
            note(tensor)
            return apart(tensor)
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
        in_memory = tensor.permute(order)
        if not in_memory.is_contiguous() or (self.technique.rounds and in_memory.shape[-1] < 2):
            # A part of something larger, or statistics.
            note(tensor)
            return apart(tensor)
        origin = self.origins.get(storage, storage)
        key = (origin, tensor.storage_offset(), tensor.numel(), in_memory.shape[-1:], tensor.dtype, tensor._version)
        if key not in self.stored:
            self._held(tensor)
            self.stored[key] = self.technique.store(in_memory)
        return partial(_restored, self.stored[key], in_memory.shape, [order.index(axis) for axis in range(tensor.ndim)])

    def _is_activation(self, tensor: Tensor) -> bool:
        if self.depth_exact or not tensor.is_floating_point() or tensor.element_size() < 2:
            return False
        return self.operands is None or tensor.untyped_storage()._cdata in self.operands

    def forget(self) -> None:
        """Autograd holds on to `pack` as long as to the graph; what is stored is to go with the operation that needs it."""
        self.references.clear()
        self.stored.clear()


def _restored(stored: Restore, shape: torch.Size, axes: list[int]) -> Tensor:
    return stored().reshape(shape).permute(axes)


def _unpack(kept: Tensor | Restore) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()
