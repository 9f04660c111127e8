"""`convert_trainer`: one line that gives a Trainer's model and its frozen reference the same recipe.

    trainer = DPOTrainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)
    convert_trainer(trainer, "fp8-row")
    trainer.train()

DPO compares log-probabilities of a policy and a frozen reference (arXiv 2305.18290, eq. 7):

    loss = -log sigmoid(beta * ((log pi(y_w) - log ref(y_w)) - (log pi(y_l) - log ref(y_l))))

Both models are the same function before the first step, so that the loss is ln 2. TRL's trainers
load the reference themselves, as `trainer.ref_model`. `narrowgauge.convert(model, ...)` does not
reach it, and a BF16 reference beside an FP8 policy adds the error of the policy's casts to every
log-ratio: the first loss was 0.7108 with `fp8-current` and 0.7210 with `nvfp4`. The same holds for
the KL term of GRPO, RLOO and KTO.

The first loss is ln 2 with every recipe of `narrowgauge.recipes`, since each rounds to nearest in
forward. Stochastic rounding is on gradients alone, and a reference computes no gradient. A recipe
with random numbers in forward draws other numbers in each model, and `convert_like` warns. Delayed
scaling has no amax history at the first step. Later the policy reads its history, and a reference
in evaluation mode takes the amax of the tensor at hand.

`precompute_ref_log_probs` of DPO computes the reference when the trainer is made, and caches it by
the data and the weights: a second recipe on the same weights reads the numbers of the first.

With an adapter of PEFT there is no second model: TRL switches the adapter off, and the base serves
both. A policy that was converted before its trainer needs one other line:

    narrowgauge.convert_like(trainer.model, trainer.ref_model)

A loop that makes its Trainer inside, as LLaMA-Factory does, takes a callback instead:

    run_exp(arguments, callbacks=[ConvertCallback("fp8-row")])

A callback sees the model and no reference. LLaMA-Factory's DPO, KTO and PPO with adapters have no
second model; with a second model a callback cannot serve them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from narrowgauge.conversion import Patterns, convert
from narrowgauge.conversion.like import convert_like
from narrowgauge.errors import ConfigError

# Frozen copies of the policy, as all trainers of TRL 1.16 that have one name it: DPO, GRPO, KTO,
# RLOO and those under `trl.experimental`. Teachers and reward models are other models.
REFERENCE = "ref_model"


def convert_trainer(trainer: Any, recipe: Patterns | None, **options: Any) -> Any:
    """Converts `trainer.model`, and its frozen reference like it, in place. Returns the trainer.

    trainer  transformers' Trainer, or a trainer of TRL or sentence-transformers; before `train`
    recipe   as for `narrowgauge.convert`; None restores both models
    options  further arguments of `narrowgauge.convert`, as fuse or embeddings

    A trainer without a reference has its model converted alone. Raises ConfigError, with both
    models as they were: as `convert` and `convert_like` do, and if the trainer computed
    log-probabilities of its reference already (`precompute_ref_log_probs`). Only a model that was
    converted before keeps the new recipe if its reference is another model.
    """
    model = _module(trainer, "model")
    if model is None:
        raise ConfigError(
            f"convert_trainer: {type(trainer).__name__} has no model (an attribute `model`, a torch "
            "module). Pass a Trainer of transformers, TRL or sentence-transformers, or call "
            "narrowgauge.convert on the model.",
            code="convert-trainer.no-model",
        )
    if recipe is not None and getattr(
        getattr(trainer, "args", None), "precompute_ref_log_probs", False
    ):
        raise ConfigError(
            f"convert_trainer: {type(trainer).__name__} computed the reference's log-probabilities when "
            "it was made (precompute_ref_log_probs = True), by a model without a recipe. Set "
            "precompute_ref_log_probs = False. Or call datasets.disable_caching() and "
            "narrowgauge.convert on the model before making the trainer: TRL's cache of "
            "log-probabilities distinguishes weights and not recipes.",
            code="convert-trainer.precomputed",
        )
    reference = _module(trainer, REFERENCE)
    # Read before convert: a model that its owner converted earlier is not restored on an error.
    was_plain = _recipes(model) == {None}
    convert(model, recipe, **options)
    if reference is None:
        return trainer
    if recipe is None:
        convert(reference, None)
        return trainer
    try:
        convert_like(model, reference)
    except ConfigError:
        if was_plain:  # the reference is another model: nothing may be half done
            convert(model, None)
        raise
    return trainer


class ConvertCallback(TrainerCallback):  # type: ignore[misc]
    """Converts the model of the Trainer that it is given to, before that makes its optimizer.

    recipe   as for `narrowgauge.convert`
    options  further arguments of `narrowgauge.convert`
    """

    def __init__(self, recipe: Patterns, **options: Any) -> None:
        self.recipe, self.options = recipe, options

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # `model` of on_train_begin may be wrapped already, and its optimizer made.
        convert(given["model"], self.recipe, **self.options)


def _module(trainer: Any, name: str) -> nn.Module | None:
    """A model of the trainer, out of the wrappers of Accelerate."""
    found = getattr(trainer, name, None)
    if not isinstance(found, nn.Module):
        return None
    accelerator = getattr(trainer, "accelerator", None)
    unwrapped: nn.Module = found if accelerator is None else accelerator.unwrap_model(found)
    return unwrapped


def _recipes(model: nn.Module) -> set[Any]:
    """Recipes of the layers; None stands for ordinary layers."""
    return {getattr(each, "recipe", None) for each in model.modules()}
