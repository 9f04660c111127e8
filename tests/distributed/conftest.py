"""The ranks of all tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """How many -> those ranks."""
    pools: dict[int, Ranks] = {}
    yield lambda world: pools.setdefault(world, Ranks(world))
    for pool in pools.values():
        pool.close()
