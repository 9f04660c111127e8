"""The machine, on kernels of a few lines: threads, branches, memory, warps, barriers, and its faults (exact).

Each fault is tried: an interpreter that finds nothing proves nothing.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.ptx.decoding import code_of
from tests.ptx.machine import Launch, Machine, Schedule
from tests.ptx.memory import Fault, GlobalMemory
from tests.ptx.order import Order
from tests.ptx.parser import Address, Immediate, PtxError, Register, Symbol, Vector, parse

HEAD = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 smem[];
.visible .entry try_it(
    .param .u64 .ptr .global .align 1 try_it_param_0,
    .param .u32 try_it_param_1
)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [try_it_param_0];
    ld.param.b32 %r1, [try_it_param_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %nctaid.x;
    mad.lo.s32 %r5, %r3, 64, %r2;       // number of the thread in the launch
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;           // its word
"""


def run(
    body: str, words: list[int] | int = 64, programs: int = 1, number: int = 7, **how
) -> list[int]:
    """The words of memory after the body has run in programs of 64 threads."""
    memory_of = np.zeros(words, np.uint32) if isinstance(words, int) else np.array(words, np.uint32)
    data = memory_of.view(np.uint8)
    threads = how.pop("threads", 64)
    memory = GlobalMemory([data], Order(programs, threads))
    launch = Launch(programs, threads, shared=how.pop("shared", 1024), **how)
    text = HEAD + body + "\n    ret;\n}\n"
    arguments = {"try_it_param_0": data.ctypes.data, "try_it_param_1": number}
    Machine(code_of(text), memory, arguments, launch).run()
    memory.copy_back()
    return memory_of.tolist()


STORE = "\n    st.global.b32 [%rd3], {%r9};"
both_schedules = pytest.mark.parametrize("schedule", Schedule)


# --- text


def test_operands_are_read_as_they_are_written():
    body = HEAD + "@!%p2 ld.global.v2.b32 { %r3, _ }, [ %rd1 + -16 ];\n $L__1: bra $L__1;\n}"
    kernel = parse(body)
    found = kernel.instructions[-2]
    assert found.opcode == "ld.global.v2.b32" and found.guard == (Register("%p2", 1), False)
    assert found.operands == (
        Vector((Register("%r3", 32), Symbol("_"))),
        Address(Register("%rd1", 64), -16),
    )
    assert kernel.labels == {"$L__1": len(kernel.instructions) - 1}
    assert kernel.parameters == (("try_it_param_0", 64), ("try_it_param_1", 32))


def test_constants_are_bits():
    body = HEAD + "mov.b32 %r1, 0f3F800000; mov.b32 %r1, -1; prmt.b32 %r1, %r2, %r3, 0x7632U;\n}"
    found = [each.operands[-1] for each in parse(body).instructions[-3:]]
    assert found == [Immediate(0x3F800000), Immediate(-1), Immediate(0x7632)]


def test_scopes_of_inline_assembly_end():
    body = (
        "{ .reg .b32 tmp, other; mov.b32 tmp, %r2; { add.s32 other, tmp, 1; } mov.b32 %r9, other; }"
    )
    assert run(body + STORE) == list(range(1, 65))


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("frobnicate.b32 %r1, %r2;", "not known"),
        ("mov.b32 %q1, %r2;", "not declared"),
        ("mov.b64 %rd1, %r2;", "has 32 bits"),
        ("cvt.u64.u32 %r1, %r2;", "cannot take 64 bits"),
        ("ld.local.b32 {%r1}, [%rd1];", "not known"),
        ("bar.sync 1, 32;", "some threads"),
        ("atom.global.cas.b32 %r1, [%rd1], %r2, %r3;", "not known"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffff;", "all lanes"),
    ],
)
def test_unknown_statements_are_refused(statement, words):
    with pytest.raises(PtxError, match=words):
        code_of(HEAD + statement + "\n}")


# --- threads and branches


