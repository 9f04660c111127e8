"""Checks before the first step of a guarded loop: setups that would fail, or go wrong silently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.conversion.switching import HIGH_PRECISION_BITS, bits, widened
from narrowgauge.diagnose import forms
from narrowgauge.errors import ConfigError
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.nn.narrow_layer import narrow_layers, recipe_of, unobserved, words_on_unknown

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

STATE = forms.record(
    {
        "taken": forms.number(0, whole=True), "next": forms.number(0, whole=True), "is_wide": forms.one_of(True, False),
        "given": forms.text, "settings": forms.text,
        "evidence": forms.record({"checks": forms.listed(forms.record(dict.fromkeys(("difference", "loss"), forms.number(finite=False))))}),
    }
)  # fmt: skip


def has_narrow(model: nn.Module) -> bool:
    """True if some layer computes in low precision, which BF16 would not."""
    return any(
        isinstance(each, QEmbedding) or is_narrow(recipe_of(each)) for each in model.modules()
    )


def _on_foreign(model: nn.Module) -> str:
    """Sentence on modules of other libraries that are not judged, with a space behind it, or ''."""
    reasons = [words_on_unknown(model)]
    reasons += [f"{name}: {unobserved(each)}." for name, each in narrow_layers(model)][:1]
    return "".join(f"{each} " for each in reasons if each)


def is_narrow(recipe: Recipe | None) -> bool:
    """True if a GEMM of the recipe is below 16 bits."""
    return recipe is not None and any(
        bits(gemm) < HIGH_PRECISION_BITS for gemm in recipe.gemms().values()
    )


def refuse(
    model: nn.Module, optimizers: Iterable[Any], also: Iterable[Any], then: str = ""
) -> None:
    """Raise ConfigError with the reason. then: recipe for a run that is worse, or ''."""
    layers = {
        name: each.recipe
        for name, each in narrow_layers(model)
        if isinstance(each, nn.Module) and each.recipe  # others have recipes of their library
    }
    if not has_narrow(model):
        raise ConfigError(
            "Guard: no product of the model is narrower than 16 bits, and no embedding has codes, so there is nothing to judge. "
            f"{_on_foreign(model)}Call narrowgauge.convert(model, ...) with a narrow recipe first.",
            code="guard.not-converted",
        )
    if then:
        try:
            widened(model, layers, then)
        except ConfigError as error:
            raise ConfigError(
                f"Guard: then = {then!r}: {error} Beside recipes there are 'warn' and 'stay'.",
                code="guard.then",
            ) from None
    learns = any(isinstance(each, LearnedSteps) for each in model.modules())
    # DDP would wait for these gradients silently: its buckets are never reduced, until the ranks'
    # gradient norms differ.
    if learns and any(
        getattr(each, "find_unused_parameters", True) is False for each in model.modules()
    ):
        raise ConfigError(
            "Guard: in BF16 the learned steps of the recipe have no gradient, for which DistributedDataParallel would wait. "
            "Wrap the model with find_unused_parameters=True.",
            code="guard.ddp-unused",
        )
    scheduler = torch.optim.lr_scheduler.LRScheduler
    held = any(isinstance(getattr(each, "scheduler", each), scheduler) for each in also)
    for optimizer in optimizers:
        if not hasattr(optimizer, "step"):
            raise ConfigError(
                f"Guard: optimizer is a {type(optimizer).__name__}. Give the one that `step` calls, or a list.",
                code="guard.optimizer",
            )
        # Set by torch's schedulers when they wrap optimizer.step.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not held:
            raise ConfigError(
                "Guard: a scheduler moves the learning rate of the optimizer, and steps of a check would move it further. "
                "Hand it over: Guard(..., also=[scheduler]).",
                code="guard.scheduler",
            )


def refuse_state(state: Any, settings: str) -> None:
    """Raise ConfigError for a state that does not come from a guard with these settings."""
    if problem := forms.refuse(state, STATE):
        raise ConfigError(
            f"Guard: its state is damaged: {problem}. Give what `state_dict` gave, or leave it out to begin anew.",
            code="guard.damaged-state",
        )
    if state["settings"] != settings:
        raise ConfigError(
            f"Guard: its state is of {state['settings']}, and this one is {settings}. Resume with the settings it had.",
            code="guard.other-settings",
        )


def refuse_no_loss(loss: Any) -> None:
    """Raise ConfigError unless the loss is a single number."""
    if not isinstance(loss, int | float) and not (
        isinstance(loss, torch.Tensor) and loss.numel() == 1
    ):
        what = (
            f"{list(loss.shape)} tensor" if isinstance(loss, torch.Tensor) else type(loss).__name__
        )
        raise ConfigError(
            f"Guard: step returned a {what}. Return the mean loss of the batch, a number.",
            code="guard.step-result",
        )
