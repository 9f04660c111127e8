"""Casts under torch.compile: opaque operators that call the kernels of eager mode.

    narrowgauge::cast           x, and x.T if requested, from one read
    narrowgauge::cast_delayed   the same by the scale of earlier steps, and the amax state, from one
                                read

Inductor would read x twice for both orientations, write codes of x.T in short runs, and round
quotients as its own options say. Under current scaling with one scale per tensor, the largest
magnitude stays in plain torch: Inductor fuses it into the loops that compute the tensor, so the
cast is its only extra read. If several layers cast one tensor, torch's CSE merges the calls.

On a CPU the C++ kernels cast integers by row so, and leave the codes of both in the memory order of x.

An operator takes a cast as strings and numbers (`ops.flat_cast`). Inductor fuses the definition
instead for devices without these kernels, stochastic rounding, decoded values, and formats that
cannot be encoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops.flat_cast import flatten_cast, is_flattenable, unflatten_cast
from narrowgauge.ops.quantize import definition, triton
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Spec, empty_scales
from narrowgauge.ops.registry import constant_while_compiling, device_facts, imported
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, CurrentScaling, DelayedScaling
from narrowgauge.scaling import WHOLE

_PAIR = "narrowgauge.ops.quantize.pair"
Four = tuple[Tensor, Tensor, Tensor, Tensor]  # amax in use, codes of x, scale, codes of x.T
Both = tuple[QTensor, QTensor | None, Tensor | None]  # x, x.T, amax of delayed scaling


def fits(x: Tensor, cast: Cast, noise: Any = None, expand: torch.dtype | None = None) -> bool:
    """Return True if the operators can cast such a tensor on a device with kernels for it."""
    if (
        noise is not None
        or expand is not None
        or cast.rounding != "nearest"
        or not is_flattenable(cast)
    ):
        return False
    return isinstance(cast.calibrate, CurrentScaling | DelayedScaling) and x.numel() > 0


def is_odd(x: Tensor) -> bool:
    """Return True if the number of columns is odd, as a constant of the trace.

    Dynamo guards it where that number is dynamic. No kernel of a CPU needs it.
    """
    if x.device.type == "cpu":
        return False
    return True if x.shape[1] % 2 else False  # noqa: SIM210  bool() would pass on a symbol


def takes(x: Tensor, cast: Cast, noise: Any = None, expand: torch.dtype | None = None) -> bool:
    """Return True if `quantize` casts such a tensor by an operator.

    It does if eager mode casts it by a kernel that an operator may call.
    """
    if not fits(x, cast, noise, expand):
        return False
    return _is_by_kernel(x.device.type, x.device.index, x.dtype, is_odd(x), *flatten_cast(cast))


@constant_while_compiling
def _is_by_kernel(
    device: str, index: int | None, dtype: torch.dtype, is_odd: bool, *words: Any
) -> bool:
    """Choose the kernel outside of the trace, which may run its self-check on the device."""
    from narrowgauge.ops.quantize import KERNELS

    cast = unflatten_cast(*words)
    # The choice depends on the parity of the columns only, so a constant shape avoids
    # recompilation.
    spec = Spec(
        device_facts(device, index),
        dtype,
        (2, 4 - is_odd),
        cast,
        amax=cast.is_per_tensor,
        in_operator=True,
    )
    return KERNELS.choose(spec).kernel.name != "reference"


def quantize(
    x: Tensor, cast: Cast, amax: Tensor | None, cols: bool = False
) -> tuple[QTensor, QTensor | None]:
    """Cast x [outer, inner], and x.T if `cols`, by the operator; `takes` must be True.

    amax  [1, 1] for tensors with one scale, or None
    """
    if amax is None and cast.is_per_tensor:
        amax = definition.tile_amax(x, (WHOLE, WHOLE))
    parts = torch.ops.narrowgauge.cast(x, amax, *_given(cast), cols)
    return _taken_apart(x, cast, parts, cols)


def delayed(x: Tensor, cast: Cast, state: Tensor, records: bool, cols: bool) -> Both:
    """Cast by delayed scaling. Returns the casts and the amax in use [1, 1].

    state    [3] amax state
    records  False leaves the state unchanged
    """
    amax, data, scale, turned = torch.ops.narrowgauge.cast_delayed(
        x, state, *_given(cast), records, cols
    )
    return (*_taken_apart(x, cast, [data, scale, turned], cols), amax)


def _given(cast: Cast) -> tuple[str, list[int], str, float]:
    format, tile, rule, headroom = flatten_cast(cast)
    return format, list(tile), rule, headroom


def _parts(rows: QTensor, cols: QTensor | None) -> list[Tensor]:
    """Return the tensors of both casts: codes, scales and the shared factor.

    The outputs of an operator must not share memory, so tensors that x.T has in common with x
    appear once.
    """
    parts = [rows.data, rows.scale]
    if rows.global_scale is not None:
        parts.append(rows.global_scale)
    if cols is not None:
        parts.append(cols.data)
        if not cols.cast.is_per_tensor:
            parts.append(cols.scale)
    return parts


def _taken_apart(
    x: Tensor, cast: Cast, parts: list[Tensor], cols: bool
) -> tuple[QTensor, QTensor | None]:
    """Invert `_parts`."""
    left = list(parts)
    data, scale = left.pop(0), left.pop(0)
    shared = left.pop(0) if cast.has_global_scale else None
    rows = QTensor(
        data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=shared, checked=True
    )
    if not cols:
        return rows, None
    data = left.pop(0)
    scale = scale if cast.is_per_tensor else left.pop(0)
    return rows, QTensor(
        data=data, scale=scale, cast=cast, inner=x.shape[0], global_scale=shared, checked=True
    )


# --- the operators: kernels on CUDA, C++ or the definition on a CPU


# torch.library.triton_op was not taken: AOTAutograd decomposes it before CSE, so q, k and v would
# cast their input three times (torch 2.11 and 2.13). The price of an opaque operator: it allocates
# its outputs, and the host calls Triton's launcher.
def _by_kernels(
    x: Tensor,
    amax: Tensor | None,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    cols: bool,
) -> list[Tensor]:
    if x.numel() == 0:  # nothing to launch
        return _by_definition(x, amax, format, tile, rule, headroom, cols)
    return _parts(
        *triton.both(x, unflatten_cast(format, (tile[0], tile[1]), rule, headroom), cols, amax)
    )


def _on_cpu(
    x: Tensor,
    amax: Tensor | None,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    cols: bool,
) -> list[Tensor]:
    if amax is None and x.numel() > 0:
        cast = unflatten_cast(format, (tile[0], tile[1]), rule, headroom)
        made = imported(_PAIR, "run_in_operator")(x, cast, cols)
        if made is not None:
            return _parts(*made)
    return _by_definition(x, amax, format, tile, rule, headroom, cols)


def _empty_codes(x: Tensor, cast: Cast) -> Tensor:
    """Allocate codes of x on a CPU: in the memory order of x, but row-major if two share a byte."""
    per_byte = cast.format.codes_per_byte
    if per_byte > 1:
        return x.new_empty((x.shape[0], -(-x.shape[1] // per_byte)), dtype=torch.uint8)
    if x.stride(0) < x.stride(1):
        return x.new_empty((x.shape[1], x.shape[0]), dtype=cast.format.storage).T
    return x.new_empty((x.shape[0], x.shape[1]), dtype=cast.format.storage)


def _by_definition(
    x: Tensor,
    amax: Tensor | None,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    cols: bool,
) -> list[Tensor]:
    cast = unflatten_cast(format, (tile[0], tile[1]), rule, headroom)
    laid = []
    for each in (x, x.T) if cols else (x,):
        q = definition.quantize(each, cast, amax, None, None)
        data = _empty_codes(each, cast).copy_(q.data)
        scale = empty_scales(q.shape, cast, x.device).copy_(q.scale)
        laid.append(replace(q, data=data, scale=scale, checked=True))
    # No two results may share memory.
    parts = _parts(laid[0], laid[1] if cols else None)
    return [part if part.ndim else part.clone() for part in parts]


def _delayed_by_kernels(
    x: Tensor,
    state: Tensor,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    records: bool,
    cols: bool,
) -> Four:
    if x.numel() == 0:
        return _delayed_by_definition(x, state, format, tile, rule, headroom, records, cols)
    cast = unflatten_cast(format, (tile[0], tile[1]), rule, headroom)
    rows, columns, amax = triton.pair(x, cast, state, records, cols, (None, None))
    return _four(amax, _parts(rows, columns))


def _delayed_by_definition(
    x: Tensor,
    state: Tensor,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    records: bool,
    cols: bool,
) -> Four:
    amax = update_amax(state, definition.tile_amax(x, (WHOLE, WHOLE)), records=records)
    return _four(amax.clone(), _by_definition(x, amax, format, tile, rule, headroom, cols))


def _four(amax: Tensor, parts: list[Tensor]) -> Four:
    """Return the outputs of `cast_delayed`; an empty tensor stands for missing codes of x.T.

    An operator that writes to an argument may not return a list: functionalization takes the list
    for an alias.
    """
    data, scale, *turned = parts
    return amax, data, scale, turned[0] if turned else data.new_empty(0)


def _fake(
    x: Tensor,
    amax: Tensor | None,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    cols: bool,
) -> list[Tensor]:
    cast = unflatten_cast(format, (tile[0], tile[1]), rule, headroom)
    if x.device.type == "cuda":  # the launcher decides the memory layout of the outputs
        return _parts(triton.empty(x, cast), triton.empty(x.T, cast) if cols else None)

    def made(x: Tensor) -> QTensor:
        data = _empty_codes(x, cast)
        scale = empty_scales((x.shape[0], x.shape[1]), cast, x.device)
        shared = x.new_empty((), dtype=torch.float32) if cast.has_global_scale else None
        return QTensor(
            data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=shared, checked=True
        )

    return _parts(made(x), made(x.T) if cols else None)


def _fake_delayed(
    x: Tensor,
    state: Tensor,
    format: str,
    tile: list[int],
    rule: str,
    headroom: float,
    records: bool,
    cols: bool,
) -> Four:
    return _four(
        x.new_empty((1, 1), dtype=torch.float32), _fake(x, None, format, tile, rule, headroom, cols)
    )


_WORDS = "str format, int[] tile, str rule, float headroom"
torch.library.define(
    "narrowgauge::cast", f"(Tensor x, Tensor? amax, {_WORDS}, bool cols) -> Tensor[]"
)
torch.library.define(
    "narrowgauge::cast_delayed",
    f"(Tensor x, Tensor(a!) state, {_WORDS}, bool records, bool cols) -> (Tensor, Tensor, Tensor, Tensor)",
)
for _name, _kernels, _defined, _shapes in (
    ("narrowgauge::cast", _by_kernels, _by_definition, _fake),
    ("narrowgauge::cast_delayed", _delayed_by_kernels, _delayed_by_definition, _fake_delayed),
):
    torch.library.impl(_name, "CUDA", _kernels)
    torch.library.impl(_name, "CPU", _on_cpu if _kernels is _by_kernels else _defined)
    torch.library.register_fake(_name, _shapes)
