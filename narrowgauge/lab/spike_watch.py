"""Loss spikes of a run (`on_spike`): detection, attribution by BF16 steps, skipping of batches.

The rule that detects a spike is in diagnose/spikes.py.

    judge    load the newest checkpoint before the spike, run the same batches up to the spike in
             BF16, restore the run (`probe`). If the BF16 loss also lies above its curve there (by
             LOSS_WITH_NORM scales), the data are the cause: the run is equivalent to BF16. Else the
             format is the cause: the run is worse
    warn     log the cause
    skip     if the data are the cause, rewind to that checkpoint and leave the batch of the spike
             out. The log and later checkpoints record the batch. A spike caused by the format is
             not skipped, since it would recur: use the guard or a recipe of higher
             precision

Judging a spike costs the steps since the checkpoint in BF16, and a skip costs the same steps in the
run's recipe. A non-finite loss or norm ends the run before anything changes and is no spike here.

A run that is killed while it judges resumes from the checkpoint and detects the spike again. With
`skip`, a stop request has the same effect. Several ranks judge together, each with its part of the
model and of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.format_text import plural
from narrowgauge.diagnose.runs import decode, encode, read_metrics
from narrowgauge.diagnose.spikes import Spike, Spikes
from narrowgauge.diagnose.verdict import (
    DATA,
    EQUIVALENT,
    FORMAT,
    SPIKE,
    UNKNOWN,
    WORSE,
    Verdict,
    outcome_of,
    stored_word,
)
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.lab.probe import place_of_copy, rolled_back, take_steps
from narrowgauge.snapshot import snapshot_bytes
from narrowgauge.train.callback import Callback

if TYPE_CHECKING:
    from narrowgauge.train.console import Console
    from narrowgauge.train.trainer import Trainer

KEY = "spikes"  # key in the facts of a checkpoint
SHOWN = 8  # most examples that a message names
MOST_SKIPS = 20  # per run: skipping batches does not repair data that spike more often


@dataclass(frozen=True)
class Judgement:
    """Comparison of a spike with BF16 steps on the same batches.

    outcome      equivalent (cause: the data), worse (cause: the format) or unknown
    why          reason for an unknown cause, else ''
    checkpoint   step from which the BF16 reference started
    wide         BF16 loss at the spike; None if the reference ended before
    was_stopped  a stop request interrupted the reference
    examples     indices of the training examples in the spike's batch
    """

    outcome: str
    why: str = ""
    checkpoint: int = 0
    wide: float | None = None
    was_stopped: bool = False
    examples: Sequence[int] = ()

    @property
    def cause(self) -> str:
        """Cause of the spike in the word of `spike` events: data, format or unknown."""
        return stored_word(SPIKE, self.outcome, CAUSE[self.outcome])

    def verdict(self, spike: Spike, sentence: str) -> Verdict:
        """The verdict on the run at the spike."""
        return Verdict(
            outcome=self.outcome,
            detail=CAUSE[self.outcome],
            estimate=None if self.wide is None else spike.loss - self.wide,
            sentence=sentence,
        )


class SpikeWatch(Callback):
    """Detects and judges the loss spikes of one run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.skips = trainer, trainer.config.on_spike == "skip"
        self.rule, self.found = Spikes(), list[Spike]()
        self.where: str | Path = "host"

    def on_start(self, show: Console) -> None:
        self.where = place_of_copy(
            snapshot_bytes(self.trainer.model, self.trainer.optimizer),
            self.trainer.folder.path,
            self.trainer.ranks,
        )

    def state(self) -> dict[str, Any]:
        return {KEY: encode(self.rule.state_dict())}

    def on_load(self, facts: Mapping[str, Any]) -> None:
        self.found = []
        self.rule = _rule_of(facts)

    def on_step(self, number: int, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return  # float16 overflow: the optimizer skipped this step
        if (spike := self.rule.add(number, loss, grad_norm)) is not None:
            self.found.append(spike)

    def after_step(self, show: Console) -> None:
        trainer = self.trainer
        # Queued steps must be read first: a probe starts from a state that the host knows.
        if not self.found or (trainer.queue is not None and trainer.queue.steps):
            return
        # A GPU run reads several steps at once, so several spikes may arrive together
        found, self.found = self.found, []
        for spike in found:
            if self._went_back(spike, show):
                break

    def _went_back(self, spike: Spike, show: Console) -> bool:
        """Judges, logs and possibly skips a spike.

        Returns True if the run was rewound, which may undo later spikes too.
        """
        trainer = self.trainer
        judged = self._judged(spike)
        if self.skips and judged.was_stopped:
            # The skipped batches must not depend on when a run is stopped, so the resumed run
            # judges the spike again
            self._go_back()
            show.say(
                f"step {spike.step}: a loss spike was not judged to the end. Resumed, the run judges it."
            )
            return True
        number = trainer.feed.number(spike.step - 1)
        is_full = len(trainer.feed.left_out) >= MOST_SKIPS
        may_skip = self.skips and judged.outcome == EQUIVALENT and not is_full
        left_out = [number] if may_skip else []
        verdict = judged.verdict(spike, _words(spike, judged, left_out, self.skips))
        trainer.log.write(
            "spike",
            spike.step,
            **{key: value for key, value in spike.event().items() if key != "step"},
            outcome=judged.outcome,
            cause=judged.cause,
            why=judged.why,
            checkpoint=judged.checkpoint,
            wide=judged.wide,
            left_out=left_out,
            examples=list(judged.examples),
            sentence=verdict.sentence,
        )
        show.say(verdict.text(f"step {trainer.step}"))
        if may_skip:
            self._skip(left_out)
        return may_skip

    def _judged(self, spike: Spike) -> Judgement:
        """Runs the batches since the newest checkpoint in BF16 and names the cause of the spike."""
        trainer = self.trainer
        switches, left_out = (
            [switch.step for switch in trainer.switches],
            list(trainer.feed.left_out),
        )
        with rolled_back(trainer, self.where):
            try:
                found = self.trainer.checkpoints.newest()
                if found is None or found.step >= spike.step:
                    return Judgement(UNKNOWN, "there is no checkpoint before it")
                if any(found.step < step <= spike.step for step in switches):
                    return Judgement(
                        UNKNOWN, "layers have got another recipe since the checkpoint before it"
                    )
                trainer.load_checkpoint(found)
                trainer.feed.leave_out(left_out)  # the batches that the run has skipped since then
            except CheckpointError as error:
                return Judgement(UNKNOWN, str(error))
            wide = take_steps(trainer, spike.step - found.step)
        if wide.ended:
            return Judgement(UNKNOWN, wide.ended, found.step, was_stopped=True)
        rule = _rule_of(found.facts)
        for number, each in enumerate(wide.steps, found.step + 1):
            # At the spike itself, apply the lower of the rule's two thresholds: a BF16 loss that
            # leaves its curve less far still points to the data.
            rule.inside = rule.inside or number == spike.step
            rule.add(number, each["loss"], each["grad_norm"])
        is_data = bool(wide.lost) or rule.inside
        last, examples = wide.drawn
        return Judgement(
            EQUIVALENT if is_data else WORSE, "", found.step, wide.losses[-1] if wide.losses else None,
            examples=examples if last == spike.step else (),
        )  # fmt: skip

    def _skip(self, numbers: list[int]) -> None:
        """Returns to the newest checkpoint and skips these batches besides the earlier ones."""
        self._go_back([*self.trainer.feed.left_out, *numbers])

    def _go_back(self, left_out: Sequence[int] = ()) -> None:
        """Loads the newest checkpoint, from which the run continues without the given batches.

        A guard check that contained these batches is dropped.
        """
        found = self.trainer.checkpoints.newest()
        assert found is not None  # the judgement used this checkpoint
        self.trainer.rewind(found, left_out, "spike")

    def summary(self) -> str:
        """Counts the spikes of the whole run from its log, including those before a resumption."""
        try:
            told = [
                outcome_of(SPIKE, event)
                for event in read_metrics(self.trainer.log.path)
                if event["event"] == "spike"
            ]
        except ConfigError as error:
            return f"Loss spikes: not counted. {error}"
        if not told:
            return "Loss spikes: none."
        counts = ", ".join(
            f"{told.count(each)} of {words}" for each, words in CAUSES.items() if each in told
        )
        return f"Loss spikes: {plural(len(told), 'spike')}, {counts}."


CAUSE = {EQUIVALENT: DATA, WORSE: FORMAT, UNKNOWN: ""}  # outcome -> detail of the verdict
CAUSES = {EQUIVALENT: "the data", WORSE: "the number format", UNKNOWN: "unknown cause"}


def _rule_of(facts: Mapping[str, Any]) -> Spikes:
    rule = Spikes()
    if KEY in facts:
        rule.load_state_dict(decode(facts[KEY]))
    return rule


def _words(spike: Spike, judged: Judgement, left_out: list[int], skips: bool) -> str:
    said = f"loss spike at step {spike.step}: {spike.loss:.4f}"
    said += (
        f" where {spike.expected_loss:.4f} was expected" if spike.expected_loss is not None else ""
    )
    if judged.outcome == UNKNOWN:
        return f"{said}. Not judged: {judged.why}."
    wide = "lost its loss" if judged.wide is None else f"had {judged.wide:.4f}"
    said += f"; BF16 from step {judged.checkpoint} on the same batches {wide}"
    if judged.outcome == WORSE:
        return f"{said}. It is the number format: let the guard act (--guard then=stay), or name a wider recipe."
    said += f". It is the data{_examples(judged.examples)}"
    if left_out:
        return f"{said}. The run goes back to step {judged.checkpoint} and leaves out batch {left_out[0]}."
    if skips:
        return (
            f"{said}. {MOST_SKIPS} batches are left out already, and no more are: look at the data."
        )
    return f"{said}. Look at the batch of this step, or leave it out with --guard.on-spike skip."


def _examples(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown, more = sorted(numbers)[:SHOWN], len(numbers) - SHOWN
    return f", examples {', '.join(map(str, shown))}{f' and {more} more (metrics.jsonl has all)' if more > 0 else ''}"
