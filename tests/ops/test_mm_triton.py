"""The Triton GEMM for tiles without a GPU: compiled for each architecture and looked at; run by triton/interpreted_products.py.

The interpreter computes on decoded float32 operands, since its FP8 is not the hardware's; the sums are bounded by 2**-20 of the
sum of magnitudes: float32 sums of at most 656 products, each with one rounding, in any order (656 * 2**-24 < 2**-14.6 in the worst
case, its square root in practice), and a few scalings.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge import recipes
from narrowgauge.formats import E4M3, E5M2
from narrowgauge.ops.mm import KERNELS, mm
from narrowgauge.ops.mm import triton as triton_kernel
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.ops.quantize import triton as casting
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.recipe import Cast
from tests.raising import coded, require
from tests.selection import quick

triton = pytest.importorskip("triton")

[KERNEL] = (kernel for kernel in KERNELS.kernels if kernel.name == "triton")
VECTOR, SQUARE = (Cast(format=E4M3, tile=tile) for tile in ((1, 128), (128, 128)))
# Instruction that multiplies FP8, and bytes of shared memory that a block may have (CUDA programming guide, table of limits).
ARCHITECTURES = {
    89: (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.e4m3\.e4m3\.f32", 99 * 1024),
    90: (r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", 227 * 1024),
    120: (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.[\w:.]*f32\.e4m3\.e4m3\.f32", 99 * 1024),
    100: (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", 227 * 1024),
}


def compiled(architecture, rows=4096, tiles=(1, 128, 128, 128)):
    """The kernel as `launch` asks for it, for an architecture that need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from narrowgauge.ops.mm.triton_blocks import block_mm

    blocks = triton_kernel.blocks_for(list(tiles), (architecture // 10, architecture % 10), rows)
    constants = {"B": blocks}
    pointers = {
        "lhs": "*fp8e4nv",
        "rhs": "*fp8e4nv",
        "lhs_scale": "*fp32",
        "rhs_scale": "*fp32",
        "bias": "*bf16",
        "out": "*bf16",
    }
    signature = pointers | {size: "i32" for size in "MNK"} | dict.fromkeys(constants, "constexpr")
    aligned = {
        (block_mm.arg_names.index(name),): [["tt.divisibility", 16]] for name in [*pointers, *"MNK"]
    }
    source = ASTSource(fn=block_mm, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel, folder):
    """Name -> bytes or registers, from the cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, encoding="utf-8", check=True
    )
    return {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)
    }


def is_fenced(ptx: str) -> bool:
    """True if a proxy fence stands between each write to shared memory and the product that reads it, line by line."""
    waits = False
    for line in ptx.splitlines():
        if re.search(r"^\s*(@%\w+ )?(cp\.async\.c|st\.shared)", line):
            waits = True
        elif "fence.proxy.async" in line:
            waits = False
        elif waits and re.search(r"wgmma\.mma_async|tcgen05\.mma", line):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "rows", "tiles"),
    quick(
        [(90, 4096, (1, 128, 128, 128))],
        [
            (89, 4096, (1, 128, 128, 128)),
            (90, 4096, (1, 128, 128, 128)),
            (90, 64, (1, 128, 1, 128)),
            (90, 4096, (1, 64, 64, 64)),
            (90, 4096, (1, 256, 32, 64)),
            (100, 4096, (1, 128, 128, 128)),
            (100, 4096, (1, 128, 1, 128)),
            (120, 4096, (128, 128, 1, 128)),
        ],
    ),
)
def test_it_compiles_to_fp8_tensor_cores_and_spills_nothing(architecture, rows, tiles, tmp_path):
    instruction, shared_bytes = ARCHITECTURES[architecture]
    kernel = compiled(architecture, rows, tiles)
    assert re.search(instruction, ptx := kernel.asm["ptx"])
    assert is_fenced(ptx)
    if architecture in (90, 100):
        assert not is_fenced(ptx.replace("fence.proxy.async", "// "))
    found = resources(kernel, tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0, found
    assert 0 < found["REG"] <= 255 and kernel.metadata.shared <= shared_bytes


def test_ampere_has_no_such_instruction():
    """Control, and why `refuse` asks for 8.9."""
    with pytest.raises(Exception, match="fp8e4nv not supported"):
        compiled(80)


# --- who refuses what, and shapes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lhs", "rhs", "device", "expected"),
    [
        (VECTOR, SQUARE, Device("cuda", (8, 9)), None),
        (VECTOR, VECTOR, Device("cuda", (9, 0)), None),
        (SQUARE, SQUARE, Device("cuda", (10, 0)), None),
        (Cast(format=E5M2, tile=(1, 128)), SQUARE, Device("cuda", (9, 0)), None),
        (
            Cast(format=E5M2, tile=(1, 128)),
            Cast(format=E5M2, tile=(1, 128)),
            Device("cuda", (9, 0)),
            coded("format", "e5m2 x e5m2"),
        ),
        (VECTOR, SQUARE, Device("cuda", (8, 0)), coded("capability", "8.0", "8.9")),
        (VECTOR, SQUARE, Device("cpu"), coded("device", "cpu", "FP8")),
        (Cast(format=E4M3), SQUARE, Device("cuda", (9, 0)), coded("operands")),
        (
            Cast(format=E4M3, tile=(1, 64)),
            Cast(format=E4M3, tile=(64, 64)),
            Device("cuda", (9, 0)),
            None,
        ),
        (
            Cast(format=E4M3, tile=(1, 96)),
            SQUARE,
            Device("cuda", (9, 0)),
            coded("tile", 64, (1, 96)),
        ),
        (
            Cast(format=E4M3, tile=(1, 128), headroom=4 / 3),
            SQUARE,
            Device("cuda", (9, 0)),
            coded("scale"),
        ),
    ],
)
def test_every_refusal_has_its_reason(lhs, rhs, device, expected, triton_installed):
    refusal = KERNEL.refuse(MmSpec(lhs, rhs, device))
    if expected is not None:
        require(refusal, expected.code, *expected.values)
    else:
        assert refusal is None and KERNEL.refuse(MmSpec(lhs, rhs, device, True)).code == "expanded"


def test_without_triton_it_says_so(monkeypatch):
    monkeypatch.setattr("narrowgauge.ops.triton.unavailable", lambda: "a reason of triton")
    refusal = KERNEL.refuse(MmSpec(VECTOR, SQUARE, Device("cuda", (9, 0))))
    assert refusal == Refusal("toolchain", "a reason of triton")


def test_a_recipe_with_another_tile_is_computed_by_it_without_a_line_of_code(triton_installed):
    """On Hopper, where cuBLAS has blocks of 128 alone. Its casts have Triton kernels too."""
    blocks = recipes.get("fp8-block")
    smaller = {
        name: replace(gemm, **{side: replace(getattr(gemm, side), tile=tuple(min(size, 64) for size in getattr(gemm, side).tile))
                               for side in ("lhs", "rhs")})
        for name, gemm in blocks.gemms().items()
    }  # fmt: skip
    recipe = replace(blocks, name="fp8-block-64", **smaller)
    hopper = Device("cuda", (9, 0), cuda=(12, 9))
    for gemm in recipe.gemms().values():
        choice = KERNELS.choose(MmSpec(gemm.lhs, gemm.rhs, hopper))
        assert choice.kernel.name == "triton" and {gemm.lhs.tile, gemm.rhs.tile} <= {
            (1, 64),
            (64, 64),
        }
        for cast in (gemm.lhs, gemm.rhs):
            assert casting.refuse(Spec(hopper, torch.bfloat16, (256, 256), cast)) is None


def test_the_operator_has_a_shape_for_the_compiler():
    with FakeTensorMode():
        codes, scale = (
            torch.empty(30, 200, device="cuda", dtype=torch.float8_e4m3fn),
            torch.empty(30, 2, device="cuda"),
        )
        out = torch.ops.narrowgauge.block_mm(
            codes, scale, codes, scale, None, [1, 128, 1, 128], torch.bfloat16
        )
    assert (
        tuple(out.shape) == (30, 30) and out.dtype == torch.bfloat16 and out.device.type == "cuda"
    )


@pytest.mark.parametrize("shape", [(0, 4, 32), (4, 0, 32), (4, 4, 0)], ids=str)
def test_empty_products(shape):
    left, right = (
        quantize(torch.zeros(shape[0], shape[2]), VECTOR),
        quantize(torch.zeros(shape[1], shape[2]), SQUARE),
    )
    assert torch.equal(
        triton_kernel.run(left, right, None, torch.float32, False), torch.zeros(shape[:2])
    )


# --- on a device -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(128, 256, 256), (33, 50, 130), (1, 1, 1), (300, 129, 656)], ids=str
)
@pytest.mark.parametrize(
    ("lhs", "rhs"), [(VECTOR, SQUARE), (SQUARE, VECTOR), (VECTOR, VECTOR)], ids=str
)
def test_on_this_gpu(lhs, rhs, shape):
    left = quantize(torch.randn(shape[0], shape[2], device="cuda"), lhs)
    right = quantize(torch.randn(shape[1], shape[2], device="cuda"), rhs)
    bias = torch.randn(shape[1], device="cuda")
    reason = KERNEL.refuse(MmSpec(lhs, rhs, Device("cuda", torch.cuda.get_device_capability())))
    if reason:
        pytest.skip(reason.text)
    out = mm(left, right, bias=bias, backend="triton")
    values = [dequantize(q).double() for q in (left, right)]
    truth, size = values[0] @ values[1].T + bias, values[0].abs() @ values[1].abs().T + bias.abs()
    assert ((out.double() - truth).abs() <= (2.0**-13 * -(-shape[2] // 32) + 2.0**-20) * size).all()


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_elements():
    """Index arithmetic in 64 bits: the last row of an operand of 2**31 + 2**19 elements."""
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    rows = 4097
    codes = torch.zeros(rows, 2**19, device="cuda", dtype=torch.float8_e4m3fn)
    codes[-1] = 1.0
    scale = torch.ones(rows, 2**12, device="cuda")
    out = triton_kernel.launch(
        codes,
        scale,
        codes[-16:].contiguous(),
        scale[-16:].contiguous(),
        None,
        [1, 128, 1, 128],
        torch.float32,
    )
    assert float(out[-1, -1]) == 2**19 and float(out[:-1].abs().max()) == 0
