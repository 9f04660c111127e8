"""Changes of single parts of the 4-bit recipes, for benchmarks/frontier_study.py: which part makes a recipe end where it does?

Each is one constant, named by the recipe that it changes and by the change. No variant is a recipe of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.oscillation_reset import OscillationReset
from narrowgauge import recipes
from narrowgauge.formats import INT4, INT8
from narrowgauge.recipe import Cast, Gemm, Hadamard, LearnedStep, LeverageScore, Recipe


def _backward_casts(recipe: Recipe, name: str, **change: object) -> Recipe:
    """`recipe` with all casts of its two backward products changed."""

    def changed(gemm: Gemm) -> Gemm:
        casts = {
            side: None if cast is None else replace(cast, **change)  # type: ignore[arg-type]
            for side, cast in (("lhs", gemm.lhs), ("rhs", gemm.rhs))
        }
        return replace(gemm, **casts)  # type: ignore[arg-type]

    return replace(
        recipe,
        name=name,
        grad_input=changed(recipe.grad_input),
        grad_weight=changed(recipe.grad_weight),
    )


def _sampled(recipe: Recipe, name: str, sample: LeverageScore | None) -> Recipe:
    return replace(
        recipe,
        name=name,
        grad_input=replace(recipe.grad_input, sample=sample),
        grad_weight=replace(recipe.grad_weight, sample=sample),
    )


def _forward(recipe: Recipe, name: str, calibrate: LearnedStep) -> Recipe:
    """`recipe` with other steps of x and w, which a straight-through backward pass reads too."""
    cast = replace(recipe.output.rhs, calibrate=calibrate)  # type: ignore[type-var]
    return replace(
        recipe,
        name=name,
        output=replace(recipe.output, lhs=cast, rhs=cast),
        grad_input=replace(recipe.grad_input, rhs=cast),
        grad_weight=replace(recipe.grad_weight, rhs=cast),
    )


# Until 29 November 2026 the cold start of learned steps was 16 steps long. Rows of that day call these
# `int4-hq-lss` and `int4-hq-lss-all-rows`, and today's `int4-hq-lss` they call `int4-hq-lss-cold-256`.
_SHORT = _forward(recipes.INT4_HQ_LSS, "int4-hq-lss-cold-16", LearnedStep(cold_steps=16))
# A scale for each rotated block instead of one for the tensor: nothing is clipped, and rows may differ in size.
_BLOCK = Cast(format=INT4, tile=(1, 128))
_BLOCKS = Gemm(lhs=_BLOCK, rhs=_BLOCK, rotate=Hadamard(block=128))

VARIANTS: tuple[Recipe, ...] = (
    _SHORT,
    _sampled(_SHORT, "int4-hq-lss-cold-16-all-rows", None),
    _sampled(recipes.INT4_HQ_BS, "int4-hq-bs-sampled", LeverageScore()),
    _backward_casts(recipes.INT4_EDEN, "int4-eden-backward-in-8", format=INT8),
    replace(recipes.INT4_EDEN, name="int4-eden-forward-of-128", output=_BLOCKS),
    _backward_casts(recipes.INT4_EDEN, "int4-eden-scale-of-32", tile=(1, 32)),
    replace(recipes.QUARTET2_46, name="quartet2-46-oscireset"),
)
RESET = "-oscireset"  # ends the names of the variants whose weights are reset


@contextmanager
def hooked(recipe: str, steps: int) -> Iterator[OscillationReset | None]:
    """Change the optimizer steps of a run as its variant says. A run that is hooked cannot be resumed."""
    if not recipe.endswith(RESET):
        yield None
        return
    cast = recipes.get(recipe).output.rhs
    assert cast is not None
    reset = OscillationReset(cast, steps)
    handle = register_optimizer_step_post_hook(reset)
    try:
        yield reset
    finally:
        handle.remove()


@contextmanager
def added() -> Iterator[None]:
    """Within it, `recipes.get` finds the variants."""
    before = recipes.ALL
    known = recipes.names()
    recipes.ALL = (*before, *(each for each in VARIANTS if each.name not in known))
    try:
        yield
    finally:
        recipes.ALL = before
