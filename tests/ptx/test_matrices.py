"""Products of matrices: fragments and descriptors as the PTX manual lists them, against numpy (exact).

Numbers are small and whole, so that every order of summation gives the same. The manual's formulas
of an element's place are written out for each type; `matrices` has one for all.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.decoding import code_of
from tests.ptx.machine import Launch, Machine
from tests.ptx.memory import Fault, GlobalMemory
from tests.ptx.order import Order
from tests.ptx.parser import PtxError

HEAD = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 smem[];
.visible .entry multiply(.param .u64 .ptr .global .align 1 multiply_param_0)
{
    .reg .pred %p<9>;
    .reg .b32 %r<300>;
    .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [multiply_param_0];
    mov.u32 %r1, %tid.x;
"""
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}  # fmt: skip
random = np.random.default_rng(5)


def launch(body: str, words: np.ndarray, threads: int, shared: int = 16) -> np.ndarray:
    data = words.astype(np.uint32)
    memory = GlobalMemory([data.view(np.uint8)], Order(1, threads))
    code = code_of(HEAD + body + "\n ret;\n}")
    arguments = {"multiply_param_0": data.ctypes.data}
    Machine(code, memory, arguments, Launch(1, threads, shared)).run()
    memory.copy_back()
    return data


def whole(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Numbers that the type holds, as int64."""
    low, high = {"u": (0, 8), "s": (-8, 8)}.get(kind[0], (-4, 5))
    return random.integers(low, high, shape)


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Elements as unsigned numbers."""
    if kind in DTYPES:
        dtype = DTYPES[kind]
        return values.astype(dtype).view(f"u{np.dtype(dtype).itemsize}").astype(np.uint32)
    return (values & (15 if kind[1] == "4" else 255)).astype(np.uint32)


def of_16_bits(i: int, is_lhs: bool) -> tuple[int, int, int]:
    """Offset of the row by 8, thread's pairs, and offset of the element: manual, m16n8k16 .bf16."""
    if is_lhs:
        return (0 if i in (0, 1, 4, 5) else 8), 2, (i & 1) + (0 if i < 4 else 8)
    return 0, 2, (i & 1) + (0 if i < 2 else 8)


def of_8_bits(i: int, is_lhs: bool) -> tuple[int, int, int]:
    """m16n8k32 .s8, .e4m3"""
    if is_lhs:
        return (0 if i < 4 or 8 <= i < 12 else 8), 4, (i & 3) + (0 if i < 8 else 16)
    return 0, 4, (i & 3) + (0 if i < 4 else 16)


def of_4_bits(i: int, is_lhs: bool) -> tuple[int, int, int]:
    """m16n8k64 .s4"""
    if is_lhs:
        return (0 if i < 8 or 16 <= i < 24 else 8), 8, (i & 7) + (0 if i < 16 else 32)
    return 0, 8, (i & 7) + (0 if i < 8 else 32)


PRODUCTS: dict[str, tuple[Callable[[int, bool], tuple[int, int, int]], int]] = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": (of_16_bits, 16),
    "m16n8k16.row.col.f32.f16.f16.f32": (of_16_bits, 16),
    "m16n8k32.row.col.f32.e4m3.e4m3.f32": (of_8_bits, 8),
    "m16n8k32.row.col.f32.e5m2.e4m3.f32": (of_8_bits, 8),
    "m16n8k32.row.col.s32.s8.s8.s32": (of_8_bits, 8),
    "m16n8k64.row.col.s32.s4.s4.s32": (of_4_bits, 4),
    "m16n8k64.row.col.s32.u4.s4.s32": (of_4_bits, 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_fragments_are_those_of_the_manual(name):
    place, bits = PRODUCTS[name]
    shape, *_, kind_a, kind_b, _ = name.split(".")
    k = int(shape[6:])
    a, b, c = whole((16, k), kind_a), whole((k, 8), kind_b), random.integers(-99, 99, (16, 8))
    packed = np.zeros((32, 10), np.uint32)  # of each lane four registers of A, two of B, four of C
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(4 * 32 // bits):
            down, pairs, along = place(i, True)
            value = encoded(a[group + down, pairs * thread + along], kind_a)
            packed[lane, i * bits // 32] |= value << np.uint32(i * bits % 32)
        for i in range(2 * 32 // bits):
            _, pairs, along = place(i, False)
            value = encoded(b[pairs * thread + along, group], kind_b)
            packed[lane, 4 + i * bits // 32] |= value << np.uint32(i * bits % 32)
        for i in range(4):
            value = c[group + (0 if i < 2 else 8), 2 * thread + (i & 1)]
            is_float = ".f32." in name
            packed[lane, 6 + i] = (
                np.float32(value).view(np.uint32) if is_float else value & 0xFFFFFFFF
            )
    loads = "\n".join(f"ld.global.b32 {{%r{10 + n}}}, [%rd2 + {4 * n}];" for n in range(10))
    stores = "\n".join(f"st.global.b32 [%rd2 + {4 * n}], {{%r{30 + n}}};" for n in range(4))
    body = f"""
    mul.wide.u32 %rd2, %r1, 40;
    add.s64 %rd2, %rd1, %rd2;
    {loads}
    mma.sync.aligned.{name} {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}},
        {{%r16, %r17, %r18, %r19}};
    {stores}
    """
    found = launch(body, packed.reshape(-1), 32).reshape(32, 10)[:, :4]
    truth = a @ b + c
    for lane in range(32):
        for i in range(4):
            expected = truth[lane // 4 + (0 if i < 2 else 8), 2 * (lane % 4) + (i & 1)]
            got = found[lane, i].view(np.float32 if ".f32." in name else np.int32)
            assert got == expected, (lane, i, got, expected)


@pytest.mark.parametrize(
    "name", ["m16n8k8.row.col.f32.tf32.tf32.f32", "m8n8k4.row.col.f32.f16.f16.f32"]
)
def test_unknown_products_are_refused(name):
    with pytest.raises(PtxError):
        code_of(HEAD + f"mma.sync.aligned.{name} {{%r1}}, {{%r1}}, {{%r1}}, {{%r1}};\n}}")


def swizzled(lines: np.ndarray, width: int) -> np.ndarray:
    """Lines [outer, bytes] as a tensor map with a swizzle writes them: eight lines of `width` bytes, then the next.

    In each group of eight lines, 16-byte piece p of line i is at p ^ i (128 bytes), p ^ (i / 2) (64), p ^ (i / 4) (32).
    """
    memory = np.zeros(len(lines) * width, np.uint8)
    by = {128: 1, 64: 2, 32: 4}[width]
    for i, line in enumerate(lines):
        for piece in range(len(line) // 16):
            to = piece ^ (i % 8) // by
            memory[i * width + 16 * to :][:16] = line[16 * piece : 16 * piece + 16]
    return memory


GROUP_PRODUCTS = {  # types, bytes of a line of A and B, whether B's lines run along n
    "e4m3, lines of 128 bytes": ("e4m3", 32, 128, 128, 0),
    "bf16, lines of 64 bytes": ("bf16", 16, 64, 64, 0),
    "bf16, lines of 32 bytes": ("bf16", 16, 32, 32, 0),
    "bf16, B by rows": ("bf16", 16, 128, 64, 1),
}


@pytest.mark.parametrize("name", GROUP_PRODUCTS)
@pytest.mark.parametrize("fenced", [True, False])
def test_products_of_a_warpgroup_read_swizzled_memory(name, fenced):
    """D = A B + D, A and B at the second 32 bytes of their lines where these are long enough."""
    kind, k, width_a, width_b, turned = GROUP_PRODUCTS[name]
    n, size = 32, 32 // k
    a, b = whole((64, k), kind), whole((k, n), kind)
    at_a, at_b = (32 if width > 64 and not turned else 0 for width in (width_a, width_b))

    def lines(matrix: np.ndarray, offset: int, width: int) -> np.ndarray:
        codes = np.ascontiguousarray(encoded(matrix, kind).astype(f"u{size}"))
        raw = codes.view(np.uint8).reshape(len(matrix), -1)
        padded = np.zeros((len(matrix), width), np.uint8)
        padded[:, offset : offset + raw.shape[1]] = raw
        return swizzled(padded, width)

    memory_a = lines(a, at_a, width_a)
    memory_b = lines(b if turned else b.T, at_b, width_b)
    image = np.concatenate([memory_a, memory_b, np.zeros(-len(memory_b) % 512, np.uint8)])
    out = 4 * 16 * 128  # bytes of D: 16 registers of 128 threads
    words = np.concatenate([np.zeros(out // 4, np.uint32), image.view(np.uint32)])
    modes = {128: 1, 64: 2, 32: 3}

    def descriptor(start: int, width: int) -> int:
        return (start >> 4) | (8 * width >> 4) << 32 | modes[width] << 62

    copies = "\n".join(
        f"ld.global.b32 {{%r3}}, [%rd2 + {out + 512 * i}]; st.shared.b32 [%r2 + {512 * i}], %r3;"
        for i in range(len(image) // 512)
    )
    results = [f"%r{100 + i}" for i in range(16)]
    body = f"""
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd1, %rd2;
    shl.b32 %r2, %r1, 2;
    {copies}
    {"fence.proxy.async.shared::cta;" if fenced else ""}
    bar.sync 0;
    {" ".join(f"mov.b32 {each}, 0f3F800000;" for each in results)}
    mov.b64 %rd5, {descriptor(at_a, width_a)};
    mov.b64 %rd6, {descriptor(len(memory_a) + at_b, width_b)};
    mov.pred %p1, -1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{",".join(results)}}}, %rd5, %rd6, %p1, 1, 1
        {f", 0, {turned}" if kind == "bf16" else ""};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {" ".join(f"st.global.b32 [%rd2 + {512 * i}], {{{each}}};" for i, each in enumerate(results))}
    """
    if not fenced:
        with pytest.raises(Fault, match="proxy fence"):
            launch(body, words, 128, len(image))
        return
    found = launch(body, words, 128, len(image))[: out // 4].view(np.float32).reshape(16, 128).T
    truth = a @ b + 1
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(16):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            assert found[thread, i] == truth[row, column], (thread, i)
