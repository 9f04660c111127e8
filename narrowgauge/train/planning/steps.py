"""A step of a run, from its settings, for `narrowgauge.plan.count`: built by the code that the trainer builds its own with.

Only the sources differ: a model comes from its configuration, not from its weights; a batch from its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from narrowgauge.optim import precision as precisions
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.plan import Step
from narrowgauge.train import step, stepping
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import ModelClass, build, own_configuration, pretrained
from narrowgauge.train.optimizer import build_optimizer, cast_in_step
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.parallel.spread import Parallel
from narrowgauge.train.planning.depth import with_layers
from narrowgauge.train.planning.shapes import Shape, batch_of
from narrowgauge.train.tasks.task import TrainTask

HOST = torch.device("cpu")  # where fake tensors are, whatever they stand for
MOST_MICRO_BATCHES = 2  # the third is like the second


@dataclass(frozen=True)
class Source:
    """What a step is made of.

    config  compiled code and CUDA graphs are counted as if they were off
    """

    config: TrainConfig
    task: TrainTask
    model_class: ModelClass
    shape: Shape

    def model(self, layers: int) -> Any:
        """In float32, with so many blocks in each stack; 0: as many as it has."""
        if not self.config.model:
            return replace(self.task, config=replace(self.config, layers=layers) if layers else self.config).model()
        config, kind = replace(self.config, from_scratch=True), self.model_class
        if layers:
            changed = with_layers(own_configuration(config, kind), layers)
            kind = replace(kind, options={**kind.options, **changed})
        return pretrained(config, kind)

    def builder(self, layers: int = 0, place: torch.device = HOST, real: bool = False) -> Callable[[], Step]:
        """Builds the step, on fake tensors or, if `real`, on real ones that lie on `place`."""
        batch = batch_of(self.config, self.task, self.shape)
        return partial(self._build, layers, place, real, batch)

    def _build(self, layers: int, place: torch.device, real: bool, given: Batch) -> Step:
        config = replace(self.config, compile=False, cuda_graph=False)
        task = replace(self.task, config=config)
        precision = precisions.get(config.precision)
        with nullcontext() if real else without_values():
            model = build(config, lambda: _tied(self.model(layers)), place, self.shape.tokens, None)
        batch = {name: value.to(place) if real else torch.zeros_like(value) for name, value in given.items()}
        batch = task.align(batch, model)
        _, objective = step.ready(
            config, task, model, precision, place, lambda: batch, on_gpu=place.type == "cuda" or not real
        )
        parallel = Parallel(config, model, Ranks(), objective, lambda: batch)
        optimizer = build_optimizer(config, model, precision)
        # Two passes need what one does, twice as long.
        one_pass = replace(config, clip_by="previous") if config.clip_by == "two-pass" else config
        parts = min(config.micro_batches, MOST_MICRO_BATCHES)
        begun = stepping.begin(one_pass, optimizer, parts)
        cast_in_step(self.config, optimizer, model)

        def loss() -> Tensor:
            return step.loss_of(parallel, objective, batch, place, precision, 1, True)

        def update() -> None:
            if not isinstance(begun, InBackward):
                step.clipped(config, model, held=begun)
            step.update(optimizer, None, partial(parallel.advance, model))

        return Step(model, loss, update, lambda: _states(optimizer), batch, parts)


def without_values() -> AbstractContextManager[Any]:
    """Models of transformers are made without values: some draw until all are within bounds, and fake tensors have none to look at."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    context: AbstractContextManager[Any] = no_init_weights()
    return context


def _tied(model: Any) -> Any:
    """transformers ties weights where it draws them."""
    model.tie_weights()
    return model


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in tree_leaves(state) if isinstance(each, Tensor))
