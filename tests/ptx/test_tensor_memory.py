"""tcgen05: products of compiled kernels agree (proof, exact or bounded), and a fault in their order is noticed (exact)."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from tests.ptx import proof
from tests.ptx.memory import Fault, SharedMemory
from tests.ptx.order import Order
from tests.ptx.tensor_memory import TensorMemory

# Aligned, so that loads are asynchronous copies in stages, as in training.
ALIGNED = proof.Case("block mm", "aligned", partial(proof._product, (1, 64, 64, 64), 96, 64, 384))
WAIT = r"(?ms)^\s*@!complete bra\.uni waitLoop;$"
FAULTS = {
    "without the fence": (r"fence\.proxy\.async\.shared::cta;", "", "proxy fence"),
    "without the wait": (WAIT, "", "no thread has waited|nobody waited"),
    "without the commit": (r"(?m)^.*tcgen05\.commit.*$", "", "hang"),
    "a commit to another barrier": (
        r"(tcgen05\.commit\S* )\[(%r\d+)\]", r"\1[\2+16]", "none was begun",
    ),
    "another row of tensor memory": (
        r"(tcgen05\.ld\S*32x32b\S* \{[^}]*\}, \[\s*%r\d+ \+ )0", r"\g<1>2097152", "another one|outside",
    ),
    "another column": (
        r"(tcgen05\.ld\S*32x32b\S* \{[^}]*\}, \[\s*%r\d+ \+ )0", r"\g<1>4", "outside|differ|wrong",
    ),
    "never freed twice": (r"(?m)^(.*tcgen05\.dealloc.*)$", r"\1 \1", "freed twice"),
}  # fmt: skip


def test_a_compiled_product_agrees():
    found = proof.outcome(ALIGNED, 100)
    assert not found.words and found.kernels == ("block_mm",), found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_its_text_is_noticed(name):
    pattern, other, words = FAULTS[name]

    def changed(kernel: str, ptx: str) -> str:
        text, count = re.subn(pattern, other, ptx)
        assert count, "the text has no such place"
        return text

    found = proof.outcome(ALIGNED, 100, mutate=changed)
    assert re.search(words, found.words), found.words


def test_operands_are_in_use_until_somebody_waits():
    shared = SharedMemory(1, 64, order := Order(1, 128), 0)
    at, one = np.arange(4)[None], np.zeros(1, np.int64)
    shared.store(at, np.ones((1, 4), np.uint8), one)
    with pytest.raises(Fault, match="proxy fence"):
        shared.load_for_product(at, one)
    shared.fence(one)
    order.barrier(0)
    assert shared.load_for_product(at, one).tolist() == [[1, 1, 1, 1]]
    with pytest.raises(Fault, match="nobody waited"):
        shared.store(at, np.ones((1, 4), np.uint8), one)
    shared.in_use[at] = False
    shared.store(at, np.zeros((1, 4), np.uint8), one)


def test_an_mbarrier_that_nobody_began_is_a_fault():
    with pytest.raises(Fault, match="none was begun"):
        TensorMemory(1).barrier(0, 64)
