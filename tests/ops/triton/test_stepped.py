"""The optimizer's kernel against its definition under Triton's interpreter: weights, masters, codes and scales to the bit (exact)."""

from __future__ import annotations

import pytest

from tests.processes import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are neither compiled nor run here")

KINDS = (
    "adamw ",
    "lion ",
    "sgd ",
    "poison ",
    "groups",
    "replayed",
    "graphed",
    "proof ",
    "broken",
)  # what a case begins with


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return interpreted("tests.ops.triton.stepped")


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_has_the_bits_of_the_definition(found, kind):
    cases = {name: words for name, words in found.items() if name.startswith(kind)}
    assert cases, "a kind without a case is a test that cannot fail"
    different = {name: words for name, words in cases.items() if words}
    assert not different, "\n".join(f"{name}: {words}" for name, words in different.items())


def test_every_case_belongs_to_a_kind(found):
    """None is computed and then looked at by nobody."""
    assert not [name for name in found if not name.startswith(KINDS)]
