"""What the ops of `ops.norm_act` are asked for and what they give: a function, a cast that is wanted of it, both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from narrowgauge.ops.registry import Device, device_of
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

Name = Literal["rms-norm", "layer-norm", "swiglu", "gelu", "gelu-tanh"]
KINDS: tuple[Name, ...] = get_args(Name)
Statistics = tuple[Tensor | None, Tensor | None]


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
        return self.name in ("rms-norm", "layer-norm")


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


@dataclass(frozen=True)
class NormActSpec:
    """What a kernel is chosen by: everything but the numbers, and how many rows there are.

    dtypes   of the tensors
    columns  of y
    casts    the casts that are wanted, with whether y.T is too
    """

    kind: Kind
    device: Device
    dtypes: tuple[torch.dtype, ...]
    columns: int
    casts: tuple[tuple[Cast, bool], ...] = ()
    is_empty: bool = False

    @classmethod
    def of(cls, kind: Kind, tensors: Sequence[Tensor], requests: Requests) -> NormActSpec:
        """tensors[0] [..., columns] in any number of axes."""
        casts = tuple((each.cast, each.transposed) for each in requests if each is not None)
        dtypes = tuple(each.dtype for each in tensors)
        return cls(kind, device_of(*tensors), dtypes, tensors[0].shape[-1], casts, tensors[0].numel() == 0)
