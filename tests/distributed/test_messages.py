"""Messages of one byte per number: what a row holds, the sums of two steps (both exact), and what was sent (counted)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.distributed import messages
from narrowgauge.distributed.messages import TILE, Link
from narrowgauge.ops.quantize import dequantize, quantize

NUMEL = (0, 1, 127, 128, 129, 1000)


def given(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers over many magnitudes, so that tiles differ."""
    generator = torch.Generator().manual_seed(100 + rank)
    magnitudes = 10.0 ** torch.linspace(-6, 2, max(numel, 1))[:numel]
    return (torch.randn(numel, generator=generator) * magnitudes).to(dtype)


# --- a row ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", NUMEL)
def test_a_message_holds_the_codes_and_scales_of_quantize(columns):
    rows = torch.stack([given(rank, columns) for rank in range(3)])
    message = messages.encode(rows)
    assert message.dtype == torch.uint8 and message.shape == (
        3,
        columns + math.ceil(columns / TILE),
    )
    assert torch.equal(
        messages.decode(message, columns), dequantize(quantize(rows, messages.MESSAGE))
    )


def test_numbers_that_are_not_finite_and_zeros_and_extremes_stay_what_they_are():
    rows = torch.ones(6, 2 * TILE)
    rows[0, 3], rows[1, 3], rows[2, 3] = math.nan, math.inf, -math.inf
    rows[3] = 0
    rows[4] = 1e-45  # subnormal
    rows[5] = torch.finfo(torch.float32).max * 0.9  # the maximum itself rounds up to infinity
    decoded = messages.decode(messages.encode(rows), 2 * TILE)
    assert decoded[:3, :TILE].isnan().all() and torch.equal(decoded[:3, TILE:], rows[:3, TILE:])
    assert torch.equal(decoded[3:5], torch.zeros(2, 2 * TILE))
    assert decoded[5].isfinite().all() and (decoded[5] / rows[5] - 1).abs().max() <= 2**-4


def test_decoded_numbers_travel_again_without_rounding():
    """By which the last step of two hops loses nothing (exact)."""
    once = messages.decode(messages.encode(given(0, 1000)[None]), 1000)
    assert torch.equal(messages.decode(messages.encode(once), 1000), once)


# --- sums over ranks --------------------------------------------------------------------------------------------------------------


def _sums(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    link = Link(dist.group.WORLD)
    x = given(link.rank, numel, dtype)
    return messages.all_reduce(x, link), messages.reduce_scatter(
        messages.as_rows(x, link.size), link
    )


def expected(numel: int, dtype: torch.dtype, ranks: int) -> tuple[Tensor, Tensor]:
    """The same in one process: (what all_reduce gives, each rank's own sum)."""
    rows = [messages.as_rows(given(rank, numel, dtype), ranks) for rank in range(ranks)]
    columns = rows[0].shape[1]
    sums = torch.zeros(ranks, columns)
    for row in rows:
        sums += messages.decode(messages.encode(row), columns)
    return messages.decode(messages.encode(sums), columns).reshape(-1)[:numel], sums


@pytest.mark.parametrize("world", (2, 3, 4))
def test_sums_are_those_of_the_decoded_messages_in_rank_order(ranks, world):
    for numel in NUMEL:
        for dtype in (torch.float32, torch.bfloat16) if numel == 1000 else (torch.float32,):
            results = ranks(world)(_sums, numel, dtype)
            reduced, scattered = expected(numel, dtype, world)
            for rank, (everywhere, mine) in enumerate(results):
                assert torch.equal(everywhere, reduced) and everywhere.dtype == torch.float32
                assert torch.equal(mine, scattered[rank])


def _alone(x: Tensor) -> list[Tensor | int]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    link = Link(groups[dist.get_rank()])
    found = [
        messages.all_reduce(x, link),
        messages.reduce_scatter(x.reshape(1, -1), link),
        link.bytes_sent.total(),
    ]
    for group in groups:
        dist.destroy_process_group(group)
    return found


def test_one_rank_sends_nothing_and_rounds_nothing(ranks):
    x = given(0, 300).view(3, 100)
    everywhere, mine, sent = ranks(2)(_alone, x)[0]
    assert torch.equal(everywhere, x) and torch.equal(mine, x.reshape(-1)) and sent == 0


def _poisoned(value: float) -> Tensor:
    link = Link(dist.group.WORLD)
    x = torch.ones(4 * TILE)
    if link.rank == 1:
        x[2 * TILE + 5] = value
    return messages.all_reduce(x, link)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_rank_s_number_that_is_not_finite_reaches_all_ranks(ranks, value):
    for reduced in ranks(2)(_poisoned, value):
        assert reduced[2 * TILE : 3 * TILE].isnan().all() and reduced.isnan().sum() == TILE
        assert (reduced[: 2 * TILE] == 2).all()


# --- bytes ------------------------------------------------------------------------------------------------------------------------


# The argument of torch's operators that holds a whole message.
OF_MESSAGE = {"alltoall_base_": 1, "_allgather_base_": 0, "allreduce_": 0}


class Traffic(TorchDispatchMode):
    """Bytes of the tensors that torch's collectives are given, seen where torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in OF_MESSAGE:
            message = args[OF_MESSAGE[name]]
            self.nbytes += (
                sum(x.nbytes for x in message) if isinstance(message, list) else message.nbytes
            )
        return func(*args, **(kwargs or {}))


def _bytes(numel: int) -> tuple[int, dict[str, int]]:
    link = Link(dist.group.WORLD)
    with Traffic() as seen:
        messages.all_reduce(given(link.rank, numel), link)
    return seen.nbytes, dict(link.bytes_sent)


def test_a_number_takes_129_128ths_of_a_byte_each_way(ranks):
    numel = 4 * TILE * 25
    for seen, sent in ranks(4)(_bytes, numel):
        assert sent == {"all-to-all": numel * 129 // 128, "all-gather": numel * 129 // 128}
        assert seen == sum(sent.values())
