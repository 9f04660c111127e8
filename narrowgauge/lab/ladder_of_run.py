"""Ladder of a run at a checkpoint: its steps and recipe, and the rungs that are taken already.

RUN/debug-STEP.json has the rungs. A command continues from those of an earlier one, if both have the
same checkpoint, number of steps, versions and device.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import narrowgauge
from narrowgauge import manifest, storage
from narrowgauge.conversion.switching import HIGH_PRECISION_BITS, bits
from narrowgauge.diagnose import left_out
from narrowgauge.diagnose.format_text import plural
from narrowgauge.diagnose.runs import decode, encode, read_metrics, read_run
from narrowgauge.diagnose.same_curve import FEWEST
from narrowgauge.errors import ConfigError
from narrowgauge.lab.ladder import Ladder
from narrowgauge.nn.linear import QLinear
from narrowgauge.storage import reading
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.console import tell

if TYPE_CHECKING:
    from narrowgauge.train.trainer import Trainer

RUNGS = reading.Kind(most_bytes=256 * reading.MIB, step="Remove it.")


def ladder_of(trainer: Trainer, run: Path, at: int, steps: int) -> Ladder:
    """The ladder, limited to the steps that remain before the end or the next recipe switch."""
    begun, config = trainer.step, trainer.config
    for switch in trainer.switches:
        # A switch at the first probed step belongs to the recipe.
        if switch.step == begun + 1:
            switch.apply(trainer.model)
    last = min(
        [config.steps, *(switch.step - 1 for switch in trainer.switches if switch.step > begun + 1)]
    )
    taken = steps_taken(run, at, steps, begun, last, config.steps)
    events = read_metrics(trainer.folder.metrics)
    # Also the batches that were skipped after the checkpoint
    trainer.feed.leave_out(left_out.of_run(read_run(trainer.folder.run), events))
    logged = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return Ladder(recipe=_recipe(trainer.model), begun=begun, steps=taken, asked=at, logged=logged)


def steps_taken(run: Path, at: int, steps: int, begun: int, last: int, end: int) -> int:
    """Number of steps of a rung: as many as requested, or as many as remain after the checkpoint.

    begun  step of the checkpoint
    last   last step before the run ends or switches its recipe
    end    last step of the run

    Raises ConfigError for fewer steps than a verdict needs. The message names the number that is
    too small, since each has another remedy.
    """
    left, wanted, needed = last - begun, at - begun + steps, 2 * FEWEST
    if left < needed:
        until = "its end" if last == end else f"its switch of recipes at step {last + 1}"
        raise ConfigError(
            f"debug: {run} has {plural(left, 'step')} between its checkpoint of step {begun} and {until}, and at least {needed} are "
            f"needed. Name an earlier --at. {checkpoint_ref.existing(run)}",
            code="debug.too-few-steps",
        )
    if wanted < needed:
        raise ConfigError(
            f"debug: --at {at} --steps {steps}: that is {plural(wanted, 'step')} from the checkpoint of step {begun}, and at least "
            f"{needed} are needed; {run} has {left} of them. Give --steps {needed - (at - begun)} or more.",
            code="debug.stretch",
        )
    return min(wanted, left)


def _recipe(model: nn.Module) -> str:
    """The recipe of most low-precision layers, or ''."""
    layers = [
        each for each in model.modules() if isinstance(each, QLinear) and not each.is_suspended
    ]
    computed = [each.recipe for each in layers if each.recipe is not None]
    narrow = [
        each
        for each in computed
        if any(bits(gemm) < HIGH_PRECISION_BITS for gemm in each.gemms().values())
    ]
    names = Counter(each.name.partition("+")[0] for each in narrow)
    return names.most_common(1)[0][0] if names else ""


def facts_of(trainer: Trainer, ladder: Ladder) -> dict[str, Any]:
    """Facts that must be equal for the rungs of an earlier command to be reused."""
    return {
        "narrowgauge": narrowgauge.__version__, "torch": torch.__version__, "device": str(trainer.passes.device),
        "fingerprint": manifest.fingerprint(Path(trainer.checkpoints.resumed_from)), "begun": ladder.begun, "steps": ladder.steps,
    }  # fmt: skip


class RungsFile:
    """RUN/debug-STEP.json.

    facts  must be equal for the rungs of an earlier command to be reused (`facts_of`)
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts

    def reuse(self, ladder: Ladder) -> None:
        """Reuses the rungs that an earlier command ran from the same checkpoint."""
        try:
            if not os.path.lexists(self.path):
                return
            known = decode(reading.bytes_of(self.path, RUNGS))
            if all(known.get(name) == value for name, value in self.facts.items()):
                ladder.take_up(known)
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
            tell(f"Note: {self.path} cannot be read, and is written anew.")

    def write(self, ladder: Ladder, **more: Any) -> None:
        """Writes the rungs, their facts and further keys."""
        text = encode({**self.facts, **ladder.facts(), **more}, indent=1)
        storage.replace_file(self.path, text + "\n")
