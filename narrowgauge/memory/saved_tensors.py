"""Shared by compression and offloading: choose saved tensors and store them in another form.

Some tensors are never replaced, since they exist anyway or must stay exact. These are parameters,
buffers and tensors that share their storage, and block inputs without gradient (masks, rotary
tables). Views of a larger storage and tensors that the technique declines are left alone too. A
technique that rounds handles activations only. It skips integers and bools, and tensors saved by
attention, softmax, dropout and the loss.

Autograd does not report which operation saves a tensor. The block therefore runs under a
TorchFunctionMode that tracks the running function.

Autograd's hooks do not see tensors saved outside it: codes, outputs kept for recomputation. Code
that saves one calls `report_saved`. Measurements receive the reports: `measure.saved_bytes` and the
trace of `narrowgauge plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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

MATMULS: frozenset[Any] = frozenset(
    {
        *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm),
        *(F.conv1d, F.conv2d, torch.conv1d, torch.conv2d),
    }
)
# Their gradients need exact tensors, or combine saved tensors with exact statistics.
EXACT: frozenset[Any] = frozenset(
    {
        *(
            F.scaled_dot_product_attention,
            F.multi_head_attention_forward,
            F.softmax,
            torch.softmax,
            Tensor.softmax,
        ),
        *(F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp, Tensor.logsumexp),
        *(F.cross_entropy, F.nll_loss, F.embedding, F.dropout, torch.dropout),
    }
)

Restore = Callable[[], Tensor]


_ACTIVE: ContextVar[Callable[[Tensor], None] | None] = ContextVar("narrowgauge_noted", default=None)


@contextmanager
def reporting(callback: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `callback` with every tensor reported by `report_saved` inside this context."""
    token = _ACTIVE.set(callback)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def report_saved(*tensors: Tensor) -> None:
    """Report tensors saved for backward without autograd, if a measurement is active."""
    if (callback := _ACTIVE.get()) is not None:
        for tensor in tensors:
            callback(tensor)


def detached(tensor: Tensor) -> Tensor:
    """Return the tensor in a form that a saved-tensor hook may hold: detached unless it is a leaf.

    An operation that saves its own result would otherwise hold itself, and leak if backward never
    runs.
    """
    return tensor if tensor.is_leaf else tensor.detach()


