"""Evaluation of a run: the task's metrics, the best weights, and a generated sample.

Metrics are scored in the run's recipe and in 16 bits, since most users of trained weights compute in
16 bits. Weights that were trained in FP8 can score lower there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.converted_model import quantized_embeddings, suspended
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Gemm
from narrowgauge.train.checkpoint import state
from narrowgauge.train.parallel.evaluation import readings

if TYPE_CHECKING:
    from narrowgauge.train.checkpoint.store import Best
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.console import Console
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.metrics import MetricsLog
    from narrowgauge.train.passes import Passes
    from narrowgauge.train.run_checkpoints import Counters
    from narrowgauge.train.tasks import TrainTask
    from narrowgauge.train.tasks.task import Compute

Metrics = dict[str, Any]


class Validation:
    """Scores the model of one run on the validation data.

    share  (index, count) of this rank's part of the data
    """

    def __init__(
        self, config: TrainConfig, task: TrainTask, passes: Passes, share: tuple[int, int]
    ) -> None:
        self.config, self.task, self.passes, self.share = config, task, passes, share

    @torch.no_grad()
    def evaluate(self, counters: Counters, best: Best, log: MetricsLog, show: Console) -> None:
        """Logs the task's metrics, updates the best weights, and logs a generated sample."""
        passes, parallel, number = self.passes, self.passes.parallel, counters.step
        self._set_training(False)
        found, wide = self.scores(self.config.eval_wide)
        log.write(
            "eval",
            number,
            **found,
            **({"wide": wide} if wide else {}),
            elapsed_s=counters.trained_s,
        )
        # The best weights are for export: recipe states stay out.
        weights, _ = state.split_scaling(state.saved_state(passes.model))
        is_best = best.take(number, found, weights)
        show.say(
            f"step {number}: validation {in_words(found, wide)}{', the best so far' if is_best else ''}"
        )
        if self.config.sample_tokens:
            with passes.precision.context(passes.device.type):
                written = parallel(self.task.sample, parallel.pipeline or passes.model)
            if written:
                log.write("sample", number, **written)
        parallel.release()
        self._set_training(True)

    @torch.no_grad()
    def scores(self, both: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Computes the task's metrics in evaluation mode.

        Returns (metrics in the run's recipe, metrics in 16 bits or None).

        both  also score with all matmuls in 16 bits; None is returned if the recipe's forward pass
              is in 16 bits anyway
        """
        model, parallel = self.passes.model, self.passes.parallel
        shared = partial(
            readings,
            score=self._score,
            share=self.share,
            ranks=self.passes.ranks,
            knows=parallel.knows_losses,
        )
        evaluate = partial(self.task.evaluate, model, shared)
        found, both = evaluate(), both and bool(parallel.of_all(narrow_forward(model)))
        return found, in_16_bits(model, evaluate) if both else None

    def _set_training(self, mode: bool) -> None:
        self.passes.model.train(mode)
        self.passes.parallel.whole.train(mode)

    def _score(self, batch: Batch, compute: Compute | None = None) -> tuple[Tensor, Tensor | None]:
        passes = self.passes
        if passes.parallel.pipeline is not None:
            return passes.parallel.pipeline.scored(batch)
        with passes.precision.context(passes.device.type):
            return passes.parallel(compute or passes.objective.scored, batch, passes.device)


def narrow_forward(model: nn.Module) -> dict[tuple[str, str], str]:
    """Low-precision parts of the forward pass. If there are none, both scores are identical.

    (layer, "output")    -> name of its recipe
    (embedding, "rows")  -> format of its codes
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QLinear)}
    found = {
        (name, "output"): each.recipe.name
        for name, each in layers.items()
        if each.recipe is not None and each.recipe.output != Gemm() and not each.is_suspended
    }
    looked_up = {
        (name, "rows"): str(each.format)
        for name, each in quantized_embeddings(model)
        if not each.is_suspended
    }
    return found | looked_up


def in_16_bits(model: nn.Module, evaluate: Callable[[], Metrics]) -> Metrics:
    """Result of `evaluate` with all recipes of the model's Linears and embeddings suspended.

    Recipe states and generators are unchanged.
    """
    with suspended(model):
        return evaluate()


def in_words(found: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """Formats the metrics for the console, with the 16-bit scores in parentheses."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}"
        + ("" if other is None else f" ({other[name]:.4f} in 16 bits)")
        for name, value in found.items()
        if isinstance(value, float)
    )
