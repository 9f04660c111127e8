"""What a kernel of quantize is chosen by: the cast, and everything about the arguments but their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from narrowgauge.ops.registry import Device, device_of
from narrowgauge.recipe import Cast
from narrowgauge.scaling import scale_shape

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key


def empty_scales(shape: tuple[int, int], cast: Cast, device: torch.device) -> Tensor:
    """[ceil(outer / tile[0]), ceil(inner / tile[1])] float32, to be written.

    As cuBLAS reads them: of tiles of 1 x 128 neighbours in memory are of neighbouring rows.
    """
    high, wide = scale_shape(shape, cast.tile)
    if cast.tile == (1, 128):
        return torch.empty(wide, high, dtype=torch.float32, device=device).T
    return torch.empty(high, wide, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Spec:
    """See the module.

    noise   how it is given: "key" (numbers not in memory yet), "tensor", or None
    amax    whether it is given
    expand  the dtype of decoded values to be kept instead of codes
    cols    (quantize_pair) whether x.T is wanted too
    delayed (quantize_pair) whether the amax comes from a window
    in_operator  whether compiled code calls the kernel as an operator (`ops.quantize.compiled`)
    """

    device: Device
    dtype: torch.dtype
    shape: tuple[int, int]
    cast: Cast
    noise: Literal["key", "tensor"] | None = None
    amax: bool = False
    expand: torch.dtype | None = None
    cols: bool = False
    delayed: bool = False
    in_operator: bool = False

    @classmethod
    def of(
        cls,
        x: Tensor,
        cast: Cast,
        amax: Tensor | None = None,
        noise: Tensor | Key | None = None,
        expand: torch.dtype | None = None,
        **of_pair: bool,
    ) -> Spec:
        given = noise if isinstance(noise, Tensor) else None
        kind: Literal["key", "tensor"] | None = None if noise is None else "key" if given is None else "tensor"
        device, shape = device_of(x, amax, given), (x.shape[0], x.shape[1])
        return cls(device, x.dtype, shape, cast, kind, amax is not None, expand, **of_pair)
