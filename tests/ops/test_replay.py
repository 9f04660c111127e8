"""Recording and replay of calls that launch kernels, without Triton: what a failed launch leaves (exact)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops.triton import workspaces
from narrowgauge.ops.triton.launch import launch, zeroed_workspace
from narrowgauge.ops.triton.replay import Recording, Replays


class Failing:
    """A kernel whose launch raises, as one that does not compile."""

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            raise RuntimeError("no kernel image is available")

        return launch


def test_a_failed_launch_does_not_hide_what_follows():
    """The caller may catch the error and compute by torch operators, which are not replayed."""
    x = torch.ones(4)
    with Recording((x,)) as recording:
        with pytest.raises(RuntimeError, match="no kernel image"):
            recording.launch(Failing(), 1, (x,), {})
        y = torch.empty(4)
        assert not recording.missed and len(recording.bases) == 2
        x + y
    assert recording.missed


class Adding:
    """The first of two kernels: it adds x to a workspace, and tells what it found there."""

    found: list[float]

    def __init__(self) -> None:
        self.found = []

    def __getitem__(self, grid):
        def run(x, shared, **options):
            self.found.append(float(shared.abs().max()))
            shared += x

        return run


class Clearing:
    """The second: it writes the workspace to y and clears it, or raises."""

    error: BaseException | None = None

    def __getitem__(self, grid):
        def run(y, shared, **options):
            if self.error is not None:
                raise self.error
            y.copy_(shared)
            shared.zero_()

        return run


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "calls_before", [0, 1, 2, 3], ids=["first", "recorded", "replayed", "later"]
)
def test_a_call_after_one_that_raised_finds_zeros(error, calls_before):
    """As maxima and cast of a row: the second launch is the one that clears."""
    first, second = Adding(), Clearing()

    def call(x):
        shared, y = zeroed_workspace(4, x.device), torch.empty_like(x)
        launch(first, 1, x, shared, warps=4)
        launch(second, 1, y, shared, warps=4)
        return y

    replays, another = Replays(call), Replays(call)
    x = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    for _ in range(3):
        another(x)
    for _ in range(calls_before):
        assert torch.equal(replays(x), x)
    second.error = error
    with pytest.raises(type(error)):
        replays(x)
    second.error = None
    for each in (replays, another, replays, replays):  # they share the buffer
        assert torch.equal(each(x), x)
    assert not any(first.found)


def test_the_buffer_that_was_left_is_the_reason(monkeypatch):
    """Control: without `drop` the next call finds what the first kernel wrote."""
    for module in ("launch", "replay"):
        monkeypatch.setattr(f"narrowgauge.ops.triton.{module}.drop", lambda: None)
    with pytest.raises(AssertionError):
        test_a_call_after_one_that_raised_finds_zeros(RuntimeError("no memory"), 3)
    workspaces.drop()
