"""What the ops of `ops.norm_act` are asked for and what they give: a function, a cast that is wanted of it, both; and its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.quantize.pair import quantize_pair
from narrowgauge.ops.registry import Device, device_of
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

Name = Literal["rms-norm", "layer-norm", "swiglu", "gelu", "gelu-tanh"]
KINDS: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True)
class Kind:
    """One of the functions of `ops.norm_act`. eps: of the norms."""

    name: Name
    eps: float = 0.0

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
    """What a kernel is chosen by: everything but the numbers.

    dtypes   of the tensors
    shape    of y
    casts    the casts that are wanted, with whether y.T is too
    """

    kind: Kind
    device: Device
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, int]
    casts: tuple[tuple[Cast, bool], ...] = ()

    @classmethod
    def of(cls, kind: Kind, tensors: Sequence[Tensor], requests: Requests) -> NormActSpec:
        """tensors[0] [..., columns] in any number of axes."""
        x = tensors[0]
        return cls(
            kind, device_of(*tensors), tuple(each.dtype for each in tensors), (x.numel() // x.shape[-1], x.shape[-1]),
            tuple((each.cast, each.transposed) for each in requests if each is not None),
        )  # fmt: skip


def cast(y: Tensor, request: CastRequest | None) -> CastResult:
    """The definition of the cast: y with what `quantize` gives of it."""
    if request is None:
        return CastResult(y)
    if request.live is None:
        plain, amax = quantize(y, request.cast), None
    else:
        plain, _, amax = quantize_pair(y, request.cast, amax_state=request.live, records=request.records, cols=False)
    return CastResult(y, plain, quantize(y.T, request.cast, amax=amax) if request.transposed else None, amax)
