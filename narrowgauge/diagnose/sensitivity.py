"""Assay sensitivity: could these runs have shown a difference, if there was one?

The term is from non-inferiority trials (ICH E10, 2000, section 1.5): "no difference was seen" is
evidence only in a study that would have seen one. Runs of three steps are equal within any margin that
is a share of their loss, whatever their recipes do. `study`, `compare`, the guard and the report ask
this one rule before they say equivalent. A reference is fit to be compared with if

    progress    its loss fell, by more than the scatter of its batches explains
    trivial     it beats the best constant predictor on the evaluated targets: token frequencies, the
                majority class, the mean (recorded in run.json; "not known" in folders without it)
    evaluation  the evaluation has so many targets that one of them weighs less than the margin
    seeds       its seeds gave different results, and none of them diverged
    control     a run that is bad on purpose (`recipes.POSITIVE_CONTROL`, the positive control of a trial)
                is shown to be worse by more than the margin; None where no such run was trained

and the margin is at most SHARE of what it learnt. If one of them fails, the verdict is unknown: these
runs have not learnt enough to tell. "Worse" needs none of them: a difference that was shown is its own
evidence of sensitivity. Then it is judged by the margin that was asked for, not by the smaller one.

SHARE: an equivalent recipe keeps 95 % of what the reference learnt. Trials accept margins that keep half
of the effect of the reference treatment (FDA, Non-Inferiority Clinical Trials, 2016, section IV.B); a
claim of equivalence asks ten times more. The usual margins (0.25 % of a loss, 0.01 of a score) are
smaller in every run whose loss fell by a twentieth of where it ended, or whose score is 0.2 above the
trivial one, so they hold there as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from narrowgauge.diagnose.band import student_quantile
from narrowgauge.diagnose.format_text import PERCENT, count, decimals, plural, true_minus

SHARE = 0.05  # of what was learnt
ENDS = 16  # steps at either end of a curve, at most
FEWEST_STEPS = 3  # two differences of neighbouring steps: fewer have no scatter
LARGEST_EXPONENT = 50.0  # of a perplexity's progress: exp of more than that is no better a limit
POSITIVE_CONTROL = "positive-control"  # the name of the recipe, for readers of run folders that do without torch
FREQUENCIES = "token frequencies"
NOT_LEARNT = "these runs have not learnt enough to tell"
PROGRESS, TRIVIAL, EVALUATION, SEEDS, DIVERGENCE, CONTROL = (
    "progress",
    "trivial",
    "evaluation",
    "seeds",
    "divergence",
    "control",
)
REMEDIES = {
    PROGRESS: "Train longer, or with a larger learning rate",
    TRIVIAL: "Train longer, or with a larger learning rate",
    EVALUATION: "Evaluate more (eval_tokens, validation_fraction)",
    SEEDS: "Name other seeds, or a metric that differs between them",
    DIVERGENCE: "Lower the learning rate",
    CONTROL: "Train longer, or with more seeds",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training loss fell, in its own units (nats).

    first, last  means over the first and the last steps, at most ENDS and at most a quarter of a run each
    shown        the lower end of the one-sided 97.5 % interval of first - last, 0 at least: the scatter of
                 batches alone gives more than zero in one of forty runs
    """

    first: float
    last: float
    shown: float


@dataclass(frozen=True, kw_only=True)
class Control:
    """A positive control against the reference.

    harm   its mean difference, above zero where it is worse; None without a finished pair
    seeds  pairs
    told   whether it is shown to be worse by more than the margin, or to diverge
    """

    harm: float | None
    seeds: int
    told: bool


