"""A run whose ranks share products, and have other tokens each between them (`--parallel tp=2,sp`), with messages of 16 bits and of FP8.

Bounded, by the control of `test_tensor_parallel_run`; with messages in FP8 of recipes that are finer than E4M3 it is `fp8-current`'s
(see tests/distributed/test_tensor_parallel.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.train import loop
from narrowgauge.train.config.settings import replace
from tests.distributed.conftest import ranks  # noqa: F401
from tests.train import tiny
from tests.train.test_tensor_parallel_run import WIDE, assert_near, perturbed  # noqa: F401
from tests.train.test_torchrun import trained


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-row", "int4-hq-bs"])
def test_two_ranks_with_other_tokens_learn_as_one_process_does(ranks, make, perturbed, recipe, activations):  # noqa: F811
    assert_near(ranks, make, perturbed, recipe, "tp=2,sp", 2, 1, activations=activations)
