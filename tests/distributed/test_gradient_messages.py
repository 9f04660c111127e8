"""What gradient_messages.py asks of sums in narrow messages, on gradients of a smaller Llama after a short training (bounded).

A tensor of some thousand numbers has a few that carry its power, and their rounding moves its slope on the truth; so here the slopes of
the four tensors are taken together. The bounds are those of the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import gradient_messages as benchmark
from tests.selection import quick


@pytest.fixture(scope="module")
def each() -> Iterator[list[dict[str, Tensor]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield benchmark.gradients(16, hidden=64, steps=20)
    torch.set_num_threads(threads)


def wrong(found: dict[str, Any]) -> list[str]:
    kind = benchmark.METHODS[found["case"]][0]
    slope = mean(found["slope"].values())
    return [
        words
        for db in found["db"].values()
        for words in benchmark.failures(kind, found["ranks"], db, slope)
    ]


@pytest.mark.parametrize("world", quick([2], (2, 4, 16)))
def test_sums_are_as_exact_as_one_rounding_of_each_message(each, world):
    for method in ("fp8 reduce-scatter", "fp8 all-reduce", "fp8-lm reduce-scatter"):
        assert not wrong(benchmark.row(method, each[:world])), method
    if world >= 2 * benchmark.NODE:
        assert not wrong(benchmark.row("fp8 all-reduce, two hops", each))


@pytest.mark.parametrize("world", quick([2], (2, 4, 16)))
def test_a_sum_in_fp8_is_rejected(each, world):
    assert wrong(benchmark.row("control: sums in fp8", each[:world]))


def test_more_ranks_make_a_reduce_scatter_more_exact_and_a_sum_in_fp8_less(each):
    def least(method: str, ranks: int) -> float:
        return min(benchmark.row(method, each[:ranks])["db"].values())

    assert least("fp8 reduce-scatter", 16) > least("fp8 reduce-scatter", 2) + 3
    assert least("control: sums in fp8", 16) < least("control: sums in fp8", 2) - 3
