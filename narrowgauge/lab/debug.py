"""`narrowgauge debug RUN --at STEP`: bisects a loss gap from a checkpoint of the run.

`lab.ladder` defines the rungs, which are variants of the recipe.

Each rung is a probe (`probe`): one model, no folder per rung, and one copy of the state as extra
memory. The run itself is unchanged. After each rung RUN/debug-STEP.json is written, so a killed
command continues where it was. The findings go to RUN/debug-STEP.txt and to the page
RUN/debug-STEP.html.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from narrowgauge import storage
from narrowgauge.conversion.switching import switched
from narrowgauge.errors import EXIT_INTERRUPTED, ConfigError, Reason
from narrowgauge.lab import ladder_page as page
from narrowgauge.lab import probe
from narrowgauge.lab.ladder import AGAIN, CONTROL, PRODUCT, RECIPE, WIDE, Ladder, Rung
from narrowgauge.lab.ladder_of_run import RungsFile, facts_of, ladder_of
from narrowgauge.lab.reopen import reopened
from narrowgauge.nn.converted_model import suspended
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
        ladder = ladder_of(trainer, run, at, steps)
        path = run / f"debug-{at}.json"
        rungs = RungsFile(path, facts_of(trainer, ladder))
        rungs.reuse(ladder)
        _climb(trainer, ladder, rungs)
        if stop.requested:
            tell(
                Reason(
                    "debug.stopped",
                    f"Stopped. The rungs that were taken are in {path}: the same command goes on from there.",
                )
            )
            return Debugged(ladder, path, "", stop.exit_code or EXIT_INTERRUPTED)
        found = Debugged(ladder, path, fix_of(trainer, run, ladder))
    rungs.write(ladder, found=list(ladder.report()), fix=found.fix)
    storage.replace_file(path.with_suffix(".txt"), found.text + "\n")
    tell(f"Page: {page.write(ladder, found.fix, run.resolve().name, path.with_suffix('.html'))}")
    return found


def _climb(trainer: Trainer, ladder: Ladder, rungs: RungsFile) -> None:
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
        rungs.write(ladder)


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
        attention = trainer.config.attention
        kept += f" --recipe.attention {attention}" if attention else ""
        return f"{command} --recipe {what}{kept} --output NEW"
    entries = ", ".join(filter(None, [trainer.config.switch, f"bf16@{begun}:{what}"]))
    return f"{command} --recipe.switch '{entries}' --output NEW"
