"""A run's model as stages of a pipeline, on torch's own schedules: the steps, the evaluation and the samples of all stages together.

    stage 0:      positions [P, width]          of a micro-batch's [rows, tokens, width], with zeros up to the longest of the step
    stage s:      positions -> positions
    last stage:   positions -> sum of -log p    the run's own loss, head and chunks included, inside of the forward pass

Every rank draws all micro-batches of its replica; what torch hands to a stage is the number of one, and the positions that the stage
before has sent. So widths and masks may differ from micro-batch to micro-batch, and a message has one shape in a step. Its shape is told
to torch, so no pass looks for it. The gradient of a parameter is summed over micro-batches in the order of one process.

Evaluation and samples go through the stages without a schedule, one batch after the other: ranks of early stages run ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from narrowgauge.data import IGNORED
from narrowgauge.distributed import distributed_state
from narrowgauge.distributed.pipeline import message_like
from narrowgauge.errors import ConfigError
from narrowgauge.optim import precision as precisions
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import NO_CACHE, Batch, Objective, inputs_of
from narrowgauge.train.parallel.stages import Cut, remove, view

T = TypeVar("T")
Key = TypeVar("Key", str, tuple[str, str])
# Name of torch -> (class, stages of a rank, whether those are the first and the last that are left: a V)
SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "1F1B": (Schedule1F1B, 1, False),
    "GPipe": (ScheduleGPipe, 1, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2, False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (ScheduleDualPipeV, 2, True),
}


class StageModule(nn.Module):
    """What torch calls a stage. `model` is named as in `spread.Spread`, so that names are those of one process."""

    def __init__(self, model: nn.Module, compute: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, received: Tensor, *, turn: Tensor) -> Tensor:
        """received: of the stage before; turn [1]: the number of the micro-batch, on the host."""
        return self.compute(self.model, received, int(turn))


class Pipeline:
    """The stages of this rank, and their neighbours.

    group      the ranks of one replica, in the order of stages
    turns      micro-batches of a step
    modules    number of a stage -> its module
    """

    def __init__(
        self, config: TrainConfig, model: Any, objective: Objective, group: dist.ProcessGroup, turns: int
    ) -> None:
        """Takes out of the model what the stages of this rank do not have. Raises ConfigError, on all ranks, for what cannot be cut."""
        self.config, self.model, self.group, self.turns = config, model, group, turns
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.kind, per_rank, self.is_v = SCHEDULES[config.schedule]
        self.count = per_rank * self.ranks
        refuse(config, self.turns, self.ranks, self.count)
        self.context = partial(precisions.get(config.precision).context, self.device.type)
        self.order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        cut = Cut.of(model, self.count)
        self.cut = cut
        self.dtype = cut.refuse_other_numbers(model, self.context())
        self.width: int = model.get_input_embeddings().weight.shape[1]
        numbers = [number for number in range(self.count) if self.owner(number) == self.rank]
        self.modules = {
            number: StageModule(view(model, cut.absent([number])), partial(self._compute, number)) for number in numbers
        }
        remove(model, cut.absent(numbers))
        self.objective = objective if self.has_last else replace(objective, head=None)  # or its weight would stay
        self._refuse_without_parameters()
        self._end = self._loss
        self._batches: list[Batch] = []
        self._positions = self._targets = 0
        self._schedule: tuple[int, Any] = (0, None)
        self._schedule_of(1)  # torch says what it refuses

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_last(self) -> bool:
        return self.count - 1 in self.modules

    def blocks(self, number: int) -> list[nn.Module]:
        """Of one stage of this rank."""
        return [self.model.get_submodule(name) for name in self.cut.blocks_of(number)]

    def owner(self, number: int) -> int:
        """The rank of the group that has a stage."""
        turn, place = divmod(number, self.ranks)
        return self.ranks - 1 - place if self.is_v and turn % 2 else place

    def stages(self, positions: int = 1) -> list[PipelineStage]:
        """As torch and `narrowgauge.distribute` have them; positions: of a message."""
        found = []
        for number, module in self.modules.items():
            reads = self._message(number, positions) if number else torch.empty(1, dtype=torch.int64, device="meta")
            is_last = number == self.count - 1
            gives = torch.empty((), device="meta") if is_last else self._message(number + 1, positions)
            told: dict[str, Any] = {
                "input_args": reads.requires_grad_(number > 0),
                "output_args": gives.requires_grad_(),
            }
            stage = PipelineStage(module, number, self.count, self.device, group=self.group, **told)
            stage.stage_index_to_group_rank = {each: self.owner(each) for each in range(self.count)}
            found.append(stage)
        return found

    # --- a step

    def step(self, batches: list[Batch], targets: int) -> Tensor:
        """The gradient of these micro-batches, added to what is there.

        -> their losses, divided by the targets, on all ranks of the group
        """
        # Of a table's step with fewer micro-batches than others: one once more, with nothing to learn.
        spare = batches[-1] | {"labels": torch.full_like(batches[-1]["labels"], IGNORED)}
        self._batches, self._targets = [*batches, *[spare] * (self.turns - len(batches))], targets
        schedule = self._schedule_of(max(map(_positions, self._batches)))
        turns, losses = torch.arange(self.turns), list[Tensor]()
        if issubclass(self.kind, PipelineScheduleMulti):
            self._exchange_scales()
        try:
            schedule.step(
                *([turns] if 0 in self.modules else []), target=turns if self.has_last else None,
                losses=losses if self.has_last else None, return_outputs=False, turn=turns,
            )  # fmt: skip
        except RuntimeError as error:  # torch says of each error in a stage that there was one
            raise error.__cause__ or error from None
        found = torch.zeros(self.turns, device=self.device)
        if losses:
            found = torch.stack([each.detach() for each in losses])
        dist.all_reduce(found, group=self.group)  # of one rank and zeros
        return found

    def _schedule_of(self, positions: int) -> Any:
        """torch's, whose messages have so many positions. It is kept until they change."""
        self._positions = positions
        if self._schedule[0] != positions:
            stages = self.stages(positions)
            given = stages if issubclass(self.kind, PipelineScheduleMulti) else stages[0]
            try:
                found = self.kind(given, self.turns, loss_fn=lambda loss, _: loss / self._targets, scale_grads=False)
            except ValueError as error:
                raise ConfigError(
                    f"schedule = {self.config.schedule!r}: {error} Change micro_batches, or take another schedule."
                ) from error
            self._schedule = positions, found
        return self._schedule[1]

    def _exchange_scales(self) -> None:
        """Of weights that travel as codes: schedules of several stages gather them before the first forward pass, which would do it."""
        for module in self.modules.values():
            if (weights := distributed_state(module).weights) is not None:
                weights.before_forward(is_first=True)

    def _compute(self, number: int, model: Any, received: Tensor, turn: int) -> Tensor:
        """The forward pass of a stage: positions [P, width], or of the last one what `_end` makes of them."""
        batch = self._batches[turn]
        with self.context():
            if number == self.count - 1:
                return self._end(model, received, batch)
            inputs = inputs_of(batch, self.device, self.objective.options)
            below = model.base_model if number == 0 else partial(_behind, model.base_model, received)
            hidden = below(**inputs).last_hidden_state
        assert hidden.dtype == self.dtype, (
            f"a stage sends {hidden.dtype}, and before the first step {self.dtype} was found"
        )
        flat = hidden.reshape(-1, self.width)
        # A copy where nothing is spare too: zero-bubble schedules detach what a stage returns in place, which torch refuses of a view.
        return nn.functional.pad(flat, (0, 0, 0, self._positions - len(flat)))

    def _loss(self, model: Any, received: Tensor, batch: Batch) -> Tensor:
        """The sum of -log p over a batch's targets."""
        is_whole = self.objective.head is None
        forward = partial(_behind, model if is_whole else model.base_model, received)
        return replace(self.objective, forward=forward)(batch, self.device)

    def _last_logits(self, model: Any, received: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = _behind(model, received, **inputs_of(batch, self.device, NO_CACHE)).logits
        return logits[:, -1:]

    # --- without a schedule

    def scored(self, batch: Batch) -> tuple[Tensor, None]:
        """The sum of -log p over a batch's targets on the rank with the last stage, 0 on the others."""
        found = self._through(batch)
        return torch.zeros((), device=self.device) if found is None else found, None

    def forward(self, batches: list[Batch]) -> None:
        """The forward pass of these micro-batches alone, for those who watch it."""
        for batch in batches:
            self._through(batch)

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        """As a model is called by those who write samples, on all ranks alike: logits of the last token."""
        self._end = self._last_logits
        try:
            found = self._through({"input_ids": input_ids})
        finally:
            self._end = self._loss
        return SimpleNamespace(logits=self.of_last(None if found is None else found.cpu()))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def _through(self, batch: Batch) -> Tensor | None:
        """What the last stage computes of a batch; None on ranks without it."""
        self._batches, self._positions = [batch], _positions(batch)
        turn = torch.zeros(1, dtype=torch.int64)
        found: Tensor = turn
        for number, module in self.modules.items():
            if self._hops(number):
                found = torch.empty_like(self._message(number, self._positions), device=self.device)
                dist.recv(found, group=self.group, group_src=self.owner(number - 1))
            found = module(found, turn=turn)
            if self._hops(number + 1):
                dist.send(found.contiguous(), group=self.group, group_dst=self.owner(number + 1))
        return found if self.has_last else None

    def of_last(self, own: Any) -> Any:
        """What the rank with the last stage has, on all ranks of the group."""
        told = [own]
        dist.broadcast_object_list(told, group=self.group, group_src=self.owner(self.count - 1))
        return told[0]

    def of_all(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """What all ranks of the group have by names of modules, or by tuples that begin with one, in the order of the whole model."""
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, own, group=self.group)
        found = {name: value for each in told for name, value in each.items()}
        names = {key: key if isinstance(key, str) else key[0] for key in found}
        return {key: found[key] for key in sorted(found, key=lambda key: self.order.get(names[key], 0))}

    def words(self) -> str:
        """For the console."""
        per_rank = len(self.modules)
        each = f"{per_rank} stages of {self.count}" if per_rank > 1 else "a stage of the model"
        return f"{each} each (pp), schedule {self.config.schedule}, {self.turns} micro-batches"

    # --- parts

    def _hops(self, number: int) -> bool:
        """Whether there is a stage `number` that reads what another rank sends."""
        return 0 < number < self.count and self.owner(number) != self.owner(number - 1)

    def _message(self, number: int, positions: int) -> Tensor:
        """What stage `number` reads, without numbers."""
        x = torch.empty(positions, self.width, dtype=self.dtype, device="meta")
        return message_like(x) if self.config.activations == "fp8" and self._hops(number) else x

    def _refuse_without_parameters(self) -> None:
        own = {
            str(number): any(x.requires_grad for x in module.parameters()) for number, module in self.modules.items()
        }
        if idle := [number for number, trains in self.of_all(own).items() if not trains]:
            raise ConfigError(
                f"freeze = {self.config.freeze!r}: nothing of stage {min(idle)} of {self.count} would train. Freeze less, or take a "
                "smaller pp."
            )


def refuse(config: TrainConfig, turns: int, ranks: int, count: int) -> None:
    """ConfigError for settings that no pipeline of `count` stages has. turns: micro-batches of a step."""
    if turns < count:
        raise ConfigError(
            f"micro_batches = {turns}: fewer than the {count} stages of the pipeline (schedule {config.schedule!r} on "
            f"{ranks} ranks), some of which would always wait. Take --micro-batches {count} or more."
        )
    if config.task not in ("text", "causal-lm"):
        raise ConfigError(
            f"parallel: pp cuts causal language models (tasks text and causal-lm), and this run's task is {config.task!r}. Take fsdp."
        )


def _positions(batch: Batch) -> int:
    return batch["input_ids"].numel()


def _behind(forward: Callable[..., Any], received: Tensor, *, input_ids: Tensor, **inputs: Any) -> Any:
    """Calls a model with what the stage before has sent in the place of its embeddings."""
    hidden = received[: input_ids.numel()].view(*input_ids.shape, -1)
    return forward(inputs_embeds=hidden, **inputs)
