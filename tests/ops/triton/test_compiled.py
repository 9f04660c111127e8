"""Every kernel of quantize compiled for the GPUs it is for, without one: instructions in the ptx, spills in the binary (exact).

The quick cases are one per kernel on sm_90, and one without the GPU's conversion; the whole matrix of casts and GPUs is marked slow.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from narrowgauge import formats
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4, INT8
from narrowgauge.ops.random import Key
from narrowgauge.recipe import WHOLE, Cast, Hadamard
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_CEIL,
    E8M0_FLOOR,
    POW2,
)
from tests.ops.triton.compiling import BEFORE_39, TARGETS, Compiled, compiled
from tests.selection import quick

from narrowgauge.ops.triton import grids, has_conversions  # isort: skip
from narrowgauge.ops.triton.cast_constants import refuse  # isort: skip
from narrowgauge.ops.quantize import triton_launch as casting  # isort: skip
from narrowgauge.ops.hadamard import encoding  # isort: skip

CASTS = {
    "tensor": Cast(format=E4M3),
    "tensor-e5m2": Cast(format=E5M2),
    "row": Cast(format=E4M3, tile=(1, WHOLE)),
    "vector": Cast(format=E4M3, tile=(1, 128), scale=POW2),
    "square": Cast(format=E4M3, tile=(128, 128), scale=POW2),
    "mx": Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL),
    "mx-e2m1": Cast(
        format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3
    ),
    "nv": Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL),
    "nv-square": Cast(format=E2M1, tile=(16, 16), scale=E4M3_TWO_LEVEL),
    "nv-stochastic": Cast(
        format=E2M1,
        tile=(1, 16),
        scale=E4M3_TWO_LEVEL_CEIL,
        rounding="stochastic",
        headroom=17 / 16,
    ),
    "int4": Cast(format=INT4, rounding="stochastic"),
    "int8-row": Cast(format=INT8, tile=(1, WHOLE)),
    "e5m2-stochastic": Cast(format=E5M2, rounding="stochastic"),
}
# Formats that no cast above has, a new one of the registry too. No GPU has a conversion for the eight
# bits of e3m4: taking e5m2's would be silent on 9.0.
OF_FORMATS = {
    f"row-{format}": Cast(format=format, tile=(1, WHOLE))
    for format in formats.ELEMENTS
    if refuse(Cast(format=format)) is None
    and format not in [cast.format for cast in CASTS.values()]
}
# Without the GPU's conversion stochastic rounding takes more: 146 registers on sm_80.
IN_PAIRS = ("cast_both", "both_delayed", "settle_both")
WAYS = ("one", "both", "delayed", "both-delayed")
QUICK = [
    ("tensor", "one", 90), ("tensor-e5m2", "delayed", 90), ("row", "both", 90), ("vector", "both", 90),
    ("row-e3m4", "both", 90),
    ("tensor", "one", 80), ("e5m2-stochastic", "both", 90), ("tensor", "both-delayed", 90), ("tensor", "both", 90),
]  # fmt: skip
MATRIX = [
    (cast, way, sm)
    for sm in TARGETS
    for cast in CASTS
    for way in WAYS
    if (cast, way, sm) not in QUICK and ("delayed" not in way or cast.startswith("tensor"))
]
MATRIX += [
    (cast, "both", sm) for sm in (80, 90) for cast in OF_FORMATS if (cast, "both", sm) not in QUICK
]
CASTS |= OF_FORMATS


def kernels(
    cast: str, way: str, sm: int, columns: int = 4096, dtype: torch.dtype = torch.bfloat16
) -> list[Compiled]:
    """What quantizing a matrix would launch. The numbers do not matter, so most of its memory is never touched."""
    how, x = CASTS[cast], torch.empty(512, columns, dtype=dtype)
    key = Key((1, 2)) if how.rounding == "stochastic" else None
    calls = {
        "one": lambda: casting.cast_pair(x, how, noise=(key, None)),
        "both": lambda: casting.cast_pair(x, how, cols=True, noise=(key, key)),
        "delayed": lambda: casting.cast_delayed(x, how, torch.zeros(3), True, False),
        "both-delayed": lambda: casting.cast_delayed(x, how, torch.zeros(3), True, True),
    }
    return list(compiled([casting], sm, calls[way]).values())


def check_all_run_at_once(found: Compiled) -> None:
    """As many programs as `triton_launch` starts fit on every multiprocessor: 64K registers, 1,536 threads, 100 KB (8.6 and 8.9)."""
    programs = casting.THREADS // (32 * found.usage["WARPS"])
    assert programs * -(-found.usage["REG"] // 8) * 8 * 32 * found.usage["WARPS"] <= 65536, (
        found.usage
    )
    assert (
        programs * 32 * found.usage["WARPS"] <= 1536
        and programs * (found.usage["SHARED"] + 1024) <= 100 * 1024
    )
    assert found.cooperative, (
        "the driver would start it where not all of its programs run, which then wait for ever"
    )


def warps_at_once(found: Compiled) -> int:
    """Warps of a kernel that the 65,536 registers of a multiprocessor hold: whole programs, registers of a thread in eights."""
    warps = found.usage["WARPS"]
    return warps * (65536 // (32 * warps * -(-found.usage["REG"] // 8) * 8))


def check(cast: str, way: str, sm: int) -> None:
    found = kernels(cast, way, sm)
    casting = [each for each in found if each.name not in ("amax", "maxima")]
    assert casting, [each.name for each in found]
    for each in found:
        assert each.spills == 0, f"{each.name}: {each.usage}"
        assert not any(".NaN" in name for name in each.instructions()), (
            "see narrowgauge/ops/triton: maxima are integers"
        )
        near = {
            name for name in each.instructions() if name.startswith("div.full") or "approx" in name
        }
        assert near <= {"rcp.approx.ftz.f32"}, (
            "the first step of an exact reciprocal, see narrowgauge/ops/triton/scales.py"
        )
        if each.name == "amax_and_cast":
            check_all_run_at_once(each)
        if each.name in IN_PAIRS and (
            has_conversions(TARGETS[sm]) or CASTS[cast].rounding == "nearest"
        ):
            converts = has_conversions(TARGETS[sm]) and CASTS[cast].rounding == "nearest"
            # Five programs of eight warps are 40, nine of four 36 (52 registers, Triton 3.7); others are bound by what they compute.
            wanted = 36 if CASTS[cast].is_per_tensor and converts else 16
            if each.name == "both_delayed" and sm in (90, 100):
                wanted = 32  # four programs of 64 registers, each with two pieces in flight
            elif each.name == "both_delayed" and way == "both-delayed" and converts:
                wanted = 48  # six programs of 40 registers
            assert warps_at_once(each) >= wanted, (
                f"the registers of a multiprocessor hold fewer warps: {each.usage}"
            )
    for each in casting:
        conversions = {name for name in each.instructions() if "satfinite" in name}
        element = {E4M3: "e4m3", E5M2: "e5m2"}.get(CASTS[cast].format)
        wanted = (
            {f"cvt.rn.satfinite.{element}x2.f32"}
            if element and has_conversions(TARGETS[sm])
            else set()
        )
        assert conversions == wanted, each.name
        assert any(name.startswith("ld.global.v4") for name in each.instructions()), (
            "16 bytes per load"
        )


@pytest.mark.parametrize(("cast", "way", "sm"), QUICK)
def test_kernels_compile_without_spills(cast, way, sm):
    """With the conversion of the GPU where it has one, none elsewhere; reciprocals exact; no NaN-propagating maximum."""
    check(cast, way, sm)


@pytest.mark.slow
@pytest.mark.parametrize(("cast", "way", "sm"), MATRIX)
def test_all_kernels_compile_without_spills(cast, way, sm):
    check(cast, way, sm)


# Forms with a cooperative grid, and GPUs.
FILLING = [
    (cast, way, sm) for sm in (*TARGETS, 120) for cast, way in (
        ("tensor", "one"), ("tensor", "both"), ("tensor-e5m2", "both"), ("row", "both"), ("int8-row", "both"),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("cast", "way", "sm"), quick([("tensor", "one", 90), ("row", "both", 90)], FILLING)
)
def test_a_program_of_a_smaller_grid_has_a_multiprocessor(cast, way, sm, monkeypatch):
    """1,024 threads of at most 64 registers, with the same loads of 16 bytes."""
    monkeypatch.setitem(TARGETS, 120, (12, 0))
    [default] = [each for each in kernels(cast, way, sm) if each.name == "amax_and_cast"]
    monkeypatch.setattr(grids, "_FREE", {None: 8})
    [found] = [each for each in kernels(cast, way, sm) if each.name == "amax_and_cast"]
    check_all_run_at_once(found)
    assert found.spills == 0 and found.usage["WARPS"] == 32, found.usage
    loads = [each.ptx.count("ld.global.v4") for each in (found, default)]
    assert loads[0] == loads[1] > 0


@pytest.mark.parametrize("way", ["delayed", "both-delayed"])
def test_a_delayed_cast_loads_the_next_piece_before_it_stores_this_one(way):
    """In the loop of its PTX: all loads, then all stores, and no fence, which would wait for the stores."""
    [found] = kernels("tensor", way, 90)
    assert found.name == "both_delayed" and found.usage["REG"] <= 64
    labels = {each[1]: each.start() for each in re.finditer(r"^(\$L\w+):", found.ptx, re.M)}
    loops = [
        found.ptx[labels[each[1]] : each.start()]
        for each in re.finditer(r"bra(?:\.uni)? \t(\$L\w+);", found.ptx)
        if labels[each[1]] < each.start()
    ]
    hot = next(each for each in loops if "st.global" in each)
    names = re.findall(r"(ld\.global|st\.global|atom\.global|red\.global)", hot)
    pieces = 4 if way == "delayed" else 2
    assert names == ["ld.global"] * pieces + ["st.global"] * 2, names


def test_packed_codes_leave_in_runs():
    """Eight bytes at a time, which Triton sees only if it knows what divides the place of a byte."""
    casting = next(each for each in kernels("int4", "one", 90) if each.name == "cast_both")
    assert not any(name.startswith("st.global.b8") for name in casting.instructions())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cast", ["tensor", "row", "vector", "mx"])
@pytest.mark.parametrize("columns", [4096, 16384, 4097])
def test_other_inputs_compile_without_spills(cast, columns, dtype):
    # Bytes of a thread: Triton 3.6 spills 16 where the columns are no multiple of 16.
    allowed = 16 if BEFORE_39 and (cast, columns) == ("vector", 4097) else 0
    for each in kernels(cast, "one", 90, columns, dtype):
        assert each.spills <= allowed, f"{each.name}: {each.usage}"


@pytest.mark.parametrize(
    ("order", "dtype", "sm"),
    quick([(32, torch.bfloat16, 90)], [(32, torch.bfloat16, 90), (64, torch.float32, 80)]),
)
def test_the_rotation_uses_tensor_cores(order, dtype, sm):
    """Of 16-bit numbers, in float32; float32 as three of them. No spills."""
    x, hadamard = torch.empty(512, 4096, dtype=dtype), Hadamard(block=order)
    found = compiled(
        [encoding],
        sm,
        lambda: encoding.run_triton(
            x, hadamard, torch.ones(4096), torch.ones(1, 1), INT4, True, True
        ),
    )["rotate_and_encode"]
    assert found.spills == 0, found.usage
    assert any("mma" in name and "f32.bf16.bf16" in name for name in found.instructions())


EDEN = {
    "two levels": Cast(format=E2M1, tile=(1, 16), scale=E4M3_EDEN, rounding="eden", block=128),
    "two candidates": Cast(
        format=E2M1, tile=(1, 16), scale=E4M3_EDEN_FOUR_OVER_SIX, rounding="eden", block=128
    ),
    "one level": Cast(format=INT4, tile=(1, 128), rounding="eden", block=128),
}


@pytest.mark.parametrize(
    ("cast", "sm"),
    quick([("two candidates", 90)], [(cast, sm) for cast in EDEN for sm in TARGETS]),
)
def test_corrected_casts_compile_without_spills(cast, sm):
    """Their sums are float64, quotients exact."""
    key = Key((1, 2)) if EDEN[cast].draws else None
    x = torch.empty(512, 4096, dtype=torch.float32)
    found = compiled([casting], sm, lambda: casting.eden(x, EDEN[cast], None, key, None))
    assert set(found) == {"cast_eden", *(["amax"] if EDEN[cast].scale.two_level else [])}
    assert all(each.spills == 0 for each in found.values()), found
    names = set(found["cast_eden"].instructions())
    wide = sorted(each for each in names if each.endswith("f64"))
    assert "div.rn.f64" in wide and {"add.f64", "add.rn.f64"} & names, wide
    assert not any("div.full" in name for name in names)


# Casts under a rotation, with its block: those of nvfp4, and of mxfp4's gradients.
ROTATED = {
    "nv": (CASTS["nv"], 16),
    "nv-stochastic": (replace(CASTS["nv-stochastic"], headroom=1.0), 16),
    "mx-e2m1": (CASTS["mx-e2m1"], 32),
}


@pytest.mark.parametrize(
    ("cast", "sm"),
    quick([("nv-stochastic", 90)], [(cast, sm) for cast in ROTATED for sm in (*TARGETS, 120)]),
)
def test_rotated_casts_compile_without_spills(cast, sm, monkeypatch):
    """The butterflies are additions of whole registers: none is fused with a product."""
    monkeypatch.setitem(TARGETS, 120, (12, 0))
    how, block = ROTATED[cast]
    x, signs = torch.empty(512, 4096, dtype=torch.bfloat16), torch.ones(512)
    key = Key((1, 2)) if how.draws else None
    for beside in (False, True):
        for expand in (None, torch.bfloat16)[: 1 + (not beside)]:
            given = x.T, how, (block, signs, None), (key, key), expand, beside
            found = compiled([casting], sm, lambda given=given: casting.rotated(*given))
            assert set(found) == {
                "cast_rotated",
                *(["maxima_rotated"] if how.scale.two_level else []),
            }
            assert all(each.spills == 0 for each in found.values()), found
            assert not any("div.full" in name for name in found["cast_rotated"].instructions())


@pytest.mark.parametrize(("cast", "scales"), [("tensor", 1), ("row", 512)])
def test_a_given_amax_and_decoded_values_compile(cast, scales):
    """What a window or a caller brings, and what a GEMM without narrow units reads."""
    x, amax = torch.empty(512, 4096, dtype=torch.bfloat16), torch.ones(scales, 1)
    found = compiled(
        [casting], 90, lambda: casting.cast_pair(x, CASTS[cast], amax=amax, expand=torch.bfloat16)
    )
    assert found and all(each.spills == 0 for each in found.values())
    assert any("neg.f32" in each.instructions() for each in found.values()), (
        "0 - x, of Triton before 3.9, loses -0"
    )


def test_the_check_notices_a_spill_and_a_maximum_that_propagates_nan():
    """Control: a kernel that keeps too much, and the maximum that issue 11111 of triton miscompiled."""
    from tests.ops.triton import bad_kernels

    found = compiled([bad_kernels], 90, bad_kernels.run)
    assert found["hoard"].spills > 0
    assert any(".NaN" in name for name in found["largest"].instructions())
