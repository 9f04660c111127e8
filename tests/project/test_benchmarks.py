"""The harness orders, counts and compares as it says (exact, with a clock of its own); same_loss sees one differing bit."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import harness, same_loss
from benchmarks.bench_int4 import crossing
from benchmarks.harness import Spread, Timing, measure, order, ratio, record, rows, table
from tests.train.liveness import rank_deaths

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]


class Clock:
    """A machine that gets slower: each call costs its own time, times a factor that grows with every call."""

    def __init__(self) -> None:
        self.now_s, self.factor = 0.0, 1.0

    def case(self, cost_s: float) -> None:
        self.now_s += cost_s * self.factor
        self.factor *= 1.001


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock.now_s)
    return clock


def test_the_order_is_balanced():
    assert [order(["a", "b"], i) for i in range(4)] == [
        ["a", "b"],
        ["b", "a"],
        ["b", "a"],
        ["a", "b"],
    ]
    places = {name: sum(order(["a", "b", "c"], i).index(name) for i in range(6)) for name in "abc"}
    assert set(places.values()) == {6}


def test_drift_cancels_in_the_ratio(clock):
    """The machine becomes 1.001 ** 200 = 1.22 times slower; what one case costs more than the other shows all the same."""
    timings = measure(
        {"a": lambda: clock.case(1), "b": lambda: clock.case(1.5)}, rounds=100, warmup=1
    )
    assert timings["a"].calls == 1
    assert timings["a"].spread_s.q3 / timings["a"].spread_s.q1 > 1.1
    assert ratio(timings["b"], timings["a"]).median == pytest.approx(
        1.5, rel=0.001
    )  # one call's drift


def test_short_calls_are_timed_together(clock):
    timings = measure({"a": lambda: clock.case(0.001)}, rounds=2, warmup=2, sample_s=0.1)
    assert timings["a"].calls == 100


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_odd_rounds_are_refused(rounds):
    with pytest.raises(ValueError, match="even rounds"):
        measure({"a": list}, rounds=rounds, warmup=1)


def test_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(median=3, q1=2, q3=4)
    assert Spread.of([2.0]) == Spread(2, 2, 2)


def test_the_table_has_one_line_per_case_with_units():
    timings = {"bf16": Timing("bf16", (0.002, 0.002), 1), "fp8": Timing("fp8", (0.001, 0.001), 1)}
    lines = table(timings, baseline="bf16", work={"fp8": (2e9, "FLOP")}).splitlines()
    assert len(lines) == 3
    assert lines[1].split("  ")[0] == "bf16" and "2 ms" in lines[1] and "1.000" in lines[1]
    assert (
        "1 ms" in lines[2]
        and "0.500 (0.500 .. 0.500)" in lines[2]
        and lines[2].endswith("2 TFLOP/s")
    )


def test_records_are_appended_with_their_conditions(tmp_path):
    timings = {"a": Timing("a", (1.0, 3.0), 7)}
    for _ in range(2):
        record("probe", rows(timings, baseline="a"), tmp_path / "new" / "probe.jsonl")
    lines = [
        json.loads(line)
        for line in (tmp_path / "new" / "probe.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) == 2
    assert (lines[0]["benchmark"], lines[0]["case"], lines[0]["median_s"]) == ("probe", "a", 2.0)
    assert lines[0]["of_baseline"] == [1, 1, 1] and lines[0]["calls_per_sample"] == 7
    for key in ("date", "command", "device", "cpu", "torch_isa", "torch", "python"):
        assert lines[0][key], key
    assert lines[0]["threads"] == 1 and {"commit", "isa", "driver", "triton"} <= lines[0].keys()


def test_same_loss_sees_the_last_bit():
    base = {1: 6.0, 2: 5.5}
    assert same_loss.difference(base, dict(base)) == ""
    assert same_loss.difference({1: math.nan}, {1: math.nan}) == ""
    assert "first at step 2: 5.5" in same_loss.difference(base, {1: 6.0, 2: math.nextafter(5.5, 6)})
    assert "different steps: 2 at BASE, 1 here" in same_loss.difference(base, {1: 6.0})


def test_same_loss_reads_a_run(tmp_path):
    events = [{"event": "step", "step": 1, "loss": 0.1}, {"event": "eval", "step": 1, "loss": 9.0}]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in events), encoding="utf-8"
    )
    assert same_loss.read_losses(tmp_path / "metrics.jsonl") == {1: 0.1}


def test_the_generated_text_is_the_same_everywhere():
    text = same_loss.generated_text()
    assert text == same_loss.generated_text() and len(text) > 50 * 8 * 64


@pytest.mark.parametrize(
    ("ratios", "width"),
    [
        ({128: 1.2, 512: 0.8}, 256),
        ({128: 0.9, 512: 0.8}, None),
        ({512: 0.9, 128: 1.1, 64: 2.0}, 256),
        ({128: 1.1}, None),
    ],
)
def test_where_a_ratio_crosses_one(ratios, width):
    """Half way between neighbours in the logarithm; nowhere if it is below from the first on, or never."""
    found = crossing(ratios)
    assert found == (None if width is None else pytest.approx(width))


def test_each_moment_of_a_fault_is_a_function_of_today():
    """A renamed one would end each of its trials before the fault, as "missed"."""
    for owner, name in rank_deaths.MOMENTS.values():
        assert callable(getattr(owner, name)), name