@dataclass(frozen=True, kw_only=True)
class Assay:
    """What the rule at the top found of a reference. Values in units of the metric.

    asked      the margin that was asked for
    margin     the one that equivalence is judged by: at most SHARE of what was learnt
    progress   of the training loss; None: no run has so many finite losses
    mean       of the reference's last evaluations; None without one
    predictor  the name of the trivial predictor, and its value; '' and None: not known
    control    None: none was trained
    flaws      names of what failed, with sentences; empty: fit to be compared with
    """

    asked: float
    margin: float
    progress: Progress | None
    mean: float | None = None
    predictor: str = ""
    trivial: float | None = None
    control: Control | None = None
    flaws: tuple[tuple[str, str], ...] = ()

    @property
    def is_sensitive(self) -> bool:
        return not self.flaws

    @property
    def is_narrowed(self) -> bool:
        """Whether the margin is the share of what was learnt, and not the one that was asked for."""
        return self.margin < self.asked

    @property
    def sentence(self) -> str:
        """Why nothing can be told, with the numbers and the next step; '' if it can."""
        if not self.flaws:
            return ""
        remedies = list(dict.fromkeys(REMEDIES[name] for name, _ in self.flaws))
        said = " ".join(words for _, words in self.flaws)
        return f"{NOT_LEARNT[0].upper()}{NOT_LEARNT[1:]}. {said} {'; '.join(_lowered(remedies))}."

    def facts(self) -> dict[str, object]:
        """For JSON."""
        progress, control = self.progress, self.control
        return {
            "is_sensitive": self.is_sensitive,
            "flaws": [name for name, _ in self.flaws],
            "asked_margin": self.asked,
            "first_loss": progress and progress.first,
            "last_loss": progress and progress.last,
            "progress": progress and progress.shown,
            "predictor": self.predictor,
            "trivial": self.trivial,
            "control": None
            if control is None
            else {"harm": control.harm, "seeds": control.seeds, "told": control.told},
        }


def _lowered(remedies: list[str]) -> list[str]:
    return [remedies[0], *(each[0].lower() + each[1:] for each in remedies[1:])]


def progress_of(curves: Iterable[Sequence[float]]) -> Progress | None:
    """The mean progress of runs, from the training losses of their steps, in order.

    A run with a loss that is not finite, or with fewer than FEWEST_STEPS, says nothing. Cost: one pass.
    """
    ends = []
    for curve in curves:
        size = max(1, min(ENDS, len(curve) // 4))
        if len(curve) >= FEWEST_STEPS and all(map(math.isfinite, curve)):
            ends.append((curve[:size], curve[-size:], [curve[:size], curve[-size:]] if size > 2 else [curve]))
    return _between(ends)


def progress_between(first: Sequence[float], last: Sequence[float]) -> Progress | None:
    """The same from losses of the first steps of a run, and of steps now; None of fewer than FEWEST_STEPS each."""
    if min(len(first), len(last)) < FEWEST_STEPS or not all(map(math.isfinite, (*first, *last))):
        return None
    return _between([(first, last, [first, last])])


def _between(ends: Sequence[tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]]]) -> Progress | None:
    """ends: of each run its first and last losses, and the pieces of its curve that the scatter of a step is taken from.

    That is var = mean d^2 / 2 over differences d of neighbours. A falling loss makes it larger, so it errs towards "not shown".
    """
    if not ends:
        return None
    freedom, variance = 0, 0.0
    for first, last, pieces in ends:
        steps = [later - earlier for piece in pieces for earlier, later in pairwise(piece)]
        scatter = math.fsum(step * step for step in steps) / (2 * len(steps))
        variance += scatter * (1 / len(first) + 1 / len(last))
        freedom += len(steps)
    begun = statistics.fmean(statistics.fmean(first) for first, _, _ in ends)
    now = statistics.fmean(statistics.fmean(last) for _, last, _ in ends)
    error = math.sqrt(variance) / len(ends)
    return Progress(first=begun, last=now, shown=max(0.0, begun - now - student_quantile(freedom) * error))


