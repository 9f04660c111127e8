"""Pipeline parallelism with torch's schedules: training steps, evaluation and samples.

    stage 0:      activations [P, width]        a micro-batch's [rows, tokens, width], flattened and
                                                zero-padded to the step's longest micro-batch
    stage s:      activations -> activations
    last stage:   activations -> sum of -log p  the run's loss, head and chunks included,
                                                computed inside of the forward pass

Every rank draws all micro-batches of its replica. torch passes to a stage only the index of a
micro-batch and the previous stage's activations. Widths and masks may therefore differ between
micro-batches. All messages of a step have one shape, which is given to torch, so torch runs no
shape inference. The gradient of a parameter is summed over micro-batches in the order of one
process.

Evaluation and samples run through the stages without a schedule, one batch after another. Early
stages run ahead of later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

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
from narrowgauge.train.loss import NO_CACHE, Batch, Objective, inputs_of
from narrowgauge.train.parallel.stages import Cut, remove, view

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig

T = TypeVar("T")
Key = TypeVar("Key", str, tuple[str, str])
# Name in torch -> (class, stages per rank, is_v). is_v: a rank holds stages s and S - 1 - s, which
# makes the forward path V-shaped over the ranks; otherwise it holds stages s and s + W.
SCHEDULES: dict[str, tuple[Any, int, bool]] = {
    "1F1B": (Schedule1F1B, 1, False),
    "GPipe": (ScheduleGPipe, 1, False),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, 2, False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (ScheduleDualPipeV, 2, True),
}


class StageModule(nn.Module):
    """Module that torch runs as one stage.

    The attribute `model` is named as in `spread.Spread`, so parameter names equal a one-process
    run's.
    """

    def __init__(self, model: nn.Module, compute: Callable[[Any, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute = compute

    def forward(self, received: Tensor, *, turn: Tensor) -> Tensor:
        """Runs the stage.

        received  activations of the previous stage
        turn      int64 [1] on the host: index of the micro-batch
        """
        return self.compute(self.model, received, int(turn))


class Pipeline:
    """The pipeline stages of this rank.

    group      process group of one replica, in stage order
    turns      micro-batches of a step
    modules    {stage number: module}, this rank's stages
    count      number of stages on all ranks
    dtype      dtype of the activations sent between stages
    width      hidden size of the model
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        objective: Objective,
        group: dist.ProcessGroup,
        turns: int,
    ) -> None:
        """Removes the modules of other ranks' stages from the model.

        Raises ConfigError on all ranks for a model or settings that cannot be cut into stages.
        """
        self.config, self.model, self.group, self.turns = config, model, group, turns
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.kind, per_rank, self.is_v = SCHEDULES[config.schedule]
        self.count = per_rank * self.ranks
        refuse(config, self.turns, self.ranks, self.count)
        self.context = partial(precisions.get(config.precision).context, self.device.type)
        self.order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        # Test the cut on the whole model first: after `remove` there is nothing left to compare
        # with.
        cut = Cut.of(model, self.count)
        self.cut = cut
        self.dtype = cut.refuse_other_numbers(model, self.context())
        self.width: int = model.get_input_embeddings().weight.shape[1]
        numbers = [number for number in range(self.count) if self.owner(number) == self.rank]
        self.modules = {
            number: StageModule(view(model, cut.absent([number])), partial(self._compute, number))
            for number in numbers
        }
        remove(model, cut.absent(numbers))
        # Without the last stage, drop the reference to the head, which would keep its weight alive.
        self.objective = objective if self.has_last else replace(objective, head=None)
        self._refuse_without_parameters()
        self._end = self._loss
        self._batches: list[Batch] = []
        self._positions = self._targets = 0
        self._schedule: tuple[int, Any] = (0, None)
        self._schedule_of(1)  # raises now if torch refuses this schedule

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_last(self) -> bool:
        return self.count - 1 in self.modules

    def blocks(self, number: int) -> list[nn.Module]:
        """Transformer blocks of one stage of this rank."""
        return [self.model.get_submodule(name) for name in self.cut.blocks_of(number)]

    def owner(self, number: int) -> int:
        """Group rank that holds stage `number`."""
        turn, place = divmod(number, self.ranks)
        return self.ranks - 1 - place if self.is_v and turn % 2 else place

    def stages(self, positions: int = 1) -> list[PipelineStage]:
        """Stages for torch's schedules and for `distribute`. positions: rows P of a message."""
        found = []
        for number, module in self.modules.items():
            reads = (
                self._message(number, positions)
                if number
                else torch.empty(1, dtype=torch.int64, device="meta")
            )
            is_last = number == self.count - 1
            gives = (
                torch.empty((), device="meta") if is_last else self._message(number + 1, positions)
            )
            told: dict[str, Any] = {
                # Meta tensors with requires_grad set: torch then skips its shape inference, which
                # would run stages on uninitialized memory and feed amax histories.
                "input_args": reads.requires_grad_(number > 0),
                "output_args": gives.requires_grad_(),
            }
            stage = PipelineStage(module, number, self.count, self.device, group=self.group, **told)
            # torch assumes stage s on rank s mod W, which is wrong for V-shaped schedules.
            stage.stage_index_to_group_rank = {each: self.owner(each) for each in range(self.count)}
            found.append(stage)
        return found

    # --- a step

    def step(self, batches: list[Batch], targets: int) -> Tensor:
        """Accumulates the gradient of a step's micro-batches.

        Returns their losses divided by the number of targets, on all ranks of the group.
        """
        # A short step of a table: pad to the schedule's fixed number of micro-batches with copies
        # whose labels are ignored.
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
        except RuntimeError as error:
            # torch wraps every error of a stage in a RuntimeError without details.
            raise error.__cause__ or error from None
        found = torch.zeros(self.turns, device=self.device)
        if losses:
            found = torch.stack([each.detach() for each in losses])
        # Only the rank with the last stage has losses; the sum with zeros broadcasts them.
        dist.all_reduce(found, group=self.group)
        return found

    def _schedule_of(self, positions: int) -> Any:
        """torch schedule for messages of `positions` rows; cached until that number changes."""
        self._positions = positions
        if self._schedule[0] != positions:
            stages = self.stages(positions)
            given = stages if issubclass(self.kind, PipelineScheduleMulti) else stages[0]
            try:
                # scale_grads=False: losses are divided by the step's targets already, not to be
                # averaged again.
                found = self.kind(
                    given,
                    self.turns,
                    loss_fn=lambda loss, _: loss / self._targets,
                    scale_grads=False,
                )
            except ValueError as error:
                raise ConfigError(
                    f"parallel.schedule = {self.config.schedule!r}: {error} Change batch.micro_batches, or take another schedule.",
                    code="pipeline.schedule",
                ) from error
            self._schedule = positions, found
        return self._schedule[1]

    def _exchange_scales(self) -> None:
        """Exchanges the scales of weights that are gathered as codes, for multi-stage schedules.

        These schedules gather all weights before the first forward pass, whose hook would come too
        late.
        """
        for module in self.modules.values():
            if (weights := distributed_state(module).weights) is not None:
                weights.before_forward(is_first=True)

    def _compute(self, number: int, model: Any, received: Tensor, turn: int) -> Tensor:
        """Forward pass of a stage: activations [P, width], or on the last stage `_end`'s result."""
        batch = self._batches[turn]
        with self.context():
            if number == self.count - 1:
                return self._end(model, received, batch)
            inputs = inputs_of(batch, self.device, self.objective.options)
            below = (
                model.base_model if number == 0 else partial(_behind, model.base_model, received)
            )
            hidden = below(**inputs).last_hidden_state
        assert hidden.dtype == self.dtype, (
            f"a stage sends {hidden.dtype}, and before the first step {self.dtype} was found"
        )
        flat = hidden.reshape(-1, self.width)
        # pad() copies even if there is nothing to pad. Zero-bubble schedules call detach_() on a
        # stage's output, and torch refuses that for a view.
        return nn.functional.pad(flat, (0, 0, 0, self._positions - len(flat)))

    def _loss(self, model: Any, received: Tensor, batch: Batch) -> Tensor:
        """Sum of -log p over the targets of a batch."""
        is_whole = self.objective.head is None
        forward = partial(_behind, model if is_whole else model.base_model, received)
        return replace(self.objective, forward=forward)(batch, self.device)

    def _last_logits(self, model: Any, received: Tensor, batch: Batch) -> Tensor:
        logits: Tensor = _behind(model, received, **inputs_of(batch, self.device, NO_CACHE)).logits
        return logits[:, -1:]

    # --- without a schedule

    def scored(self, batch: Batch) -> tuple[Tensor, None]:
        """(sum of -log p over the targets, None) on the rank with the last stage; 0 elsewhere."""
        found = self._through(batch)
        return torch.zeros((), device=self.device) if found is None else found, None

    def forward(self, batches: list[Batch]) -> None:
        """Runs the forward pass alone, for observers such as the search for non-finite values."""
        for batch in batches:
            self._through(batch)

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        """Logits of the last token on all ranks, with the signature that sampling code calls."""
        # The last stage normally returns the loss.
        self._end = self._last_logits
        try:
            found = self._through({"input_ids": input_ids})
        finally:
            self._end = self._loss
        return SimpleNamespace(logits=self.of_last(None if found is None else found.cpu()))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def _through(self, batch: Batch) -> Tensor | None:
        """Runs a batch through the stages, without a schedule; None without the last stage."""
        self._batches, self._positions = [batch], _positions(batch)
        turn = torch.zeros(1, dtype=torch.int64)
        found: Tensor = turn
        for number, module in self.modules.items():
            if self._hops(number):
                found = torch.empty_like(self._message(number, self._positions), device=self.device)
                # Ranks visit their stages in ascending order and messages flow forward only, so
                # send and recv pair up.
                dist.recv(found, group=self.group, group_src=self.owner(number - 1))
            found = module(found, turn=turn)
            if self._hops(number + 1):
                dist.send(found.contiguous(), group=self.group, group_dst=self.owner(number + 1))
        return found if self.has_last else None

    def of_last(self, own: Any) -> Any:
        """Broadcasts an object from the rank with the last stage to all ranks of the group."""
        told = [own]
        dist.broadcast_object_list(told, group=self.group, group_src=self.owner(self.count - 1))
        return told[0]

    def of_all(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """Merges the dicts of all ranks of the group, in the order of the whole model's modules.

        Keys are module names, or tuples that begin with one.
        """
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, own, group=self.group)
        found = {name: value for each in told for name, value in each.items()}
        names = {key: key if isinstance(key, str) else key[0] for key in found}
        return {
            key: found[key] for key in sorted(found, key=lambda key: self.order.get(names[key], 0))
        }

    def words(self) -> str:
        """Description for the console."""
        per_rank = len(self.modules)
        each = f"{per_rank} stages of {self.count}" if per_rank > 1 else "a stage of the model"
        return f"{each} each (pp), schedule {self.config.schedule}, {self.turns} micro-batches"

    # --- parts

    def _hops(self, number: int) -> bool:
        """True if stage `number` reads its input from another rank."""
        return 0 < number < self.count and self.owner(number) != self.owner(number - 1)

    def _message(self, number: int, positions: int) -> Tensor:
        """Meta tensor with shape and dtype of the input of stage `number`."""
        x = torch.empty(positions, self.width, dtype=self.dtype, device="meta")
        # An FP8 message packs codes and scales, so its shape differs from the activations'.
        return message_like(x) if self.config.activations == "fp8" and self._hops(number) else x

    def _refuse_without_parameters(self) -> None:
        own = {
            str(number): any(x.requires_grad for x in module.parameters())
            for number, module in self.modules.items()
        }
        if idle := [number for number, trains in self.of_all(own).items() if not trains]:
            raise ConfigError(
                f"model.freeze = {self.config.freeze!r}: nothing of stage {min(idle)} of {self.count} would train. Freeze less, or take a "
                "smaller pp.",
                code="pipeline.all-frozen",
            )


def refuse(config: TrainConfig, turns: int, ranks: int, count: int) -> None:
    """Raises ConfigError for settings that a pipeline of `count` stages does not support.

    turns  micro-batches of a step
    """
    if turns < count:
        raise ConfigError(
            f"batch.micro_batches = {turns}: fewer than the {count} stages of the pipeline (schedule {config.schedule!r} on "
            f"{ranks} ranks), some of which would always wait. Take --batch.micro-batches {count} or more.",
            code="pipeline.micro-batches",
        )
    if config.task not in ("text", "causal-lm"):
        raise ConfigError(
            f"parallel: pp cuts causal language models (tasks text and causal-lm), and this run's task is {config.task!r}. Take fsdp.",
            code="pipeline.task",
        )


def _positions(batch: Batch) -> int:
    return batch["input_ids"].numel()


def _behind(
    forward: Callable[..., Any], received: Tensor, *, input_ids: Tensor, **inputs: Any
) -> Any:
    """Calls a model with the previous stage's activations in the place of its embeddings."""
    hidden = received[: input_ids.numel()].view(*input_ids.shape, -1)
    return forward(inputs_embeds=hidden, **inputs)
