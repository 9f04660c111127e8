"""Results of blame as a table, as sentences, as a setting, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from narrowgauge.lab.blame.judge import (
    Baseline,
    Finding,
    as_numbers,
    errors_of,
    from_numbers,
    judged_by,
)
from narrowgauge.recipe import GEMMS

ROWS = 10  # rows of the table


@dataclass(frozen=True)
class Confirmation:
    """Effect on loss or gradient of computing suspects alone in 16 bits.

    products  "layer:GEMM" of the suspects
    hurts     True if they cause a loss of accuracy here, False if not; None: the measurement cannot
              decide
    words     clause with the numbers
    numbers   the numbers
    """

    products: tuple[str, ...]
    hurts: bool | None
    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Blame:
    """GEMMs of one observed step, worst first.

    findings       every observed GEMM
    confirmations  results for the first suspects
    notes          sentences on GEMMs that could not be observed
    step           step of a run; 0 outside of a run
    foreign        layers of another library, for which `setting` is no line
    """

    findings: tuple[Finding, ...]
    confirmations: tuple[Confirmation, ...] = ()
    notes: tuple[str, ...] = ()
    step: int = 0
    foreign: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.is_suspect)

    @property
    def baseline(self) -> Baseline:
        """Expected errors for a later step, if this step was sound."""
        return errors_of(self.findings)

    def beside(self, baseline: Blame | Baseline) -> Blame:
        """The same step, judged against a sound one."""
        known = baseline.baseline if isinstance(baseline, Blame) else baseline
        judged = tuple(judged_by(self.findings, known))
        return replace(self, findings=judged, confirmations=())

    @property
    def recipes(self) -> list[str]:
        """Entries of the setting `recipes` that compute the suspects in 16 bits.

        If some suspects are confirmed, only these. Layers of another library have no entry.
        """
        # If nothing is confirmed, the setting covers all suspects.
        hurting = {name for each in self.confirmations if each.hurts for name in each.products}
        return entries(
            each
            for each in self.suspects
            if (not hurting or each.name in hurting) and each.layer not in self.foreign
        )

    @property
    def setting(self) -> str:
        """Line for a configuration file, or ''."""
        return f"recipe.layers = {json.dumps(self.recipes)}" if self.recipes else ""

    def sentences(self) -> list[str]:
        """Sentences on the result; the last one is the setting to use, if there are suspects."""
        layers = len({each.layer for each in self.findings})
        seen = f"{len(self.findings)} products of {layers} layers"
        if not self.suspects:
            worst = (
                f": the least accurate, {self.findings[0].name}: {self.findings[0].reason}"
                if self.findings
                else ""
            )
            return [f"No product is suspect among {seen}{worst}.", *self.notes]
        said = [
            f"{len(self.suspects)} of {seen} {'is' if len(self.suspects) == 1 else 'are'} suspect."
        ]
        said += [
            f"{place}. {each.name}: {each.reason}."
            for place, each in enumerate(self.suspects[:ROWS], 1)
        ]
        if len(self.suspects) > ROWS:
            said.append(f"And {len(self.suspects) - ROWS} more.")
        said += [_confirmed(each) for each in self.confirmations]
        if not self.setting:
            return [*said, *self.notes]
        return [*said, *self.notes, "In 16 bits they are computed with", self.setting]

    def table(self, rows: int = ROWS) -> str:
        """The worst GEMMs, one line each."""
        head = ("product", "error", "expected", "times", "saturates", "to zero", "kernel", "")
        lines = [head]
        for each in self.findings[:rows]:
            worse = each.worse
            lines.append((
                each.name, f"{worse.error:.4f}", f"{worse.expected:.4f}", f"{worse.times:.1f}", f"{worse.saturated:.1%}",
                f"{worse.underflown:.1%}", f"{each.kernel:.4f}", "suspect" if each.is_suspect else "",
            ))  # fmt: skip
        widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
        rows_of_text = (
            "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join(each.rstrip() for each in rows_of_text)

    def __str__(self) -> str:
        return "\n".join([self.table(), *self.sentences()])

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON's types; `from_dict` reads them."""
        return {
            "step": self.step,
            "findings": [as_numbers(each) for each in self.findings],
            "suspects": [each.name for each in self.suspects],
            "confirmations": [asdict(each) for each in self.confirmations],
            "notes": list(self.notes),
            "recipes": self.recipes if self.suspects else [],
            "foreign": list(self.foreign),
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Blame:
        confirmations = (
            Confirmation(**{**each, "products": tuple(each["products"])})
            for each in given["confirmations"]
        )
        findings = tuple(map(from_numbers, given["findings"]))
        foreign = tuple(given.get("foreign", ()))  # older logs lack it
        return cls(findings, tuple(confirmations), tuple(given["notes"]), given["step"], foreign)


def entries(findings: Iterable[Finding]) -> list[str]:
    """'layer=bf16:products' for each layer."""
    products: dict[str, set[str]] = {}
    for each in findings:
        products.setdefault(each.layer, set()).add(each.product)
    return [
        f"{layer}=bf16:{'+'.join(name for name in GEMMS if name in own)}"
        for layer, own in products.items()
    ]


def _confirmed(each: Confirmation) -> str:
    verdict = {
        True: "confirmed",
        False: "inaccurate, but it does not hurt",
        None: "not known whether it hurts",
    }[each.hurts]
    return f"{', '.join(each.products)}: {verdict}: {each.words}."
