"""The casts that the optimizer's kernel leaves, and what takes them up, against the reference under Triton's interpreter (exact)."""

from __future__ import annotations

import pytest

from tests.processes import interpreted

pytest.importorskip("triton", reason="triton is not installed: its kernels are neither compiled nor run here")

KINDS = ("step ", "poison ", "take ", "proof ", "broken", "training ")  # what a case begins with


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return interpreted("tests.ops.triton.casting")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_step_leaves_has_the_bits_of_casting_anew(found, kind):
    cases = {name: words for name, words in found.items() if name.startswith(kind)}
    assert cases, "a kind without a case is a test that cannot fail"
    different = {name: words for name, words in cases.items() if words}
    assert not different, "\n".join(f"{name}: {words}" for name, words in different.items())


def test_every_case_belongs_to_a_kind(found):
    """None is computed and then looked at by nobody."""
    assert not [name for name in found if not name.startswith(KINDS)]
