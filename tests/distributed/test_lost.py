"""Errors that mean a lost rank are told from errors of the call itself, by their messages (exact)."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from narrowgauge.distributed.all_ranks import is_lost

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] "


@pytest.mark.parametrize(
    "message",
    [
        f"{PAIR}Connection closed by peer [127.0.0.1]:4711",
        f"{PAIR}Read error [127.0.0.1]:4711: Connection reset by peer",
        f"{PAIR}Read error [127.0.0.1]:4711: No route to host",
        f"{PAIR}writev [127.0.0.1]:4711: Broken pipe",
        f"{PAIR}Read timeout [127.0.0.1]:4711",
        f"{PAIR}Socket closed [127.0.0.1]:4711",
        "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "Gloo connectFullMesh failed with [socket.cc:149] connect: Connection refused",
    ],
)
def test_a_broken_connection_is_a_lost_rank(message):
    assert is_lost(RuntimeError(message))
    assert not is_lost(ValueError(message))


def test_distributed_errors_of_torch_are_a_lost_rank():
    assert is_lost(dist.DistNetworkError("failed to recv, got 0 bytes"))


@pytest.mark.parametrize(
    "message",
    [
        "ProcessGroupGloo: gloo does not support reduce_scatter of bfloat16",
        "no backend gloo for device cuda",
        f"{PAIR}op.preamble.length <= op.nbytes. 32 vs 16",
    ],
)
def test_an_error_that_only_mentions_gloo_is_no_lost_rank(message):
    assert not is_lost(RuntimeError(message))
