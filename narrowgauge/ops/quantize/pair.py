"""quantize_pair: codes of x and x.T, and the amax for the next step, from one read of x.

    rows = quantize(x, cast, amax)
    cols = quantize(x.T, cast, amax), in its own row-major order
    amax   [1, 1] under delayed scaling, else None

The definition computes these in sequence; the Triton kernels read x once (triton.py). If the amax
of a tensor is not finite, the codes of a delayed kernel may differ from the definition's. Their
scale is NaN, which makes every value NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.flat_cast import flatten_cast, unflatten_cast
from narrowgauge.ops.quantize import KERNELS as OF_ONE
from narrowgauge.ops.quantize import check_of, compiled, cpp, definition, quantize, triton
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Pair, Spec, Two
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import (
    Kernel,
    Refusal,
    Registry,
    constant_while_compiling,
    device_facts,
)
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast


def reference_pair(
    x: Tensor,
    cast: Cast,
    state: Tensor | None,
    records: bool,
    cols: bool,
    noise: Two,
    backend: str | None = None,
) -> Pair:
    """Definition: each cast by its fastest kernel, or by the kernel that is named."""
    amax = None
    if state is not None:
        amax = update_amax(state, definition.tile_amax(x, (WHOLE, WHOLE)), records=records)
    rows = quantize(x, cast, amax=amax, noise=noise[0], backend=backend)
    return (
        rows,
        quantize(x.T, cast, amax=amax, noise=noise[1], backend=backend) if cols else None,
        amax,
    )


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why the kernels that read x once do not quantize such a tensor, or None."""
    if spec.delayed and (spec.cast.tile != (WHOLE, WHOLE) or spec.cast.rounding != "nearest"):
        return Refusal("tile", "rounds to nearest by one scale per tensor")
    if spec.delayed and not spec.cols and spec.cast.format.codes_per_byte > 1 and spec.shape[1] % 2:
        return Refusal("shape", f"packs two codes into a byte, and rows have {spec.shape[1]}")
    if not spec.delayed and not spec.cols:
        return Refusal("operands", "gives nothing beside one cast, which `quantize` makes")
    return triton.refuse(spec)


KERNELS: Registry[Spec] = Registry("quantize_pair")
KERNELS.register(
    Kernel("triton", refuse, triton.pair, check=check_of(KERNELS.op), replays=True),
    Kernel("native-cpp", cpp.refuse_pair, cpp.run_pair, on="cpu"),
    Kernel("reference", lambda spec: None, reference_pair, by_torch=True),
)


def reads_once(x: Tensor, cast: Cast, delayed: bool, cols: bool = True) -> bool:
    """Return True if a kernel computes all outputs from one read of x.

    Otherwise they are computed in sequence.
    """
    if torch.compiler.is_compiling():
        fits = compiled.fits(x, cast) and not (delayed and cast.has_global_scale)
        return fits and _is_by_kernel(
            x.device.type,
            x.device.index,
            x.dtype,
            compiled.is_odd(x),
            delayed,
            cols,
            *flatten_cast(cast),
        )
    noise = Key((0, 0)) if cast.draws else None
    return (
        KERNELS.choose(Spec.of(x, cast, noise=noise, cols=cols, delayed=delayed)).kernel.name
        != "reference"
    )


@constant_while_compiling
def _is_by_kernel(
    device: str,
    index: int | None,
    dtype: torch.dtype,
    is_odd: bool,
    delayed: bool,
    cols: bool,
    *words: Any,
) -> bool:
    """Like `_is_by_kernel` of `compiled`."""
    spec = Spec(
        device_facts(device, index), dtype, (2, 4 - is_odd), unflatten_cast(*words), cols=cols, delayed=delayed, in_operator=True
    )  # fmt: skip
    return KERNELS.choose(spec).kernel.name != "reference"


