"""The kernels that quantize must prove themselves on a device before they may compute there: the reference's bits, on a small sample.

    136 x 272      no multiple of 128 in any axis; blocks of 16 x 16 up to 2**24 apart, among them zeros and subnormal numbers

in the order of memory and as the transpose of it, and the same with a NaN and an infinity in it. Codes and scales must have the bits that
the reference computes on the CPU: an instruction that rounds ties another way, a quotient that is off by a bit, noise of another
element, a scale of another tile are seen in a single code. Of delayed scaling the state of the window is compared as well; its codes
under a scale that is NaN are free (see `pair`).

Once per process, device, kernel, cast, type of x, and way of calling; then a dictionary. What it does not prove: rows longer than
8,192, and every shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops import selfcheck
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import Kernel
from narrowgauge.ops.selfcheck import Verdict
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

ROWS, COLUMNS, SPREAD, SEED = 136, 272, 12, 20260612
KEY, TURNED_KEY = Key(2**32 - 5, 77), Key(3, 2**31 + 1)

# (run of the kernel, the call it is proven for, device, x on it, whether x is poisoned) -> what differs, or None
Check = Callable[[Callable[..., Any], Spec, torch.device, Tensor, bool], str | None]


def proven(op: str, kernel: Kernel[Spec], check: Check) -> Kernel[Spec]:
    """The kernel, refused as well where it fails its proof on the device at hand (see `Device.index`)."""

    def refuse(spec: Spec) -> str | None:
        reason = kernel.refuse(spec)
        if reason is not None or spec.device.index is None:
            return reason
        kind = (spec.cast, spec.dtype, spec.noise, spec.amax, spec.expand, spec.cols, spec.delayed)
        return selfcheck.once(
            op, kernel.name, kind, spec.device.type, spec.device.index, lambda device: _compare(kernel.run, spec, check, device)
        )  # fmt: skip

    return replace(kernel, refuse=refuse)


def examine(run: Callable[..., Any], spec: Spec, check: Check, device: torch.device) -> Verdict:
    """The proof itself, see `ops.selfcheck.examine`."""
    return selfcheck.examine("quantize", lambda device: _compare(run, spec, check, device), device)


def _compare(run: Callable[..., Any], spec: Spec, check: Check, device: torch.device) -> tuple[float, str | None]:
    for poisoned in (False, True):
        x = sample(spec.dtype, poisoned)
        for turned in (False, True):
            here = x.T.contiguous().to(device).T if turned else x.to(device)
            if (reason := check(run, spec, device, here, poisoned)) is not None:
                where = f"{', x.T in memory' if turned else ''}{', NaN within' if poisoned else ''}"
                return float("inf"), reason + where
    return 0.0, None


@cache
def sample(dtype: torch.dtype, poisoned: bool) -> Tensor:
    """[ROWS, COLUMNS] on the CPU; see the module."""
    generator = torch.Generator().manual_seed(SEED)
    spread = torch.randint(-SPREAD, SPREAD + 1, (-(-ROWS // 16), -(-COLUMNS // 16)), generator=generator)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x = torch.ldexp(x, spread.repeat_interleave(16, 0)[:ROWS].repeat_interleave(16, 1)[:, :COLUMNS])
    x[5:7], x[32:48, 32:48] = 0.0, 0.0
    x[9, :8] = torch.tensor([-0.0, 1e-40, -1e-40, 1e-30, 0.5, -0.5, 1.5, 2.5])
    if poisoned:
        x[ROWS // 2, COLUMNS // 3], x[3, 200] = float("nan"), float("-inf")
    return x.to(dtype)


def check_one(run: Callable[..., Any], spec: Spec, device: torch.device, x: Tensor, poisoned: bool) -> str | None:
    """`quantize`."""
    amax = torch.full((1, 1), 3.0) if spec.amax else None
    key = KEY if spec.noise is not None else None
    got = run(x, spec.cast, None if amax is None else amax.to(device), key, spec.expand)
    return _difference(got, _truth(x, spec, amax, key), device)


def check_pair(run: Callable[..., Any], spec: Spec, device: torch.device, x: Tensor, poisoned: bool) -> str | None:
    """`quantize_pair`; delayed with an amax of earlier steps and without one."""
    if not spec.delayed:
        keys = (KEY, TURNED_KEY) if spec.noise is not None else (None, None)
        rows, cols, _ = run(x, spec.cast, None, True, True, keys)
        return compare_both(rows, cols, spec, device, x, keys)
    for in_use in (0.0, 3.0):
        before = torch.tensor([in_use, 0.5, 0.0])
        here = before.to(device, copy=True)
        *found, used = run(x, spec.cast, here, True, spec.cols, (None, None))
        casts = [each for each in found if each is not None]
        if (reason := compare_delayed(casts, used, here, before, spec, device, x, poisoned)) is not None:
            return f"{reason}, in use {in_use}"
    return None


def compare_both(
    plain: QTensor,
    turned: QTensor,
    spec: Spec,
    device: torch.device,
    x: Tensor,
    keys: tuple[Key | None, ...] = (None, None),
) -> str | None:
    """What differs in the casts of x and of x.T by their own amax."""
    reason = _difference(plain, _truth(x, spec, None, keys[0]), device)
    return reason or _difference(turned, _truth(x.T, spec, None, keys[1]), device, " of x.T")


def compare_delayed(
    found: Sequence[QTensor],
    used: Tensor,
    here: Tensor,
    live: Tensor,
    spec: Spec,
    device: torch.device,
    x: Tensor,
    poisoned: bool,
) -> str | None:
    """What differs in the casts of x and of x.T, in the amax that they used, and in the window `here`, which was `live` before."""
    live = live.clone()
    amax = update_amax(live, definition.tile_amax(x.cpu(), (WHOLE, WHOLE)))
    reason = selfcheck.difference("amax", used, amax, device) or selfcheck.difference("window", here, live, device)
    for got, of in zip(found, (x, x.T), strict=False):
        expected = _truth(of, spec, amax, None)
        if poisoned:  # the codes under NaN are free
            reason = reason or selfcheck.difference("scale", got.scale, expected.scale, device)
        else:
            reason = reason or _difference(got, expected, device)
    return reason


def _truth(x: Tensor, spec: Spec, amax: Tensor | None, key: Key | None) -> QTensor:
    x = x.cpu().contiguous()
    return definition.quantize(x, spec.cast, amax, None if key is None else key.uniform(tuple(x.shape)), spec.expand)


def _difference(got: QTensor, expected: QTensor, device: torch.device, of: str = "") -> str | None:
    reason = selfcheck.difference(f"scale{of}", got.scale, expected.scale, device)
    if expected.global_scale is not None:
        assert got.global_scale is not None
        reason = reason or selfcheck.difference(
            f"tensor's scale{of}", got.global_scale.reshape(1), expected.global_scale.reshape(1), device
        )
    return reason or selfcheck.difference(
        f"{'codes' if not got.is_expanded else 'values'}{of}", got.data, expected.data, device
    )
