"""State of a guard check in progress, as each checkpoint of the run stores it.

Gradient samples of the BF16 reference are not stored. A run that is killed before the first step of
a check repeats the reference steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.lab.guard.audit import Audited
from narrowgauge.lab.guard.check import judged
from narrowgauge.lab.guard.same_weights import FirstGradients, Samples, slopes
from narrowgauge.train.checkpoint_ref import NUMBERS, STEPS

if TYPE_CHECKING:
    from narrowgauge.diagnose.guard_settings import GuardSettings
    from narrowgauge.lab.guard.evidence import Evidence
    from narrowgauge.lab.guard.result import GuardResult
    from narrowgauge.train.trainer import Trainer


def terms(trainer: Trainer, settings: GuardSettings) -> dict[str, Any]:
    """Settings and batches that the losses of a check depend on.

    They change by resuming with other settings, in a branch, or when a spike's batch is skipped. A
    check in progress is dropped then: its BF16 steps are no reference for the run any more. Without
    this rule, a branch with ten times the learning rate was judged 1.17 nats better than its
    parent's reference.
    """
    of_run = {
        name: str(getattr(trainer.config, name)) for name in sorted(NUMBERS | STEPS | {"steps"})
    }
    return {
        "run": of_run,
        "left_out": trainer.feed.left_out,
        "every": settings.every,
        "steps": settings.steps,
    }


@dataclass
class CheckProgress:
    """A guard check in progress.

    begun      step of the run before the check
    wide       log fields of the BF16 reference steps
    lost       first step with a non-finite loss in BF16; 0: none
    control    losses of a second reference run in another order of summation; None: there was none
    narrow     losses of the run itself, since `begun`
    slopes     weight name -> slope of the run's gradient against BF16's at the first step; empty if
               not observed
    spent_s    duration of the reference steps
    trained_s  training time of the run before the check
    audited    results of recomputing the run's last steps
    """

    begun: int
    wide: list[dict[str, Any]]
    lost: int = 0
    control: list[float] | None = None
    narrow: list[float] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    spent_s: float = 0.0
    trained_s: float = 0.0
    audited: Audited = field(default_factory=Audited)

    def facts(self, terms: dict[str, Any]) -> dict[str, Any]:
        """Contents for a checkpoint.

        terms  the settings and batches that the losses depend on (`terms`)
        """
        return {**asdict(self), "terms": terms}

    @classmethod
    def of(cls, facts: Mapping[str, Any], terms: dict[str, Any]) -> CheckProgress | None:
        """Rebuilds a check from a checkpoint; None if the run continues under other terms."""
        known = dict(facts)
        # Under other settings or batches, the BF16 steps are no reference for the run.
        if known.pop("terms", None) != terms:
            return None
        return cls(**{**known, "audited": Audited(**known.get("audited", {}))})

    def judged(self, evidence: Evidence, steps: int) -> tuple[GuardResult, dict[str, Any]]:
        """Returns (result including this check, fields of its log event)."""
        wide = [each["loss"] for each in self.wide]
        result, said = judged(
            evidence, self.begun, steps, self.narrow, wide, self.control, self.slopes, self.audited
        )
        return result, said | {"lost": self.lost}


class FirstStep:
    """Samples the gradients of the run's first step in a check and compares them with BF16's."""

    def __init__(self, trainer: Trainer, wide: Samples, steps: list[dict[str, Any]]) -> None:
        """Starts to sample gradients.

        wide   gradient samples of the BF16 reference's first step
        steps  log fields of the reference steps

        There is nothing to compare if float16 overflowed in the first reference step.
        """
        is_first = bool(steps) and abs(steps[0]["grad_norm"]) < float("inf")
        self._wide = wide if is_first else {}
        self._narrow = FirstGradients(trainer.model, trainer.optimizer)

    def slopes(self) -> dict[str, float]:
        """Slopes of the gradients, after the first step.

        All ranks call it: dot products are summed over ranks.
        """
        self.close()
        return slopes(self._narrow.samples, self._wide)

    def close(self) -> None:
        """Removes the hook on the optimizer."""
        self._narrow.close()
