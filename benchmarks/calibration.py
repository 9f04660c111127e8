"""Fits the rates of `narrowgauge.ops.timing.rates` to published times, and predicts each of those from all the others.

    python -m benchmarks.calibration        rows appended to benchmarks/results/calibration.jsonl

Least squares of log(predicted / published) over the rates that the figures can tell (FITTED) and the share that each card reaches, by
Gauss-Newton; a weak prior (the first guesses, within a factor e^PRIOR) holds what few figures tell. For the errors each figure, with the
others of its line, is left out, and the rest fitted again: the columns of one table share their card and their day, so leaving out one
phase of three would leave its twins.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import RESULTS, record
from benchmarks.published import Figure, figures
from narrowgauge.ops.timing.rates import RATES, Rates

FITTED = ("narrow", "fp4", "blocks", "mx", "rows", "copied", "eager", "compiled")
GUESSED = {
    "narrow": 0.95,
    "fp4": 0.95,
    "blocks": 1.2,
    "mx": 1.05,
    "rows": 1.1,
    "copied": 0.85,
    "eager": 1.25,
    "compiled": 1.15,
}
PRIOR, ROUNDS = 0.3, 8
NOISE = {
    "product": 0.05,
    "layer": 0.05,
    "compiled": 0.08,
    "eager": 0.15,
}  # about what they come out as
SAME = {"H200": "H100", "A100-80": "A100", "B300": "B200"}  # one chip, or nearly


def card_of(each: Figure) -> str:
    return SAME.get(each.on.name, each.on.name)


class Fit:
    """Rates and what each card reaches, from figures."""

    def __init__(self, known: list[Figure], cards: list[str]) -> None:
        self.names = [*FITTED, *cards]
        self.logs = torch.tensor(
            [*(math.log(GUESSED[name]) for name in FITTED), *([math.log(0.75)] * len(cards))],
            dtype=torch.float64,
        )
        prior = self.logs.clone()
        noise = torch.tensor([NOISE[each.of] for each in known], dtype=torch.float64)
        for _ in range(ROUNDS):
            residuals = self.residuals(known, self.logs)
            slopes = torch.stack(
                [
                    (self.residuals(known, self.logs + step) - residuals) / 1e-5
                    for step in 1e-5 * torch.eye(len(self.logs), dtype=torch.float64)
                ],
                1,
            )
            held = torch.eye(len(self.logs), dtype=torch.float64) / PRIOR
            matrix = torch.cat([slopes / noise[:, None], held])
            target = torch.cat([-residuals / noise, (prior - self.logs) / PRIOR])
            self.logs = self.logs + torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]

    def residuals(self, known: list[Figure], logs: torch.Tensor) -> torch.Tensor:
        values = dict(zip(self.names, logs.exp().tolist(), strict=True))
        rates = replace(RATES, **{name: values[name] for name in FITTED})
        return torch.tensor(
            [
                math.log(each.predicted(rates, values[card_of(each)]) / each.published_s)
                for each in known
            ],
            dtype=torch.float64,
        )

    @property
    def values(self) -> dict[str, float]:
        return dict(zip(self.names, self.logs.exp().tolist(), strict=True))

    @property
    def rates(self) -> Rates:
        return replace(RATES, **{name: self.values[name] for name in FITTED})

    def predicted(self, each: Figure) -> float:
        return each.predicted(self.rates, self.values[card_of(each)])


def line_of(each: Figure) -> tuple[str, str, str]:
    """What is left out together."""
    case = each.case.rpartition(", ")[0] if each.source == "TE" else each.case
    return each.source, each.on.name, case


def main() -> None:
    known = figures()
    cards = sorted({card_of(each) for each in known})
    fitted = [each for each in known if not each.apart]
    whole = Fit(fitted, cards)
    print({name: round(value, 4) for name, value in whole.values.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for line in dict.fromkeys(map(line_of, known)):
        left_out = [each for each in known if line_of(each) == line]
        is_apart = bool(left_out[0].apart)
        others = (
            whole if is_apart else Fit([each for each in fitted if line_of(each) != line], cards)
        )
        published, found, alone = (
            sum(times)
            for times in zip(
                *(
                    (each.published_s, whole.predicted(each), others.predicted(each))
                    for each in left_out
                ),
                strict=True,
            )
        )
        first = left_out[0]
        rows.append(
            {
                "case": line[2], "source": line[0], "card": line[1], "of": first.of, "published_ms": 1e3 * published,
                "fitted_ms": 1e3 * found, "left_out_ms": 1e3 * alone, "left_out_error": alone / published - 1, "apart": first.apart,
            }
        )  # fmt: skip
        told = f"{line[0]:11} {line[1]:12} {line[2]:44} {1e3 * published:9.3f}"
        print(f"{told} {found / published:6.3f} {alone / published:6.3f} {first.apart}", flush=True)
    for of in NOISE:
        errors = sorted(
            abs(row["left_out_error"]) for row in rows if row["of"] == of and not row["apart"]
        )
        within = errors[math.ceil(2 * len(errors) / 3) - 1]
        print(
            f"{of}: {len(errors)} lines, median {statistics.median(errors):.3f}, two of three within {within:.3f}, worst {errors[-1]:.3f}"
        )
    rows.append(
        {"case": "fitted", **{name: round(value, 4) for name, value in whole.values.items()}}
    )
    record("calibration", rows, RESULTS / "calibration.jsonl")


if __name__ == "__main__":
    main()
