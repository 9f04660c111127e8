"""Block-scaled GEMMs of cuBLAS without a GPU: what is handed over, where each scale lies, and the product that follows (bounded).

`cublas.py` stands in for torch's function: it checks the arguments with torch's own shape function for CUDA and reads the scales
by address. The products are exact but for float64 sums, so 2**-22 of the sum of magnitudes covers the rounding to float32, the
factor of a tensor and the bias; 2**-8 more where a kernel returns bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from narrowgauge import recipes
from narrowgauge.formats import E2M1, E4M3, E5M2
from narrowgauge.ops.mm import KERNELS, mm
from narrowgauge.ops.mm import cublas as gemms
from narrowgauge.ops.mm.spec import MmSpec, refuse
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast, Gemm
from narrowgauge.scaling import E4M3_TWO_LEVEL, E8M0_CEIL, E8M0_FLOOR, FP32, POW2
from tests.compare import assert_same
from tests.ops import cublas
from tests.raising import coded, require

HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
BLACKWELL = Device("cuda", (10, 0), cuda=(12, 8))

VECTOR, SQUARE = (Cast(format=E4M3, tile=tile, scale=FP32) for tile in ((1, 128), (128, 128)))
MXFP8 = Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL)
MXFP4 = Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, headroom=4 / 3)
NVFP4, NVFP4_SQUARE = (
    Cast(format=E2M1, tile=tile, scale=E4M3_TWO_LEVEL) for tile in ((1, 16), (16, 16))
)
MXFP8_E5M2 = Cast(format=E5M2, tile=(1, 32), scale=POW2)

BLOCKS, MX = (
    (kernel.refuse, kernel.run)
    for kernel in KERNELS.kernels
    if kernel.name in ("native-block", "native-mx")
)

GEMMS = {
    "1x128, 128x128": (BLOCKS, VECTOR, SQUARE),
    "128x128, 1x128": (BLOCKS, SQUARE, VECTOR),
    "1x128, 1x128": (BLOCKS, VECTOR, VECTOR),
    "mxfp8": (MX, MXFP8, MXFP8),
    "mxfp8 e5m2": (MX, MXFP8_E5M2, MXFP8),
    "mxfp4": (MX, MXFP4, MXFP4),
    "nvfp4": (MX, NVFP4, NVFP4_SQUARE),
}
every_gemm = pytest.mark.parametrize(("kernel", "lhs", "rhs"), GEMMS.values(), ids=GEMMS)
SHAPES = [(128, 256, 256), (33, 50, 130), (1, 1, 1), (300, 129, 656), (16, 128, 96)]


def matrix(rows, columns, seed=0):
    """Normal numbers whose magnitude differs by up to 2**10 from one 16 x 16 block to the next."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-5, 6, (-(-rows // 16), -(-columns // 16)), generator=generator)
    x = torch.randn(rows, columns, generator=generator)
    return torch.ldexp(
        x, powers.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    )


@pytest.fixture
def on_cublas(monkeypatch):
    monkeypatch.setattr(gemms, "scaled_mm", cublas.scaled_mm)


def assert_product(out, lhs, rhs, bias=None, roundings=0.0):
    left, right = (dequantize(q).to(torch.float64) for q in (lhs, rhs))
    truth, size = left @ right.T, left.abs() @ right.abs().T
    if bias is not None:
        truth, size = truth + bias.to(torch.float64), size + bias.abs()
    assert ((out.to(torch.float64) - truth).abs() <= (2.0**-22 + roundings) * size).all()


