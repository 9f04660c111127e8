"""Observe each GEMM of each low-precision Linear in a step and measure it (`measure`) at once.

Nothing of the GEMM is stored. For recipes that save only codes of x, an observed layer saves x
itself (`KeepPolicy.observer_needs_x`), so that grad_weight is judged against x. Judged against the codes,
grad_weight looked exact. With `at_once` layers per pass, more passes need less memory each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.lab.blame.measure import Product
from narrowgauge.nn.narrow_layer import NarrowLayer, narrow_layers
from narrowgauge.nn.plan import OPERANDS as OPERANDS
from narrowgauge.nn.plan import PRODUCTS
from narrowgauge.structure import plain_name

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

Key = tuple[str, str]  # (layer, GEMM)


class LayerWatch:
    """Observer of one layer (`nn.observer.ProductObserver`)."""

    def __init__(self, name: str, layer: NarrowLayer, found: dict[Key, Product]) -> None:
        self.name, self.layer, self.found = name, layer, found
        # (GEMM, role) -> (original, codes) between the call of an operand and of its result.
        self.seen: dict[tuple[str, str], tuple[Tensor, QTensor | Tensor]] = {}
        self.noise: dict[tuple[str, str], Tensor] = {}

    def drew(self, gemm: str, role: str, noise: Tensor) -> None:
        self.noise[gemm, role] = noise

    def __call__(self, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        # Originals arrive untransposed; the second GEMM of a role reads its transpose.
        is_rows = PRODUCTS[role][0] == gemm
        self.seen[gemm, role] = (original.detach() if is_rows else original.detach().T, operand)

    def multiplied(self, gemm: str, bias: Tensor | None, result: Tensor) -> None:
        lhs, rhs = (self.seen.pop((gemm, role), None) for role in OPERANDS[gemm])
        left, right = (self.noise.pop((gemm, role), None) for role in OPERANDS[gemm])
        if lhs is None or rhs is None:
            return
        recipe = self.layer.recipe
        fast = recipe is not None and getattr(recipe, gemm).fast_accumulate
        product = self.found.setdefault((self.name, gemm), Product())
        # Measured inside the hook: storing operands until the end of the step would keep all
        # activations alive.
        product.add((lhs[0], rhs[0]), (lhs[1], rhs[1]), bias, result.detach(), fast, (left, right))


@contextmanager
def watching(
    layers: Sequence[tuple[str, NarrowLayer]], found: dict[Key, Product]
) -> Iterator[None]:
    """Measure GEMMs of `layers` inside the block; earlier observers are restored afterwards."""
    before = [layer.observer for _, layer in layers]
    try:
        for name, layer in layers:
            layer.observer = LayerWatch(name, layer, found)
        yield
    finally:
        for (_, layer), observer in zip(layers, before, strict=True):
            layer.observer = observer


def of_all_ranks(found: dict[Key, Product]) -> dict[Key, Product]:
    """Sum over all ranks; every rank must call this.

    Shards of a layer add up as micro-batches do.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return found
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, found)
    total: dict[Key, Product] = {}
    for each in told:
        for key, product in each.items():
            total.setdefault(key, Product()).take(product)
    return total


def converted(model: nn.Module) -> list[tuple[str, NarrowLayer]]:
    """Linears that use a recipe now, with their names stripped of wrappers."""
    return [
        (plain_name(name), each)
        for name, each in narrow_layers(model)
        if each.recipe is not None and not each.is_suspended
    ]
