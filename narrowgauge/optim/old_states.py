"""Conversion of states saved in earlier forms (see `moments.FORM`) to the present form.

Form 2 stored "8bit" first moments as c |c| / 127^2 with c int8, and second moments as floats with 5
exponent and 3 mantissa bits. Form 3 stored second moments with a taper over 60 octaves. All have
the dtypes and shapes of their successors, so a distributed checkpoint can be resharded before the
conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim import moments, shards, states
from narrowgauge.optim.step import as_tiles, shape_of

if TYPE_CHECKING:
    from narrowgauge.optim.moments import Encoded, Moment
    from narrowgauge.optim.rules import Rule


def is_old(group: Mapping[str, Any]) -> bool:
    """Return True if a group was saved in an earlier form that can be converted.

    The first form of 4-bit states cannot be converted.
    """
    form = group.get("form", 1)
    return form in (2, 3) or (form < 2 and "4bit" not in str(group.get("states")))


def converted(state: Mapping[str, Any], group: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """Convert one parameter's state to the present form. `group` is the group as it was saved."""
    found, name = dict(state), group.get("states")
    changed = (moments.TAPERED8,) if group.get("form", 1) == 3 else (moments.E5M2, moments.TAPERED8)
    kept = states.named(name) if isinstance(name, str) and states.is_known(name) else None
    for moment, format in zip(
        rule.moments, (kept.first, kept.second) if kept else (), strict=False
    ):
        codes, scale = found.get(moment), found.get(f"{moment}_scale")
        if format not in changed or not isinstance(codes, Tensor) or not isinstance(scale, Tensor):
            continue
        sharded = shards.is_sharded(codes)
        if codes.dtype == format.dtype and sharded == shards.is_sharded(scale):
            own, own_scale = _converted(
                shards.local(codes), shards.local(scale), format, group.get("form", 1)
            )
            found[moment] = shards.wrapped(own, codes, codes.shape) if sharded else own
            found[f"{moment}_scale"] = (
                shards.wrapped(own_scale, scale, scale.shape) if sharded else own_scale
            )
    return found


def _converted(codes: Tensor, scale: Tensor, format: Moment, form: int) -> tuple[Tensor, Tensor]:
    """Convert codes of the parameter's shape and scales [rows, tiles] to the present form."""
    rows, columns = shape_of(codes)
    if not codes.numel() or scale.ndim != 2 or not scale.shape[1]:
        return codes, scale
    tiles, tile = scale.shape[1], 256 if -(-columns // 256) == scale.shape[1] else 128
    cut = as_tiles(codes.reshape(rows, columns), tiles, tile)
    read = _squares if format is moments.E5M2 else _taper_of_60_octaves if form == 3 else _e5m3
    x = read(cut, scale)
    if columns % tile:
        x[:, -1, columns % tile :] = 0.0
    # Loading rounds to nearest: the conversion is deterministic and happens once.
    noise = torch.full(x.shape, moments.NEAREST, dtype=torch.int32, device=x.device)
    found: Encoded = format.encode(x, noise)
    assert found.scale is not None
    return found.codes.flatten(1)[:, :columns].reshape(codes.shape).contiguous(), found.scale


def _squares(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.to(torch.float32)
    return code * code.abs() * (scale.to(torch.float32)[..., None] * (1 / 127.0**2))


def _e5m3(codes: Tensor, scale: Tensor) -> Tensor:
    share = ((codes.to(torch.int32) + 761) << 20).view(torch.float32)
    return torch.where(codes > 0, share, 0.0) * scale.to(torch.float32)[..., None]


def _taper_of_60_octaves(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode form 3: `moments.Tapered` with 16 codes per octave over 4 octaves instead of 3."""
    code, top = codes.to(torch.int32), ((127 + 25) << (23 - moments.TAPER_SHIFT)) + 255
    distance = (top - code << moments.TAPER_SHIFT).view(torch.float32).to(torch.int32)
    share = ((127 << 23) + (4 << 23) - distance).view(torch.float32)
    return torch.where(codes > 0, share, 0.0) * scale.to(torch.float32)[..., None]
