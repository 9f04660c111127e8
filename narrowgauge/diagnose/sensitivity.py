"""Assay sensitivity: could these runs have shown a difference, if there was one?

The term is from non-inferiority trials (ICH E10, 2000, section 1.5): "no difference was seen" is
evidence only in a study that would have detected one. Runs of three steps are equal within any
margin that is a share of their loss, whatever their recipes. `study`, `compare`, the guard and the
report apply this rule before they report "equivalent". A reference passes if

    progress    its loss fell by more than the scatter of its batches explains
    trivial     it beats the best constant predictor on the evaluated targets: token frequencies,
                the majority class, the mean (recorded in run.json; "not known" in folders without
                it)
    evaluation  the evaluation has so many targets that one target weighs less than the margin
    seeds       its seeds gave different results, and none diverged
    control     a run that is bad on purpose (`recipes.POSITIVE_CONTROL`, the positive control of a
                trial) is shown to be worse by more than the margin; skipped if no such run was
                trained

and the margin is at most SHARE of its progress. If a condition fails, the verdict is unknown: these
runs have not learnt enough to tell. "Worse" needs none of the conditions, since a difference that
was shown proves sensitivity. It is judged by the requested margin, not by the smaller one.
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

# An equivalent recipe keeps 95 % of the reference's progress. Trials accept margins that keep half
# of the effect of the reference treatment (FDA, Non-Inferiority Clinical Trials, 2016, section
# IV.B); equivalence asks for ten times more here. The usual margins (0.25 % of a loss, 0.01 of a
# score) are smaller in every run whose loss fell by a twentieth of its final value, or whose score
# is 0.2 above the trivial one, so they stay as they are. Tried and lost: 1 %, which would narrow
# the usual margin for an accuracy of 0.9 on two classes to 0.004.
SHARE = 0.05
ENDS = 16  # largest number of steps at either end of a curve
FEWEST_STEPS = 3  # two differences of neighbouring steps; fewer have no variance
LARGEST_EXPONENT = 50.0  # limit on the exponent of a perplexity, against overflow
# Name of the recipe, repeated here for readers of run folders without torch.
POSITIVE_CONTROL = "positive-control"
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
class LossDecrease:
    """Decrease of a training loss, in nats.

    first, last  means over the first and the last steps, at most ENDS and at most a quarter of a
                 run each
    shown        lower end of the one-sided 97.5 % interval of first - last, at least 0. The scatter
                 of batches alone gives more than zero in 1 of 40 runs
    """

    first: float
    last: float
    shown: float


@dataclass(frozen=True, kw_only=True)
class Control:
    """Result of a positive control against the reference.

    harm   mean difference, above zero if worse; None without a finished pair
    seeds  number of pairs
    told   True if it is shown to be worse by more than the margin, or to diverge
    """

    harm: float | None
    seeds: int
    told: bool


@dataclass(frozen=True, kw_only=True)
class Assay:
    """Result of the rule in the module docstring for one reference. Values in units of the metric.

    asked      requested margin
    margin     margin that equivalence is judged by: at most SHARE of the progress
    progress   decrease of the training loss; None: no run has enough finite losses
    mean       mean of the reference's last evaluations; None without one
    predictor  name of the trivial predictor; '': not known
    trivial    its value of the metric; None: not known
    control    result of the positive control; None: none was trained
    flaws      (name, sentence) of each failed condition; empty: the reference passes
    """

    asked: float
    margin: float
    progress: LossDecrease | None
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
        """True if the margin is the share of the progress and not the requested one."""
        return self.margin < self.asked

    @property
    def sentence(self) -> str:
        """Sentences on the failed conditions, with numbers and the next step.

        '' if the reference passes.
        """
        if not self.flaws:
            return ""
        remedies = list(dict.fromkeys(REMEDIES[name] for name, _ in self.flaws))
        said = " ".join(words for _, words in self.flaws)
        return f"{NOT_LEARNT[0].upper()}{NOT_LEARNT[1:]}. {said} {'; '.join(_lowered(remedies))}."

    def facts(self) -> dict[str, object]:
        """Values for JSON."""
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


def progress_of(curves: Iterable[Sequence[float]]) -> LossDecrease | None:
    """Mean progress of several runs, from the training losses of their steps, in order.

    Skips runs with a non-finite loss or with fewer than FEWEST_STEPS. One pass.
    """
    ends = []
    for curve in curves:
        size = max(1, min(ENDS, len(curve) // 4))
        if len(curve) >= FEWEST_STEPS and all(map(math.isfinite, curve)):
            # Up to two steps per end give too few differences, so the variance comes from the whole
            # curve.
            ends.append(
                (
                    curve[:size],
                    curve[-size:],
                    [curve[:size], curve[-size:]] if size > 2 else [curve],
                )
            )
    return _between(ends)


def progress_between(first: Sequence[float], last: Sequence[float]) -> LossDecrease | None:
    """Progress between losses of the first steps of a run and recent losses.

    None if either has fewer than FEWEST_STEPS.
    """
    if min(len(first), len(last)) < FEWEST_STEPS or not all(map(math.isfinite, (*first, *last))):
        return None
    return _between([(first, last, [first, last])])


def _between(
    ends: Sequence[tuple[Sequence[float], Sequence[float], Sequence[Sequence[float]]]],
) -> LossDecrease | None:
    """Progress from the ends of curves.

    ends  (first losses, last losses, pieces of the curve for the variance of a step) of each run
    """
    if not ends:
        return None
    freedom, variance = 0, 0.0
    for first, last, pieces in ends:
        steps = [later - earlier for piece in pieces for earlier, later in pairwise(piece)]
        # var = mean d^2 / 2 over differences d of neighbours. A falling loss makes it larger, so it
        # errs towards "not shown".
        scatter = math.fsum(step * step for step in steps) / (2 * len(steps))
        variance += scatter * (1 / len(first) + 1 / len(last))
        freedom += len(steps)
    begun = statistics.fmean(statistics.fmean(first) for first, _, _ in ends)
    now = statistics.fmean(statistics.fmean(last) for _, last, _ in ends)
    # Standard error of a mean over runs; each run adds the variances of its two end means.
    error = math.sqrt(variance) / len(ends)
    return LossDecrease(
        first=begun, last=now, shown=max(0.0, begun - now - student_quantile(freedom) * error)
    )


def trivial_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """Trivial predictor of a run.json: {"predictor": its name, metric: its value}; {} if not known.

    Older folders have only the entropy of the training tokens, which applies to running text.
    """
    if found := run.get("trivial"):
        return dict(found)
    entropy = (run.get("data") or {}).get("unigram_entropy")
    if entropy is None or run.get("task", "text") != "text":
        return {}
    return {
        "predictor": FREQUENCIES,
        "loss": entropy,
        "perplexity": math.exp(min(entropy, LARGEST_EXPONENT)),
    }


def narrowed(margin: float, learnt: float | None) -> float:
    """The margin, or SHARE of the progress if that is smaller.

    learnt  progress in the same units; None: not known
    """
    return margin if learnt is None else min(margin, SHARE * max(learnt, 0.0))


def flaw_of_progress(progress: LossDecrease | None, name: str) -> str:
    """Sentence if no progress is shown, else ''."""
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


def flaw_of_trivial(
    predictor: str, trivial: float | None, reached: float | None, sign: int, name: str
) -> str:
    """Sentence if the reference does not beat a known trivial predictor, else ''.

    reached  worse end of the reference's interval, or its value
    sign     1 if lower is better, -1 if higher is better
    """
    if trivial is None or reached is None or sign * (trivial - reached) > 0:
        return ""
    side = "below" if sign > 0 else "above"
    return f"{name} is not shown to be {side} {true_minus(f'{trivial:.4f}')}, which {predictor} alone reach."


def flaw_of_evaluation(targets: int | None, margin: float, whole: float) -> str:
    """Sentence if one evaluated target weighs more than the margin, else ''.

    whole  largest contribution of one target to the mean: the loss, or the range of a score
    """
    if targets is None or targets * margin >= whole:
        return ""
    needed = (
        f"{count(math.ceil(whole / margin))} are needed" if margin > 0 else "no number is enough"
    )
    return f"The evaluation has {plural(targets, 'target')}, and one weighs more than the margin: {needed}."


def flaw_of_control(control: Control | None, name: str) -> str:
    """Sentence if a trained positive control is not distinguished from the reference, else ''."""
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
    """Known facts on a reference, for one metric.

    name       name in sentences
    sign       1 if a lower metric is better, -1 if a higher one is
    progress   decrease of its training loss
    learnt     progress of the metric, in its units; None: not known
    mean       mean over seeds; None: not measured
    reached    worse end of the metric's interval over seeds; None: not measured
    predictor  name of the trivial predictor
    trivial    its value of the metric; None: not known
    targets    targets of one evaluation; None: not known
    whole      largest contribution of one target to the metric: the loss, or the range of a score
    samples    flaw name -> sentence, for each further reason why its runs are not independent
               samples
    """

    name: str
    sign: int = 1
    progress: LossDecrease | None = None
    learnt: float | None = None
    mean: float | None = None
    reached: float | None = None
    predictor: str = ""
    trivial: float | None = None
    targets: int | None = None
    whole: float = 0.0
    samples: Mapping[str, str] = field(default_factory=dict)


def assess(
    reference: Reference, asked: float, control_at: Callable[[float], Control] | None = None
) -> Assay:
    """Apply the rule in the module docstring.

    control_at  control_at(margin) -> result of the positive control; None: none was trained
    """
    margin = narrowed(asked, reference.learnt)
    control = None if control_at is None else control_at(margin)
    flaws = {
        **reference.samples,
        PROGRESS: flaw_of_progress(reference.progress, reference.name),
        TRIVIAL: flaw_of_trivial(
            reference.predictor,
            reference.trivial,
            reference.reached,
            reference.sign,
            reference.name,
        ),
        EVALUATION: flaw_of_evaluation(reference.targets, margin, reference.whole),
        CONTROL: flaw_of_control(control, reference.name),
    }
    if flaws[PROGRESS] or flaws[TRIVIAL]:
        # Without progress the margin is zero, and no evaluation is large enough for it.
        flaws[EVALUATION] = ""
    return Assay(
        asked=asked, margin=margin, progress=reference.progress, mean=reference.mean, predictor=reference.predictor,
        trivial=reference.trivial, control=control, flaws=tuple((kind, words) for kind, words in flaws.items() if words),
    )  # fmt: skip


def assess_curve(
    name: str,
    losses: Sequence[float],
    asked: float,
    trivial: Mapping[str, Any],
    evaluated: float | None,
) -> Assay:
    """Assay sensitivity of one run that others are compared with, step by step.

    losses     training losses from the first step on, including the parent's for a branch
    asked      requested margin in nats
    trivial    as returned by `trivial_of`
    evaluated  newest validation loss; None: not known
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