def plan(
    x: Tensor, cast: Cast, records: bool, cols: bool, delayed: bool
) -> Callable[[Tensor, Tensor | None, Two], Pair]:
    """Choose the kernel of `quantize_pair` for such arguments: run(x, amax_state, noise).

    It is valid for the same tensors as the plan of `quantize`.
    """
    noise = Key((0, 0)) if cast.draws else None
    kernel = KERNELS.choose(Spec.of(x, cast, noise=noise, cols=cols, delayed=delayed)).kernel
    if noise is None and not kernel.by_torch and not kernel.replays:
        return lambda x, state, noise: kernel.run(x, cast, state, records, cols, noise)
    if noise is not None or not kernel.replays:
        return lambda x, state, noise: quantize_pair(
            x, cast, amax_state=state, records=records, cols=cols, noise=noise
        )
    from narrowgauge.ops.triton.replay import Replays  # imported only where kernels are launched

    replays = Replays(lambda x, state: kernel.run(x, cast, state, records, cols, (None, None)))
    return lambda x, state, _: replays(x, state)


def plan_with_amax(
    x: Tensor, cast: Cast
) -> Callable[[Tensor], tuple[QTensor | None, Tensor | None]]:
    """Return a function of x that returns (its cast or None, its amax [1, 1]).

    The cast is None if it takes a separate launch. x.T is then cast by this amax: with one scale, or
    under a two-level rule by `plan_by_amax`. Without a kernel for that, cast and amax are None.
    The function is valid for the same tensors as `plan`.
    """
    of_tiles = cast.scale.two_level
    specs = Spec.of(x, cast), Spec.of(x.T, cast, None if of_tiles else x.new_empty((1, 1)))
    if not all(OF_ONE.choose(spec).kernel.name == "triton" for spec in specs):
        if of_tiles:
            return lambda x: (None, None)
        return lambda x: (None, definition.tile_amax(x.detach(), cast.tile))
    from narrowgauge.ops.triton.replay import Replays  # imported only where kernels are launched

    return Replays(lambda x: triton.with_amax(x, cast))


def plan_by_amax(cast: Cast) -> Callable[[Tensor, Tensor], QTensor]:
    """Return run(x, amax) for a two-level cast whose amax `plan_with_amax` returned.

    amax  [1, 1], of the whole tensor: it sets the tensor's scale, and tiles take their own
    """
    from narrowgauge.ops.triton.replay import Replays  # imported only where kernels are launched

    return Replays(lambda x, amax: triton.by_amax(x, cast, amax))


@torch.no_grad()
def quantize_pair(
    x: Tensor,
    cast: Cast,
    *,
    amax_state: Tensor | None = None,
    records: bool = True,
    cols: bool = True,
    noise: Two = (None, None),
    backend: str | None = None,
) -> Pair:
    """Quantize x [outer, inner] and x.T by the same cast -> (x, x.T, amax); see the module.

    amax_state  [3] amax state under delayed scaling, updated as by `update_amax`; None: current
                scaling, and amax is None
    records     False leaves the amax state unchanged
    cols        False returns None in place of x.T
    noise       noise of x and of x.T, if the cast rounds stochastically; see `quantize`
    """
    if torch.compiler.is_compiling() and backend is None:
        if noise[0] is not None or not reads_once(x, cast, amax_state is not None, cols):
            return reference_pair(x, cast, amax_state, records, cols, noise)
        if amax_state is not None:
            return compiled.delayed(x, cast, amax_state, records, cols)
        return (*compiled.quantize(x, cast, None, cols), None)
    spec = Spec.of(x, cast, noise=noise[0], cols=cols, delayed=amax_state is not None)
    pair: Pair = KERNELS.choose(spec, backend).kernel.run(x, cast, amax_state, records, cols, noise)
    return pair


def run_in_operator(x: Tensor, cast: Cast, cols: bool) -> tuple[QTensor, QTensor | None] | None:
    """Cast x, and x.T if `cols`, for compiled code; None where the definition has to.

    Codes of both are in the memory order of x, which compiled code knows before.
    """
    if not cpp.serves_compiled(cast) or cpp.LIBRARY.missing:
        return None
    if x.dtype not in cpp.DTYPES:  # torch's copy may change the order
        is_turned = x.stride(0) < x.stride(1)
        x = x.T.to(torch.float32).contiguous().T if is_turned else x.to(torch.float32).contiguous()
    if cols:
        return cpp.run_pair(x, cast, None, False, True, (None, None))[:2]
    return cpp.run(x, cast, None, None, None), None
