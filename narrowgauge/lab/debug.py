"""`narrowgauge debug RUN --at STEP`: bisects a loss gap from a checkpoint of the run.

`lab.ladder` defines the rungs, which are variants of the recipe.

Each rung is a probe (`probe`): one model, no folder per rung, and one copy of the state as extra
memory. The run itself is unchanged. After each rung RUN/debug-STEP.json is written, so a killed
command continues where it was. The findings go to RUN/debug-STEP.txt and to the page
RUN/debug-STEP.html.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import narrowgauge
from narrowgauge import manifest, storage
from narrowgauge.conversion.switching import HIGH_PRECISION_BITS, bits, switched
from narrowgauge.diagnose import left_out
from narrowgauge.diagnose.format_text import plural
from narrowgauge.diagnose.runs import decode, encode, read_metrics, read_run
from narrowgauge.diagnose.same_curve import FEWEST
from narrowgauge.errors import EXIT_INTERRUPTED, ConfigError, Reason
from narrowgauge.lab import ladder_page as page
from narrowgauge.lab import probe
from narrowgauge.lab.ladder import AGAIN, CONTROL, PRODUCT, RECIPE, WIDE, Ladder, Rung
from narrowgauge.lab.reopen import reopened
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.linear import QLinear
from narrowgauge.storage import reading
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.console import clock, tell
from narrowgauge.train.parallel.ranks import under_torchrun
from narrowgauge.train.preparation import prepare
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.signals import StopRequest

if TYPE_CHECKING:
    from narrowgauge.train.trainer import Trainer

Change = Callable[[nn.Module], AbstractContextManager[Any]]
STEPS = 100
RUNGS = reading.Kind(most_bytes=256 * reading.MIB, step="Remove it.")


@dataclass(frozen=True)
class Debugged:
    """Result of `debug`.

    path       its JSON file
    fix        command that starts a branch with the change that closes the gap, or ''
    exit_code  0, or the code of the signal that stopped it
    """

    ladder: Ladder
    path: Path
    fix: str
    exit_code: int = 0

    @property
    def text(self) -> str:
        return "\n".join(
            [*self.ladder.report(), *([f"Go on with it: {self.fix}"] if self.fix else [])]
        )


def debug(run: Path, at: int, steps: int = STEPS, device: str = "") -> Debugged:
    """Runs the ladder from the last checkpoint at or before step `at`.

    steps   steps after `at`; each rung starts at the checkpoint, so it also repeats the steps up to
            `at`
    device  '': the device of the run

    Raises ConfigError for a missing checkpoint or too few remaining steps, BusyError while the run
    is being trained, and the errors of loading the checkpoint. One process: a run of several ranks
    is repeated on one.
    """
    if under_torchrun():
        raise ConfigError(
            "debug: repeats a stretch of a run in one process. Start it without torchrun.",
            code="debug.torchrun",
        )
    if steps < 1 or at < 1:
        raise ConfigError(
            f"debug: --at {at} --steps {steps}: both are at least 1.", code="debug.counts"
        )
    config = replace(checkpoint_ref.settings_of(run), plan="never")
    start = checkpoint_ref.at_or_before(run, at)
    with RunFolder.reading(run):  # raises BusyError before the data are read
        pass
    tell(f"Reading {config.data} ...")
    prepared, task = prepare(config)
    with StopRequest() as stop, reopened(start, prepared, task, device or config.device) as trainer:
        trainer.stop_with(stop)
        # As in Trainer.train: code since the restore may have drawn random numbers.
        trainer.start.restore_generators()
        ladder = _ladder(trainer, run, at, steps)
        path = run / f"debug-{at}.json"
        key = _key(trainer, ladder)
        _reuse_rungs(path, key, ladder)
        _climb(trainer, ladder, path, key)
        if stop.requested:
            tell(
                Reason(
                    "debug.stopped",
                    f"Stopped. The rungs that were taken are in {path}: the same command goes on from there.",
                )
            )
            return Debugged(ladder, path, "", stop.exit_code or EXIT_INTERRUPTED)
        found = Debugged(ladder, path, fix_of(trainer, run, ladder))
    storage.replace_file(
        path,
        encode(
            {**key, **ladder.facts(), "found": list(ladder.report()), "fix": found.fix}, indent=1
        )
        + "\n",
    )
    storage.replace_file(path.with_suffix(".txt"), found.text + "\n")
    tell(f"Page: {page.write(ladder, found.fix, run.resolve().name, path.with_suffix('.html'))}")
    return found


def _ladder(trainer: Trainer, run: Path, at: int, steps: int) -> Ladder:
    """The ladder, limited to the steps that remain before the end or the next recipe switch."""
    begun, config = trainer.step, trainer.config
    for switch in trainer.switches:
        # A switch at the first probed step belongs to the recipe.
        if switch.step == begun + 1:
            switch.apply(trainer.model)
    last = min(
        [config.steps, *(switch.step - 1 for switch in trainer.switches if switch.step > begun + 1)]
    )
    taken = _steps_taken(run, at, steps, begun, last, config.steps)
    events = read_metrics(trainer.folder.metrics)
    # Also the batches that were skipped after the checkpoint
    trainer.feed.leave_out(left_out.of_run(read_run(trainer.folder.run), events))
    logged = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return Ladder(recipe=_recipe(trainer.model), begun=begun, steps=taken, asked=at, logged=logged)


def _steps_taken(run: Path, at: int, steps: int, begun: int, last: int, end: int) -> int:
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


def _key(trainer: Trainer, ladder: Ladder) -> dict[str, Any]:
    """Facts that must be equal for the rungs of an earlier command to be reused."""
    return {
        "narrowgauge": narrowgauge.__version__, "torch": torch.__version__, "device": str(trainer.passes.device),
        "fingerprint": manifest.fingerprint(Path(trainer.checkpoints.resumed_from)), "begun": ladder.begun, "steps": ladder.steps,
    }  # fmt: skip


def _reuse_rungs(path: Path, key: dict[str, Any], ladder: Ladder) -> None:
    """Reuses the rungs that an earlier command ran from the same checkpoint."""
    try:
        if not os.path.lexists(path):
            return
        known = decode(reading.bytes_of(path, RUNGS))
        if all(known.get(name) == value for name, value in key.items()):
            ladder.take_up(known)
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
        tell(f"Note: {path} cannot be read, and is written anew.")


def _climb(trainer: Trainer, ladder: Ladder, path: Path, key: dict[str, Any]) -> None:
    per_step_s = 0.0
    if not ladder.scores:
        ladder.scores = _scores(trainer)
    while (name := ladder.next()) and not trainer.stop.requested:
        done, most = len(ladder.rungs), ladder.most()
        per_rung_s = per_step_s * ladder.steps
        left = (
            f"; about {clock(per_rung_s)}, {clock(per_rung_s * (most - done))} for all that may follow"
            if per_step_s
            else ""
        )
        tell(
            f"[{done + 1} of at most {most}] {name}: {ladder.steps} steps from step {ladder.begun}{left}"
        )
        rung = _taken(trainer, ladder, name)
        if rung is None:
            return
        if rung.losses:
            per_step_s = rung.spent_s / len(rung.losses)
        ladder.rungs[name] = rung
        # After every rung: a killed command continues from here.
        storage.replace_file(path, encode({**key, **ladder.facts()}, indent=1) + "\n")


def _taken(trainer: Trainer, ladder: Ladder, name: str) -> Rung | None:
    """Runs one rung. Returns None if a signal interrupted it."""
    try:
        found = probe.run_probe(trainer, ladder.steps, _change(name), other_order=name == CONTROL)
    except (
        ConfigError
        # Not every recipe allows this change: a straight-through estimator has no single GEMM to
        # switch.
    ) as error:
        return Rung(name=name, refused=str(error))
    if found.ended:
        return None
    return Rung(name=name, losses=found.losses, lost=found.lost, spent_s=found.spent_s)


def _change(name: str) -> Change:
    kind, _, what = name.partition(":")
    if name == AGAIN:
        return lambda model: nullcontext()
    if name in (WIDE, CONTROL):
        return suspended
    if kind == RECIPE[:-1]:
        return partial(switched, recipe=what)
    assert kind == PRODUCT[:-1]
    return partial(switched, recipe="bf16", products=(what,))


def _scores(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Validation scores at the checkpoint, in the recipe and in 16 bits."""
    with probe.rolled_back(trainer):
        trainer.model.eval()
        narrow, wide = trainer.validation.scores(both=True)
        trainer.model.train()
    found = {"narrow": narrow} if wide is None else {"narrow": narrow, "wide": wide}
    return {
        side: {name: value for name, value in each.items() if isinstance(value, float)}
        for side, each in found.items()
    }


def fix_of(trainer: Trainer, run: Path, ladder: Ladder) -> str:
    """The command that starts a branch with the first change that closes the gap, or ''."""
    if not ladder.recipe or not ladder.against_bf16().differs:
        return ""
    begun, found = ladder.begun, ladder.mended()
    command = f"narrowgauge train --from {run}@{begun}"
    if not found:
        return "" if ladder.rungs[WIDE].lost else f"{command} --recipe bf16 --output NEW"
    kind, _, what = found[0].partition(":")
    if kind == RECIPE[:-1]:
        kept = "".join(
            f" --recipe.layers '{pattern}={recipe}'"
            for pattern, recipe in trainer.config.layers_recipe.items()
        )
        # A new recipe resets these settings unless they are given again
        codes = trainer.config.embedding_codes
        kept += f" --recipe.embedding-codes {codes}" if codes else ""
        return f"{command} --recipe {what}{kept} --output NEW"
    entries = ", ".join(filter(None, [trainer.config.switch, f"bf16@{begun}:{what}"]))
    return f"{command} --recipe.switch '{entries}' --output NEW"
