"""`narrowgauge debug RUN --at STEP`: the ladder of debugging, taken from a checkpoint of the run (`diagnose.ladder` has its rungs).

Each rung is a stretch of steps that do not count (`stretch`): one model, no folder per rung, and what it needs beside a training is a copy
of the state. Nothing of the run is touched: files of this are RUN/debug-STEP.json, written after each rung, so that a command that was
killed goes on where it was, and, of what was found, RUN/debug-STEP.txt and a page, RUN/debug-STEP.html.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import narrowgauge
from narrowgauge import manifest, storage
from narrowgauge.conversion import suspended
from narrowgauge.conversion.switching import HIGH_PRECISION_BITS, bits, switched
from narrowgauge.diagnose import left_out
from narrowgauge.diagnose.format_text import plural
from narrowgauge.diagnose.generators import set_generators
from narrowgauge.diagnose.ladder import AGAIN, CONTROL, PRODUCT, RECIPE, WIDE, Ladder, Rung
from narrowgauge.diagnose.runs import decode, encode, read_metrics, read_run
from narrowgauge.diagnose.same_curve import DIFFERS, FEWEST
from narrowgauge.errors import EXIT_INTERRUPTED, ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.report import ladder as page
from narrowgauge.storage import reading
from narrowgauge.train import place, stretch
from narrowgauge.train.console import clock, tell
from narrowgauge.train.loop import prepare
from narrowgauge.train.parallel.ranks import under_torchrun
from narrowgauge.train.reopen import reopened
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.signals import StopRequest
from narrowgauge.train.trainer import Trainer

Change = Callable[[nn.Module], AbstractContextManager[Any]]
STEPS = 100
RUNGS = reading.Kind(most_bytes=256 * reading.MIB, step="Remove it.")


@dataclass(frozen=True)
class Debugged:
    """What `debug` found. path: of its JSON; fix: the command that goes on with the change that mends it, or ''; stopped: by a signal."""

    ladder: Ladder
    path: Path
    fix: str
    exit_code: int = 0

    @property
    def text(self) -> str:
        return "\n".join([*self.ladder.report(), *([f"Go on with it: {self.fix}"] if self.fix else [])])


def debug(run: Path, at: int, steps: int = STEPS, device: str = "") -> Debugged:
    """Takes the ladder from the last checkpoint at or before step `at`.

    steps   after `at`; the rungs begin at the checkpoint, so they have the steps up to `at` as well
    device  '': that of the run
    Raises ConfigError for a place without a checkpoint or with too few steps left, BusyError while the run is being trained, and what
    reading its checkpoint raises. One process: a run of several ranks is repeated on one.
    """
    if under_torchrun():
        raise ConfigError("debug: repeats a stretch of a run in one process. Start it without torchrun.")
    if steps < 1 or at < 1:
        raise ConfigError(f"debug: --at {at} --steps {steps}: both are at least 1.")
    config = replace(place.settings_of(run), plan="never")
    start = place.at_or_before(run, at)
    with RunFolder.reading(run):  # before data are read
        pass
    tell(f"Reading {config.data} ...")
    prepared, task = prepare(config)
    with StopRequest() as stop, reopened(start, prepared, task, device or config.device) as trainer:
        trainer.stop = stop
        set_generators(trainer.generators)
        ladder = _ladder(trainer, run, at, steps)
        path = run / f"debug-{at}.json"
        key = _key(trainer, ladder)
        _take_up(path, key, ladder)
        _climb(trainer, ladder, path, key)
        if stop.requested:
            tell(f"Stopped. The rungs that were taken are in {path}: the same command goes on from there.")
            return Debugged(ladder, path, "", stop.exit_code or EXIT_INTERRUPTED)
        found = Debugged(ladder, path, fix_of(trainer, run, ladder))
    storage.replace_file(
        path, encode({**key, **ladder.facts(), "found": list(ladder.report()), "fix": found.fix}, indent=1) + "\n"
    )
    storage.replace_file(path.with_suffix(".txt"), found.text + "\n")
    tell(f"Page: {page.write(ladder, found.fix, run.resolve().name, path.with_suffix('.html'))}")
    return found


def _ladder(trainer: Trainer, run: Path, at: int, steps: int) -> Ladder:
    """With as many steps as are left, and before a switch."""
    begun, config = trainer.step, trainer.config
    for stage in trainer.stages:
        if stage.step == begun + 1:
            stage.apply(trainer.model)
    last = min([config.steps, *(stage.step - 1 for stage in trainer.stages if stage.step > begun + 1)])
    taken = _steps_taken(run, at, steps, begun, last, config.steps)
    events = read_metrics(trainer.folder.metrics)
    trainer.feed.leave_out(left_out.of_run(read_run(trainer.folder.run), events))  # since the checkpoint too
    logged = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return Ladder(recipe=_recipe(trainer.model), begun=begun, steps=taken, asked=at, logged=logged)


def _steps_taken(run: Path, at: int, steps: int, begun: int, last: int, end: int) -> int:
    """Steps of a rung: as many as were asked for, or as are left after the checkpoint.

    begun  step of the checkpoint; last: the last step before the run ends or switches its recipe
    end    last step of the run
    Raises ConfigError for fewer than a verdict needs. The message says which of the two numbers is
    too small, since each has another remedy.
    """
    left, wanted, needed = last - begun, at - begun + steps, 2 * FEWEST
    if left < needed:
        until = "its end" if last == end else f"its switch of recipes at step {last + 1}"
        raise ConfigError(
            f"debug: {run} has {plural(left, 'step')} between its checkpoint of step {begun} and {until}, and at least {needed} are "
            f"needed. Name an earlier --at. {place.existing(run)}"
        )
    if wanted < needed:
        raise ConfigError(
            f"debug: --at {at} --steps {steps}: that is {plural(wanted, 'step')} from the checkpoint of step {begun}, and at least "
            f"{needed} are needed; {run} has {left} of them. Give --steps {needed - (at - begun)} or more."
        )
    return min(wanted, left)


def _recipe(model: nn.Module) -> str:
    """The recipe of most layers with a narrow product; '' if there is none."""
    layers = [each for each in model.modules() if isinstance(each, QLinear) and not each.is_suspended]
    computed = [each.recipe for each in layers if each.recipe is not None]
    narrow = [each for each in computed if any(bits(gemm) < HIGH_PRECISION_BITS for gemm in each.gemms().values())]
    names = Counter(each.name.partition("+")[0] for each in narrow)
    return names.most_common(1)[0][0] if names else ""


def _key(trainer: Trainer, ladder: Ladder) -> dict[str, Any]:
    """What must be the same for rungs of an earlier command to count."""
    return {
        "narrowgauge": narrowgauge.__version__, "torch": torch.__version__, "device": str(trainer.device),
        "fingerprint": manifest.fingerprint(Path(trainer.resumed_from)), "begun": ladder.begun, "steps": ladder.steps,
    }  # fmt: skip


def _take_up(path: Path, key: dict[str, Any], ladder: Ladder) -> None:
    """Rungs that an earlier command took from the same checkpoint."""
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
        tell(f"[{done + 1} of at most {most}] {name}: {ladder.steps} steps from step {ladder.begun}{left}")
        rung = _taken(trainer, ladder, name)
        if rung is None:
            return
        if rung.losses:
            per_step_s = rung.spent_s / len(rung.losses)
        ladder.rungs[name] = rung
        storage.replace_file(path, encode({**key, **ladder.facts()}, indent=1) + "\n")


def _taken(trainer: Trainer, ladder: Ladder, name: str) -> Rung | None:
    """None if a signal ended it."""
    try:
        found = stretch.stretch(trainer, ladder.steps, _change(name), other_order=name == CONTROL)
    except (
        ConfigError
    ) as error:  # of a change that the recipe does not allow, as one product of a straight-through estimator
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
    """The validation set narrow and wide, at the checkpoint."""
    with stretch.undone(trainer):
        trainer.model.eval()
        narrow, wide = trainer.scores(both=True)
        trainer.model.train()
    found = {"narrow": narrow} if wide is None else {"narrow": narrow, "wide": wide}
    return {
        side: {name: value for name, value in each.items() if isinstance(value, float)} for side, each in found.items()
    }


def fix_of(trainer: Trainer, run: Path, ladder: Ladder) -> str:
    """The command that starts a branch with the first change that mends it; ''."""
    if not ladder.recipe or ladder.against_bf16().name != DIFFERS:
        return ""
    begun, found = ladder.begun, ladder.mended()
    command = f"narrowgauge train --from {run}@{begun}"
    if not found:
        return "" if ladder.rungs[WIDE].lost else f"{command} --recipe bf16 --output NEW"
    kind, _, what = found[0].partition(":")
    if kind == RECIPE[:-1]:
        kept = "".join(f" --recipes '{pattern}={recipe}'" for pattern, recipe in trainer.config.layers_recipe.items())
        codes = trainer.config.embedding_codes  # which another recipe does away with, unless they are named
        kept += f" --embedding-codes {codes}" if codes else ""
        return f"{command} --recipe {what}{kept} --output NEW"
    entries = ", ".join(filter(None, [trainer.config.switch, f"bf16@{begun}:{what}"]))
    return f"{command} --switch '{entries}' --output NEW"
