"""A plan as a batch sampler of torch's DataLoader, in any loop and in transformers' Trainer, with a state of a few numbers.

    sampler = LengthBatchSampler(examples.lengths, Batching(token_budget=4096), rank=rank)
    loader = DataLoader(examples, batch_sampler=sampler, collate_fn=Collator(pad_id, widths=sampler.widths))
    for batch in loader: ...           # each pass is the next epoch

Each rank makes its own sampler with the same lengths and settings, and draws its own part of the same plan. Do not wrap it in
a DistributedSampler, nor let accelerate prepare the loader: both would divide the batches once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from narrowgauge.data.order import Indices
from narrowgauge.data.plan import Batching, Item, Plan, examples_of, plan
from narrowgauge.errors import CheckpointError, ConfigError

Segment = tuple[Batching, int]  # settings, and the steps of this epoch that were done under them


class LengthBatchSampler(Sampler[list[Any]]):
    """Yields the batches of one rank, lists of indices (of tuples of indices if the plan packs), epoch after epoch.

    The state is the epoch and the step in it. When the settings differ from those of the state (the world has
    another size), the steps done stay done and the rest of the epoch is planned anew: no example twice, none lost.

    plan    of the epoch's rest at hand: padding, notes, widths
    """

    def __init__(self, lengths: Sequence[int] | Indices, batching: Batching, *, rank: int = 0):
        if not 0 <= rank < batching.world:
            raise ConfigError(f"LengthBatchSampler: rank {rank} of a world of {batching.world}; ranks count from 0.")
        self.lengths: Indices = np.asarray(lengths, dtype=np.int64)
        self.batching, self.rank = batching, rank
        self._data = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()
        self._start(0, [])

    def _start(self, epoch: int, done: list[Segment]) -> None:
        """At what is left of this epoch after these segments; the last goes on if the settings are the same."""
        self.epoch, self._drawn, self._exhausted = epoch, 0, False
        self._first = done[-1][1] if done and done[-1][0] == self.batching else 0
        self._before = done[:-1] if self._first else done
        among: list[int] | None = None
        for batching, steps in self._before:
            left = np.zeros(len(self.lengths), dtype=bool)
            left[slice(None) if among is None else among] = True
            for step in self._planned(batching, among, steps).steps[:steps]:
                left[[index for batch in step for index in examples_of(batch)]] = False
            among = np.flatnonzero(left).tolist()
        self.plan: Plan = self._planned(self.batching, among, self._first)

    def _planned(self, batching: Batching, among: list[int] | None, done: int) -> Plan:
        """Of this epoch, with at least the `done` steps of the state."""
        found = plan(self.lengths, batching, self.epoch, among=among)
        if done > len(found):
            raise CheckpointError(
                f"LengthBatchSampler: the state is at step {done} of an epoch of {len(found)} steps. Pass the state that was "
                "saved with these data."
            )
        return found

    @property
    def widths(self) -> tuple[int, ...]:
        """What batches may be padded to, for the collator. The same in every epoch."""
        return self.plan.widths

    @property
    def batch_sampler(self) -> LengthBatchSampler:
        """Itself: transformers' Trainer looks one level down for the sampler that it tells the epoch."""
        return self

    def __len__(self) -> int:
        """Steps of this epoch, those before a resumption included."""
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
        """At the beginning of this epoch; where it stands, if it stands in this epoch already."""
        if epoch != self.epoch or self._exhausted:
            self._start(epoch, [])

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Plain values for a checkpoint.

        step  batches of this epoch that the loop has finished, those before a resumption included. None takes those that
              were drawn; right without workers alone, since a DataLoader's workers draw ahead of the loop.
        """
        before = sum(steps for _, steps in self._before)
        done = before + max(self._first, self._drawn) if step is None else step
        if not before + self._first <= done <= len(self):
            raise ConfigError(
                f"LengthBatchSampler: step {done} is not one of {before + self._first} to {len(self)}, those left of epoch {self.epoch}."
            )
        segments = [*self._before, (self.batching, done - before)]
        return {
            "epoch": self.epoch,
            "step": done,
            "lengths": self._data,
            "segments": [[asdict(batching), steps] for batching, steps in segments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the state stands. Raises CheckpointError if it is malformed or belongs to other data."""
        try:
            epoch, lengths = int(state["epoch"]), state["lengths"]
            segments = [(Batching(**settings), int(steps)) for settings, steps in state["segments"]]
            done = sum(steps for _, steps in segments)
            if done != state["step"] or epoch < 0 or any(steps < 0 for _, steps in segments):
                raise ValueError(
                    f"step {state['step']} of epoch {epoch}, but segments of {[each[1] for each in segments]}"
                )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(
                f"LengthBatchSampler: not a state of this sampler: {error}. Pass what state_dict returned."
            ) from error
        if lengths != self._data:
            raise CheckpointError(
                f"LengthBatchSampler: the state belongs to other data than these {len(self.lengths)} examples: their lengths "
                "differ. Resume with the data, tokenizer and limits of the saved run."
            )
        self._start(epoch, [segment for segment in segments if segment[1]])
