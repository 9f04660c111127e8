"""Recording of a call that launches kernels, without Triton: what a failed launch leaves (exact)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops.triton.replay import Recording


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
