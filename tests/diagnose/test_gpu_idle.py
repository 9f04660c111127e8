"""Idle time between kernels, found in made-up traces (exact), and the advice that follows (in words)."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from narrowgauge.diagnose.gpu_idle import LONG_S, advice, measure, on_device, watched

US = 1e-6


def trace(kernel_us: float, gap_us: float, count: int) -> list[tuple[float, float]]:
    step = (kernel_us + gap_us) * US
    return [(5.0 + i * step, 5.0 + i * step + kernel_us * US) for i in range(count)]


def test_a_gpu_without_gaps_is_busy():
    found = measure(trace(100, 0, 50))
    assert (
        found.kernels == 50
        and found.idle == pytest.approx(0, abs=1e-9)
        and not found.is_launch_bound
    )
    assert advice(found) == []


def test_short_kernels_far_apart_are_launch_bound():
    found = measure(trace(10, 30, 1000))
    assert found.idle == pytest.approx(0.75, abs=1e-3) and found.is_launch_bound and not found.waits
    assert found.median_kernel_s == pytest.approx(10 * US)
    assert "idle for 75% of a step of 40 ms, between 1000 kernels of 10 us" in str(found)


def test_one_long_wait_is_not_a_matter_of_launches():
    first, second = trace(100, 1, 100), trace(100, 1, 100)
    later = [(begins + 0.05, ends + 0.05) for begins, ends in second]
    found = measure(first + later)
    assert found.waits and not found.is_launch_bound and found.longest_gap_s > 0.03
    [sentence] = advice(found)
    assert f"{1e3 * found.longest_gap_s:.3g} ms" in sentence


def test_kernels_that_overlap_on_several_streams_count_once():
    found = measure([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (5.0005, 6.0)])
    assert (
        found.span_s == 6.0 and found.launching_s == pytest.approx(0.0005) and found.waiting_s == 0
    )


def test_no_kernel_is_nothing():
    assert measure([]) is None


@hypothesis.given(
    st.lists(st.tuples(st.floats(0, 1e-1), st.floats(0, 5e-3)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_busy_and_idle_are_the_whole(pairs, random):
    """Beside counting cells of a microsecond, and in any order."""
    intervals = [(round(begin, 6), round(begin, 6) + round(length, 6)) for begin, length in pairs]
    found = measure(intervals)
    cells: set[int] = set()
    for begins, ends in intervals:
        cells |= set(range(round(begins / US), round(ends / US)))
    begin = min(round(begins / US) for begins, _ in intervals)
    end = max(round(ends / US) for _, ends in intervals)
    assert found.launching_s + found.waiting_s == pytest.approx(
        (end - begin - len(cells)) * US, abs=1e-9
    )
    shuffled = list(intervals)
    random.shuffle(shuffled)
    assert measure(shuffled) == found


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (dict(), ["--device.cuda-graph", "larger micro-batch", "--device.compile"]),
        (
            dict(graphs_refused="8-bit states"),
            ["cannot be had: 8-bit states", "larger micro-batch", "--device.compile"],
        ),
        (dict(graphs=True, compiled=True), ["larger micro-batch"]),
        (dict(graphs=True, compiled=True, micro_batches=8), ["batch.micro_batches = 8"]),
    ],
)
def test_advice_names_what_is_left_to_change(setup, words):
    found = advice(measure(trace(5, 20, 100)), **setup)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True)), found


def test_marked_ranges_and_the_host_are_not_kernels():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=10.0, end=30.0)
    events = [
        SimpleNamespace(device_type=cuda, time_range=span, is_user_annotation=False),
        SimpleNamespace(device_type=cuda, time_range=span, is_user_annotation=True),
        SimpleNamespace(device_type=cpu, time_range=span, is_user_annotation=False),
    ]
    assert on_device(events) == [(10 * US, 30 * US)] and on_device(None) == []


@pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events:UserWarning"
)  # torch 2.11; there are none
def test_events_of_the_profiler_have_what_is_read():
    """The names, with events of the host; a GPU's are of the same class."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3) + 1
    [first, *_] = profiler.events()
    assert first.time_range.end >= first.time_range.start and hasattr(first, "device_type")
    assert hasattr(first, "is_user_annotation")
    assert on_device(profiler.events()) == []


@pytest.mark.gpu
def test_sleeping_between_kernels_shows():
    import time

    x = torch.randn(256, 256, device="cuda")
    x @ x
    with watched() as found:
        for _ in range(5):
            x @ x
            torch.cuda.synchronize()
            time.sleep(10 * LONG_S)
    launches = measure(found)
    assert launches.waits and launches.waiting_s > 4 * 9 * LONG_S and launches.kernels >= 5
