"""A check of a guarded run that is under way: what is known of it, which lies in every checkpoint of the run from its first step on.

What waits for the first step, samples of the gradients of BF16, does not: a run that ends before it takes the stretch once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.guard.audit import Audited
from narrowgauge.diagnose.guard.check import judged
from narrowgauge.diagnose.guard.evidence import Evidence
from narrowgauge.diagnose.guard.same_weights import FirstGradients, Samples, slopes
from narrowgauge.diagnose.guard.verdict import Verdict

if TYPE_CHECKING:
    from narrowgauge.train.trainer import Trainer


@dataclass
class Running:
    """A check that has begun.

    wide     the steps of the stretch, as the log of a run has them
    lost     the step at which BF16 was not finite; 0: none
    control  losses of a second one; None: there was none
    narrow   losses of the run since
    slopes   of the gradients of the first step, narrow against wide; none where they were not seen
    spent_s  in the stretch; trained_s: of the run before it
    audited  what the last steps of the run compute
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
        """terms: what its losses depend on (`guard_before.terms`)."""
        return {**asdict(self), "terms": terms}

    @classmethod
    def of(cls, facts: Mapping[str, Any], terms: dict[str, Any]) -> Running | None:
        """What `facts` gave; None where the run goes on under other terms."""
        known = dict(facts)
        if known.pop("terms", None) != terms:
            return None
        return cls(**{**known, "audited": Audited(**known.get("audited", {}))})

    def judged(self, evidence: Evidence, steps: int) -> tuple[Verdict, dict[str, Any]]:
        """The verdict with this check, and what the log says of it."""
        wide = [each["loss"] for each in self.wide]
        verdict, said = judged(evidence, self.begun, steps, self.narrow, wide, self.control, self.slopes, self.audited)
        return verdict, said | {"lost": self.lost}


class FirstStep:
    """The first step of the run in a check: waits for its gradients, and compares them with those of BF16."""

    def __init__(self, trainer: Trainer, wide: Samples, steps: list[dict[str, Any]]) -> None:
        """wide: the samples of the stretch, steps: what was said of its steps. A first one that float16 left out has none."""
        is_first = bool(steps) and abs(steps[0]["grad_norm"]) < float("inf")
        self._wide = wide if is_first else {}
        self._narrow = FirstGradients(trainer.model, trainer.optimizer)

    def slopes(self) -> dict[str, float]:
        """After that step; all ranks call it."""
        self.close()
        return slopes(self._narrow.samples, self._wide)

    def close(self) -> None:
        """Waits no longer."""
        self._narrow.close()
