"""Plans the batches of an epoch for all ranks: a pure function of lengths, settings and epoch.

    widths    at most `classes` widths, chosen from the lengths (see `rows`); an example's class is
              the smallest width that holds it
    order     examples are shuffled, then sorted by class, the widest first.
              With `strata` (label groups), every batch has the data's share of each (see `strata`).
              With order "shuffled" they are not sorted: a step is a random sample, and only its
              micro-batches have one width
    cut       a step takes the next rows x world examples; rows = batch_size, or as many as
              `token_budget` holds at the width of the widest. If a class runs out, the next
              narrower class fills the step, so only one step is ragged
    ranks     rank r takes every world-th example of a step, so all ranks have the same width and
              work. A step of several widths is sorted, the widest first, so that its micro-batches,
              consecutive runs of rows, have nearly one width each
    shuffle   the steps, so that lengths do not drift through the epoch. The step with the most
              positions comes first, so that an out-of-memory error appears at once

Packed rows are planned in the same way, with the sum of their examples as length. If packing would
pad more than one example per row does, each example gets its own row.

No example is lost or duplicated unless `ragged` says so. Every rank computes the same plan. The
state is (epoch, step).

Lengths within a step are not distributed as in the data, unless steps are shuffled. Normalize the
loss by targets (see `targets`), or short examples weigh more than long ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from narrowgauge.data.batches import Indices, permutation
from narrowgauge.data.rows import (
    PaddingReport,
    Waste,
    choose_widths,
    dynamic_waste,
    pack,
    round_up,
    width_of,
)
from narrowgauge.data.strata import stratified
from narrowgauge.errors import ConfigError, DataError

Item = int | tuple[int, ...]  # index of an example, or the indices of one packed row


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Settings of batching. Either batch_size or token_budget is given.

    batch_size       rows per rank and step
    token_budget     positions (rows x width, with padding) per rank and step
    row_length       packs examples into rows of at most this length; None pads each example
    world            number of ranks
    seed             seed of all shuffles
    multiple         widths are multiples of this power of two
    tokens_multiple  rows x width is a multiple of this power of two; 16 for 8-bit matmuls
    classes          largest number of widths
    ragged           examples of an incomplete step. "smaller" makes a step with fewer rows; "drop"
                     skips them (others in each epoch); "repeat" fills the step with earlier
                     examples of the epoch, under a budget with none that is longer
    too_long         examples above the budget: "error", or "skip", which the plan counts
    stratify         every batch has the data's share of each stratum, if strata are given
    order            "length": a step has examples of one width. "shuffled": a random sample
    """

    batch_size: int | None = None
    token_budget: int | None = None
    row_length: int | None = None
    world: int = 1
    seed: int = 0
    multiple: int = 8
    tokens_multiple: int = 16
    classes: int = 10
    ragged: Literal["smaller", "drop", "repeat"] = "smaller"
    too_long: Literal["error", "skip"] = "error"
    stratify: bool = True
    order: Literal["length", "shuffled"] = "length"

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.token_budget is None):
            raise ConfigError(
                f"batching: batch_size {self.batch_size} and token_budget {self.token_budget}. Pass exactly one of them.",
                code="batching.size",
            )
        for name in ("batch_size", "token_budget", "row_length", "world", "classes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(
                    f"batching: {name} {value} is not a positive number.",
                    code="batching.not-positive",
                )
        for name in ("multiple", "tokens_multiple"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ConfigError(
                    f"batching: {name} {value} is not a power of two. Pass 8 or 16, or 1 for none.",
                    code="batching.power-of-two",
                )
        for name, known in (
            ("ragged", ("smaller", "drop", "repeat")), ("too_long", ("error", "skip")), ("order", ("length", "shuffled")),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in known:
                raise ConfigError(
                    f"batching: {name} {value!r}. Pass {' or '.join(map(repr, known))}.",
                    code="batching.choice",
                )
        if self.row_length is not None and self.row_length % self.tokens_multiple:
            raise ConfigError(
                f"batching: row_length {self.row_length} is no multiple of tokens_multiple {self.tokens_multiple}. Pass "
                f"{round_up(self.row_length, self.tokens_multiple)}.",
                code="batching.row-multiple",
            )
        if (
            self.row_length is not None
            and self.token_budget is not None
            and self.token_budget < self.row_length
        ):
            raise ConfigError(
                f"batching: token_budget {self.token_budget} holds no row of row_length {self.row_length}. "
                "Pass a larger budget or a shorter row.",
                code="batching.budget",
            )

    def rows(self, width: int) -> int:
        """Rows per rank at this width; 0 if none fits the budget."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.token_budget is not None
        # With a multiple of `several` rows, rows x width is a multiple of tokens_multiple.
        several = self.tokens_multiple // math.gcd(width, self.tokens_multiple)
        return self.token_budget // (width * several) * several

    def shape(self, width: int, rows: int) -> tuple[int, int]:
        """(positions, width) of a batch of `rows` rows of at least this width, as collated."""
        width = width_of(width, rows, (width,), self.tokens_multiple)
        return rows * width, width


@dataclass(frozen=True)
class EpochPlan:
    """Batches of one epoch.

    steps     steps[step][rank]: the examples of one batch, or tuples of examples if packed
    widths    widths for the collator
    padding   padding of this plan and of its alternatives
    skipped   examples that are too long
    dropped   examples of the incomplete step (ragged "drop")
    repeated  number of examples drawn again (ragged "repeat")
    alone     reason why packing put one example into each row, or ''
    """

    steps: list[list[list[Item]]]
    widths: tuple[int, ...]
    padding: PaddingReport
    skipped: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    repeated: int = 0
    alone: str = ""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: examples skipped or repeated, and why packing was not used."""
        counts = {
            "are longer than the budget and are left out.": len(self.skipped),
            "fill no whole step and are left out of this epoch.": len(self.dropped),
            "are drawn again in this epoch to fill its last step.": self.repeated,
        }
        return [self.alone] * bool(self.alone) + [
            f"{count} examples {what}" for what, count in counts.items() if count
        ]


def plan(
    lengths: Sequence[int] | Indices,
    batching: Batching,
    epoch: int = 0,
    *,
    among: Sequence[int] | Indices | None = None,
    strata: Indices | None = None,
    micro_batches: int = 1,
) -> EpochPlan:
    """Plans the batches of one epoch; see the module docstring.

    lengths        tokens of each example
    among          examples to plan; None means all. Widths always come from all lengths
    strata         [N] label group of each example; None: no groups
    micro_batches  runs of nearly equal size into which a rank's batch is cut; affects only
                   `padding`

    O(N log N); on one core 1.5 s per million examples padded, 5 s packed. Raises DataError for an
    example without tokens, or longer than the budget (unless too_long is "skip"). Raises
    ConfigError if there are fewer examples than ranks, or strata of packed rows.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.min()) < 1:
        raise DataError(
            f"plan: example {int(np.argmin(sizes))} has no tokens. Leave it out of the data.",
            code="plan.empty-example",
        )
    fitting = _fitting(sizes, batching)
    chosen = np.arange(len(sizes)) if among is None else np.asarray(among, dtype=np.int64)
    skipped = chosen[~fitting[chosen]].tolist()
    chosen = chosen[fitting[chosen]]
    # Shuffled before the stable sort by width, so that examples of one width come in random order.
    chosen = chosen[permutation(len(chosen), b"examples:%d:%d" % (batching.seed, epoch))]
    rows, tokens, widths, alone = _rows(sizes, chosen, sizes[fitting], batching, epoch)
    groups = _groups(strata, len(sizes), batching)
    order, width = _ordered(
        tokens, widths, None if groups is None else groups[chosen], batching.order == "shuffled"
    )
    parts, dropped = _cut(width, batching)
    items, world = [rows[place] for place in order], batching.world
    if groups is not None or batching.order == "shuffled":
        # Sorted, so that every rank's batch and every micro-batch has nearly one width.
        parts = [sorted(part, key=lambda place: -width[place]) for part in parts]
    ranks = [[part[rank::world] for rank in range(world)] for part in parts]
    steps = [[[items[place] for place in batch] for batch in step] for step in ranks]
    drawn = np.fromiter(
        (index for step in steps for batch in step for index in examples_of(batch)), dtype=np.int64
    )
    shapes = [
        [batching.shape(max(width[place] for place in batch), len(batch)) for batch in step]
        for step in ranks
    ]
    micro = [run for step in ranks for batch in step for run in runs(batch, micro_batches)]
    positions = sum(
        batching.shape(max(width[place] for place in run), len(run))[0] for run in micro
    )
    planned, shuffled = sizes[chosen], sizes[chosen][permutation(len(chosen), b"padding")]
    batches = max(1, sum(map(len, shapes)))
    return EpochPlan(
        [steps[place] for place in _shuffled([max(step) for step in shapes], batching.seed, epoch)],
        widths,
        PaddingReport(
            fixed=dynamic_waste(planned, max(1, len(planned)), batching.multiple),
            shuffled=dynamic_waste(shuffled, max(1, len(drawn) // batches), batching.multiple),
            planned=Waste(int(sizes[drawn].sum()), positions),
        ),
        skipped,
        dropped=list(examples_of([items[place] for place in dropped])),
        repeated=max(0, len(drawn) - len(chosen)),
        alone=alone,
    )


def _fitting(sizes: Indices, batching: Batching) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[N] bool: True if the example fits into a batch by itself.

    Raises DataError if one does not, unless too_long is "skip".
    """
    what, limit = "row_length", batching.row_length
    if limit is None and batching.token_budget is not None:
        what, multiple = "token_budget", batching.multiple
        holding = range(batching.token_budget // multiple * multiple, 0, -multiple)
        # The widest usable width need not be the widest below the budget: with tokens_multiple,
        # some widths need several rows at once.
        limit = next((width for width in holding if batching.rows(width)), 0)
    fitting = np.ones(len(sizes), dtype=bool) if limit is None else sizes <= limit
    if batching.too_long == "error" and not fitting.all():
        raise DataError(
            f"plan: {int((~fitting).sum())} of {len(sizes)} examples do not fit {what} {getattr(batching, what)}, which holds "
            f"{limit} tokens; the longest has {int(sizes.max())} (example {int(np.argmax(sizes))}). Pass a larger one, truncate the "
            "examples, or leave them out with too_long='skip'.",
            code="plan.example-too-long",
        )
    return fitting


def _widths(tokens: Indices, batching: Batching) -> tuple[int, ...]:
    """Widths for these lengths; each holds at least one row within the budget."""
    limit, usable = batching.row_length or sys.maxsize, set()
    for width in choose_widths(tokens, count=batching.classes, multiple=batching.multiple):
        # Usable widths are not monotone: with tokens_multiple 16, width 9 needs 16 rows at once
        # (144 positions), width 16 needs one. Widen until the rows fit.
        while width < limit and not batching.rows(width):
            width += batching.multiple
        usable.add(min(width, limit))
    return tuple(sorted(usable))


def _rows(
    sizes: Indices, chosen: Indices, every: Indices, batching: Batching, epoch: int
) -> tuple[Sequence[Item], Indices, tuple[int, ...], str]:
    """Returns (rows, tokens of each, widths to pad to, reason for one example per row or '').

    `every` holds the lengths of all fitting examples. Widths and the choice between packed and
    single rows depend on `every`, so that they stay the same after a resumption.
    """
    singles = _widths(every, batching)
    if batching.row_length is None:
        return chosen.tolist(), sizes[chosen], singles, ""
    rows, tokens = _packed(sizes[chosen], batching.row_length)
    whole = tokens if len(chosen) == len(every) else _packed(every, batching.row_length)[1]
    widths = _widths(whole, replace(batching, classes=max(1, batching.classes - 1)))
    # After a resumption, the remaining examples may fill rows further than all examples did.
    if not widths or widths[-1] < batching.row_length:
        widths = (*(widths if batching.classes > 1 else ()), batching.row_length)
    packed_positions, single_positions = (
        _positions(*each, batching) for each in ((whole, widths), (every, singles))
    )
    # Packing can lose: rows are as long as row_length, while single examples get narrow widths.
    if single_positions < packed_positions:
        packed, padded = (
            Waste(int(every.sum()), positions).percent
            for positions in (packed_positions, single_positions)
        )
        reason = (
            f"Rows of {batching.row_length} tokens would be padded by {packed:.1f} % with several examples in a row and by "
            f"{padded:.1f} % with one: each example has its own. Longer rows hold more."
        )
        return [(index,) for index in chosen.tolist()], sizes[chosen], singles, reason
    order = permutation(len(rows), b"rows:%d:%d" % (batching.seed, epoch))
    return [tuple(chosen[rows[place]].tolist()) for place in order], tokens[order], widths, ""


def _packed(sizes: Indices, row_length: int) -> tuple[list[list[int]], Indices]:
    """(packed rows, tokens of each)."""
    rows = pack(sizes, row_length)
    return rows, np.fromiter(
        (int(sizes[row].sum()) for row in rows), dtype=np.int64, count=len(rows)
    )


def _positions(tokens: Indices, widths: tuple[int, ...], batching: Batching) -> int:
    """Positions of rows with these tokens, batched in this order for one rank, none dropped."""
    is_shuffled = batching.order == "shuffled"
    if is_shuffled:
        tokens = tokens[permutation(len(tokens), b"padding")]
    width = _ordered(tokens, widths, shuffled=is_shuffled)[1]
    parts, _ = _cut(width, replace(batching, ragged="smaller", world=1))
    return sum(batching.shape(max(width[place] for place in part), len(part))[0] for part in parts)


def _groups(strata: Indices | None, count: int, batching: Batching) -> Indices | None:
    """Strata to use, or None. Raises ConfigError if they do not fit the examples."""
    if strata is None or not batching.stratify:
        return None
    if batching.row_length is not None or len(strata) != count:
        raise ConfigError(
            f"plan: {len(strata)} strata for {count} examples, row_length {batching.row_length}. Pass one for each example that has a "
            "row of its own, or stratify=False: packed rows have no stratum.",
            code="plan.strata",
        )
    return np.asarray(strata, dtype=np.int64)


def _ordered(
    tokens: Indices, widths: tuple[int, ...], strata: Indices | None = None, shuffled: bool = False
) -> tuple[list[int], list[int]]:
    """(row indices, width of each), from the widest class to the narrowest.

    If shuffled, the given order is kept. With strata, each stratum is spread evenly over the order.
    """
    classes = np.searchsorted(widths, tokens)
    keys = np.zeros_like(classes) if shuffled else classes
    # Stable, so that equal widths keep their shuffled order.
    order = np.argsort(-keys, kind="stable") if strata is None else stratified(keys, strata)
    return order.tolist(), [widths[each] for each in classes[order].tolist()]


def _cut(width: list[int], batching: Batching) -> tuple[list[Sequence[int]], Sequence[int]]:
    """(row indices of each step, row indices dropped) for rows with the given widths."""
    # Without strata or shuffling, rows are sorted by width and `width[start]` is a step's widest.
    world, start = batching.world, 0
    parts: list[Sequence[int]] = []
    while (
        start < len(width)
        and (take := _rows_of_step(width, start, batching) * world) <= len(width) - start
    ):
        parts.append(range(start, start + take))
        start += take
    tail = range(start, len(width))
    if not tail or batching.ragged == "drop":
        return parts, tail
    if batching.ragged == "repeat":
        return [*parts, *_filled_up(tail, width, batching)], ()
    # Every rank needs a row: join the tail with the last whole step.
    if len(tail) < world and parts:
        tail = range(parts.pop()[0], len(width))
    return [*parts, *_smaller(tail, max(width[tail[0] :]), batching)], ()


def _rows_of_step(width: list[int], start: int, batching: Batching) -> int:
    """Rows per rank of the step that begins at `start`; they fit at the width of the widest row."""
    rows, budget = batching.rows(width[start]), batching.token_budget or sys.maxsize
    # More rows can include a wider one, which in turn leaves room for fewer.
    while (
        batching.shape(widest := max(width[start : start + rows * batching.world]), rows)[0]
        > budget
    ):
        rows = min(batching.rows(widest), rows - 1)
    return rows


def _filled_up(tail: range, width: list[int], batching: Batching) -> Iterator[Sequence[int]]:
    """Whole steps of the tail; earlier rows (no wider, under a budget) fill the last step."""
    while tail:
        widest = max(width[tail[0] :])
        count = batching.rows(widest) * batching.world
        if missing := max(0, count - len(tail)):
            limit = widest if batching.token_budget else sys.maxsize
            before = [place for place in range(tail[0]) if width[place] <= limit]
            again = before[-missing:] or tail
            yield [*tail, *(again[place % len(again)] for place in range(missing))]
        else:
            yield tail[:count]
        tail = tail[count:]


def _smaller(tail: range, width: int, batching: Batching) -> Iterator[range]:
    """Cuts the tail into few steps, each within the budget and with a row for every rank."""
    world, most = batching.world, batching.rows(width)

    def fits(count: int) -> bool:
        few, many = count // world, -(-count // world)  # rows of the last ranks and of the first
        if many > most or 0 < len(tail) - count < world:
            return False
        budget = batching.token_budget or sys.maxsize
        return all(batching.shape(width, rows)[0] <= budget for rows in {few, many})

    while tail:
        count = next((count for count in range(len(tail), world - 1, -1) if fits(count)), 0)
        if not count:
            raise ConfigError(
                f"batching: the last {len(tail)} examples do not go round {world} ranks in steps of at most {most} rows each. "
                "Pass ragged='repeat' or ragged='drop', or larger batches.",
                code="batching.ranks",
            )
        yield tail[:count]
        tail = tail[count:]


def _shuffled(largest: list[tuple[int, int]], seed: int, epoch: int) -> list[int]:
    """Random order of the steps; the step with the most positions comes first.

    largest  largest (positions, width) of each step
    """
    order: list[int] = permutation(len(largest), b"steps:%d:%d" % (seed, epoch)).tolist()
    if order:
        worst = order.index(max(order, key=lambda place: largest[place]))
        order[0], order[worst] = order[worst], order[0]
    return order


def runs(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Cuts `items` into at most `parts` non-empty runs of nearly equal length: micro-batches."""
    parts = min(len(items), parts)
    bounds = [len(items) * place // parts for place in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


def examples_of(batch: Sequence[Item]) -> Iterator[int]:
    """Yields the examples of a batch, packed or not."""
    for item in batch:
        yield from item if isinstance(item, tuple) else (item,)
