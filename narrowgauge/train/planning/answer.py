"""Answers of `narrowgauge plan`: memory, fit on a card, largest batch, settings that would fit.

Every figure is traced (`counts`) and none is interpolated: an estimate only selects the next
configuration to trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import isqrt
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.format_text import elsewhere
from narrowgauge.distributed.messages import BYTES_PER_ELEMENT
from narrowgauge.errors import ConfigError
from narrowgauge.optim import precision as precisions
from narrowgauge.plan import messages, roofline
from narrowgauge.plan.room import KEPT_FREE, Room
from narrowgauge.plan.tally import repeated
from narrowgauge.plan.text import gib
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.planning.steps import MOST_MICRO_BATCHES, Source
from narrowgauge.train.planning.techniques import CHEAPEST_FIRST, ROAD, SQRT, Technique, lines

if TYPE_CHECKING:
    from narrowgauge.ops.timing.cards import Card
    from narrowgauge.plan.forecast import Forecast
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.planning.counts import Counts
    from narrowgauge.train.tasks import Shape

MOST_ROWS = 2**16
MOST_CHANGES = 3  # suggestions in an answer; each suffices alone
MOST_COUNTS = 6  # traces in a search for the largest batch, at most
CLOSE = 0.999  # the search ends when a batch fills this share of the limit


@dataclass
class Answers:
    """Plans one run on one card.

    config  settings of the run
    room    the card and its usable memory
    counts  traces configurations, each once
    """

    config: TrainConfig
    room: Room
    counts: Counts

    def shape(self) -> Shape:
        """Shape of the largest micro-batch that the settings allow."""
        return Source.of(self.config, parallel_syntax.named(self.config.parallel).data).shape

    def answer(self, table: bool = False) -> dict[str, Any]:
        """JSON answer with the keys that docs/planner.md documents. table: adds rows of `table`."""
        config, shape, room = self.config, self.shape(), self.room
        found, other = (
            self.counts.of(config),
            elsewhere(config.layers_recipe, config.embedding_codes, config.attention),
        )
        answer: dict[str, Any] = {
            "run": f"{config.recipe}{other} ({config.precision}, {config.optimizer} with {config.states} states)",
            "batch": {
                "rows": shape.rows,
                "width": shape.width,
                "micro_batches": config.micro_batches,
            },
            **room.answer(found),
        }
        sizes = parallel_syntax.named(config.parallel)
        # Under tp or pp the trace does not contain a rank's share of the matmuls.
        if room.card is not None and sizes.tp * sizes.pp == 1:
            answer["time"] = self.time(found, shape, room.card, sizes)
        if room.usable:
            answer["largest"] = self.largest_batch(shape)
            if not room.fits(found):
                answer["changes"] = self.changes()
                if not answer["changes"]:
                    words, answer["changes"] = self.never(shape)
                    answer["verdict"] += f" {words}"
        if table:
            answer["table"] = list(self.table(found))
        return answer

    def time(
        self, found: Forecast, shape: Shape, card: Card, sizes: parallel_syntax.Layout
    ) -> dict[str, Any]:
        """Predicted time of an eager step, with the communication of dp and fsdp."""
        parts = self.config.micro_batches
        # At most MOST_MICRO_BATCHES are traced; their work is scaled to all micro-batches.
        done = repeated(found.work, parts / min(parts, MOST_MICRO_BATCHES))
        # Each rank updates only its shard of the parameters.
        done = {
            each: times / sizes.fsdp if each.phase == "step" else times
            for each, times in done.items()
        }
        weights = sizes.fsdp * max(each.parts.get(("weights", ""), 0) for each in found.moments)
        blocks = max(1, round(weights / found.block_weights)) if found.block_weights else 1
        number = precisions.get(self.config.precision).weights.itemsize
        sent = messages.of_step(
            weights, blocks, copies=sizes.dp, shards=sizes.fsdp, micro_batches=parts,
            # Bytes relative to the weights' dtype: codes take one byte for each element.
            gathered=1.0 if self.config.weights == "16bit" else 1 / number,
            reduced=1.0 if self.config.gradients == "16bit" else BYTES_PER_ELEMENT / number,
        )  # fmt: skip
        tokens = shape.rows * shape.width * parts * sizes.data
        return roofline.as_dict(roofline.time(done, card), card, tokens, sent)

    def largest_batch(self, shape: Shape) -> dict[str, int]:
        """Largest number of rows of a micro-batch that fits, within 0.1 %; 0 if one does not fit.

        Memory grows more than linearly with rows, so a secant through two traces overshoots. The
        next trace corrects it. Row numbers that the settings reject do not fit and are not used for
        a secant.
        """
        known: dict[int, int] = {}

        def need(rows: int) -> int | None:
            try:
                known[rows] = self.counts.of(self.config, replace(shape, rows=rows)).allocated
            except ConfigError:
                return None
            return known[rows]

        limit = int(self.room.usable / (1 + KEPT_FREE))
        low, high = 0, MOST_ROWS + 1  # invariant: low rows fit, high rows do not
        guess = shape.rows
        while True:
            needed = need(guess)
            if needed is not None and needed <= limit:
                low = guess
            else:
                high = guess
            is_close = needed is not None and CLOSE * limit <= needed <= limit
            if high - low <= 1 or is_close or len(known) == MOST_COUNTS:
                break
            # Geometric mean: the range spans several orders of magnitude.
            following = isqrt(low * high) if needed is None else _next(known, limit, guess)
            guess = min(
                max(following if following < high else isqrt(low * high), low + 1), high - 1
            )
        return {"rows": low, "width": shape.width, "tokens": low * shape.width}

    def changes(self) -> list[dict[str, Any]]:
        """Settings that make the run fit: single techniques, else the cheapest combination.

        Before a combination is searched, one trace with all techniques tells if any can succeed.
        Single techniques need no such test: tracing the sufficient ones costs no more than tracing
        all.
        """
        # A generator: after MOST_CHANGES hits no further technique is traced.
        single = (
            (each, after)
            for each in CHEAPEST_FIRST
            if self._may_fit([each]) and (after := each.applied(self.config)) is not None
        )
        fitting = list(
            islice(
                ((after, each.words) for each, after in single if self._fits(after)), MOST_CHANGES
            )
        )
        if not fitting and not self._hopeless():
            together = self._together()
            fitting = [together] if together else []
        return [self._change(after, words) for after, words in fitting]

    def _everything(self, without: tuple[Technique, ...] = ()) -> TrainConfig:
        """Configuration with every memory-saving technique that is compatible with its settings."""
        everything = self.config
        for each in CHEAPEST_FIRST:
            everything = (None if each in without else each.applied(everything)) or everything
        return everything

    def _hopeless(self) -> bool:
        """True if the run does not fit even with all techniques, so no combination can succeed.

        Checkpointing in segments is tried last: it treats blocks differently, so every layer is
        traced, which takes ten times as long.
        """
        try:
            return not any(
                self.room.fits(self.counts.of(self._everything(left))) for left in ((SQRT,), ())
            )
        except ConfigError:
            return False

    def _change(self, config: TrainConfig, words: str) -> dict[str, Any]:
        return {
            "words": words, "lines": lines(self.config, config), "allocated_bytes": self.counts.of(config).allocated,
        }  # fmt: skip

    def _fits(self, config: TrainConfig) -> bool:
        try:
            return self.room.fits(self.counts.of(config))
        except ConfigError:  # building the step shows that the settings are incompatible
            return False

    def _may_fit(self, techniques: list[Technique]) -> bool:
        """False if the run exceeds the card even without the parts that these techniques reduce.

        A cheap bound that avoids a trace.
        """
        if not all(each.parts for each in techniques):
            return True
        # Lower bound: what remains if the reducible parts were free.
        smaller = {part for each in techniques for part in each.parts}
        moments = self.counts.of(self.config).moments
        least = max(
            sum(size for (part, _), size in each.parts.items() if part not in smaller)
            for each in moments
        )
        return least <= self.room.usable

    def _together(self) -> tuple[TrainConfig, str] | None:
        """Cheapest combination of techniques that fits, as (configuration, names), or None."""
        taken = list[Technique]()
        for each in CHEAPEST_FIRST:
            if (after := _all(self.config, [*taken, each])) is None:
                continue
            taken.append(each)
            if self._may_fit(taken) and self._fits(after):
                break
        else:
            return None
        # Greedy: techniques were added until the run fitted. Remove those that turn out to be
        # unnecessary, the most expensive first.
        for each in sorted(taken[:-1], key=lambda one: (-one.numbers, -one.time)):
            without = [one for one in taken if one is not each]
            fewer = _all(self.config, without)
            if fewer is not None and self._may_fit(without) and self._fits(fewer):
                taken = without
        found = _all(self.config, taken)
        assert found is not None
        return found, "; ".join(each.name for each in taken)

    def never(self, shape: Shape) -> tuple[str, list[dict[str, Any]]]:
        """Returns (sentence, changes) for a run that no technique makes fit.

        The changes are shards on more ranks, if their forecast fits; else the sentence asks for a
        larger card.
        """
        everything = self._everything()
        least = gib(self.counts.of(everything, replace(shape, rows=1)).allocated)
        needs = f"With all that saves memory, one row still needs {least}."
        if not self.config.freeze:
            needs += (
                ' What trains is yours to say, so freezing is not tried: model.freeze = "embed*,layers.0-7" saves states and '
                "gradients."
            )
        # batch_size grows with the ranks, so that the rows of each rank stay the same.
        for ranks in (2, 4, 8, 16, 32, 64):
            layout = replace(
                everything, parallel=f"fsdp={ranks}", batch_size=everything.batch_size * ranks
            )
            if self._fits(layout):
                change = self._change(
                    layout, f"on each of {ranks} such cards, with all that saves memory"
                )
                return f"{needs} Take {ranks} such cards or more.", [change]
        return f"{needs} Take a larger card, or a smaller model.", []

    def table(self, found: Forecast) -> Iterator[dict[str, Any]]:
        """Rows that add one technique after another to the user's settings."""
        config, before = self.config, found.allocated
        yield {"name": "as configured", "settings": "", "allocated_bytes": before, "words": ""}
        for each in ROAD:
            after = each.applied(config)
            if after is None:
                continue
            try:
                size = self.counts.of(after).allocated
            except ConfigError:
                continue
            settings = ", ".join(lines(config, after))
            yield {
                "name": each.name,
                "settings": settings,
                "allocated_bytes": size,
                "words": each.words,
            }
            config = after


def _next(known: dict[int, int], limit: int, guess: int) -> int:
    """Rows where the secant through the two traces nearest the limit meets it.

    With one trace: twice or half its rows.
    """
    if len(known) == 1:
        return 2 * guess if known[guess] <= limit else guess // 2
    first, second = sorted(sorted(known, key=lambda rows: abs(known[rows] - limit))[:2])
    slope = (known[second] - known[first]) / (second - first)
    # Equal or shrinking traces give no secant: try the upper end next.
    return MOST_ROWS if slope <= 0 else int(first + (limit - known[first]) / slope)


def _all(config: TrainConfig, techniques: list[Technique]) -> TrainConfig | None:
    """Configuration with all techniques applied in order; None if one is incompatible."""
    for each in techniques:
        after = each.applied(config)
        if after is None:
            return None
        config = after
    return config
