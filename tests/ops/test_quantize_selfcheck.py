"""Kernels that quantize are checked before they compute: right ones pass, wrong ones are refused in words (exact).

The device is the CPU; wrong kernels are the reference with one mistake.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.errors import BackendError
from narrowgauge.formats import E2M1, E4M3, E5M2, INT4
from narrowgauge.ops import selfcheck
from narrowgauge.ops.hadamard import EncodedRows, encoding
from narrowgauge.ops.quantize import definition, tile_amax
from narrowgauge.ops.quantize import selfcheck as casting
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.pair import reference_pair
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import Device, Kernel, Registry
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import E8M0_CEIL, POW2
from tests.raising import raises

CPU, HERE = torch.device("cpu"), Device("cpu", index=0)
CASTS = (
    Cast(format=E4M3),
    Cast(format=E4M3, tile=(1, WHOLE)),
    Cast(format=E4M3, tile=(1, 128), scale=POW2),
    Cast(format=E4M3, tile=(128, 128), scale=POW2),
    Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL, rounding="stochastic", headroom=4 / 3),
    Cast(format=E5M2, rounding="stochastic"),
)


def spec(cast: Cast, **changes) -> Spec:
    noise = "key" if cast.draws else None
    return replace(Spec(HERE, torch.bfloat16, (64, 64), cast, noise), **changes)


def examine(run, of: Spec, op: str = "quantize") -> selfcheck.CheckResult:
    check = casting.CHECKS[op]
    return selfcheck.examine("quantize", run, check, check.kind(of), CPU)


def right(x, cast, amax, key, expand):
    return definition.quantize(
        x, cast, amax, None if key is None else key.uniform(tuple(x.shape)), expand
    )


def right_both(x, cast, amax_state, records, cols, keys):
    return right(x, cast, None, keys[0], None), right(x.T, cast, None, keys[1], None), None


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_the_reference_passes(cast):
    assert examine(right, spec(cast)).reason is None
    assert examine(right_both, spec(cast), "quantize_pair").reason is None


def test_other_ways_of_calling_pass():
    cast = Cast(format=E4M3)
    assert examine(right, spec(cast, amax=True)).reason is None
    assert examine(right, spec(cast, expand=torch.bfloat16)).reason is None
    assert examine(right, spec(cast, dtype=torch.float16)).reason is None
    for cols in (False, True):
        assert (
            examine(reference_pair, spec(cast, delayed=True, cols=cols), "quantize_pair").reason
            is None
        )


def one_code_off(x, cast, amax, key, expand):
    q = right(x, cast, amax, key, expand)
    q.data.view(torch.uint8)[100, 7] ^= 1
    return q


def next_scale(x, cast, amax, key, expand):
    q = right(x, cast, amax, key, expand)
    return replace(q, scale=q.scale.roll(1, 0))


def hides_nan(x, cast, amax, key, expand):
    return right(x.nan_to_num(0.0, 1.0, -1.0), cast, amax, key, expand)


def forgets_the_transpose(x, cast, amax, key, expand):
    """Reads the memory in its order, whatever the strides are."""
    return right(
        x if x.stride(1) == 1 else x.T.contiguous().reshape(x.shape), cast, amax, key, expand
    )


def other_noise(x, cast, amax, key, expand):
    return right(x, cast, amax, Key((key.words[0] + 1, key.words[1])), expand)


@pytest.mark.parametrize(
    ("run", "cast", "words"),
    [
        (one_code_off, CASTS[0], r"its codes is wrong on cpu in 1 of 39168 elements, first at \[100, 7\]: bits 0x"),
        (next_scale, CASTS[1], "its scale is wrong on cpu in "),
        (hides_nan, CASTS[2], "NaN within"),
        (forgets_the_transpose, CASTS[3], "x.T "),
        (other_noise, CASTS[5], "its codes is wrong on cpu in "),
        (lambda *call: 1 / 0, CASTS[0], "it failed when it was tried on cpu: ZeroDivisionError: division by zero"),
        (lambda x, *call: right(x[:-1], *call), CASTS[1], r"its scale is float32 \[143, 1\] on cpu, not float32 \[144, 1\]"),
    ],
    ids=["a code", "a scale", "nan", "strides", "noise", "raises", "shape"],
)  # fmt: skip
def test_wrong_kernels_are_found(run, cast, words):
    result = examine(run, spec(cast))
    assert result.worst == float("inf")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(result.reason)


def never_records(x, cast, live, *rest):
    amax = update_amax(live, tile_amax(x, (WHOLE, WHOLE)), records=False)
    return right(x, cast, amax, None, None), None, amax


def ignores_the_window(x, cast, live, *rest):
    update_amax(live, tile_amax(x, (WHOLE, WHOLE)))
    amax = tile_amax(x, (WHOLE, WHOLE))
    return right(x, cast, amax, None, None), None, amax


@pytest.mark.parametrize(
    ("run", "words"), [(never_records, "its window"), (ignores_the_window, "its amax")]
)
def test_a_window_that_is_kept_wrongly_is_found(run, words):
    reason = examine(run, spec(Cast(format=E4M3), delayed=True), "quantize_pair").reason
    assert reason is not None and reason.startswith(words)


def test_a_second_orientation_with_the_first_ones_scales_is_found():
    def run(*call):
        rows, cols, amax = right_both(*call)
        return rows, replace(cols, scale=cols.scale.flip(0)), amax

    reason = examine(run, spec(CASTS[1]), "quantize_pair").reason
    assert reason is not None and "scale of x.T" in reason


# --- the registry --------------------------------------------------------------------------------------------------------------


def registry_of(run) -> Registry[Spec]:
    registry: Registry[Spec] = Registry("quantize")
    registry.register(
        Kernel("fast", lambda spec: None, run, check=lambda: casting.CHECKS["quantize"])
    )
    registry.register(Kernel("reference", lambda spec: None, right))
    return registry


def test_a_check_is_made_once_for_a_kind_of_call(no_results):
    calls = []

    def run(*call):
        calls.append(call)
        return right(*call)

    registry = registry_of(run)
    for shape in ((64, 64), (3, 5), (64, 64)):
        assert registry.choose(spec(CASTS[0], shape=shape)).kernel.name == "fast"
    assert len(calls) == 8, (
        "as it lies and transposed, whole and its last rows, with NaN and without"
    )
    registry.choose(spec(CASTS[0], dtype=torch.float32))
    assert len(calls) == 16
    registry.choose(spec(CASTS[0], device=Device("cuda", (9, 0))))
    assert len(calls) == 16, "a device that is not here asks for no check"


def test_a_refused_kernel_is_named_and_replaced(no_results):
    registry = registry_of(one_code_off)
    with pytest.warns(
        RuntimeWarning,
        match="quantize: the fast kernel is not used, .* because its codes is wrong on cpu",
    ):
        choice = registry.choose(spec(CASTS[0]))
    assert (
        choice.kernel.name == "reference"
        and "its codes is wrong on cpu" in choice.refusals[0][1].text
    )
    with raises(BackendError, "kernel.refused", "quantize", "fast"):
        registry.choose(spec(CASTS[0]), "fast")


def test_no_check_while_a_graph_is_captured(no_results, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(BackendError, "kernel.unchecked", "fast", "cuda:0"):
        registry_of(right).choose(spec(CASTS[0], device=Device("cuda", (9, 0), index=0)))


# --- rotation ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rotation_passes(order, dtype):
    found = selfcheck.examine(
        "rotate", encoding.reference_rotate_and_encode, encoding.CHECK, (order, INT4, dtype), CPU
    )
    assert found.reason is None and 0.9 < found.worst < 1


def changed(**parts):
    def run(x, hadamard, signs, *rest):
        found = encoding.reference_rotate_and_encode(x, hadamard, signs, *rest)
        return EncodedRows(
            **{
                **found._asdict(),
                **{name: change(getattr(found, name)) for name, change in parts.items()},
            }
        )

    return run


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (
            lambda x, h, signs, *rest: encoding.reference_rotate_and_encode(
                x, h, -signs.abs(), *rest
            ),
            "its codes is wrong on cpu",
        ),
        (changed(codes=lambda codes: codes.roll(16, 1)), "its codes is wrong on cpu"),
        (changed(bits=lambda bits: bits.flip(1)), "its bits of what was not clipped is wrong"),
        (changed(packed=lambda pairs: (pairs >> 4) | (pairs << 4)), "its packed codes is wrong"),
        (
            lambda x, *rest: encoding.reference_rotate_and_encode(x.nan_to_num(), *rest),
            "its codes is wrong on cpu: inf times",
        ),
    ],
    ids=["signs", "blocks", "bits", "nibbles", "nan"],
)
def test_wrong_rotations_are_found(run, words):
    found = selfcheck.examine("rotate", run, encoding.CHECK, (32, INT4, torch.bfloat16), CPU)
    assert found.reason is not None and found.reason.startswith(words) and found.worst > 1
