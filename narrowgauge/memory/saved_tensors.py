"""Shared by the techniques for saved activations: which tensors they may handle, and which operation saves.

Never touched, because they exist anyway or must be exact: parameters, buffers and what shares memory with them; inputs of the block
that need no gradient (masks, rotary tables); integers and booleans; small tensors.

Autograd does not say which operation saves a tensor, so the block runs under a TorchFunctionMode that keeps the name of the
function at work. Under autocast a product casts its weight inside, and the cast is saved: so the operands that are no parameters
are cast beforehand, as autocast would, and of what such a product saves only these count as activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError

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

Pack = Callable[[Tensor], Any]


class SavedTensorMode(TorchFunctionMode):
    """Tracks the running function and, for a product under autocast, the operands that are activations.

    origins  storage of an operand that was cast beforehand -> the storage it was cast from; equal casts hold equal numbers
    """

    def __init__(self, exact_storages: set[int]) -> None:
        super().__init__()
        self.exact_storages = exact_storages
        self.depth_exact = 0
        self.operands: set[int] | None = None
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
        if not isinstance(argument, Tensor) or self._is_exact(argument) or argument.dtype == torch.float64:
            return argument
        if not argument.is_floating_point() or argument.dtype == dtype:
            return argument
        cast, storage = argument.to(dtype), argument.untyped_storage()
        self.references += [StorageWeakRef(storage), StorageWeakRef(cast.untyped_storage())]
        self.origins[cast.untyped_storage()._cdata] = storage._cdata
        return cast

    def _is_exact(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.exact_storages

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether the tensor that autograd saves now may be kept in another form."""
        if self.depth_exact or not tensor.is_floating_point() or tensor.element_size() < 2 or self._is_exact(tensor):
            return False
        return self.operands is None or tensor.untyped_storage()._cdata in self.operands


@contextmanager
def around_saves(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], verb: str, unpack: Callable[[Any], Tensor]
) -> Iterator[tuple[SavedTensorMode, Callable[[Pack], AbstractContextManager[object]]]]:
    """Enters a SavedTensorMode for the block; yields it, and what turns a pack function into the hooks to enter."""
    if torch.compiler.is_compiling():
        raise ConfigError(
            f"{verb}: the compiler fixes what is kept for backward itself and sees no saved tensors. "
            "Do not compile the model, or use checkpoint instead."
        )
    exact = [*block.parameters(), *block.buffers()]
    exact += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.requires_grad]
    working = SavedTensorMode({tensor.untyped_storage()._cdata for tensor in exact})
    with working:
        yield working, lambda pack: torch.autograd.graph.saved_tensors_hooks(pack, unpack)
