"""Faults in the PTX are found in its text, applied to one kernel, and noticed (exact).

Fifty of them: `python -m benchmarks.ptx_proof --mutations`.
"""

from __future__ import annotations

import pytest

from tests.ptx.mutants import KINDS, Mutant, mutants, noticed
from tests.ptx.proof import cases, outcome

TEXT = """
	st.shared.b32 	[%r98], %r94;
	bar.sync 	0;
	.loc	1 2 3                         // one.py:2:3
$L__tmp3:
	bar.sync 	0;
	ld.shared.b32 	%r102, [%r101+128];
	setp.lt.s64 	%p1, %rd1, %rd9;
	setp.lt.s64 	%p2, %rd2, %rd9;
	setp.lt.s64 	%p3, %rd2, 7;
	shl.b64 	%rd3, %rd2, 1;
	mul.wide.s32 	%rd4, %r2, 64;
	@%p2 ld.global.cg.b32 { %r80 }, [ %rd38 + 0 ];
	@!%p2 bra $L__BB0_2;
	bar.warp.sync 	-1;
	atom.global.gpu.acq_rel.add.u32 %r87, [ %rd43 + 0 ], %r88;
"""


def found() -> dict[tuple[int, ...], list[str]]:
    """Lines, from 0, -> what stands in the first of them instead."""
    after: dict[tuple[int, ...], list[str]] = {}
    for each in mutants("case", "kernel", TEXT):
        after.setdefault(each.lines, []).append(" ".join(each.after[0].split()))
    return after


def test_faults_are_found_in_the_text():
    """Two barriers with nothing between them are one fault, and so are comparisons with one limit."""
    assert found() == {
        (2, 5): [""],
        (6,): ["ld.shared.b32 %r102, [%r101+256];"],
        (7, 8): ["setp.le.s64 %p1, %rd1, %rd9;"],
        (10,): ["shl.b64 %rd3, %rd2, 2;"],
        (11,): ["mul.wide.s32 %rd4, %r2, 128;"],
        (12,): ["ld.global.cg.b32 { %r80 }, [ %rd38 + 0 ];"],
        (14,): [""],
        (15,): [
            "atom.global.gpu.acquire.add.u32 %r87, [ %rd43 + 0 ], %r88;",
            "atom.global.gpu.release.add.u32 %r87, [ %rd43 + 0 ], %r88;",
        ],
    }


def test_going_past_the_cache_matters_where_programs_wait():
    waits = TEXT + "ld.global.gpu.acquire.b32 %r1, [%rd1];"
    [fault] = [each for each in mutants("case", "kernel", waits) if each.lines == (12,)][:1]
    assert ".cg" not in fault.after[0]


def test_a_fault_changes_its_kernel_alone():
    fault = Mutant("barrier", "case", "kernel", (2,), ("\tbar.sync \t0;",), ("",))
    assert fault.applied("kernel", TEXT).count("bar.sync") == 1
    assert fault.applied("other", TEXT) == TEXT
    assert fault.applied("kernel", "\n" + TEXT) == "\n" + TEXT


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_noticed(kind):
    """Two of each kind in a cooperative cast, and none without a fault."""
    case = next(each for each in cases(90) if each.name == "row 80x144 and x.T")
    texts: dict[str, str] = {}
    assert not outcome(case, 90, mutate=lambda kernel, ptx: texts.setdefault(kernel, ptx)).words
    [(kernel, ptx)] = texts.items()
    chosen = [each for each in mutants(case.name, kernel, ptx) if each.kind == kind]
    # Barriers and atomics of the end, when programs leave; masks and strides of the beginning.
    chosen = chosen[-2:] if kind in ("barrier", "order") else chosen[:2]
    assert len(chosen) == 2
    assert all(noticed(case, 90, each) for each in chosen), chosen
