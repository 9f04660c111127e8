"""Blame in a run: which products are inaccurate at its present step, and whether the loss comes back with them in 16 bits.

    from narrowgauge.train.blamed import blame_run
    found = blame_run(trainer, show)                 on an alarm of the guard, say

The step that would come next is observed with its own batch (diagnose.blame). The first suspects are confirmed by stretches of steps that
do not count (train.stretch), all from the same state on the same batches: the recipe as it is, 16 bits everywhere, 16 bits in another order
of summation for the noise, and 16 bits in each suspect alone. Everything is put back to the bit; an event `blame` says what was found.

    gap        mean loss of the second half of a stretch, less that of 16 bits everywhere
    hurts      the gap of the recipe is above NOISE times that of the control (or its numbers end), and a suspect alone takes away half of
               it, or of several suspects its part of half
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge.conversion import suspended
from narrowgauge.diagnose.blame import CONFIRMED, Blame, Confirmation, observed
from narrowgauge.diagnose.blame.confirm import by_gradient, in_16_bits
from narrowgauge.diagnose.blame.judge import Baseline, Expected, Finding
from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import ConfigError
from narrowgauge.train.loss import Objective
from narrowgauge.train.parallel.step import targets_of_ranks
from narrowgauge.train.stretch import Stretch, stretch, undone

STEPS = 50  # of a stretch
SHORTEST = 8
NOISE = 3.0
SMALLEST_GAP = 1e-4  # nats: below it nothing is said to hurt
COMES_BACK = 0.5


def blame_run(
    trainer: Any,
    show: Any = None,
    *,
    steps: int = STEPS,
    baseline: Blame | Baseline | None = None,
    confirm: int = CONFIRMED,
    where: str | Path = "host",
) -> Blame:
    """Observes the next step of a Trainer, confirms the first suspects, logs an event, and leaves the run as it was.

    show      a Console, which is told what was found; None: nobody is
    steps     of a stretch; fewer where the run ends before
    baseline  a healthy step; None: the last one that the run has logged without a suspect, else others of the kind
    confirm   suspects that are confirmed; 0: none
    where     as `Fork` keeps its copy of the state: "host", or a folder

    Every rank calls it. ConfigError for a pipeline, whose stages see micro-batches of each other, and for what cannot be observed.
    """
    if trainer.parallel.pipeline is not None:
        raise ConfigError(
            "blame: a rank of a pipeline has a stage of the model alone. Blame a copy of the run that has no pp."
        )
    with undone(trainer, where):
        compute = _next_step(trainer)
        found = observed(trainer.model, compute, trace=True)
    trainer.optimizer.zero_grad()
    healthy = logged_baseline(trainer.log.path, trainer.step) if baseline is None else baseline
    if healthy:
        found = found.beside(healthy)
    suspects, notes = found.suspects[:confirm], found.notes
    confirmations: list[Confirmation] = []
    if (
        suspects
        and (number := min(steps, trainer.config.steps - trainer.step)) >= SHORTEST
        and not trainer.config.cuda_graph
    ):
        confirmations = by_stretches(trainer, suspects, number, where)
    elif suspects and trainer.ranks.world == 1 and trainer.stepping is None:
        with undone(trainer, where):
            confirmations = by_gradient(trainer.model, _next_step(trainer), suspects)
    elif suspects:
        notes = (*notes, "Suspects are not confirmed: the run has no steps left for a stretch.")
    found = Blame(found.findings, tuple(confirmations), notes, trainer.step)
    trainer.log.write("blame", trainer.step, **event(found))
    if show is not None:
        for line in found.sentences():
            show.say(line)
    return found


def _next_step(trainer: Any) -> Callable[[], None]:
    """Forward and backward of the step that comes next, uncompiled, so that observers see it. Inside `undone`."""
    drawn = trainer.feed.draw(trainer.step)
    targets, _ = targets_of_ranks(drawn, trainer.step + 1, trainer.stop, trainer.ranks)
    whole = Objective(trainer.model, trainer.task.options)

    def repeat() -> None:
        trainer.repeat_draws()
        for turn, batch in enumerate(drawn.batches, 1):
            trainer.parallel.follows(turn == len(drawn.batches))
            trainer.backward(whole, batch, targets)

    return repeat if trainer.stepping is None else partial(trainer.stepping.measure, repeat)


# Confirmation


def by_stretches(
    trainer: Any, suspects: tuple[Finding, ...], steps: int, where: str | Path = "host"
) -> list[Confirmation]:
    """One for each suspect alone; if none of several does it, one for all of them together."""
    taken = partial(stretch, trainer, steps, where=where)
    narrow, wide = taken(_as_it_is), taken(suspended)
    control = taken(suspended, other_order=True)
    level = _level(wide)
    gap, noise = _level(narrow) - level, abs(_level(control) - level)
    numbers = {"steps": float(steps), "wide": level, "gap": gap, "noise": noise}
    names = tuple(each.name for each in suspects)
    if ended := narrow.ended or wide.ended or control.ended:
        return [Confirmation(names, None, f"its stretches were cut short by {ended}", numbers)]
    if wide.lost:
        return [Confirmation(names, None, f"in 16 bits step {wide.lost} is not finite either", numbers)]
    if not narrow.lost and not abs(gap) > max(NOISE * noise, SMALLEST_GAP):
        words = (
            f"{steps} steps in the recipe end {gap:+.4f} nats from 16 bits, and two ways to sum in 16 bits {noise:.4f}"
        )
        return [Confirmation(names, False, words, numbers)]

    def alone(group: Sequence[Finding]) -> Confirmation:
        own = taken(partial(in_16_bits, findings=group))
        if own.ended:
            return Confirmation(
                tuple(each.name for each in group), None, f"its stretch was cut short by {own.ended}", numbers
            )
        left = _level(own) - level
        back = 1.0 if narrow.lost and not own.lost else 0.0 if own.lost or narrow.lost else 1 - abs(left) / abs(gap)
        words = f"in {steps} steps with {'it' if len(group) == 1 else 'them'} alone in 16 bits "
        if narrow.lost:
            words += (
                f"step {own.lost} is not finite"
                if own.lost
                else f"all are finite; in the recipe step {narrow.lost} is not"
            )
        else:
            words += f"{max(back, 0):.0%} of the difference to 16 bits goes ({gap:+.4f} nats before, {left:+.4f} then; noise {noise:.4f})"
        least = COMES_BACK / (len(suspects) if len(group) == 1 else 1)
        seen = {**numbers, "left": left, "back": back}
        return Confirmation(tuple(each.name for each in group), back >= least, words, seen)

    found = [alone((each,)) for each in suspects]
    if len(suspects) > 1 and not any(each.hurts for each in found):
        found.append(alone(suspects))
    return found


def _as_it_is(model: nn.Module) -> Any:
    return nullcontext(model)


def _level(seen: Stretch) -> float:
    """Mean loss of its second half."""
    losses = seen.losses
    return statistics.fmean(losses[len(losses) // 2 :]) if losses else 0.0


# The log


def event(found: Blame) -> dict[str, Any]:
    """What metrics.jsonl says: suspects with the numbers behind them, and the errors of all operands, by which a later step is judged."""
    told = found.as_dict()
    return {
        "suspects": told["suspects"],
        "findings": told["findings"][: max(len(found.suspects), 1)],
        "confirmations": told["confirmations"],
        "recipes": told["recipes"],
        "errors": {
            f"{layer}:{product}": {role: list(each) for role, each in errors.items()}
            for (layer, product), errors in found.baseline.items()
        },
    }


def logged_baseline(metrics: Path, step: int) -> Baseline | None:
    """The errors that the last `blame` without suspects has logged, at a step before this one; None without one."""
    healthy = [
        each
        for each in read_metrics(metrics)
        if each["event"] == "blame" and not each["suspects"] and each["step"] < step
    ]
    if not healthy:
        return None
    named = ((name.rpartition(":"), errors) for name, errors in healthy[-1]["errors"].items())
    return {
        (layer, product): {role: Expected(*each) for role, each in errors.items()}
        for (layer, _, product), errors in named
    }
