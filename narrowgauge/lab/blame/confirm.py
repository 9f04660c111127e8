"""Confirm suspects without a trainer, by the gradient with one suspect alone in 16 bits.

    share = 1 - |g_suspect in 16 bits - g|^2 / |g_low - g|^2

g is the gradient with all GEMMs in 16 bits and the same random numbers, g_low the gradient of the
recipe. A suspect is confirmed if it accounts for at least SHARE of the squared distance.

Limits: faults that do not show in the gradient of one step. A saturating amax history may even
shorten the distance, and a GEMM whose result reaches no trained weight has no gradient. A probe
over many steps (train.blamed) detects these too. Costs a forward and a backward pass per suspect
and two more, and one copy of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.conversion.products import mixed
from narrowgauge.errors import ConfigError
from narrowgauge.lab.blame.report import Confirmation
from narrowgauge.lab.blame.watch import converted
from narrowgauge.nn.converted_model import suspended
from narrowgauge.recipe import Recipe
from narrowgauge.recipes import BF16
from narrowgauge.snapshot import undisturbed

if TYPE_CHECKING:
    from narrowgauge.lab.blame.judge import Finding

SHARE = 0.1


@contextmanager
def in_16_bits(model: nn.Module, findings: Iterable[Finding]) -> Iterator[None]:
    """Compute the GEMMs of the findings in 16 bits inside the block.

    Layers keep their persistent state.

    Raises ConfigError for a weight that is stored as codes alone: no 16-bit GEMM can read it.
    """
    layers, wider = dict(converted(model)), dict[str, Recipe]()
    before = {name: layer.recipe for name, layer in layers.items()}
    for each in findings:
        if layers[each.layer].frozen is not None:
            raise ConfigError(
                f"the weight of {each.layer!r} is frozen as codes. Call narrowgauge.memory.thaw(model) first.",
                code="blame.frozen-codes",
            )
        own: Any = wider.get(each.layer, before[each.layer])
        wider[each.layer] = mixed(own, BF16, (each.product,))
    try:
        for name, recipe in wider.items():
            # compute_as keeps amax histories and learned steps; a conversion would replace them.
            layers[name].compute_as(recipe)
        yield
    finally:
        for name in wider:
            layers[name].compute_as(before[name])


def by_gradient(
    model: nn.Module, compute: Callable[[], object], suspects: Sequence[Finding]
) -> list[Confirmation]:
    """Confirm each suspect. compute: forward and backward of the whole step."""
    with undisturbed(model), suspended(model):
        compute()
        wide = [
            None if each.grad is None else each.grad.detach().clone() for each in model.parameters()
        ]
    whole, _ = _distance(model, compute, wide)
    return [_confirmed(model, compute, each, wide, whole) for each in suspects]


def _confirmed(
    model: nn.Module,
    compute: Callable[[], object],
    suspect: Finding,
    wide: list[Tensor | None],
    whole: float,
) -> Confirmation:
    try:
        with in_16_bits(model, [suspect]):
            left, size = _distance(model, compute, wide)
    except ConfigError as error:
        return Confirmation(
            (suspect.name,), None, f"it cannot be computed in 16 bits: {str(error).rstrip('.')}"
        )
    if not whole > 0:
        return Confirmation(
            (suspect.name,), None, "the gradient is that of 16 bits, whatever it computes"
        )
    # left can exceed whole: errors of several GEMMs partly cancel in the gradient.
    share, off = 1 - left / whole, (whole / size) ** 0.5 if size > 0 else float("inf")
    words = (
        f"with it alone in 16 bits {max(share, 0):.0%} of the squared distance of the gradient from that in 16 bits is gone "
        f"(which is {off:.2g} of its norm)"
    )
    if share >= SHARE:
        return Confirmation((suspect.name,), True, words, {"share": share, "distance": off})
    more = "; clipping and slow drifts do not show in a gradient, only in a stretch of steps"
    return Confirmation((suspect.name,), None, words + more, {"share": share, "distance": off})


def _distance(
    model: nn.Module, compute: Callable[[], object], wide: list[Tensor | None]
) -> tuple[float, float]:
    """(squared distance of the gradient from `wide`, squared norm of `wide`)."""
    far = size = 0.0
    with undisturbed(model):
        compute()
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), wide, strict=True):
                if parameter.grad is not None and other is not None:
                    # float64 sums: squares of many small differences would lose digits in the
                    # gradient's dtype.
                    far += float((parameter.grad - other).square().sum(dtype=torch.float64))
                    size += float(other.square().sum(dtype=torch.float64))
    return far, size
