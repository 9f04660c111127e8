"""What one read of a tensor can give at once: both orientations, or codes and the amax of the next step.

    quantize_both(x, cast)            quantize(x, cast) and quantize(x.T, cast), codes of each in its own row-major order
    quantize_delayed(x, cast, live)   quantize(x, cast, amax) for the amax that delayed scaling gives x, and that amax [1, 1]

The references say just that. The Triton kernels read x once (`triton_kernel`); of a tensor with an amax that is not finite,
`quantize_delayed` may then leave other codes under its scale, which is NaN and makes NaN of all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.delayed import observe
from narrowgauge.ops.noise import DeviceKey, Key
from narrowgauge.ops.quantize import quantize, tile_amax, triton_kernel
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Registry
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.tiles import WHOLE

Noise = Tensor | Key | DeviceKey | None


def _both_in_turn(x: Tensor, cast: Cast, noise: Noise, turned_noise: Noise) -> tuple[QTensor, QTensor]:
    return quantize(x, cast, noise=noise), quantize(x.T, cast, noise=turned_noise)


def _delayed_in_turn(x: Tensor, cast: Cast, live: Tensor, records: bool) -> tuple[QTensor, Tensor]:
    amax = observe(live, tile_amax(x, (WHOLE, WHOLE)), records=records)
    return quantize(x, cast, amax=amax), amax


def refuse_delayed(spec: Spec) -> str | None:
    """Why the kernel in one pass does not quantize such a tensor, or None."""
    if spec.cast.tile != (WHOLE, WHOLE) or spec.cast.rounding != "nearest":
        return "rounds to nearest by one scale per tensor"
    if spec.cast.format.codes_per_byte > 1 and spec.shape[1] % 2:
        return f"packs two codes into a byte, and rows have {spec.shape[1]}"
    return triton_kernel.refuse(spec)


BOTH: Registry[Spec] = Registry("quantize_both")
BOTH.register(Kernel("triton", triton_kernel.refuse, triton_kernel.both))
BOTH.register(Kernel("reference", lambda spec: None, _both_in_turn))

DELAYED: Registry[Spec] = Registry("quantize_delayed")
DELAYED.register(Kernel("triton", refuse_delayed, triton_kernel.delayed))
DELAYED.register(Kernel("reference", lambda spec: None, _delayed_in_turn))


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
