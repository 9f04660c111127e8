"""The kernels against the reference under Triton's interpreter: codes, scales and noise to the bit (exact)."""

from __future__ import annotations

import json

import pytest

from tests.processes import PYTHON, run_ok

pytest.importorskip("triton", reason="triton is not installed: its kernels are neither compiled nor run here")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Name of a case -> what differs. One process, for the interpreter is chosen when a kernel is defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        return json.loads(run_ok([PYTHON, "-W", "ignore", "-m", "tests.ops.triton.interpreted"], timeout_s=280).stdout)


# By what a case begins with; a kind without a case would be a test that cannot fail.
@pytest.mark.parametrize(
    "kind",
    [
        "noise", "e4m3 tensor", "e5m2 tensor", "e3m2 tensor", "e2m3 tensor", "e3m0 tensor", "e2m1 tensor", "int8 tensor",
        "int4 tensor", "int4x2 tensor", "both ", "turned ", "float16 ", "values ", "nan ", "infinity ", "huge ", "tiny ",
        "given amax ", "one column ", "long rows ", "delayed, ", "rotated ",
        "proof ", "broken ", "layers ",
    ],
)  # fmt: skip
def test_kernels_have_the_bits_of_the_reference(found, kind):
    cases = {name: words for name, words in found.items() if name.startswith(kind)}
    assert cases
    different = {name: words for name, words in cases.items() if words}
    assert not different, "\n".join(f"{name}: {words}" for name, words in different.items())


def test_every_case_belongs_to_a_kind(found):
    """None is computed and then looked at by nobody."""
    kinds = test_kernels_have_the_bits_of_the_reference.pytestmark[0].args[1]
    assert not [name for name in found if not name.startswith(tuple(kinds))]
