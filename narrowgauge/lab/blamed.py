"""Blame in a run: finds inaccurate matmuls at the present step, and tests them in 16 bits.

    from narrowgauge.lab.blamed import blame_run
    found = blame_run(trainer, show)                 for example on an alarm of the guard

The next step is observed with its own batch (lab.blame). Probes (train.probe) confirm the
first suspects. All probes start from the same state and use the same batches: the recipe, 16 bits
everywhere, 16 bits with another order of summation as a control, and the recipe with one suspect in
16 bits. The run's state is restored bit for bit, and an event `blame` records the result.

    gap        mean loss of the second half of a probe, minus the same mean with 16 bits everywhere
    hurts      the recipe's gap exceeds NOISE times the control's gap (or the recipe's loss is not
               finite), and a suspect alone in 16 bits removes COMES_BACK (half) of this gap. Each
               of several suspects together has to remove its share of this half
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import ConfigError
from narrowgauge.lab.blame import CONFIRMED, Blame, Confirmation, observed
from narrowgauge.lab.blame.confirm import by_gradient, in_16_bits
from narrowgauge.lab.blame.judge import Baseline, Expected, Finding
from narrowgauge.lab.probe import ProbeResult, rolled_back, run_probe
from narrowgauge.nn.converted_model import suspended
from narrowgauge.train.loss import Objective

STEPS = 50  # length of a probe
# Fewer steps confirm nothing
SHORTEST = 8
NOISE = 3.0
SMALLEST_GAP = 1e-4  # nats; a smaller gap is never blamed on a suspect
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
    """Observes the next step of a Trainer, confirms the first suspects and logs an event.

    Restores the run.

    show      Console for the findings; None: print nothing
    steps     length of a probe, shorter near the end of the run
    baseline  a step without suspects; None: the last one that the run has logged, else layers of
              the same kind
    confirm   number of suspects to confirm; 0: none
    where     place of the state's copy, as for `Snapshot`: "host" or a folder

    Every rank calls it. Raises ConfigError for a pipeline, whose stages see micro-batches of each
    other, and for steps that cannot be observed.
    """
    if trainer.parallel.pipeline is not None:
        raise ConfigError(
            "blame: a rank of a pipeline has a stage of the model alone. Blame a copy of the run that has no pp.",
            code="blame.pipeline",
        )
    with rolled_back(trainer, where):
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
        # Captured graphs replay the recipe's kernels, so probes of other recipes are impossible:
        # compare gradients instead.
        and not trainer.config.cuda_graph
    ):
        confirmations = by_probes(trainer, suspects, number, where)
    elif suspects and trainer.ranks.world == 1 and trainer.passes.in_backward is None:
        with rolled_back(trainer, where):
            confirmations = by_gradient(trainer.model, _next_step(trainer), suspects)
    elif suspects:
        notes = (*notes, "Suspects are not confirmed: the run has no steps left for a stretch.")
    found = replace(
        found, confirmations=tuple(confirmations), notes=tuple(notes), step=trainer.step
    )
    trainer.log.write("blame", trainer.step, **event(found))
    if show is not None:
        for line in found.sentences():
            show.say(line)
    return found


def _next_step(trainer: Any) -> Callable[[], None]:
    """Returns a function that runs forward and backward of the next step. Call inside `rolled_back`.

    It runs the uncompiled model, so that observers see every matmul.
    """
    drawn = trainer.feed.draw(trainer.step)
    targets, _ = trainer.passes.targets(drawn, trainer.step + 1, trainer.stop)
    whole = Objective(trainer.model, trainer.task.options)

    def repeat() -> None:
        trainer.passes.repeat_draws()
        for turn, batch in enumerate(drawn.batches, 1):
            trainer.parallel.follows(turn == len(drawn.batches))
            trainer.passes.backward(whole, batch, targets)

    return (
        repeat
        if trainer.passes.in_backward is None
        else partial(trainer.passes.in_backward.measure, repeat)
    )


# Confirmation


def by_probes(
    trainer: Any, suspects: tuple[Finding, ...], steps: int, where: str | Path = "host"
) -> list[Confirmation]:
    """Confirms suspects by probes, one result per suspect.

    If each of several suspects is too little alone, a last probe has all suspects in 16 bits.
    """
    taken = partial(run_probe, trainer, steps, where=where)
    narrow, wide = taken(_as_it_is), taken(suspended)
    control = taken(suspended, other_order=True)
    level = _level(wide)
    gap, noise = _level(narrow) - level, abs(_level(control) - level)
    numbers = {"steps": float(steps), "wide": level, "gap": gap, "noise": noise}
    names = tuple(each.name for each in suspects)
    if ended := narrow.ended or wide.ended or control.ended:
        return [Confirmation(names, None, f"its stretches were cut short by {ended}", numbers)]
    if wide.lost:
        return [
            Confirmation(names, None, f"in 16 bits step {wide.lost} is not finite either", numbers)
        ]
    if not narrow.lost and not abs(gap) > max(NOISE * noise, SMALLEST_GAP):
        words = f"{steps} steps in the recipe end {gap:+.4f} nats from 16 bits, and two ways to sum in 16 bits {noise:.4f}"
        return [Confirmation(names, False, words, numbers)]

    def alone(group: Sequence[Finding]) -> Confirmation:
        own = taken(partial(in_16_bits, findings=group))
        if own.ended:
            return Confirmation(
                tuple(each.name for each in group),
                None,
                f"its stretch was cut short by {own.ended}",
                numbers,
            )
        left = _level(own) - level
        # A loss that becomes finite counts as all of the gap, a loss that does not as nothing.
        back = (
            1.0
            if narrow.lost and not own.lost
            else 0.0
            if own.lost or narrow.lost
            else 1 - abs(left) / abs(gap)
        )
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


def _level(seen: ProbeResult) -> float:
    """Mean loss of the second half of a probe."""
    losses = seen.losses
    return statistics.fmean(losses[len(losses) // 2 :]) if losses else 0.0


# The log


def event(found: Blame) -> dict[str, Any]:
    """Fields of the `blame` event: suspects with their numbers, and the errors of all operands.

    Later steps use these errors as their baseline.
    """
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
    """Operand errors of the last `blame` event without suspects before `step`, or None."""
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
