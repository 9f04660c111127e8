"""Loss spikes of a run (`on_spike`): noticed by a robust rule (diagnose/spikes.py), judged by BF16, skipped where the data are to blame.

    judge    the newest checkpoint before the spike is taken up, BF16 takes the same batches up to the spike, and the run is put back to the
             bit (`stretch`). Where BF16 lies above the curve there as well (LOSS_WITH_NORM scales), it is the data; where not, the format
    warn     says which
    skip     of data: the run goes back to that checkpoint and leaves the batch of the spike out. The log names it, and checkpoints know it.
             A spike of the format is not skipped: it would come again. The guard, or a wider recipe, is for that

A spike costs the steps since the checkpoint once more in BF16, and a skip once more as they are. A loss or norm that is not finite ends a
run before anything changes, as ever, and is no spike here. A kill in between resumes from the checkpoint, and finds the spike again; so
does, with skip, a request to stop. Several ranks judge together, each with its part of the model and of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.format_text import plural
from narrowgauge.diagnose.guard.fork import fork_bytes
from narrowgauge.diagnose.runs import decode, encode, read_metrics
from narrowgauge.diagnose.spikes import Spike, Spikes
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.train import guarded
from narrowgauge.train.checkpoint.store import Checkpoint
from narrowgauge.train.console import Console
from narrowgauge.train.guard_before import place_of_copy
from narrowgauge.train.parallel import checkpoints
from narrowgauge.train.stretch import taken, undone
from narrowgauge.train.watch import Several, Watch

if TYPE_CHECKING:
    from narrowgauge.train.trainer import Trainer

KEY = "spikes"  # in the facts of a checkpoint
DATA, FORMAT, UNKNOWN = "data", "format", "unknown"
SHOWN = 8  # numbers of examples that a sentence names
MOST_SKIPS = 20  # in a run; data that spike more often are not mended by leaving batches out


@dataclass(frozen=True)
class Judgement:
    """cause: data, format or unknown, and then why; checkpoint: the step from which BF16 went; wide: its loss at the spike, or None.

    was_stopped: a request to stop cut it short. examples: numbers of the training examples in the batch of the spike
    """

    cause: str
    why: str = ""
    checkpoint: int = 0
    wide: float | None = None
    was_stopped: bool = False
    examples: Sequence[int] = ()


class SpikeWatch(Watch):
    """Of one run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.skips = trainer, trainer.config.on_spike == "skip"
        self.rule, self.found = Spikes(), list[Spike]()
        self.where: str | Path = "host"

    def announce(self, show: Console) -> None:
        self.where = place_of_copy(
            fork_bytes(self.trainer.model, self.trainer.optimizer), self.trainer.folder.path, self.trainer.ranks
        )

    def facts(self) -> dict[str, Any]:
        return {KEY: encode(self.rule.state_dict())}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.found = []
        self.rule = _rule_of(facts)

    def saw(self, number: int, loss: float, grad_norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return  # float16 overflowed, and the step was left out
        if (spike := self.rule.add(number, loss, grad_norm)) is not None:
            self.found.append(spike)

    def after_step(self, show: Console) -> None:
        trainer = self.trainer
        if not self.found or (trainer.pending is not None and trainer.pending.steps):
            return
        found, self.found = self.found, []  # on a GPU several may come at once
        for spike in found:
            if self._went_back(spike, show):
                break

    def _went_back(self, spike: Spike, show: Console) -> bool:
        """Judges a spike, tells it, and skips it where that is to be done: True if the run went back, to before later spikes too."""
        trainer = self.trainer
        judged = self._judged(spike)
        if self.skips and judged.was_stopped:
            self._go_back()  # resumed it comes to the spike again: what is skipped does not depend on when a run is stopped
            show.say(f"step {spike.step}: a loss spike was not judged to the end. Resumed, the run judges it.")
            return True
        number = trainer.feed.number(spike.step - 1)
        is_full = len(trainer.feed.left_out) >= MOST_SKIPS
        may_skip = self.skips and judged.cause == DATA and not is_full
        left_out = [number] if may_skip else []
        words = _words(spike, judged, left_out, self.skips)
        trainer.log.write(
            "spike", spike.step, **{key: value for key, value in spike.event().items() if key != "step"}, cause=judged.cause,
            why=judged.why, checkpoint=judged.checkpoint, wide=judged.wide, left_out=left_out, examples=list(judged.examples),
            sentence=words,
        )  # fmt: skip
        show.say(f"step {trainer.step}: {words}")
        if may_skip:
            self._skip(left_out)
        return may_skip

    def _newest(self) -> Checkpoint | None:
        trainer = self.trainer
        found, _ = checkpoints.newest_valid(
            trainer.folder.checkpoints,
            lambda found: None,
            trainer.model,
            trainer.optimizer,
            trainer.ranks,
            trainer.numbers,
        )
        return found

    def _judged(self, spike: Spike) -> Judgement:
        """What BF16 makes of the batches since the newest checkpoint."""
        trainer = self.trainer
        stages, left_out = [stage.step for stage in trainer.stages], list(trainer.feed.left_out)
        with undone(trainer, self.where):
            try:
                found = self._newest()
                if found is None or found.step >= spike.step:
                    return Judgement(UNKNOWN, "there is no checkpoint before it")
                if any(found.step < step <= spike.step for step in stages):
                    return Judgement(UNKNOWN, "layers have got another recipe since the checkpoint before it")
                trainer.take_up(found)
                trainer.feed.leave_out(
                    left_out
                )  # what the run left out since: BF16 takes the batches that the run took
            except CheckpointError as error:
                return Judgement(UNKNOWN, str(error))
            wide = taken(trainer, spike.step - found.step)
        if wide.ended:
            return Judgement(UNKNOWN, wide.ended, found.step, was_stopped=True)
        rule = _rule_of(found.facts)
        for number, each in enumerate(wide.steps, found.step + 1):
            # At the spike itself the lower of the rule's two lines: BF16 has lost the curve as well, if not as far.
            rule.inside = rule.inside or number == spike.step
            rule.add(number, each["loss"], each["grad_norm"])
        is_data = bool(wide.lost) or rule.inside
        last, examples = wide.drawn
        return Judgement(
            DATA if is_data else FORMAT, "", found.step, wide.losses[-1] if wide.losses else None,
            examples=examples if last == spike.step else (),
        )  # fmt: skip

    def _skip(self, numbers: list[int]) -> None:
        """Back to the newest checkpoint, without these batches and those that were left out before."""
        self._go_back([*self.trainer.feed.left_out, *numbers])

    def _go_back(self, left_out: Sequence[int] = ()) -> None:
        """The newest checkpoint becomes the run, from there on without these batches: a check of the guard that had them is dropped."""
        trainer, found = self.trainer, self._newest()
        assert found is not None  # it was there to judge by
        steps = trainer.step - found.step
        trainer.optimizer.zero_grad()
        trainer.take_up(found)
        trainer.feed.leave_out(left_out)
        trainer.watch.restore(found.facts)
        trainer.saved_step = found.step
        if trainer.decision is not None:
            trainer.decision = trainer.new_decision()
        if trainer.pending is not None:
            trainer.pending.forget_windows()
        trainer.log.write("rewind", found.step, steps=steps, why="spike")

    def last_words(self) -> str:
        """Of the whole run, and not of what went on since it was resumed."""
        try:
            told = [event["cause"] for event in read_metrics(self.trainer.log.path) if event["event"] == "spike"]
        except ConfigError as error:
            return f"Loss spikes: not counted. {error}"
        if not told:
            return "Loss spikes: none."
        counts = ", ".join(f"{told.count(each)} of {words}" for each, words in CAUSES.items() if each in told)
        return f"Loss spikes: {plural(len(told), 'spike')}, {counts}."


CAUSES = {DATA: "the data", FORMAT: "the number format", UNKNOWN: "unknown cause"}


def _rule_of(facts: Mapping[str, Any]) -> Spikes:
    rule = Spikes()
    if KEY in facts:
        rule.load_state_dict(decode(facts[KEY]))
    return rule


def _words(spike: Spike, judged: Judgement, left_out: list[int], skips: bool) -> str:
    said = f"loss spike at step {spike.step}: {spike.loss:.4f}"
    said += f" where {spike.expected_loss:.4f} was expected" if spike.expected_loss is not None else ""
    if judged.cause == UNKNOWN:
        return f"{said}. Not judged: {judged.why}."
    wide = "lost its loss" if judged.wide is None else f"had {judged.wide:.4f}"
    said += f"; BF16 from step {judged.checkpoint} on the same batches {wide}"
    if judged.cause == FORMAT:
        return f"{said}. It is the number format: let the guard act (--guard then=stay), or name a wider recipe."
    said += f". It is the data{_examples(judged.examples)}"
    if left_out:
        return f"{said}. The run goes back to step {judged.checkpoint} and leaves out batch {left_out[0]}."
    if skips:
        return f"{said}. {MOST_SKIPS} batches are left out already, and no more are: look at the data."
    return f"{said}. Look at the batch of this step, or leave it out with --on-spike skip."


def _examples(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    shown, more = sorted(numbers)[:SHOWN], len(numbers) - SHOWN
    return f", examples {', '.join(map(str, shown))}{f' and {more} more (metrics.jsonl has all)' if more > 0 else ''}"


def watch_of(trainer: Trainer) -> Watch:
    """What looks after a run: its guard, and this."""
    guard = guarded.watch_of(trainer)
    return Several([guard, SpikeWatch(trainer)]) if trainer.config.on_spike else guard