class SavedActivations:
    """A technique that stores saved activations in another form.

    name    of the user's function, for error messages
    rounds  True if the restored tensors are not exact
    """

    name: ClassVar[str]
    rounds: ClassVar[bool]

    def accepts(self, tensor: Tensor) -> bool:
        raise NotImplementedError

    def store(self, tensor: Tensor) -> Restore:
        """Store a contiguous tensor; return a function that restores it, in any shape.

        Called once for tensors with the same memory.
        """
        raise NotImplementedError

    @contextmanager
    def hooks(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        if torch.compiler.is_compiling():
            raise ConfigError(
                f"{self.name}: the compiler fixes what is kept for backward itself and sees no saved tensors. "
                "Do not compile the model, or use checkpoint instead.",
                code="saved-tensors.compiled",
            )
        exact = [*block.parameters(), *block.buffers()]
        exact += [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and not leaf.requires_grad
        ]
        with SavedTensorMode(self, {tensor.untyped_storage()._cdata for tensor in exact}) as mode:
            try:
                with torch.autograd.graph.saved_tensors_hooks(mode.pack, _unpack):
                    yield
            finally:
                mode.clear()


def blocks_for(
    kind: type[SavedActivations], model: nn.Module, names: str | Iterable[str] | None
) -> list[nn.Module]:
    """Return the model's blocks. Raises ConfigError if another technique handles their saved tensors.

    Only one saved-tensor hook can replace a tensor.
    """
    found = find_blocks(model, names, kind.name)
    for name, block in found.items():
        forward = forward_of(block)
        if forward and forward.saving is not None and not isinstance(forward.saving, kind):
            raise ConfigError(
                f"{name}: its saved activations are under {forward.saving.name} already. Take that off first, "
                f"{forward.saving.name}(model, None), or give each a part of the model with blocks=.",
                code="saved-tensors.twice",
            )
    return list(found.values())


class SavedTensorMode(TorchFunctionMode):
    """One forward pass of one block: tracks the running function and stores each tensor once.

    technique           the technique
    exact               storages of parameters, buffers and inputs without gradient
    saved_unchanged     storages that some operation saves unchanged; storing another form would
                        save nothing
    stored              key of a stored tensor -> function that restores it
    exact_depth         nesting depth of functions whose tensors stay exact
    operands            storages of the activations among a matmul's operands, while one runs under
                        autocast
    copied_from         storage of an autocast copy -> storage of its source; copies of one source
                        are equal
    storage_references  weak references that prevent the reuse of storage addresses
    """

    def __init__(self, technique: SavedActivations, exact: set[int]) -> None:
        super().__init__()
        self.technique, self.exact = technique, exact
        self.saved_unchanged = set(exact)
        self.stored: dict[Any, Restore] = {}
        self.exact_depth = 0
        self.operands: set[int] | None = None
        self.copied_from: dict[int, int] = {}
        self.storage_references: list[StorageWeakRef] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in EXACT:
            self.exact_depth += 1
            try:
                return func(*args, **kwargs)
            finally:
                self.exact_depth -= 1
        if func in MATMULS and self.operands is None:
            return self._matmul(func, args, kwargs)
        return func(*args, **kwargs)

    def _matmul(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = tensors[0].device.type
        if not torch.is_autocast_enabled(kind) or not any(
            self._is_exact(tensor) for tensor in tensors
        ):
            return func(*args, **kwargs)
        dtype = torch.get_autocast_dtype(kind)
        # Autocast casts the weight inside the matmul, and autograd saves that copy, which looks
        # like an activation of the same shape. So cast the activations beforehand, as autocast
        # would: only they are replaced among the tensors saved by this matmul.
        args = tuple(self._cast(each, dtype) for each in args)
        self.operands = {
            each.untyped_storage()._cdata
            for each in args
            if isinstance(each, Tensor) and not self._is_exact(each)
        }
        try:
            return func(*args, **kwargs)
        finally:
            self.operands = None

    def _cast(self, argument: Any, dtype: torch.dtype) -> Any:
        if (
            not isinstance(argument, Tensor)
            or self._is_exact(argument)
            or argument.dtype in (torch.float64, dtype)
        ):
            return argument
        if not argument.is_floating_point():
            return argument
        cast = argument.to(dtype)
        self.copied_from[self._reserved_address(cast)] = self._reserved_address(argument)
        return cast

    def _is_exact(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.exact

    def _reserved_address(self, tensor: Tensor) -> int:
        """Return the storage address of the tensor, and reserve it for this pass."""
        self.storage_references.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.untyped_storage()._cdata

    def pack(self, tensor: Tensor) -> Tensor | Restore:
        """Saved-tensor hook: return the tensor, or a function that restores it."""
        storage = tensor.untyped_storage()._cdata
        if not self.technique.accepts(tensor) or storage in self.saved_unchanged:
            report_saved(tensor)
            return detached(tensor)
        if self.technique.rounds and not self._is_activation(tensor):
            # Other operations that save this storage save it unchanged too: a second form costs
            # memory.
            self.saved_unchanged.add(self._reserved_address(tensor))
            report_saved(tensor)
            return detached(tensor)
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
        # Axes in memory order: transposed tensors become contiguous, and equal memory gets one key.
        in_memory = tensor.permute(order)
        if not in_memory.is_contiguous() or (self.technique.rounds and in_memory.shape[-1] < 2):
            # A view of a larger storage, or row statistics.
            report_saved(tensor)
            return detached(tensor)
        source = self.copied_from.get(storage, storage)
        # _version: an in-place change between two saves makes another tensor.
        key = (
            source,
            tensor.storage_offset(),
            tensor.numel(),
            in_memory.shape[-1:],
            tensor.dtype,
            tensor._version,
        )
        if key not in self.stored:
            self._reserved_address(tensor)
            self.stored[key] = self.technique.store(in_memory)
        return partial(
            _restored,
            self.stored[key],
            in_memory.shape,
            [order.index(axis) for axis in range(tensor.ndim)],
        )

    def _is_activation(self, tensor: Tensor) -> bool:
        if self.exact_depth or not tensor.is_floating_point() or tensor.element_size() < 2:
            return False
        return self.operands is None or tensor.untyped_storage()._cdata in self.operands

    def clear(self) -> None:
        """Drop the stored forms at the end of forward.

        Autograd references `pack`, and so this object, as long as the graph. A stored form should
        be freed with the operation that needs it.
        """
        self.storage_references.clear()
        self.stored.clear()


def _restored(stored: Restore, shape: torch.Size, axes: list[int]) -> Tensor:
    return stored().reshape(shape).permute(axes)


def _unpack(packed: Tensor | Restore) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()
