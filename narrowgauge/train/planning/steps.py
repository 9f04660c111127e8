"""A training step built from settings, for `narrowgauge.plan.count`, by the trainer's own code.

Only the inputs differ from a real run: the model comes from its configuration instead of its
weights, the batch from its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from narrowgauge import data
from narrowgauge.optim import precision as precisions
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.plan import Step
from narrowgauge.train import step, stepping
from narrowgauge.train.model import build
from narrowgauge.train.optimizer import build_optimizer, cast_in_step
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.parallel.spread import Parallel
from narrowgauge.train.planning.depth import with_layers
from narrowgauge.train.pretrained import ModelClass, own_configuration, pretrained
from narrowgauge.train.tasks import Shape, TrainTask, task_class

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch

HOST = torch.device("cpu")  # device of all fake tensors, whatever device they simulate
MOST_MICRO_BATCHES = 2  # micro-batches that are traced; later ones equal the second


@dataclass(frozen=True)
class Vocabulary:
    """Stand-in for a tokenizer, with the largest vocabulary that the settings allow."""

    words: int
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0
    model_max_length: int = 10**30

    def __len__(self) -> int:
        return self.words

    def get_vocab(self) -> dict[str, int]:
        return {}


def task_of(config: TrainConfig) -> tuple[TrainTask, ModelClass]:
    """(task without data, model class) of a configuration."""
    # A pretrained model's own vocabulary size is used.
    words = (
        0
        if config.model
        else len(data.load(config.tokenizer))
        if config.tokenizer
        else config.vocab_size
    )
    return task_class(config.task).without_data(config, Vocabulary(words))


@dataclass(frozen=True)
class Source:
    """Inputs from which a step is built.

    config       settings; compile and cuda_graph are treated as off
    task         task without data
    model_class  model class of the task
    shape        shape of a micro-batch
    """

    config: TrainConfig
    task: TrainTask
    model_class: ModelClass
    shape: Shape

    @classmethod
    def of(cls, config: TrainConfig, copies: int = 1, shape: Shape | None = None) -> Source:
        """The inputs that a configuration defines.

        copies  ranks that share the step's micro-batches among them
        shape   shape of a micro-batch; None: the largest that the settings allow
        """
        task, model_class = task_of(config)
        shape = shape or task.largest_micro_batch(config.micro_batches * copies)
        return cls(config, task, model_class, shape)

    def model(self, layers: int) -> Any:
        """Float32 model with `layers` blocks in each stack; 0: its own number."""
        if not self.config.model:
            return replace(
                self.task, config=replace(self.config, layers=layers) if layers else self.config
            ).model()
        # Adapters and codes of the base come later, in `build`.
        config = replace(self.config, from_scratch=True, lora="", base="", merge=False)
        kind = self.model_class
        if layers:
            changed = with_layers(own_configuration(config, kind), layers)
            kind = replace(kind, options={**kind.options, **changed})
        return pretrained(config, kind)

    def builder(
        self, layers: int = 0, place: torch.device = HOST, real: bool = False
    ) -> Callable[[], Step]:
        """Returns a function that builds the step.

        layers  blocks in each stack; 0: all
        place   device of real tensors
        real    use real tensors instead of fake ones
        """
        batch = self.task.dummy_batch(self.shape)
        return partial(self._build, layers, place, real, batch)

    def _build(self, layers: int, place: torch.device, real: bool, given: Batch) -> Step:
        # Compiled code and graphs decide about memory on their own; the eager step is traced
        # instead.
        config = replace(self.config, compile=False, cuda_graph=False)
        task = replace(self.task, config=config)
        precision = precisions.get(config.precision)
        with nullcontext() if real else without_values():
            model = build(config, lambda: _tied(self.model(layers)), place, self.shape.tokens, None)
        # Fake copies are made inside the fake tensor mode.
        batch = {
            name: value.to(place) if real else torch.zeros_like(value)
            for name, value in given.items()
        }
        batch = task.align(batch, model)
        _, objective = step.ready(
            config,
            task,
            model,
            precision,
            place,
            lambda: batch,
            on_gpu=place.type == "cuda" or not real,
        )
        parallel = Parallel(config, model, Ranks(), objective, lambda: batch)
        optimizer = build_optimizer(config, model, precision)
        # The two passes of "two-pass" have the same peak as one; trace one.
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
    """Context in which transformers models skip weight initialization.

    Some initializers redraw until all values lie within bounds, and fake tensors have no values to
    compare.
    """
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    context: AbstractContextManager[Any] = no_init_weights()
    return context


def _tied(model: Any) -> Any:
    """Ties weights: transformers does so during initialization, which is skipped here."""
    model.tie_weights()
    return model


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in tree_leaves(state) if isinstance(each, Tensor))