@every_gemm
@pytest.mark.parametrize(
    "shape",
    [
        each if each in SHAPES[1:3] else pytest.param(each, marks=pytest.mark.slow)
        for each in SHAPES
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_every_scale_meets_its_elements(kernel, lhs, rhs, shape, biased, on_cublas):
    left, right = (
        quantize(matrix(shape[0], shape[2]), lhs),
        quantize(matrix(shape[1], shape[2], seed=1), rhs),
    )
    bias = matrix(1, shape[1], seed=2)[0] if biased else None
    bf16_kernel = lhs == MXFP4
    for out_dtype in (torch.float32, torch.bfloat16):
        out = kernel[1](left, right, bias, out_dtype, True)
        assert out.dtype == out_dtype and tuple(out.shape) == shape[:2]
        assert_product(
            out, left, right, bias, 2.0**-8 * (bf16_kernel + (out_dtype == torch.bfloat16))
        )


@pytest.mark.parametrize(
    "kernel_and_casts", [GEMMS["1x128, 128x128"], GEMMS["nvfp4"]], ids=["blocks", "nvfp4"]
)
def test_a_poisoned_tile_stays_visible(kernel_and_casts, on_cublas):
    kernel, lhs, rhs = kernel_and_casts
    x = matrix(40, 256)
    x[7, 200] = float("nan")
    left, right = quantize(x, lhs), quantize(matrix(48, 256, seed=1), rhs)
    out = kernel[1](left, right, None, torch.float32, False)
    wanted = torch.zeros(40, 48, dtype=torch.bool)
    wanted[slice(None) if lhs.has_global_scale else 7] = (
        True  # a second scale, of the tensor, is poisoned with it
    )
    assert torch.equal(out.isnan(), mm(left, right, backend="reference").isnan())
    assert out.isnan()[7].all() and (lhs.has_global_scale or torch.equal(out.isnan(), wanted))


def test_the_weight_of_the_forward_product_serves_backward_turned(on_cublas):
    """What grad_input multiplies by: codes and scales transposed by view."""
    w = quantize(matrix(200, 300), SQUARE)
    gy = quantize(matrix(64, 200, seed=1), VECTOR)
    assert_product(
        gemms.run_block(gy, w.transposed(), None, torch.float32, False), gy, w.transposed()
    )


@every_gemm
@pytest.mark.parametrize("shape", [(0, 4, 32), (4, 0, 32), (4, 4, 0)], ids=str)
def test_empty_products(kernel, lhs, rhs, shape):
    left, right = (
        quantize(torch.zeros(shape[0], shape[2]), lhs),
        quantize(torch.zeros(shape[1], shape[2]), rhs),
    )
    bias = torch.ones(shape[1])
    assert_same(kernel[1](left, right, bias, torch.float32, False), torch.ones(shape[:2]))


def test_torch_miscounts_the_scales_of_mxfp4():
    """Why compiled code is refused MXFP4: the shape function of torch 2.13 counts bytes where the kernel counts codes.

    When this fails torch has mended it, and run_mx can accept it.
    """
    q = quantize(matrix(128, 256), MXFP4)
    codes, scales, *_ = gemms.mx_operand(q)
    how, swizzle = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    with (
        FakeTensorMode(),
        pytest.raises(RuntimeError, match=r"for MX scaling scale_a must have 512 \(got: 1024\)"),
    ):
        scales = cublas.fakes(scales)
        scaled_mm(
            cublas.fake(codes),
            cublas.fake(codes).T,
            scales,
            how,
            scales,
            how,
            swizzle_a=swizzle,
            swizzle_b=swizzle,
        )
    assert refuse("native-mx")(MmSpec(MXFP4, MXFP4, BLACKWELL)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, lhs, rhs", [(BLOCKS, VECTOR, SQUARE), (MX, MXFP8, MXFP8)], ids=["blocks", "mxfp8"]
)
def test_torch_compile_traces_the_product(kernel, lhs, rhs):
    """Without a break, which torch 2.11 made at torch.nn.functional.scaled_mm. On the meta device: shapes alone."""
    left, right = (
        replace(q, data=q.data.to("meta"), scale=q.scale.to("meta"))
        for q in (quantize(matrix(128, 256), lhs), quantize(matrix(256, 256, seed=1), rhs))
    )

    def product(data: torch.Tensor) -> torch.Tensor:
        return kernel[1](replace(left, data=data), right, None, torch.bfloat16, False)

    out = torch.compile(product, backend="eager", fullgraph=True)(left.data)
    assert tuple(out.shape) == (128, 256) and out.dtype == torch.bfloat16


# --- layouts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (384, 12), (32, 8)], ids=str)
def test_the_swizzle_is_that_of_the_documentation(shape):
    """Exact, element by element: cuBLAS 12.9, "1D block scaling factors layout"."""
    rows, columns = shape
    scale = torch.randint(1, 255, shape, dtype=torch.uint8)
    flat = gemms.swizzled(scale)
    panels = -(-columns // 4)
    wanted = torch.zeros(-(-rows // 128) * panels * 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            block = (row // 128) * panels + column // 4
            wanted[block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale[
                row, column
            ]
    assert_same(flat, wanted)


def test_e8m0_is_the_exponent():
    """Exact, every power of two that a scale can be, and NaN; torch's own cast agrees."""
    powers = torch.ldexp(torch.ones(254), torch.arange(-126, 128))
    assert_same(gemms.to_e8m0(powers).view(torch.uint8), torch.arange(1, 255, dtype=torch.uint8))
    assert_same(gemms.to_e8m0(powers).to(torch.float32), powers)
    assert int(gemms.to_e8m0(torch.tensor([float("nan")])).view(torch.uint8)) == 0xFF


# --- who refuses what --------------------------------------------------------------------------------------------------------


def reason(kernel, lhs, rhs, device, expanded=False):
    refusal = kernel[0](MmSpec(lhs, rhs, device, expanded))
    return refusal


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_recipes_that_these_kernels_serve(gemm):
    def chosen(name, device):
        products = getattr(recipes.get(name), gemm)
        return KERNELS.choose(MmSpec(products.lhs, products.rhs, device)).kernel.name

    assert chosen("fp8-block", HOPPER) == "native-block"
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        assert chosen(name, BLACKWELL) == "native-mx" and chosen(name, HOPPER) == "reference"


@pytest.mark.parametrize(
    ("kernel", "lhs", "rhs", "device", "expected"),
    [
        (BLOCKS, VECTOR, SQUARE, Device("cpu"), coded("device", "cpu", "FP8")),
        (
            BLOCKS,
            VECTOR,
            SQUARE,
            Device("cuda", (8, 9), cuda=(12, 9)),
            coded("capability", "8.9"),
        ),
        (
            BLOCKS,
            VECTOR,
            SQUARE,
            Device("cuda", (10, 0), cuda=(12, 9)),
            coded("capability", "10.0"),
        ),
        (
            BLOCKS,
            VECTOR,
            SQUARE,
            Device("cuda", (9, 0), cuda=(12, 8)),
            coded("toolchain", "12.8", "12.9"),
        ),
        (BLOCKS, SQUARE, SQUARE, HOPPER, coded("tile")),
        (
            BLOCKS,
            Cast(format=E5M2, tile=(1, 128)),
            VECTOR,
            HOPPER,
            coded("format"),
        ),
        (
            BLOCKS,
            Cast(format=E4M3),
            VECTOR,
            HOPPER,
            coded("operands"),
        ),
        (BLOCKS, None, VECTOR, HOPPER, coded("operands")),
        (MX, MXFP8, MXFP8, HOPPER, coded("capability", "9.0", "10.0")),
        (MX, NVFP4, NVFP4, HOPPER, coded("capability", "9.0", "10.0")),
        (
            MX,
            MXFP4,
            MXFP4,
            Device("cuda", (12, 0), cuda=(12, 9)),
            coded("capability", "12.0"),
        ),
        (
            MX,
            MXFP8,
            MXFP8,
            Device("cuda", (10, 0), cuda=(12, 6)),
            coded("toolchain", "12.6", "12.8"),
        ),
        (MX, MXFP8, MXFP8, Device("cpu"), coded("device", "cpu", "MX")),
        (MX, MXFP8, NVFP4, BLACKWELL, coded("operands")),
        (MX, MXFP8_E5M2, MXFP8_E5M2, BLACKWELL, coded("format", "e5m2 x e5m2")),
        (
            MX,
            Cast(format=E4M3, tile=(1, 32)),
            MXFP8,
            BLACKWELL,
            coded("operands"),
        ),  # float32 scales
    ],
)
def test_every_refusal_has_its_reason(kernel, lhs, rhs, device, expected):
    require(reason(kernel, lhs, rhs, device), expected.code, *expected.values)
    assert reason(kernel, lhs, rhs, device, expanded=True) is not None


def test_expanded_operands_are_refused():
    for kernel, lhs, rhs, device in (
        (BLOCKS, VECTOR, SQUARE, HOPPER),
        (MX, MXFP8, MXFP8, BLACKWELL),
    ):
        assert reason(kernel, lhs, rhs, device) is None
        require(reason(kernel, lhs, rhs, device, True), "expanded")


# --- on a device -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_gemm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_this_gpu(kernel, lhs, rhs, shape):
    """The real kernel, where there is one: 2**-8 for bfloat16 results, and 13 bits per 32 products in the tensor core's sum."""
    left, right = (
        quantize(matrix(shape[0], shape[2]), lhs),
        quantize(matrix(shape[1], shape[2], seed=1), rhs),
    )
    on_gpu = [
        q.__class__(
            data=q.data.cuda(), scale=q.scale.cuda(), cast=q.cast, inner=q.inner,
            global_scale=None if q.global_scale is None else q.global_scale.cuda(),
        )
        for q in (left, right)
    ]  # fmt: skip
    gemm = Gemm(lhs=lhs, rhs=rhs)
    name = "native-block" if kernel is BLOCKS else "native-mx"
    from narrowgauge.ops.mm import plan

    refusals = dict(plan(gemm, torch.device("cuda", 0)).choice.refusals)
    if name in refusals:
        pytest.skip(f"{name}: {refusals[name].text}")
    out = mm(*on_gpu, backend=name).cpu()
    assert_product(out, left, right, roundings=2.0**-8 + 2.0**-13 * -(-shape[2] // 32))
