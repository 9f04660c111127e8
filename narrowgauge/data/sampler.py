"""Batch sampler for torch's DataLoader that follows a plan, and batches of evaluations.

The sampler works in any loop and in transformers' Trainer. Each rank creates a sampler with the same lengths
and settings, and draws its part of the same plan. Do not wrap it in a DistributedSampler or let
accelerate prepare the loader: both would divide the batches again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from narrowgauge.data.epochs import Batching, EpochPlan, Item, examples_of, plan
from narrowgauge.data.rows import round_up
from narrowgauge.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices

Segment = tuple[Batching, int]  # (settings, steps of this epoch done with them)


class LengthBatchSampler(Sampler[list[Any]]):
    """Yields the batches of one rank: lists of indices, or of tuples of indices if the plan packs.

    lengths   tokens of each example
    batching  settings
    strata    label group of each example, whose share every batch keeps (`Examples.strata`), or
              None
    rank      number of this rank
    plan      plan of the rest of the current epoch

    Each pass is the next epoch. The state is (epoch, step). The settings, such as the number of
    ranks, may differ from a saved state. The remaining examples of the epoch are then
    planned anew, and none is repeated or lost.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Indices,
        batching: Batching,
        *,
        strata: Indices | None = None,
        rank: int = 0,
    ):
        if not 0 <= rank < batching.world:
            raise ConfigError(
                f"LengthBatchSampler: rank {rank} of a world of {batching.world}; ranks count from 0.",
                code="sampler.rank",
            )
        self.lengths: Indices = np.asarray(lengths, dtype=np.int64)
        # Without strata the setting has no effect, so states with and without it must be equal.
        self.batching, self.rank = (
            replace(batching, stratify=batching.stratify and strata is not None),
            rank,
        )
        self.strata = None if strata is None else np.asarray(strata, dtype=np.int64)
        self._strata = (
            ""
            if self.strata is None
            else hashlib.sha256(self.strata.astype("<i8").tobytes()).hexdigest()
        )
        self._data = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()
        self._start(0, [])

    def _start(self, epoch: int, done: list[Segment]) -> None:
        """Plans the rest of an epoch after the segments `done`.

        The last segment continues if its settings are the current ones. Raises CheckpointError,
        before anything changes, if a plan has fewer steps than were done with it.
        """

        def planned(batching: Batching, steps: int) -> EpochPlan:
            found = plan(self.lengths, batching, epoch, among=left, strata=self.strata)
            if steps > len(found):
                raise CheckpointError(
                    f"LengthBatchSampler: the state is at step {steps} of an epoch of {len(found)} steps. Pass the state that was "
                    "saved with these data.",
                    code="sampler.other-epoch",
                )
            return found

        first = done.pop()[1] if done and done[-1][0] == self.batching else 0
        left: Indices | None = None
        for batching, steps in done:
            finished = planned(batching, steps).steps[:steps]
            # A state stores settings, not indices: the examples drawn are found by planning the
            # finished segments again.
            drawn = [index for step in finished for batch in step for index in examples_of(batch)]
            # Examples that no finished segment has drawn.
            left = np.setdiff1d(np.arange(len(self.lengths)) if left is None else left, drawn)
        self.plan = planned(self.batching, first)
        self.epoch, self._before, self._first, self._drawn, self._exhausted = (
            epoch,
            done,
            first,
            first,
            False,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths for the collator; the same in every epoch."""
        return self.plan.widths

    @property
    def batch_sampler(self) -> LengthBatchSampler:
        """The sampler itself: Trainer calls set_epoch on `loader.batch_sampler.batch_sampler`."""
        return self

    def __len__(self) -> int:
        """Steps of this epoch, including steps before a resumption."""
        return sum(steps for _, steps in self._before) + len(self.plan)

    def __iter__(self) -> Iterator[list[Item]]:
        if self._exhausted:
            self.set_epoch(self.epoch + 1)
        self._drawn = self._first
        for step in self.plan.steps[self._first :]:
            self._drawn += 1
            yield step[self.rank]
        self._exhausted = True

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of an epoch; no effect if the sampler is already in it."""
        # Trainer calls set_epoch with the current epoch after a resumption, which must not restart
        # it.
        if epoch != self.epoch or self._exhausted:
            self._start(epoch, [])

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Plain values for a checkpoint.

        step  batches of this epoch that the loop has finished, including batches before a
              resumption.
              None means the batches drawn so far, which is correct only without workers, since
              workers draw ahead
        """
        before = sum(steps for _, steps in self._before)
        done = before + self._drawn if step is None else step
        if not before + self._first <= done <= len(self):
            raise ConfigError(
                f"LengthBatchSampler: step {done} is not in {before + self._first} to {len(self)}, the rest of epoch {self.epoch}. Pass "
                "the number of batches that the loop has finished.",
                code="sampler.step",
            )
        segments = [*self._before, (self.batching, done - before)]
        return {
            "epoch": self.epoch,
            "step": done,
            "lengths": self._data,
            "strata": self._strata,
            "segments": [[asdict(batching), steps] for batching, steps in segments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.

        Raises CheckpointError if it is malformed or belongs to other data.
        """
        try:
            epoch, lengths = int(state["epoch"]), state["lengths"]
            segments = [
                (Batching(**{"stratify": False, **settings}), int(steps))
                for settings, steps in state["segments"]
            ]
            # States saved before strata existed have neither `strata` nor `stratify`.
            strata = state.get("strata", "")
            done = sum(steps for _, steps in segments)
            if done != state["step"] or epoch < 0 or any(steps < 0 for _, steps in segments):
                raise ValueError(
                    f"step {state['step']} of epoch {epoch}, but segments of {[each[1] for each in segments]}"
                )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(
                f"LengthBatchSampler: not a state of this sampler: {error}. Pass what state_dict returned.",
                code="sampler.state",
            ) from error
        if lengths != self._data:
            raise CheckpointError(
                f"LengthBatchSampler: the state belongs to other data than these {len(self.lengths)} examples: their lengths "
                "differ. Resume with the data, tokenizer and limits of the saved run.",
                code="sampler.other-data",
            )
        if strata != self._strata and any(batching.stratify for batching, _ in segments):
            raise CheckpointError(
                "LengthBatchSampler: the batches of the state were stratified by other labels than are given here. Pass the strata "
                "(`examples.strata`) of the saved run.",
                code="sampler.other-strata",
            )
        self._start(epoch, [segment for segment in segments if segment[1]])


def sorted_batches(
    lengths: Sequence[int] | Indices,
    *,
    batch_size: int | None = None,
    token_budget: int | None = None,
    multiple: int = 8,
) -> list[list[int]]:
    """Evaluation batches sorted by length, the longest first; `restore_order` restores the order.

    This "uniform dynamic padding" has the least padding possible for the batch sizes. Do not train
    on it: the order is the same in every epoch. An example above the budget is a batch by itself.
    """
    Batching(batch_size=batch_size, token_budget=token_budget, multiple=multiple)  # validates
    sizes = np.asarray(lengths, dtype=np.int64)
    # stable: equal lengths keep the order of the data, the same on every machine.
    queue, batches = np.argsort(-sizes, kind="stable"), []
    while len(queue):
        width = round_up(max(1, int(sizes[queue[0]])), multiple)
        rows = batch_size or max(1, (token_budget or 0) // width)
        batches.append(queue[:rows].tolist())
        queue = queue[rows:]
    return batches


def restore_order(batches: Sequence[Sequence[int]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """Puts the results of batches into the order of the data.

    Raises DataError if the number of results differs from the number of examples.
    """
    if [len(batch) for batch in batches] != [len(result) for result in results]:
        given, needed = (sum(map(len, each)) for each in (results, batches))
        raise DataError(
            f"restore_order: {given} results for {needed} examples. Pass one result per example.",
            code="restore-order.count",
        )
    by_index = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
    return [by_index[index] for index in range(len(by_index))]
