"""What the kernels of `ops.norm_act` are asked for and what they give: a function, a cast that is wanted of it, both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

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
class Order:
    """A cast of what is produced, y [rows, columns].

    live     [3] of the window by which y is cast (see `delayed`), noted there if it `records`; None: by y itself
    turned   whether y.T is wanted by the same cast as well
    """

    cast: Cast
    live: Tensor | None = None
    records: bool = True
    turned: bool = False


@dataclass(frozen=True, eq=False)
class Made:
    """y and its casts: of y, of y.T (codes in its own row-major order), and the amax [1, 1] that a window gave it."""

    value: Tensor
    plain: QTensor | None = None
    turned: QTensor | None = None
    amax: Tensor | None = None
