"""What all proofs of kernels share: a kernel that is new on a device computes a small sample, and is refused if it is wrong.

A kernel that was never run on a device, a layout that a library changed, a driver or a compiler that mistranslates: none of them raises an
error, all of them give plausible numbers. So before a kernel is first taken on a device for a kind of call, it computes a sample there,
and the definition computes the same on the CPU. What a proof compares is told where the op is: mm/selfcheck.py, quantize/selfcheck.py,
hadamard/selfcheck.py, and optim/selfcheck.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import BackendError, OutOfMemoryError

# The device -> (largest error as a share of what is allowed, why the kernel fails as a clause or None).
Compare = Callable[[torch.device], tuple[float, str | None]]


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    reason     why the kernel is refused, as a clause; None: it passed
    worst      largest error as a share of what is allowed
    elapsed_s  what the proof took, the first compilation or loading of the kernel included
    """

    reason: str | None
    worst: float
    elapsed_s: float


BOOK: dict[tuple[Hashable, ...], Verdict] = {}  # (op, kernel, what it was tried on, index of the device)


def once(op: str, kernel: str, kind: Hashable, device_type: str, index: int, compare: Compare) -> str | None:
    """Why the kernel failed its proof for this kind of call on this device, or None. Proves it if that is still to do.

    A failure is a warning as well: nobody may look at the reasons of a cast, and another kernel is slower, not wrong.
    """
    key = (op, kernel, kind, index)
    if key not in BOOK:
        refuse_capture(op, kernel, device_type, index)
        verdict = BOOK[key] = examine(op, compare, torch.device(device_type, index))
        if verdict.reason is not None:
            warnings.warn(
                f"{op}: the {kernel} kernel is not used, and a slower one is, because {verdict.reason}",
                RuntimeWarning,
                stacklevel=2,
            )
    return BOOK[key].reason


def refuse_capture(op: str, kernel: str, device_type: str, index: int) -> None:
    """Raises BackendError while a CUDA graph is captured: what a proof computes and waits for may not be part of it."""
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BackendError(
            f"{op}: {kernel} was never checked on cuda:{index}, and it cannot be while a CUDA graph is captured. "
            "Run one step before the capture."
        )


def examine(op: str, compare: Compare, device: torch.device) -> Verdict:
    """The proof itself. A kernel that raises is refused with its own words; OutOfMemoryError if the device has no room for it."""
    started_at_s = time.perf_counter()
    # On the CPU, whatever the default device is: there the truth is computed.
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            worst, reason = compare(device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{op}: {device} has no memory left for the check of a kernel, which takes a few MiB. Free some, or "
                f"lower the batch size. ({_first_line(error)})"
            ) from error
        except Exception as error:  # whatever torch, cuBLAS or Triton raise, it is the reason of the refusal
            worst, reason = float("inf"), f"it failed when it was tried on {device}: {_first_line(error)}"
    return Verdict(reason, worst, time.perf_counter() - started_at_s)


def difference(name: str, got: Tensor, expected: Tensor, device: torch.device) -> str | None:
    """What differs in a bit between what a kernel computed and the truth, as a clause; a NaN is like every other. None: nothing."""
    got = got.detach().to("cpu").contiguous()
    expected = expected.detach().contiguous()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"its {name} is {_form(got)} on {device}, not {_form(expected)}: "  # a change of the op that a kernel missed
            "the kernel computes something else"
        )
    if got.numel() == 0:
        return None
    left, right = (_bits(x) for x in (got, expected))
    differs = left != right
    if expected.dtype.is_floating_point:
        differs &= ~(got.to(torch.float32).isnan() & expected.to(torch.float32).isnan())
    count = int(differs.sum())
    if count == 0:
        return None
    place = [int(axis[0]) for axis in differs.nonzero(as_tuple=True)]
    here = tuple(place)
    return (
        f"its {name} is wrong on {device} in {count} of {got.numel()} elements, first at {place}: "
        f"bits {int(left[here]):#x} where the reference has {int(right[here]):#x}"
    )


def _bits(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return x.to(torch.int64)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(integer).to(torch.int64) & ((1 << min(8 * x.element_size(), 63)) - 1)


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
