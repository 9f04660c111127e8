"""The ranks that the other tests use."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, Ranks


def _sum(x: float) -> tuple[int, float]:
    given = torch.tensor(x + dist.get_rank())
    dist.all_reduce(given)
    return os.getpid(), float(given)


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was asked to")
    dist.barrier()


def test_ranks_stay_and_talk_to_each_other(ranks):
    first, second = ranks(2)(_sum, 1.0), ranks(2)(_sum, 2.0)
    assert [value for _, value in first] == [3.0, 3.0] and [value for _, value in second] == [
        5.0,
        5.0,
    ]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_the_others_do_not_hang(ranks):
    with pytest.raises(RankError, match=r"rank 1 of 2: (.|\n)*rank 1 was asked to"):
        ranks(2)(_fail_on, 1)
    assert [value for _, value in ranks(2)(_sum, 1.0)] == [3.0, 3.0]


def _interrupt_and_stop(pid: int) -> None:
    # Both ranks have begun the call: a rank that still imports torch would print the stack of an import.
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.slow
def test_stacks_of_ranks_are_printed_where_a_call_is_interrupted(capfd):
    with pytest.raises(KeyboardInterrupt):
        Ranks(2)(_interrupt_and_stop, os.getpid())
    said = capfd.readouterr().err
    # Rank 0 may be before its second barrier or in it: the frame of the call holds both.
    first, second = said.partition("stacks of rank 1 of 2")[::2]
    assert "stacks of rank 0 of 2" in first and "in _interrupt_and_stop" in first
    assert "in _interrupt_and_stop" in second
