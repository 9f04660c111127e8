"""What one read of a tensor can give at once: both orientations, or codes and the amax of the next step.

    quantize_both(x, cast)            quantize(x, cast) and quantize(x.T, cast), codes of each in its own row-major order
    quantize_delayed(x, cast, live)   quantize(x, cast, amax) for the amax that delayed scaling gives x, and that amax [1, 1]
    quantize_both_delayed             both
    in_one_read                       the one of these that a cast asks for, where a kernel does it in one read

The references say just that. The Triton kernels read x once (`triton_kernel`); of a tensor with an amax that is not finite,
`quantize_delayed` may then leave other codes under its scale, which is NaN and makes NaN of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.ops.quantize import quantize, selfcheck, tile_amax, triton
from narrowgauge.ops.quantize.amax_state import observe
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import DeviceKey, Key, draw
from narrowgauge.ops.registry import Kernel, Registry
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Window
from narrowgauge.tiles import WHOLE

Noise = Tensor | Key | DeviceKey | None


def _both_in_turn(x: Tensor, cast: Cast, noise: Noise, turned_noise: Noise) -> tuple[QTensor, QTensor]:
    return quantize(x, cast, noise=noise), quantize(x.T, cast, noise=turned_noise)


def _delayed_in_turn(x: Tensor, cast: Cast, live: Tensor, records: bool) -> tuple[QTensor, Tensor]:
    amax = observe(live, tile_amax(x, (WHOLE, WHOLE)), records=records)
    return quantize(x, cast, amax=amax), amax


def _both_delayed_in_turn(x: Tensor, cast: Cast, live: Tensor, records: bool) -> tuple[QTensor, QTensor, Tensor]:
    q, amax = _delayed_in_turn(x, cast, live, records)
    return q, quantize(x.T, cast, amax=amax), amax


def _refuse_both_delayed(spec: Spec) -> str | None:
    if spec.cast.tile != (WHOLE, WHOLE) or spec.cast.rounding != "nearest":
        return "rounds to nearest by one scale per tensor"
    return triton.refuse(spec)


def refuse_delayed(spec: Spec) -> str | None:
    """Why the kernel in one pass does not quantize such a tensor, or None."""
    if spec.cast.tile != (WHOLE, WHOLE) or spec.cast.rounding != "nearest":
        return "rounds to nearest by one scale per tensor"
    if spec.cast.format.codes_per_byte > 1 and spec.shape[1] % 2:
        return f"packs two codes into a byte, and rows have {spec.shape[1]}"
    return triton.refuse(spec)


BOTH: Registry[Spec] = Registry("quantize_both")
BOTH.register(selfcheck.proven("quantize_both", Kernel("triton", triton.refuse, triton.both), selfcheck.check_both))
BOTH.register(Kernel("reference", lambda spec: None, _both_in_turn, by_torch=True))

DELAYED: Registry[Spec] = Registry("quantize_delayed")
DELAYED.register(
    selfcheck.proven("quantize_delayed", Kernel("triton", refuse_delayed, triton.delayed), selfcheck.check_delayed)
)
DELAYED.register(Kernel("reference", lambda spec: None, _delayed_in_turn, by_torch=True))

BOTH_DELAYED: Registry[Spec] = Registry("quantize_both_delayed")
BOTH_DELAYED.register(
    selfcheck.proven(
        "quantize_both_delayed",
        Kernel("triton", _refuse_both_delayed, triton.both_delayed),
        selfcheck.check_delayed,
    )
)
BOTH_DELAYED.register(Kernel("reference", lambda spec: None, _both_delayed_in_turn, by_torch=True))


def reads_once(x: Tensor, cast: Cast, delayed: bool, both: bool = True) -> bool:
    """Whether a kernel gives both orientations, or codes and the next step's amax, from one read of x; else it is done in turn."""
    if torch.compiler.is_compiling():
        return False
    spec = Spec.of(x, cast, None, None)
    if cast.rounding == "stochastic":
        spec = replace(spec, noise="key")
    registry = (BOTH_DELAYED if both else DELAYED) if delayed else BOTH
    return registry.choose(spec).kernel.name != "reference"


@torch.no_grad()
def quantize_both(
    x: Tensor, cast: Cast, *, noise: Noise = None, turned_noise: Noise = None, backend: str | None = None
) -> tuple[QTensor, QTensor]:
    """x [outer, inner] -> (x, x.T) quantized by the same cast, see the module.

    noise, turned_noise  of x and of x.T, when the cast rounds stochastically; see `quantize`
    """
    return BOTH.choose(Spec.of(x, cast, None, noise), backend).kernel.run(x, cast, noise, turned_noise)


@torch.no_grad()
def quantize_delayed(
    x: Tensor, cast: Cast, live: Tensor, *, records: bool = True, backend: str | None = None
) -> tuple[QTensor, Tensor]:
    """x [outer, inner], not empty -> (x quantized, the amax [1, 1] by which), see the module.

    live     [3] of the tensor's `delayed.AmaxWindow`; if it records, updated as `delayed.observe` does
    """
    return DELAYED.choose(Spec.of(x, cast), backend).kernel.run(x, cast, live, records)


@torch.no_grad()
def quantize_both_delayed(
    x: Tensor, cast: Cast, live: Tensor, *, records: bool = True, backend: str | None = None
) -> tuple[QTensor, QTensor, Tensor]:
    """x [outer, inner], not empty -> (x and x.T quantized, the amax [1, 1] by which), see the module and `quantize_delayed`."""
    return BOTH_DELAYED.choose(Spec.of(x, cast), backend).kernel.run(x, cast, live, records)


@dataclass(frozen=True)
class OneRead:
    """A tensor cast once, perhaps with the cast of its transpose, and the amax [1, 1] of its window if it has one."""

    plain: QTensor
    turned: QTensor | None = None
    amax: Tensor | None = None


def in_one_read(x: Tensor, cast: Cast, live: Tensor | None, *, records: bool, both: bool = True) -> OneRead | None:
    """Both orientations of x, or one and its window's amax, where a kernel reads x once for them; None: nothing was done.

    live  of the window that gives the cast its amax, None for a cast without one
    """
    delayed = isinstance(cast.calibrate, Window)
    if x.numel() == 0 or delayed != (live is not None) or not (delayed or both):
        return None
    if not reads_once(x, cast, delayed, both):
        return None
    if live is None:
        return OneRead(*quantize_both(x, cast, noise=_drawn(x, cast), turned_noise=_drawn(x.T, cast)))
    if both:
        return OneRead(*quantize_both_delayed(x, cast, live, records=records))
    q, amax = quantize_delayed(x, cast, live, records=records)
    return OneRead(q, None, amax)


def _drawn(x: Tensor, cast: Cast) -> Noise:
    return draw(tuple(x.shape), x.device) if cast.rounding == "stochastic" else None
