"""Functions, cast requests and results of `ops.norm_act`, and the spec that selects a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, INT8
from narrowgauge.ops.registry import Device, device_of
from narrowgauge.recipe import Cast
from narrowgauge.scaling import POW2

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

Norm = Literal["rms-norm", "gemma-norm", "layer-norm"]
Activation = Literal["gelu", "gelu-tanh", "silu", "relu", "relu2"]
Gated = Literal["swiglu", "geglu", "geglu-tanh", "reglu"]
Name = Literal[Norm, Gated, Activation]
# Activation of the gate.
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh", "reglu": "relu"}
KINDS: tuple[Name, ...] = get_args(Name)
Statistics = tuple[Tensor | None, Tensor | None]
# Casts by which the inputs of activations are saved for backward in 8 bits.
NARROW = {
    "fp8": Cast(format=E4M3, tile=(1, 128), scale=POW2),
    "int8": Cast(format=INT8, tile=(1, 128), scale=POW2),
}


@dataclass(frozen=True)
class Kind:
    """One of the functions of `ops.norm_act`.

    eps   epsilon of the norms
    wide  True for a norm with float32 weights in a 16-bit model: y has x's dtype and is rounded
          once, n is not rounded
    out   dtype to which y is rounded at last, e.g. autocast's; None: the function's own
    """

    name: Name
    eps: float = 0.0
    wide: bool = False
    out: torch.dtype | None = None

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("-norm")

    @property
    def is_gated(self) -> bool:
        return self.name in GATED

    @property
    def activation(self) -> str:
        """Activation of x, or of the gate."""
        return GATED.get(self.name, self.name)

    def result_dtype(self, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """Dtype of y for inputs of these dtypes.

        It is torch's promotion of the inputs; layer-norm and wide norms have x's.
        """
        promotes = (self.name == "rms-norm" or self.is_gated) and not self.wide
        own = torch.promote_types(dtypes[0], dtypes[1]) if promotes else dtypes[0]
        return self.out or own


@dataclass(frozen=True, eq=False)
class CastRequest:
    """Request to cast the result y [rows, columns].

    cast        the cast
    amax_state  [3] amax state under delayed scaling (see `amax_state`); None: current scaling
    records     True updates the amax state
    transposed  True also casts y.T
    """

    cast: Cast
    amax_state: Tensor | None = None
    records: bool = True
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class CastResult:
    """y and its casts.

    value       y
    plain       cast of y
    transposed  cast of y.T, in its own row-major order
    amax        [1, 1] amax that set the scale under delayed scaling, else None
    """

    value: Tensor
    plain: QTensor | None = None
    transposed: QTensor | None = None
    amax: Tensor | None = None


Requests = Sequence[CastRequest | None]


@dataclass(frozen=True, eq=False)
class StoredAsCodes:
    """A tensor [rows, columns] that is stored only as codes.

    codes   codes of the tensor, or of its transpose
    dtype   dtype of the tensor
    turned  True if `codes` has the transpose
    """

    codes: QTensor
    dtype: torch.dtype
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        outer, inner = self.codes.shape
        return (inner, outer) if self.turned else (outer, inner)

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def to(self, device: str | torch.device) -> StoredAsCodes:
        return replace(self, codes=self.codes.to(torch.device(device)))


Given = Tensor | StoredAsCodes  # an input of a function


@dataclass(frozen=True)
class NormActSpec:
    """Properties of a call that decide which kernel is chosen.

    They exclude the values and the number of rows.

    dtypes   dtypes of the tensors
    columns  columns of y
    casts    (cast, True if y.T is cast too) of each requested cast
    kept     (cast, turned) if the first tensor is stored only as codes, else None
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
        """Return the spec of a call. tensors[0] is [..., columns] with any number of axes."""
        casts = tuple((each.cast, each.transposed) for each in requests if each is not None)
        dtypes, first = tuple(each.dtype for each in tensors), tensors[0]
        kept = (first.codes.cast, first.turned) if isinstance(first, StoredAsCodes) else None
        device = device_of(
            *(each.codes.data if isinstance(each, StoredAsCodes) else each for each in tensors)
        )
        return cls(kind, device, dtypes, first.shape[-1], casts, first.numel() == 0, kept)
