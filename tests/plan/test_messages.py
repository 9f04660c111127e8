"""The alpha-beta model of messages, by hand (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.plan.messages import NETWORK, NODE, collective, of_step


def test_a_collective():
    assert collective(8e9, 1) == 0
    assert collective(8e9, 8) == 3 * NODE.start + 7e9 / NODE.rate
    assert collective(8e9, 64) == 6 * NETWORK.start + 8e9 * 63 / 64 / NETWORK.rate


def test_a_step():
    """FSDP gathers twice in each micro-batch and reduces once; copies reduce and gather gradients once a step, of a shard's size."""
    assert of_step(16e9, 32, copies=1, shards=8, micro_batches=2) == pytest.approx(
        32 * 6 * collective(5e8, 8)
    )
    assert of_step(16e9, 32, copies=8, shards=1) == pytest.approx(32 * 2 * collective(5e8, 8))
    assert of_step(16e9, 32, copies=1, shards=1) == 0