def trivial_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The trivial predictor of a run.json: {"predictor": its name, metric: its value}; {} where it is not known.

    Folders from before it was recorded have the entropy of the training tokens, of running text alone.
    """
    if found := run.get("trivial"):
        return dict(found)
    entropy = (run.get("data") or {}).get("unigram_entropy")
    if entropy is None or run.get("task", "text") != "text":
        return {}
    return {"predictor": FREQUENCIES, "loss": entropy, "perplexity": math.exp(min(entropy, LARGEST_EXPONENT))}


def narrowed(margin: float, learnt: float | None) -> float:
    """The margin, or SHARE of what was learnt where that is smaller. learnt: same units; None: not known."""
    return margin if learnt is None else min(margin, SHARE * max(learnt, 0.0))


def flaw_of_progress(progress: Progress | None, name: str) -> str:
    """A sentence if no progress is shown, else ''."""
    if progress is None:
        return f"{name} logged too few training losses to show that it learnt."
    if progress.shown > 0:
        return ""
    fell = progress.first - progress.last
    places = decimals(fell) if fell else 4
    return (
        f"The training loss of {name} went from {progress.first:.4f} to {progress.last:.4f} "
        f"({true_minus(f'{-fell:+.{places}f}')}), which the scatter of its batches explains."
    )


def flaw_of_trivial(predictor: str, trivial: float | None, reached: float | None, sign: int, name: str) -> str:
    """A sentence if the reference does not beat a trivial predictor that is known, else ''.

    reached  what it reached at least: the worse end of an interval, or the value itself
    sign     1 where less is better, -1 where more is
    """
    if trivial is None or reached is None or sign * (trivial - reached) > 0:
        return ""
    side = "below" if sign > 0 else "above"
    return f"{name} is not shown to be {side} {true_minus(f'{trivial:.4f}')}, which {predictor} alone reach."


def flaw_of_evaluation(targets: int | None, margin: float, whole: float) -> str:
    """A sentence if one evaluated target weighs more than the margin, else ''.

    whole  what the metric is a mean of, by size: the loss, or the range of a score
    """
    if targets is None or targets * margin >= whole:
        return ""
    needed = f"{count(math.ceil(whole / margin))} are needed" if margin > 0 else "no number is enough"
    return f"The evaluation has {plural(targets, 'target')}, and one weighs more than the margin: {needed}."


def flaw_of_control(control: Control | None, name: str) -> str:
    """A sentence if a positive control was trained and is not told from the reference, else ''."""
    if control is None or control.told:
        return ""
    if control.harm is None:
        return f"The positive control, which is bad on purpose, has no finished pair with {name}."
    found = true_minus(f"{control.harm:+.{decimals(control.harm) if control.harm else 4}f}")
    return (
        f"The positive control, which is bad on purpose, is not shown to be worse than {name} by more than the margin "
        f"({found} over {plural(control.seeds, 'pair')}, one-sided t test at 5{PERCENT})."
    )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What is known of a reference, by metric.

    name       for sentences
    sign       1 where less of the metric is better, -1 where more is
    progress   of its training loss
    learnt     how far the metric moved, in its units; None: not known
    reached    the metric, at the worse end of its interval over seeds; None: none was measured
    predictor  the name of the trivial predictor, and its value of the metric; None: not known
    targets    of one evaluation; None: not known
    whole      what the metric is a mean of, by size
    samples    one sentence for each further reason why its runs are no samples, by name of the flaw
    """

    name: str
    sign: int = 1
    progress: Progress | None = None
    learnt: float | None = None
    mean: float | None = None
    reached: float | None = None
    predictor: str = ""
    trivial: float | None = None
    targets: int | None = None
    whole: float = 0.0
    samples: Mapping[str, str] = field(default_factory=dict)


def assess(reference: Reference, asked: float, control_at: Callable[[float], Control] | None = None) -> Assay:
    """The rule at the top of this file. control_at: what a positive control shows against a margin; None: none was trained."""
    margin = narrowed(asked, reference.learnt)
    control = None if control_at is None else control_at(margin)
    flaws = {
        **reference.samples,
        PROGRESS: flaw_of_progress(reference.progress, reference.name),
        TRIVIAL: flaw_of_trivial(
            reference.predictor, reference.trivial, reference.reached, reference.sign, reference.name
        ),
        EVALUATION: flaw_of_evaluation(reference.targets, margin, reference.whole),
        CONTROL: flaw_of_control(control, reference.name),
    }
    if flaws[PROGRESS] or flaws[TRIVIAL]:
        flaws[EVALUATION] = ""  # nothing was learnt: the margin is zero, and no evaluation is large enough for it
    return Assay(
        asked=asked, margin=margin, progress=reference.progress, mean=reference.mean, predictor=reference.predictor,
        trivial=reference.trivial, control=control, flaws=tuple((kind, words) for kind, words in flaws.items() if words),
    )  # fmt: skip


def assess_curve(
    name: str, losses: Sequence[float], asked: float, trivial: Mapping[str, Any], evaluated: float | None
) -> Assay:
    """Of one run that others are compared with, step by step.

    losses     of its training from the first step on, of a branch with its parent's
    asked      the margin, nats
    trivial    as `trivial_of` gives it
    evaluated  the newest validation loss; None: not known
    """
    progress = progress_of([losses])
    reference = Reference(
        name=name,
        progress=progress,
        learnt=progress.shown if progress else 0.0,
        mean=evaluated,
        reached=evaluated,
        predictor=str(trivial.get("predictor", "")),
        trivial=trivial.get("loss"),
    )
    return assess(reference, asked)
