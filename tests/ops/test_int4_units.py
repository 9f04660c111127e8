"""Products on INT4 units: the kernel's source, executed thread by thread on the CPU, is the definition (exact); who is chosen, in words.

int4_units/threads.h stands in for a GPU: the fragments of mma and ldmatrix are those of the PTX manual, copies arrive as late or as early
as they may, threads run forward or backward. So the index arithmetic, the stages and the barriers are those that a GPU will run; what is
not shown is what ptxas makes of it, but for the registers and instructions that it tells.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import BackendError
from narrowgauge.formats import INT4, INT4X2, INT8
from narrowgauge.ops import nvrtc
from narrowgauge.ops.mm import KERNELS, cublas, definition, int4_units
from narrowgauge.ops.mm.selfcheck import CHECK
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry
from narrowgauge.ops.selfcheck import examine
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import WHOLE, Cast
from tests.compare import assert_same
from tests.raising import coded, require

TENSOR, ROW = Cast(format=INT4), Cast(format=INT4, tile=(1, WHOLE))
A100 = Device("cuda", (8, 0), cuda=(13, 0))
FOLDER = Path(__file__).parent / "int4_units"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++ builds the emulation of a GPU's threads"
)


# --- who is chosen ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "")


def refusals(lhs, rhs, device):
    return dict(KERNELS.choose(MmSpec(lhs, rhs, device)).refusals)


@pytest.mark.parametrize(
    ("lhs", "rhs", "device", "expected"),
    [
        (TENSOR, Cast(format=INT8), A100, coded("operands")),
        (Cast(format=INT4X2, tile=(1, WHOLE)), TENSOR, A100, coded("operands")),
        (Cast(format=INT4, tile=(WHOLE, 1)), TENSOR, A100, coded("tile")),
        (TENSOR, ROW, Device("cpu"), coded("device", "cpu", "INT4")),
        (TENSOR, ROW, Device("cuda", (7, 5)), coded("capability", "7.5", "8.0", "8.9")),
        (TENSOR, ROW, Device("cuda", (9, 0)), coded("capability", "9.0", "8.0", "8.9")),
    ],
)  # fmt: skip
def test_refusals_say_what_it_is_made_for(lhs, rhs, device, expected, with_nvrtc):
    require(refusals(lhs, rhs, device)["native-int4"], expected.code, *expected.values)


def test_without_nvrtc_it_says_so(monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "a reason of nvrtc")
    assert refusals(TENSOR, ROW, A100)["native-int4"] == Refusal("toolchain", "a reason of nvrtc")


def test_a_device_that_is_not_here_takes_int8(with_nvrtc):
    choice = KERNELS.choose(MmSpec(TENSOR, ROW, A100))
    refusal = dict(choice.refusals)["native-int4"]
    assert (
        choice.kernel.name == "native-int8"
        and refusal.code == "slower"
        and "native-int8" in refusal.text
    )
    assert KERNELS.choose(MmSpec(TENSOR, ROW, A100), "native-int4").kernel.name == "native-int4"


@pytest.mark.parametrize(
    ("ours", "chosen"), [(0.5, "native-int4"), (1.0, "native-int8"), (2.0, "native-int8")]
)
def test_it_is_taken_where_it_was_measured_faster(ours, chosen, monkeypatch):
    """One measurement per device, of both kernels; a tie goes to INT8."""
    asked = []

    def milliseconds(multiply, device):
        asked.append(multiply)
        return ours if multiply is int4_units.run else 1.0

    monkeypatch.setattr(int4_units, "_milliseconds", milliseconds)
    int4_units._slower.cache_clear()
    registry: Registry[Device] = Registry("op")
    registry.register(
        Kernel("native-int4", lambda _: None, print, slower=int4_units.slower),
        Kernel("native-int8", lambda _: None, print, by_torch=True),
    )
    here = Device("cuda", (8, 0), index=0)
    choices = [registry.choose(here) for _ in range(3)]
    int4_units._slower.cache_clear()
    assert {choice.kernel.name for choice in choices} == {chosen} and asked == [
        int4_units.run,
        cublas.run_int8,
    ]
    if chosen == "native-int8":
        words = f"4096 x 4096 x 4096 takes it {ours:.3g} ms on cuda:0, native-int8 1"
        assert choices[0].refusals == (("native-int4", Refusal("slower", words)),)
        assert registry.choose(here, "native-int4").kernel.name == "native-int4", (
            "who names it gets it"
        )


# --- the kernel, executed ---------------------------------------------------------------------------------------------------


class Emulated:
    """Takes the place of the source on a GPU: `launch` runs every thread of every program here."""

    def __init__(self, library, order):
        self.library, self.order, self.launched = library, order, []

    def launch(self, kernel, programs, threads, device, *arguments):
        self.launched.append(kernel)
        values = [
            x if isinstance(x, int) else ctypes.c_void_p(0 if x is None else x.data_ptr())
            for x in arguments
        ]
        if kernel == "int4_mm":
            assert threads == int4_units.THREADS
            self.library.emulated_int4_mm(self.order, programs, *values)
        else:
            self.library.emulated_pack_int4(*values, programs, threads)


@cache
def library(folder):
    sources = Path(int4_units.__file__).parent
    target = Path(folder) / "emulated.so"
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-ffp-contract=off",
        "-w",
        f"-I{sources}",
        f"-I{FOLDER}",
    ]
    subprocess.run([*command, str(FOLDER / "emulated.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(params=range(4), ids=["late", "early", "late-backward", "early-backward"])
def emulated(request, monkeypatch, tmp_path_factory):
    found = Emulated(library(str(tmp_path_factory.getbasetemp())), request.param)
    monkeypatch.setattr(int4_units, "SOURCE", found)
    return found


def random_codes(rows, inner, cast=TENSOR, packed=False):
    codes = torch.randint(-7, 8, (rows, inner), dtype=torch.int8)
    scale = torch.rand(rows if cast == ROW else 1, 1) + 0.5
    return QTensor(data=INT4.pack(codes) if packed else codes, scale=scale, cast=cast, inner=inner)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "casts", "dtype", "with_bias"),
    [
        (128, 128, 384, (TENSOR, TENSOR), torch.float32, False),
        (131, 75, 500, (ROW, TENSOR), torch.bfloat16, True),
        (5, 257, 33, (TENSOR, ROW), torch.float16, False),
        (1, 1, 1, (ROW, ROW), torch.float32, True),
    ],
)
def test_the_kernel_is_the_definition(emulated, m, n, k, casts, dtype, with_bias):
    """To the bit: ragged in all axes, packed and one to a byte, one scale and one per row, with and without a bias."""
    bias = torch.randn(n) if with_bias else None
    for packed in (False, True):
        lhs, rhs = random_codes(m, k, casts[0], packed), random_codes(n, k, casts[1], packed)
        assert_same(
            int4_units.run(lhs, rhs, bias, dtype, False),
            definition.run(lhs, rhs, bias, dtype, False),
        )
    assert emulated.launched == ["pack_int4", "pack_int4", "int4_mm", "int4_mm"]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_every_element_is_read_once_where_the_definition_reads_it(emulated, side):
    """Times a unit matrix each element comes out once, alone: its number, [0, 2**14), told digit by digit to the base of 13."""
    size, digits = 128, 4
    number = torch.arange(size * size).reshape(size, size)
    unit = QTensor(
        data=torch.eye(size, dtype=torch.int8), scale=torch.ones(1, 1), cast=TENSOR, inner=size
    )
    found = torch.zeros(size, size, dtype=torch.int64)
    for digit in range(digits):
        codes = (number // 13**digit % 13 - 6).to(torch.int8)
        operand = QTensor(data=codes, scale=torch.ones(1, 1), cast=TENSOR, inner=size)
        pair = (operand, unit) if side == "lhs" else (unit, operand)
        found += (int4_units.run(*pair, None, torch.float32, False).to(torch.int64) + 6) * 13**digit
    assert torch.equal(found, number if side == "lhs" else number.T)


@pytest.mark.slow
@needs_compiler
def test_the_check_on_a_device_passes_the_kernel_and_fails_one_that_is_wrong(emulated):
    """What is examined before the first product on a GPU, NaN included; a kernel that swaps two columns of a tile is found out."""
    if emulated.order:
        pytest.skip("one order is enough for the check")
    kind = CHECK.kind(MmSpec(ROW, TENSOR, A100))

    def swapped(*call):
        out = int4_units.run(*call)
        return out[:, [1, 0, *range(2, out.shape[1])]]

    assert examine("mm", int4_units.run, CHECK, kind, torch.device("cpu")).reason is None
    assert "is wrong" in str(examine("mm", swapped, CHECK, kind, torch.device("cpu")).reason)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_what_torch_wants(emulated, dtype):
    """It has no kernel for the CPU: the emulated one stands in."""
    operator = torch.library.Library("narrowgauge", "IMPL")
    operator.impl("int4_mm", int4_units.launch, "CPU", allow_override=True)
    lhs, rhs = random_codes(3, 40, ROW), random_codes(5, 40)
    given = (lhs.data, lhs.scale, rhs.data, rhs.scale, torch.randn(5), dtype)
    torch.library.opcheck(torch.ops.narrowgauge.int4_mm.default, given)


@pytest.mark.slow
@needs_compiler
def test_codes_at_odd_addresses_are_moved(emulated):
    """The kernel reads 8 codes and copies 16 bytes at once; a view may begin between them."""
    data = torch.randint(-7, 8, (1 + 16 * 64,), dtype=torch.int8)[1:].reshape(16, 64)
    assert data.data_ptr() % 8
    one, both = INT4.pack(data), torch.zeros(1 + 16 * 32, dtype=torch.uint8)
    both[1:] = one.flatten()
    assert_same(int4_units.packed(data), one)
    moved = int4_units.packed(both[1:].reshape(16, 32))
    assert_same(moved, one)
    assert moved.data_ptr() % int4_units.ALIGNMENT == 0


def test_a_sum_that_could_pass_32_bits_is_the_definitions(monkeypatch):
    monkeypatch.setattr(int4_units, "LONGEST_SUM", 10)
    lhs, rhs = (quantize(torch.randn(4, 11), TENSOR) for _ in range(2))
    assert_same(
        int4_units.run(lhs, rhs, None, torch.float32, False),
        definition.run(lhs, rhs, None, torch.float32, False),
    )


# --- what ptxas makes of it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch's CUDA build brings NVRTC")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_two_programs_fit_a_multiprocessor_and_nothing_spills(capability, tmp_path):
    """Of 65,536 registers and at least 100 KiB of shared memory; INT4 instructions, 64 to 16 KiB copied by a warp's program."""
    options = (*nvrtc.OPTIONS, "--ptxas-options=-v")
    binary, words = nvrtc.compiled("int4_units.cu", int4_units.SOURCE.text, capability, options)
    product = words[words.index("'int4_mm'") :]
    assert "0 bytes spill stores, 0 bytes spill loads" in product
    registers = int(re.search(r"Used (\d+) registers", product).group(1))
    shared = int(re.search(r"(\d+) bytes smem", product).group(1))
    assert 2 * int4_units.THREADS * registers <= 65536 and 2 * (shared + 1024) <= 100 * 1024
    triton = pytest.importorskip("triton", reason="Triton brings cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (tmp_path / "k.cubin").write_bytes(binary)
    sass = subprocess.run(
        [cuobjdump, "-sass", tmp_path / "k.cubin"], capture_output=True, text=True, check=True
    ).stdout
    loop = sass[sass.index("Function : int4_mm") :]
    loop = loop[: loop.index("Function :", 20)] if "Function :" in loop[20:] else loop
    counts = {
        name: loop.count(name)
        for name in ("IMMA.16864.S4.S4", "LDSM.16.M88.4", "LDGSTS.E.BYPASS.128", "LDL", "STL")
    }
    assert counts == {
        "IMMA.16864.S4.S4": 64,
        "LDSM.16.M88.4": 16,
        "LDGSTS.E.BYPASS.128": 24,
        "LDL": 0,
        "STL": 0,
    }


def test_a_source_that_does_not_compile_says_where():
    if torch.version.cuda is None:
        pytest.skip("torch's CUDA build brings NVRTC")
    with pytest.raises(
        BackendError,
        match=r"nvrtc: broken\.cu does not compile for compute capability 8\.0: broken\.cu\(1\)",
    ):
        nvrtc.compiled("broken.cu", "__global__ void f() { g(); }", (8, 0))
