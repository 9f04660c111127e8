"""Selection of a GEMM kernel by the properties of a call.

`MmSpec` describes a call, and `NEEDS` is the table of each kernel's requirements. A kernel refuses
for the first requirement that is not met. The code "operands" means that the kernel is made for
other operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from narrowgauge.formats import E4M3, E5M2, INT4, INT4X2, Format, IntFormat
from narrowgauge.ops.registry import Code, Device, Refusal
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

FP8 = (E4M3, E5M2)
ROW_OR_TENSOR = ((1, WHOLE), (WHOLE, WHOLE))
BLOCK, MX, NV = 128, 32, 16
VECTOR, SQUARE = (1, BLOCK), (BLOCK, BLOCK)
SHORTEST = 64  # shortest tile along the contracted axis for the Triton kernel, see triton.py


@dataclass(frozen=True)
class MmSpec:
    """Properties of a call that decide which kernel is chosen.

    lhs, rhs  casts of the operands; None for a 16-bit operand
    expanded  True if an operand holds decoded values instead of codes
    """

    lhs: Cast | None
    rhs: Cast | None
    device: Device
    expanded: bool = False

    @property
    def casts(self) -> tuple[Cast | None, Cast | None]:
        return self.lhs, self.rhs

    @property
    def formats(self) -> tuple[Format | None, ...]:
        return (
            None if self.lhs is None else self.lhs.format,
            None if self.rhs is None else self.rhs.format,
        )

    @property
    def tiles(self) -> tuple[tuple[int, int] | None, ...]:
        return (
            None if self.lhs is None else self.lhs.tile,
            None if self.rhs is None else self.rhs.tile,
        )

    @property
    def kind(self) -> str | None:
        """`mx_kind` of the operands if both have the same, else None."""
        kind = mx_kind(self.lhs)
        return kind if kind is not None and kind == mx_kind(self.rhs) else None

    @property
    def units(self) -> str:
        """Name of the tensor cores that such operands are made for."""
        if self.formats == (INT4, INT4):
            return "INT4"
        return {None: "FP8", "mxfp8": "MX"}.get(self.kind, "FP4")


def mx_kind(cast: Cast | None) -> str | None:
    """Return "mxfp8", "mxfp4" or "nvfp4", or None for any other cast."""
    return None if cast is None else cast.mx_kind


class Need(NamedTuple):
    """A requirement of a kernel.

    code  code of the refusal
    met   met(spec) returns True if the requirement is met
    text  text of the refusal, or a function of the spec that returns it
    """

    code: Code
    met: Callable[[MmSpec], bool]
    text: str | Callable[[MmSpec], str]


def _in(found: tuple[object, ...], wanted: tuple[object, ...]) -> bool:
    return found[0] in wanted and found[1] in wanted


def _suits_triton(tile: tuple[int, int] | None) -> bool:
    return tile is not None and not any(side & (side - 1) for side in tile) and tile[1] >= SHORTEST


def _has_e5m2_rows(s: MmSpec) -> bool:
    return E5M2 in s.formats and (1, WHOLE) in s.tiles


def _words_of_tiles(s: MmSpec) -> str:
    unsuited = next(tile for tile in s.tiles if not _suits_triton(tile))
    return f"takes tiles of powers of two, {SHORTEST} or more along the contracted axis, not {unsuited}"


def _is_tiled(cast: Cast | None) -> bool:
    return cast is not None and WHOLE not in cast.tile and mx_kind(cast) is None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _reaches(version: tuple[int, int], least: tuple[int, int]) -> bool:
    """Return True if version >= least.

    The numbers are compared one by one, because Dynamo of torch 2.11 cannot compare the tuples of a
    Device.
    """
    return version[0] > least[0] or (version[0] == least[0] and version[1] >= least[1])


def _is_nvidia(device: Device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _sm(met: Callable[[MmSpec], bool], text: str) -> Need:
    """Return a requirement on the compute capability.

    {} in the text stands for the units of the operands.
    """
    return Need(
        "capability",
        met,
        lambda s: f"compute capability {_dotted(s.device.capability)}, {text.format(s.units)}",
    )


def _cuda(least: tuple[int, int], what: str) -> Need:
    return Need(
        "toolchain", lambda s: _reaches(s.device.cuda, least),
        lambda s: f"torch was built for CUDA {_dotted(s.device.cuda)}, {what.format(s.units)} {_dotted(least)}",
    )  # fmt: skip


CODES = Need(
    "expanded", lambda s: not s.expanded, "takes codes, but an operand is expanded to floats"
)
ONE_SCALE = Need(
    "scale", lambda s: not any(cast and cast.has_global_scale for cast in s.casts),
    "takes one scale, but a cast has a second one for the tensor (headroom)",
)  # fmt: skip
NO_E5M2_PAIR = Need(
    "format", lambda s: s.formats != (E5M2, E5M2), "e5m2 x e5m2 does not exist in hardware"
)
# torch calls an AMD GPU "cuda" too.
ROCM = (
    "narrowgauge has no kernels for AMD GPUs (ROCm) yet, and FP8 of MI300 is another format (fnuz)"
)
# Types of other GPUs of torch -> the same sentence.
OTHER_GPUS = {
    "mps": "narrowgauge has no kernels for Apple GPUs (MPS)",
    "xpu": "narrowgauge has no kernels for Intel GPUs (XPU)",
}


def without_kernels(device_type: str) -> str:
    """Return a clause that says that narrowgauge has no kernels for GPUs of this type, or ''."""
    if device_type == "cuda":
        return "" if torch.version.hip is None else ROCM
    return OTHER_GPUS.get(device_type, "")


def gpu_without_kernels() -> str:
    """Return the type of a GPU here that torch sees and narrowgauge has no kernels for, or ''."""
    if torch.cuda.is_available():
        return "cuda" if without_kernels("cuda") else ""
    if torch.backends.mps.is_available():
        return "mps"
    return "xpu" if torch.xpu.is_available() else ""


ON_CUDA = Need(
    "device", lambda s: _is_nvidia(s.device),
    lambda s: without_kernels(s.device.type) or f"{s.device.type} has no {s.units} units",
)  # fmt: skip
ADA = _sm(lambda s: _reaches(s.device.capability, (8, 9)), "FP8 needs 8.9")
FP8_UNITS = (NO_E5M2_PAIR, CODES, ONE_SCALE, ON_CUDA, ADA)
NOT_FP8 = "needs two FP8 operands"
NOT_BY_ROW = "needs two operands with one scale per tensor or row"
NOT_INTEGERS = "needs two integer operands"
NOT_INT4 = "needs two operands of INT4, one of which may be a bit-split gradient"
# Bug in torch 2.13, _check_scaled_mm_sizes_v2.
COUNTS_BYTES = "torch 2.13 takes two packed codes for one in the shapes of compiled MXFP4"
CPU_IS_SLOW = (
    "this CPU has no VNNI instructions; its integer GEMM is many times slower than float32"
)
# "native-int8" takes 4-bit integers too: their codes, and those of a bit-split gradient, are exact
# as INT8. E5M2 with row scales is a CUTLASS kernel in torch.
NEEDS: dict[str, tuple[Need, ...]] = {
    "native": (
        Need("operands", lambda s: _in(s.formats, FP8), NOT_FP8),
        Need("operands", lambda s: _in(s.tiles, ROW_OR_TENSOR), NOT_BY_ROW),
        *FP8_UNITS,
        _sm(lambda s: _reaches(s.device.capability, (9, 0)) or not _has_e5m2_rows(s), "row scales of E5M2 need 9.0"),
    ),
    "native-block": (
        Need(
            "operands", lambda s: _in(s.tiles, (VECTOR, SQUARE)) and _in(s.formats, FP8),
            "needs two FP8 operands in tiles of 1x128 or 128x128",
        ),
        Need("format", lambda s: s.formats == (E4M3, E4M3), "takes E4M3 alone in tiles of 128"),
        *FP8_UNITS,
        _sm(lambda s: s.device.capability[0] == 9, "cuBLAS has blocks of 128 on 9.0 alone"),
        _cuda((12, 9), "blocks of 128 need"),
        Need("tile", lambda s: s.tiles != (SQUARE, SQUARE), "128x128 by 128x128 does not exist in cuBLAS"),
    ),
    "native-mx": (
        Need("operands", lambda s: s.kind is not None, "needs two operands of MXFP8, MXFP4 or NVFP4"),
        NO_E5M2_PAIR, CODES, ON_CUDA,
        _sm(lambda s: _reaches(s.device.capability, (10, 0)), "{} needs 10.0"),
        _sm(lambda s: s.kind != "mxfp4" or s.device.capability[0] == 10, "torch has MXFP4 on 10.x alone"),
        _cuda((12, 8), "{} needs"),
        Need("compiling", lambda s: s.kind != "mxfp4" or not torch.compiler.is_compiling(), COUNTS_BYTES),
    ),
    "native-int4": (
        Need("operands", lambda s: s.formats == (INT4, INT4), "needs two operands of INT4"),
        Need("tile", lambda s: _in(s.tiles, ROW_OR_TENSOR), "takes one scale per tensor or per row"),
        CODES, ONE_SCALE,
        ON_CUDA,
        _sm(lambda s: s.device.capability[0] == 8, "INT4 units are those of 8.0 to 8.9"),
    ),
    "native-int8-cpp": (
        Need(
            "operands", lambda s: s.device.type == "cpu" and all(isinstance(format, IntFormat) for format in s.formats),
            "needs two integer operands on a CPU",
        ),
        Need("tile", lambda s: _in(s.tiles, ROW_OR_TENSOR), "takes one scale per tensor or per row"),
        CODES, ONE_SCALE,
    ),
    "native-int8": (
        Need("operands", lambda s: all(isinstance(format, IntFormat) for format in s.formats), NOT_INTEGERS),
        Need("tile", lambda s: _in(s.tiles, ROW_OR_TENSOR), "takes one scale per tensor or per row"),
        CODES, ONE_SCALE,
        Need("capability", lambda s: s.device.type != "cpu" or s.device.int8_gemm, CPU_IS_SLOW),
        Need(
            "device", lambda s: s.device.type == "cpu" or _is_nvidia(s.device),
            lambda s: without_kernels(s.device.type) or f"no integer GEMM on {s.device.type}",
        ),
        _sm(lambda s: s.device.type == "cpu" or _reaches(s.device.capability, (8, 0)), "the integer GEMM needs 8.0"),
    ),
    "native-cpp": (
        Need("operands", lambda s: INT4 in s.formats and _in(s.formats, (INT4, INT4X2)), NOT_INT4),
        Need("tile", lambda s: _in(s.tiles, ROW_OR_TENSOR), "takes one scale per tensor or per row"),
        CODES, ONE_SCALE,
    ),
    "triton": (
        Need("operands", lambda s: _in(s.formats, FP8) and all(map(_is_tiled, s.casts)), "needs two FP8 operands in tiles"),
        Need("tile", lambda s: all(map(_suits_triton, s.tiles)), _words_of_tiles),
        *FP8_UNITS,
    ),
}  # fmt: skip


def refuse(kernel: str) -> Callable[[MmSpec], Refusal | None]:
    """Return a function that yields the kernel's refusal by `NEEDS`, or None."""

    def refuse(spec: MmSpec) -> Refusal | None:
        # Texts are functions of the spec: one str.format with all words for each refusal made a
        # plan take 13 to 20 us instead of 10.
        for code, met, text in NEEDS[kernel]:
            if not met(spec):
                return Refusal(code, text if isinstance(text, str) else text(spec))
        return None

    return refuse
