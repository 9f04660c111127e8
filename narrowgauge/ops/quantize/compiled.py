"""Casts while torch.compile traces: operators that the compiler keeps whole, each a call of the kernels that eager mode takes.

    narrowgauge::cast           x, and x.T if it is wanted too, from one read
    narrowgauge::cast_delayed   the same by the scale of earlier steps, and the window's state, from one read

Inductor would read x twice for both orientations, write codes of x.T in short runs, and round quotients as its own options say. What it
does better is left to it: the largest magnitude of a tensor with one scale (current scaling) is taken in plain torch, in the loops that
compute the tensor, so that the cast is its only read. Casts of one tensor by several layers are one call, which torch sees by itself.

Why operators without a look inside, and not torch.library.triton_op: that one is taken apart before torch looks for equal
computations, and q, k and v cast their input three times (torch 2.11 and 2.13). The price: an operator allocates what it returns, and
the host calls it as in eager mode.

An operator is handed no objects but words for them (`ops.cast_words`). Left to the definition, which Inductor fuses: devices
without these kernels, random rounding, values that are kept decoded, formats that have no words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops.cast_words import as_words, has_words, of_words
from narrowgauge.ops.quantize import definition, triton
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Spec, empty_scales
from narrowgauge.ops.registry import constant_while_compiling, device_facts
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current, Window
from narrowgauge.scaling import WHOLE

Four = tuple[Tensor, Tensor, Tensor, Tensor]  # the amax in use, codes of x, the scale, codes of x.T
Both = tuple[QTensor, QTensor | None, Tensor | None]  # of x, of x.T, the amax of a window


def fits(x: Tensor, cast: Cast, noise: Any = None, expand: torch.dtype | None = None) -> bool:
    """Whether the operators cast such a tensor where there are kernels for it."""
    if noise is not None or expand is not None or cast.rounding != "nearest" or not has_words(cast):
        return False
    return isinstance(cast.calibrate, Current | Window) and x.numel() > 0


def takes(x: Tensor, cast: Cast, noise: Any = None, expand: torch.dtype | None = None) -> bool:
    """Whether eager mode casts such a tensor by a Triton kernel, and so `quantize` by an operator."""
    if not fits(x, cast, noise, expand):
        return False
    return _is_by_triton(x.device.type, x.device.index, x.dtype, x.shape[1] % 2 == 1, *as_words(cast))


@constant_while_compiling
def _is_by_triton(device: str, index: int | None, dtype: torch.dtype, is_odd: bool, *words: Any) -> bool:
    """Asks the registry, outside of what is traced: there the kernel is examined on the device."""
    from narrowgauge.ops.quantize import KERNELS

    cast = of_words(*words)
    spec = Spec(device_facts(device, index), dtype, (2, 4 - is_odd), cast, amax=cast.is_per_tensor, in_operator=True)
    return KERNELS.choose(spec).kernel.name == "triton"


def quantize(x: Tensor, cast: Cast, amax: Tensor | None, cols: bool = False) -> tuple[QTensor, QTensor | None]:
    """x [outer, inner], and with cols x.T, of which `takes` is true. amax: [1, 1], of tensors with one scale."""
    if amax is None and cast.is_per_tensor:
        amax = definition.tile_amax(x, (WHOLE, WHOLE))
    parts = torch.ops.narrowgauge.cast(x, amax, *_given(cast), cols)
    return _taken_apart(x, cast, parts, cols)


def delayed(x: Tensor, cast: Cast, state: Tensor, records: bool, cols: bool) -> Both:
    """The same by a window, whose state [3] it notes x in if it records; and the amax in use, [1, 1]."""
    amax, data, scale, turned = torch.ops.narrowgauge.cast_delayed(x, state, *_given(cast), records, cols)
    return (*_taken_apart(x, cast, [data, scale, turned], cols), amax)


def _given(cast: Cast) -> tuple[str, list[int], str, float]:
    format, tile, rule, headroom = as_words(cast)
    return format, list(tile), rule, headroom


def _parts(rows: QTensor, cols: QTensor | None) -> list[Tensor]:
    """Tensors that share no memory: codes, scales and the factor of all; of x.T those that are not those of x."""
    parts = [rows.data, rows.scale]
    if rows.global_scale is not None:
        parts.append(rows.global_scale)
    if cols is not None:
        parts.append(cols.data)
        if not cols.cast.is_per_tensor:
            parts.append(cols.scale)
    return parts


def _taken_apart(x: Tensor, cast: Cast, parts: list[Tensor], cols: bool) -> tuple[QTensor, QTensor | None]:
    """What `_parts` put together."""
    left = list(parts)
    data, scale = left.pop(0), left.pop(0)
    shared = left.pop(0) if cast.has_global_scale else None
    rows = QTensor(data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=shared, checked=True)
    if not cols:
        return rows, None
    data = left.pop(0)
    scale = scale if cast.is_per_tensor else left.pop(0)
    return rows, QTensor(data=data, scale=scale, cast=cast, inner=x.shape[0], global_scale=shared, checked=True)


# --- the operators: by kernels on CUDA, by the definition elsewhere


def _by_kernels(
    x: Tensor, amax: Tensor | None, format: str, tile: list[int], rule: str, headroom: float, cols: bool
) -> list[Tensor]:
    if x.numel() == 0:  # nothing to launch
        return _by_definition(x, amax, format, tile, rule, headroom, cols)
    return _parts(*triton.both(x, of_words(format, (tile[0], tile[1]), rule, headroom), cols, amax))


def _by_definition(
    x: Tensor, amax: Tensor | None, format: str, tile: list[int], rule: str, headroom: float, cols: bool
) -> list[Tensor]:
    cast = of_words(format, (tile[0], tile[1]), rule, headroom)
    made = [definition.quantize(each, cast, amax, None, None) for each in ((x, x.T) if cols else (x,))]
    laid = [replace(q, scale=empty_scales(q.shape, cast, x.device).copy_(q.scale), checked=True) for q in made]
    return _dense(_parts(laid[0], laid[1] if cols else None))


def _delayed_by_kernels(
    x: Tensor, state: Tensor, format: str, tile: list[int], rule: str, headroom: float, records: bool, cols: bool
) -> Four:
    if x.numel() == 0:
        return _delayed_by_definition(x, state, format, tile, rule, headroom, records, cols)
    cast = of_words(format, (tile[0], tile[1]), rule, headroom)
    rows, columns, amax = triton.pair(x, cast, state, records, cols, (None, None))
    return _four(amax, _parts(rows, columns))


def _delayed_by_definition(
    x: Tensor, state: Tensor, format: str, tile: list[int], rule: str, headroom: float, records: bool, cols: bool
) -> Four:
    amax = update_amax(state, definition.tile_amax(x, (WHOLE, WHOLE)), records=records)
    return _four(amax.clone(), _by_definition(x, amax, format, tile, rule, headroom, cols))


def _four(amax: Tensor, parts: list[Tensor]) -> Four:
    """An operator that writes to an argument may return no list; codes of x.T that are not wanted are an empty tensor."""
    data, scale, *turned = parts
    return amax, data, scale, turned[0] if turned else data.new_empty(0)


def _dense(parts: list[Tensor]) -> list[Tensor]:
    """Each in memory of its own, codes row by row, as kernels write them; the order of scales stays."""
    orders = [torch.preserve_format if part.dtype == torch.float32 else torch.contiguous_format for part in parts]
    return [part.clone(memory_format=order) for part, order in zip(parts, orders, strict=True)]


def _fake(
    x: Tensor, amax: Tensor | None, format: str, tile: list[int], rule: str, headroom: float, cols: bool
) -> list[Tensor]:
    cast = of_words(format, (tile[0], tile[1]), rule, headroom)
    if x.device.type == "cuda":  # who launches the kernels says how what they write lies in memory
        return _parts(triton.empty(x, cast), triton.empty(x.T, cast) if cols else None)

    def made(x: Tensor) -> QTensor:
        per_byte = cast.format.codes_per_byte
        dtype = torch.uint8 if per_byte > 1 else cast.format.storage
        data = x.new_empty((x.shape[0], -(-x.shape[1] // per_byte)), dtype=dtype)
        scale = empty_scales((x.shape[0], x.shape[1]), cast, x.device)
        shared = x.new_empty((), dtype=torch.float32) if cast.has_global_scale else None
        return QTensor(data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=shared, checked=True)

    return _parts(made(x), made(x.T) if cols else None)


def _fake_delayed(
    x: Tensor, state: Tensor, format: str, tile: list[int], rule: str, headroom: float, records: bool, cols: bool
) -> Four:
    return _four(x.new_empty((1, 1), dtype=torch.float32), _fake(x, None, format, tile, rule, headroom, cols))


_WORDS = "str format, int[] tile, str rule, float headroom"
torch.library.define("narrowgauge::cast", f"(Tensor x, Tensor? amax, {_WORDS}, bool cols) -> Tensor[]")
torch.library.define(
    "narrowgauge::cast_delayed",
    f"(Tensor x, Tensor(a!) state, {_WORDS}, bool records, bool cols) -> (Tensor, Tensor, Tensor, Tensor)",
)
for _name, _kernels, _defined, _shapes in (
    ("narrowgauge::cast", _by_kernels, _by_definition, _fake),
    ("narrowgauge::cast_delayed", _delayed_by_kernels, _delayed_by_definition, _fake_delayed),
):
    torch.library.impl(_name, "CUDA", _kernels)
    torch.library.impl(_name, "CPU", _defined)
    torch.library.register_fake(_name, _shapes)
