"""The study of 4-bit recipes: its interval against a search by its definition (bounded), and one tiny study to the end."""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import frontier_study
from narrowgauge.diagnose.band import student_quantile


def is_inside(ratio: float, gaps: list[float], base: list[float], t: float) -> bool:
    """The mean of g - r b is within t standard errors of zero."""
    left = [g - ratio * b for g, b in zip(gaps, base, strict=True)]
    return abs(statistics.mean(left)) <= t * statistics.stdev(left) / len(left) ** 0.5


@pytest.mark.parametrize(
    ("gaps", "base"),
    [
        ([0.03, 0.05, 0.02, 0.04, 0.03], [0.05, 0.07, 0.04, 0.06, 0.05]),
        ([-0.01, 0.01, 0.0, 0.02], [0.06, 0.05, 0.07, 0.06]),
        ([0.1, 0.3], [0.2001, 0.2]),
    ],
    ids=str,
)
def test_the_interval_ends_where_its_definition_does(gaps, base):
    t = student_quantile(len(gaps) - 1) if len(gaps) > 2 else 12.706
    interval = frontier_study.fieller(gaps, base, t)
    assert interval is not None
    low, high = interval
    assert low <= sum(gaps) / sum(base) <= high
    width = high - low
    for end, outwards in ((low, -1), (high, 1)):
        assert is_inside(end - outwards * 0.001 * width, gaps, base, t)
        assert not is_inside(end + outwards * 0.001 * width, gaps, base, t)


def test_a_base_that_is_not_told_from_zero_has_no_interval():
    assert frontier_study.fieller([0.1, 0.2, 0.1], [0.1, -0.1, 0.05], 4.3) is None
    assert frontier_study.fieller([0.1], [0.1], 4.3) is None


def test_ratios_are_those_of_the_seeds_of_both():
    rows = [
        {"recipe": "bf16", "differences": {0: 0.0, 1: 0.0}},
        {"recipe": "nvfp4", "differences": {0: 0.04, 1: 0.06}},
        {"recipe": "quartet2", "differences": {0: 0.02, 2: 0.5}},
    ]
    found = {row["recipe"]: row["ratio"] for row in frontier_study.ratios(rows)}
    assert found == {"bf16": 0.0, "nvfp4": 1.0, "quartet2": 0.5}


@pytest.mark.slow
@pytest.mark.benchmark
def test_a_study_ends_with_a_row_for_each_recipe_and_repeats_no_run(tmp_path, monkeypatch):
    text, results = tmp_path / "text.txt", tmp_path / "results.jsonl"
    text.write_text("".join(f"line {i} of {i * i}\n" for i in range(6000)), encoding="utf-8")
    small = {"hidden_size": 32, "layers": 1, "eval_tokens": 1024, "vocab_size": 300}
    monkeypatch.setattr(frontier_study, "CHANGES", small)
    # In this process, which has torch already.
    monkeypatch.setattr(
        frontier_study, "ProcessPoolExecutor", lambda jobs, context: ThreadPoolExecutor(1)
    )
    words = [
        "frontier_study",
        f"--data={text}",
        f"--output={tmp_path / 'runs'}",
        f"--results={results}",
    ]
    words += ["--steps=2", "--seeds", "0", "--recipes", "bf16", "nvfp4"]
    monkeypatch.setattr(sys, "argv", words)
    frontier_study.main()
    finals = sorted(tmp_path.glob("runs/text/*/final"))
    made = [each.stat().st_mtime_ns for each in finals]
    frontier_study.main()
    assert len(made) == 2 and made == [each.stat().st_mtime_ns for each in finals]
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [row["recipe"] for row in rows] == ["bf16", "nvfp4"] * 4
    assert [row["metric"] for row in rows[::2]] == [*frontier_study.METRICS] * 2
    assert rows[1]["ratio"] == 1.0 and rows[1]["losses"] == rows[5]["losses"]
