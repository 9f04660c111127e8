"""What the ops of `ops.norm_act` are asked for and what they give: a function, a cast that is wanted of it, both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, INT8
from narrowgauge.ops.registry import Device, device_of
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import POW2

Norm = Literal["rms-norm", "gemma-norm", "layer-norm"]
Activation = Literal["gelu", "gelu-tanh", "silu", "relu", "relu2"]
Gated = Literal["swiglu", "geglu", "geglu-tanh", "reglu"]
Name = Literal[Norm, Gated, Activation]
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh", "reglu": "relu"}  # the function of the gate
KINDS: tuple[Name, ...] = get_args(Name)
Statistics = tuple[Tensor | None, Tensor | None]
# How inputs of activations are kept in 8 bits.
NARROW = {"fp8": Cast(format=E4M3, tile=(1, 128), scale=POW2), "int8": Cast(format=INT8, tile=(1, 128), scale=POW2)}


@dataclass(frozen=True)
class Kind:
    """One of the functions of `ops.norm_act`.

    eps   of the norms
    wide  of a norm with float32 weights in a 16-bit model: y has the type of x, and is rounded once; n is not
    """

    name: Name
    eps: float = 0.0
    wide: bool = False

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("-norm")

    @property
    def is_gated(self) -> bool:
        return self.name in GATED

    @property
    def activation(self) -> str:
        """Of x, or of the gate."""
        return GATED.get(self.name, self.name)


@dataclass(frozen=True, eq=False)
class CastRequest:
    """A cast of what is computed, y [rows, columns].

    live        [3] of the window by which y is cast (see `amax_state`), noted there if it `records`; None: by y itself
    transposed  whether y.T is wanted by the same cast as well
    """

    cast: Cast
    live: Tensor | None = None
    records: bool = True
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class CastResult:
    """y and its casts: of y, of y.T (codes in its own row-major order), and the amax [1, 1] that a window gave it."""

    value: Tensor
    plain: QTensor | None = None
    transposed: QTensor | None = None
    amax: Tensor | None = None


Requests = Sequence[CastRequest | None]


@dataclass(frozen=True, eq=False)
class Kept:
    """A tensor [rows, columns] of type `dtype` that is there as codes alone: of itself or, turned, of its transpose."""

    codes: QTensor
    dtype: torch.dtype
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outer, inner = self.codes.shape
        return (inner, outer) if self.turned else (outer, inner)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def to(self, device: str | torch.device) -> Kept:
        return replace(self, codes=self.codes.to(torch.device(device)))


Given = Tensor | Kept  # one of the tensors that a function has


@dataclass(frozen=True)
class NormActSpec:
    """What a kernel is chosen by: everything but the numbers, and how many rows there are.

    dtypes   of the tensors
    columns  of y
    casts    the casts that are wanted, with whether y.T is too
    kept     (cast, turned) of the first tensor if it is there as codes alone; None: it is not
    """

    kind: Kind
    device: Device
    dtypes: tuple[torch.dtype, ...]
    columns: int
    casts: tuple[tuple[Cast, bool], ...] = ()
    is_empty: bool = False
    kept: tuple[Cast, bool] | None = None

    @classmethod
    def of(cls, kind: Kind, tensors: Sequence[Given], requests: Requests) -> NormActSpec:
        """tensors[0] [..., columns] in any number of axes."""
        casts = tuple((each.cast, each.transposed) for each in requests if each is not None)
        dtypes, first = tuple(each.dtype for each in tensors), tensors[0]
        kept = (first.codes.cast, first.turned) if isinstance(first, Kept) else None
        device = device_of(*(each.codes.data if isinstance(each, Kept) else each for each in tensors))
        return cls(kind, device, dtypes, first.shape[-1], casts, first.numel() == 0, kept)