@both_schedules
def test_threads_take_their_branches_and_meet_again(schedule):
    body = """
    and.b32 %r6, %r2, 1;
    setp.eq.s32 %p1, %r6, 0;
    mov.b32 %r9, 100;
    @%p1 bra $L_even;
    add.s32 %r9, %r9, %r2;
    bra $L_end;
$L_even:
    sub.s32 %r9, %r9, %r2;
$L_end:
    @!%p1 add.s32 %r9, %r9, 1000;
    """
    expected = [100 - n if n % 2 == 0 else 1100 + n for n in range(64)]
    assert run(body + STORE, schedule=schedule) == expected


@both_schedules
def test_loops_end_for_each_thread_by_itself(schedule):
    body = """
    mov.b32 %r9, 0;
    mov.b32 %r6, %r2;
$L_loop:
    add.s32 %r9, %r9, %r6;
    add.s32 %r6, %r6, -1;
    setp.gt.s32 %p1, %r6, 0;
    @%p1 bra $L_loop;
    """
    assert run(body + STORE, schedule=schedule) == [n * (n + 1) // 2 for n in range(64)]


@both_schedules
def test_threads_that_returned_do_nothing_more(schedule):
    body = "setp.lt.u32 %p1, %r2, 32;\n @%p1 ret;\n mov.b32 %r9, 5;" + STORE
    assert run(body, schedule=schedule) == [0] * 32 + [5] * 32


def test_programs_have_their_numbers():
    body = "mad.lo.s32 %r9, %r3, 100, %r4;" + STORE
    assert run(body, 192, programs=3) == [100 * n + 3 for n in range(3) for _ in range(64)]


def test_registers_begin_with_junk():
    """A kernel that reads what nothing wrote has no constant there."""
    assert len(set(run("mov.b32 %r9, %r20;" + STORE))) > 60


def test_parts_of_a_register():
    body = """
    mov.b32 {%rs1, %rs2}, %r5;
    mov.b32 %r6, {%rs2, %rs1};
    mov.b64 %rd4, {%r6, %r5};
    mov.b64 {_, %r7}, %rd4;
    add.s32 %r9, %r6, %r7;
    """
    assert run(body + STORE) == [(n << 16) + n for n in range(64)]


# --- memory

GLOBAL_FAULTS = {
    "outside": "add.s64 %rd4, %rd3, 4;\n ld.global.b32 {%r9}, [%rd4];",
    "misaligned": "add.s64 %rd4, %rd1, 4;\n ld.global.v2.b32 {%r9, %r8}, [%rd4];",
    "race: two threads": """
    st.global.b32 [%rd1], {%r3};
    mov.b32 %r8, 1;
    setp.eq.u32 %p1, %r2, 40;
    @%p1 st.global.b32 [%rd1], {%r8};
    """,
    "race: threads of one": "st.global.b32 [%rd1], {%r2};",
    "race: a load": """
    st.global.b32 [%rd3], {%r2};
    xor.b32 %r6, %r2, 1;
    mul.wide.u32 %rd4, %r6, 4;
    add.s64 %rd4, %rd1, %rd4;
    ld.global.b32 {%r9}, [%rd4];
    """,
}


@pytest.mark.parametrize("words", GLOBAL_FAULTS)
def test_faults_of_global_memory(words):
    with pytest.raises(Fault, match=words):
        run(GLOBAL_FAULTS[words])


def test_a_masked_access_touches_nothing():
    body = (
        "setp.lt.u32 %p1, %r2, 63;\n mov.b32 %r9, 9;\n @%p1 ld.global.b32 {%r9}, [%rd3 + 4];"
        + STORE
    )
    assert run(body, list(range(64)))[61:] == [62, 63, 9]


@pytest.mark.parametrize(("kind", "bits"), [("b8", 8), ("b16", 16)])
def test_narrow_loads_are_extended_by_zeros(kind, bits):
    body = f"ld.global.{kind} {{%rs1}}, [%rd3];\n cvt.u32.u16 %r9, %rs1;" + STORE
    assert run(body, [0xFFFFFFF0 + n % 16 for n in range(64)])[5] == (0xF5 if bits == 8 else 0xFFF5)


SHARED = """
    shl.b32 %r6, %r2, 2;
    mov.b32 %r7, smem;
    add.s32 %r6, %r7, %r6;
    st.shared.b32 [%r6], {%r2};
    BARRIER
    xor.b32 %r8, %r6, FLIP;
    ld.shared.b32 {%r9}, [%r8];
"""


@both_schedules
@pytest.mark.parametrize(("barrier", "flip"), [("bar.sync 0;", 128), ("bar.warp.sync -1;", 4)])
def test_a_barrier_orders_shared_memory(barrier, flip, schedule):
    """Of the program across warps (byte 128 is the next warp's), of the warp within it."""
    body = SHARED.replace("BARRIER", barrier).replace("FLIP", str(flip)) + STORE
    assert run(body, schedule=schedule) == [n ^ flip // 4 for n in range(64)]


@pytest.mark.parametrize(("barrier", "flip"), [("", 128), ("", 4), ("bar.warp.sync -1;", 128)])
def test_without_it_the_load_races(barrier, flip):
    with pytest.raises(Fault, match="race: a shared load"):
        run(SHARED.replace("BARRIER", barrier).replace("FLIP", str(flip)))


@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_a_store_waits_for_the_readers(barrier):
    """What another warp has read since the last barrier must not change."""
    body = SHARED.replace("BARRIER", "bar.sync 0;").replace("FLIP", "128") + barrier
    body += "\n add.s32 %r9, %r9, 1;\n st.shared.b32 [%r6], {%r9};"
    if barrier:
        run(body)
    else:
        with pytest.raises(Fault, match="race: a shared store"):
            run(body)


def test_shared_memory_ends():
    with pytest.raises(Fault, match="outside of the program's shared memory"):
        run(SHARED.replace("BARRIER", "").replace("FLIP", "0"), shared=128)


# --- warps

SHUFFLES = {
    "shfl.sync.bfly.b32 %r9, %r2, 5, 31, -1;": lambda n: n ^ 5,
    "shfl.sync.up.b32 %r9, %r2, 3, 0, -1;": lambda n: n if n % 32 < 3 else n - 3,
    "shfl.sync.down.b32 %r9, %r2, 3, 31, -1;": lambda n: n if n % 32 > 28 else n + 3,
    "shfl.sync.idx.b32 %r9, %r2, 7, 31, -1;": lambda n: n // 32 * 32 + 7,
    "shfl.sync.bfly.b32 %r9, %r2, 9, 0x181f, -1;": lambda n: n if n % 32 ^ 9 > n % 32 // 8 * 8 + 7 else n ^ 9,
    "redux.sync.max.s32 %r9, %r2, -1;": lambda n: n // 32 * 32 + 31,
    "redux.sync.min.s32 %r9, %r2, -1;": lambda n: n // 32 * 32,
    "redux.sync.add.s32 %r9, %r2, -1;": lambda n: sum(range(32)) + 1024 * (n // 32),
    "elect.sync %r8|%p1, -1;\n selp.b32 %r9, 1, 0, %p1;": lambda n: int(n % 32 == 0),
}  # fmt: skip


@pytest.mark.parametrize("statement", SHUFFLES)
def test_lanes_exchange_numbers(statement):
    assert run(statement + STORE) == list(map(SHUFFLES[statement], range(64)))


def test_a_maximum_of_floats_ignores_nan():
    body = "cvt.rn.f32.u32 %r6, %r2;\n setp.eq.u32 %p1, %r2, 31;\n @%p1 mov.b32 %r6, 0f7FC00000;\n redux.sync.max.f32 %r9, %r6, -1;"
    found = np.array(run(body + STORE), np.uint32).view(np.float32)
    assert (found == [30.0] * 32 + [63.0] * 32).all()


def test_a_shuffle_of_half_a_warp_faults():
    body = "setp.lt.u32 %p1, %r2, 16;\n @%p1 shfl.sync.bfly.b32 %r9, %r2, 1, 31, -1;"
    with pytest.raises(Fault, match="warp: not all of its lanes"):
        run(body)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_shared_memory(count, trans):
    """ldmatrix of 16-bit numbers: lane l gets row l // 4, columns 2 (l % 4) and the next; stmatrix undoes it.

    The memory begins as 16-bit numbers 0, 1, 2, ..., so a matrix of eight rows of 16 bytes holds 8 r + c.
    """
    registers = ", ".join(f"%r{10 + n}" for n in range(count))
    stored = ", ".join(f"%r{20 + n}" for n in range(count))
    fill = """
    mul.wide.u32 %rd4, %r2, 8;
    add.s64 %rd4, %rd1, %rd4;
    ld.global.v2.b32 {%r7, %r8}, [%rd4];
    shl.b32 %r6, %r2, 3;
    st.shared.v2.b32 [%r6], {%r7, %r8};
    bar.sync 0;
    and.b32 %r6, %r2, 31;
    shl.b32 %r6, %r6, 4;
    """
    load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r6];\n"
    words = [2 * n | (2 * n + 1) << 16 for n in range(128)]
    for n in range(count):
        body = fill + load + f"mov.b32 %r9, %r{10 + n};" + "\n bar.sync 0;\n" + STORE
        found = run(body, words)[:32]
        for lane, word in enumerate(found):
            row, column = lane // 4, 2 * (lane % 4)
            places = [(row, column), (row, column + 1)]
            if trans:
                places = [(c, r) for r, c in places]
            low, high = (64 * n + 8 * r + c for r, c in places)
            assert word == low | high << 16
    moves = "\n".join(f"mov.b32 %r{20 + n}, %r{10 + n};" for n in range(count))
    back = f"""
    {moves}
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6 + 512], {{{stored}}};
    bar.sync 0;
    shl.b32 %r6, %r2, 2;
    ld.shared.b32 {{%r9}}, [%r6 + 512];
    """
    one_warp = fill.replace("shl.b32 %r6, %r2, 3", "shl.b32 %r6, %r2, 3")
    assert run(one_warp + load + back + STORE, words, shared=2048, threads=64)[: 32 * count][:32] == words[:32]  # fmt: skip


# --- barriers and programs

ARRIVE = """
    bar.sync 0;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 atom.global.gpu.acq_rel.add.u32 %r6, [%rd1 + 0], 1;
    @!%p1 bra $L_there;
$L_wait:
    ld.global.gpu.acquire.b32 %r7, [%rd1 + 0];
    setp.lt.u32 %p2, %r7, %r4;
    @%p2 bra $L_wait;
$L_there:
    bar.sync 0;
"""
# Each program stores 5 + its number behind the counter, waits for all, and reads the next one's.
MEET = """
    mul.wide.u32 %rd4, %r3, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.s32 %r8, %r3, 5;
    setp.eq.u32 %p3, %r2, 33;
    @%p3 st.global.b32 [%rd5 + 4], {%r8};
    ARRIVE
    add.s32 %r10, %r3, 1;
    rem.u32 %r10, %r10, %r4;
    mul.wide.u32 %rd6, %r10, 4;
    add.s64 %rd7, %rd1, %rd6;
    ld.global.cg.b32 {%r9}, [%rd7 + 4];
    add.s64 %rd3, %rd3, 256;
"""


def meet(change=lambda body: body, **how) -> list[int]:
    """Three programs meet; words from the 64th on are what their threads read."""
    body = change(MEET.replace("ARRIVE", ARRIVE) + STORE.replace("[%rd3]", "[%rd3]"))
    return run(body, 64 + 192, programs=3, **how)[64:]


@both_schedules
def test_programs_meet_at_a_barrier_of_the_grid(schedule):
    assert meet(schedule=schedule) == [5 + (n + 1) % 3 for n in range(3) for _ in range(64)]


WITHOUT = {
    "a release": ("atom.global.gpu.acq_rel", "atom.global.gpu.acquire", "race: a load"),
    "an acquire": ("ld.global.gpu.acquire.b32", "ld.global.gpu.relaxed.b32", "race: a load"),
    "the first barrier": ("    bar.sync 0;\n    setp.eq.u32 %p1", "    setp.eq.u32 %p1", "race: a load"),
    "the second barrier": ("$L_there:\n    bar.sync 0;", "$L_there:", "race: a load"),
    "the wait": ("@%p2 bra $L_wait;", "", "race: a load"),
    "going past the cache": ("ld.global.cg", "ld.global", "stale"),
    "an arrival": ("%r6, [%rd1 + 0], 1;", "%r6, [%rd1 + 0], 0;", "hang"),
}  # fmt: skip


# Programs that step together have all arrived when the first of them looks.
LUCKY = {("the wait", Schedule.TOGETHER)}


@pytest.mark.parametrize(
    ("what", "schedule"),
    [
        (what, schedule)
        for what in WITHOUT
        for schedule in Schedule
        if (what, schedule) not in LUCKY
    ],
)
def test_without_a_part_of_it_a_fault_is_told(what, schedule):
    before, after, words = WITHOUT[what]

    def change(body: str) -> str:
        assert before in body
        return body.replace(before, after)

    with pytest.raises(Fault, match=words):
        meet(change, schedule=schedule, patience=100)


def test_a_barrier_that_some_threads_skip_faults():
    body = "setp.lt.u32 %p1, %r2, 32;\n @%p1 ret;\n bar.sync 0;"
    with pytest.raises(Fault, match="barrier"):
        run(body)
    with pytest.raises(Fault, match="barrier: not all threads of a warp"):
        run("setp.lt.u32 %p1, %r2, 3;\n @%p1 bar.sync 0;")


ATOMICS = {
    "add.u32": (7, lambda old, new: sum(new) + 7 * 0 + old),
    "max.s32": (0xFFFFFFF0, lambda old, new: max(new)),
    "min.u32": (0xFFFFFFF0, lambda old, new: min(new)),
    "or.b32": (64, lambda old, new: old | 63),
    "and.b32": (0xFF, lambda old, new: 0),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_of_all_threads(name):
    start, function = ATOMICS[name]
    words = [start, *[0] * 63]
    assert run(f"red.global.gpu.relaxed.{name} [%rd1], %r2;", words)[0] == function(
        start, range(64)
    )


def test_an_exchange_hands_each_value_on_once():
    """In any order: what the threads get and what is left are the first value and theirs."""
    found = run("atom.global.gpu.acq_rel.exch.b32 %r9, [%rd1], %r2;\n add.s64 %rd3, %rd3, 4;" + STORE, [99, *[0] * 64])  # fmt: skip
    assert sorted(found) == sorted([99, *range(64)])


COPY = """
    setp.ne.u32 %p1, %r2, 3;
    selp.b32 %r6, 4, 0, %p1;
    shl.b32 %r7, %r2, 2;
    cp.async.ca.shared.global [ %r7 + 0 ], [ %rd3 + 0 ], 0x4, %r6;
    cp.async.commit_group;
    cp.async.commit_group;
    WAIT
    ld.shared.b32 {%r9}, [%r7];
"""


@pytest.mark.parametrize("wait", ["cp.async.wait_group 1;", "cp.async.wait_all;"])
def test_copies_arrive_and_masked_ones_are_zero(wait):
    found = run(COPY.replace("WAIT", wait) + STORE, list(range(100, 164)))
    assert found == [0 if n == 3 else 100 + n for n in range(64)]


def test_a_copy_arrives_no_earlier_than_its_wait_asks():
    found = run(COPY.replace("WAIT", "cp.async.wait_group 2;") + STORE, list(range(100, 164)))
    assert set(found) == {0xCDCDCDCD}


def test_faults_name_their_statement():
    with pytest.raises(Fault, match=re.escape("ld.global.b32 {%r9}, [%rd4]")):
        run(GLOBAL_FAULTS["outside"])
