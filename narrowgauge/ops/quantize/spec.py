"""Selection of a quantize kernel by the cast and by properties of the arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from narrowgauge.ops.registry import Device, device_facts, device_of
from narrowgauge.scaling import SCALE_COLUMNS, SCALE_ROWS, scale_shape, swizzled_length

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast


def empty_scales(shape: tuple[int, int], cast: Cast, device: torch.device) -> Tensor:
    """Allocate scales [ceil(outer / tile[0]), ceil(inner / tile[1])] float32.

    For tiles of 1 x 128 the layout is the one that cuBLAS reads: scales of neighbouring rows are
    adjacent.
    """
    high, wide = scale_shape(shape, cast.tile)
    if cast.tile == (1, 128):
        return torch.empty(wide, high, dtype=torch.float32, device=device).T
    return torch.empty(high, wide, dtype=torch.float32, device=device)


def empty_units(shape: tuple[int, int], cast: Cast, device: torch.device) -> Tensor | None:
    """Allocate the scales of `QTensor.units`, uint8, or None where a product reads others.

    Padding of ragged shapes is zeroed, by a launch of its own.
    """
    if cast.mx_kind is None or device_facts(device.type, device.index).capability < (10, 0):
        return None
    columns = scale_shape(shape, cast.tile)[1]
    is_whole = not (shape[0] % SCALE_ROWS or columns % SCALE_COLUMNS)
    made = torch.empty if is_whole else torch.zeros
    return made(swizzled_length(shape[0], columns), dtype=torch.uint8, device=device)


class Turn(NamedTuple):
    """A rotation along the rows of x, in blocks, by signs of a first and of a second round. block 1: none."""

    block: int = 1
    signs: Tensor | None = None
    second: Tensor | None = None


# Noise of x and of x.T, of `quantize_pair`, and what it returns.
Two = tuple["Tensor | Key | None", "Tensor | Key | None"]
Pair = tuple["QTensor", "QTensor | None", "Tensor | None"]


@dataclass(frozen=True)
class Spec:
    """Properties of a call that decide which kernel is chosen.

    noise        form of the noise: "key" (not materialized), "tensor", or None
    amax         True if an amax is passed
    expand       dtype of decoded values to return instead of codes
    cols         (quantize_pair) True if x.T is quantized too
    delayed      (quantize_pair) True under delayed scaling
    in_operator  True if compiled code calls the kernel through an operator
                 (`ops.quantize.compiled`)
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
        **others: Any,
    ) -> Self:
        given = noise if isinstance(noise, Tensor) else None
        kind: Literal["key", "tensor"] | None = (
            None if noise is None else "key" if given is None else "tensor"
        )
        device, shape = device_of(x, amax, given), (x.shape[0], x.shape[1])
        return cls(device, x.dtype, shape, cast, kind, amax is not None, expand, **others)

    def with_keys(self) -> Self:
        """The same with noise that is no tensor, for a plan that is made before it is drawn."""
        return replace(self, noise="key")
