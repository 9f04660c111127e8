"""A kernel that is new on a device computes a small sample there first, and is refused if it is wrong.

A kernel that was never run on a device, a layout that a library changed, a driver or a compiler that mistranslates: none of them raises an
error, all of them give plausible numbers. So before a kernel is first taken on a device for a kind of call, it computes a sample there,
and the definition computes the truth on the CPU. An op says what it compares by a `Check` (selfcheck.py of mm,
quantize and norm_act, hadamard/encoding.py, rotary, optim/backends.py), and the registry asks for it ahead of a kernel. The rest is here.

Once per process, device, kernel and kind of call; then a dictionary. Random numbers come from generators of their own, and nothing is
recorded for autograd. Devices that are not here (`Device.index` None) are taken by their word. Tests examine every checked kernel of every
registry by the `examples` of its check.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import BackendError, OutOfMemoryError
from narrowgauge.ops.registry import Kernel

Spec = TypeVar("Spec")


class Comparison(NamedTuple):
    """What a kernel computed, by name, beside the truth.

    bound  largest error allowed, which broadcasts against the truth; NaN must be where the truth has it. None: equal to the bit, where
           a NaN is like every other
    """

    name: str
    got: Tensor
    truth: Tensor
    bound: Tensor | float | None = None


# (run of the kernel, the kind of call, device) -> comparisons, or clauses that say what is wrong. It stops at the first that fails.
Compare = Callable[[Callable[..., Any], Any, torch.device], Iterable[Comparison | str]]


@dataclass(frozen=True)
class Check(Generic[Spec]):
    """How kernels of an op are examined.

    kind      what of a spec the numbers depend on, as `compare` takes it; None: there is nothing to examine. Of ops whose kernels are
              chosen while torch.compile traces, parts of the spec as they are, or numbers and strings
    compare   see above
    examples  the specs by which tests examine a kernel
    """

    kind: Callable[[Spec], tuple[Hashable, ...] | None]
    compare: Compare
    examples: Callable[[], Iterable[Spec]]

    def failure(self, op: str, kernel: Kernel[Spec], kind: tuple[Hashable, ...], device: torch.device) -> str | None:
        """Why the kernel failed for this kind of call on this device, or None. Examines it if that is still to do.

        A failure is a warning too: nobody may look at the reasons of a cast, and another kernel is slower, not wrong. Raises BackendError
        while a CUDA graph is captured: what an examination computes and waits for may not be part of it.
        """
        key = (op, kernel.name, kind, device.index)
        if key not in RESULTS:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"{op}: {kernel.name} was never checked on {device}, and it cannot be while a CUDA graph is captured. "
                    "Run one step before the capture."
                )
            RESULTS[key] = examine(op, kernel.run, self, kind, device)
            if (reason := RESULTS[key].reason) is not None:
                words = f"{op}: the {kernel.name} kernel is not used, and a slower one is, because {reason}"
                warnings.warn(words, RuntimeWarning, stacklevel=2)
        return RESULTS[key].reason


@dataclass(frozen=True)
class Result:
    """What an examination found.

    reason     why the kernel is refused, as a clause; None: it passed
    worst      largest error as a share of what is allowed
    elapsed_s  what it took, the first compilation or loading of the kernel included
    """

    reason: str | None
    worst: float
    elapsed_s: float


RESULTS: dict[tuple[str, str, Hashable, int], Result] = {}  # (op, kernel, kind of call, index of the device)


def examine(op: str, run: Callable[..., Any], check: Check[Any], kind: Hashable, device: torch.device) -> Result:
    """One examination. A kernel that raises is refused with its own words; OutOfMemoryError if the device has no room for it."""
    started_at_s = time.perf_counter()
    # On the CPU, whatever the default device is: there the truth is computed.
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), torch.autocast(device.type, enabled=False):
        try:
            worst, reason = _first_failure(check.compare(run, kind, device), device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{op}: {device} has no memory left for the check of a kernel, which takes a few MiB. Free some, or "
                f"lower the batch size. ({_first_line(error)})"
            ) from error
        except Exception as error:  # whatever torch, cuBLAS or Triton raise, it is the reason of the refusal
            worst, reason = float("inf"), f"it failed when it was tried on {device}: {_first_line(error)}"
    return Result(reason, worst, time.perf_counter() - started_at_s)


def _first_failure(found: Iterable[Comparison | str], device: torch.device) -> tuple[float, str | None]:
    """(largest error as a share of its bound, what is wrong as a clause or None)."""
    worst = 0.0
    for each in found:
        error, reason = (float("inf"), each) if isinstance(each, str) else _error(*each, device)
        worst = max(worst, error)
        if reason is not None:
            return worst, reason
    return worst, None


def _error(
    name: str, got: Tensor, truth: Tensor, bound: Tensor | float | None, device: torch.device
) -> tuple[float, str | None]:
    """The same of one comparison."""
    if bound is None:
        reason = difference(name, got, truth, device)
        return (0.0 if reason is None else float("inf")), reason
    got, truth = got.detach().to("cpu").to(torch.float64), truth.to(torch.float64)
    if got.shape != truth.shape:
        return float("inf"), f"its {name} has the shape {list(got.shape)} on {device}, not {list(truth.shape)}"
    # A bound of zero leaves 0 / 0 where nothing is wrong; NaN against NaN is right.
    worst = float(((got - truth).abs() / bound).nan_to_num(nan=0.0, posinf=float("inf")).max())
    if worst > 1:
        return worst, f"its {name} is wrong on {device}: {worst:.2g} times the error that is allowed"
    if not torch.equal(got.isnan(), truth.isnan()):
        what = "hides NaN" if int(got.isnan().sum()) < int(truth.isnan().sum()) else "makes NaN of numbers"
        return float("inf"), f"it {what} on {device}"
    return worst, None


def difference(name: str, got: Tensor, expected: Tensor, device: torch.device) -> str | None:
    """What differs in a bit between what a kernel computed and the truth, as a clause; a NaN is like every other. None: nothing."""
    got, expected = got.detach().to("cpu").contiguous(), expected.detach().contiguous()
    if got.shape != expected.shape or got.dtype != expected.dtype:  # a change of the op that a kernel missed
        forms = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (got, expected)]
        return f"its {name} is {forms[0]} on {device}, not {forms[1]}: the kernel computes something else"
    left, right = _bits(got), _bits(expected)
    differs = left != right
    if expected.dtype.is_floating_point:
        differs &= ~(got.to(torch.float32).isnan() & expected.to(torch.float32).isnan())
    places = differs.nonzero()
    if len(places) == 0:
        return None
    place = places[0].tolist()
    return (
        f"its {name} is wrong on {device} in {len(places)} of {got.numel()} elements, first at {place}: "
        f"bits {int(left[tuple(place)]):#x} where the reference has {int(right[tuple(place)]):#x}"
    )


def _bits(x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return x.to(torch.int64)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(integer).to(torch.int64) & ((1 << min(8 * x.element_size(), 63)) - 1)


def spread_normal(rows: int, columns: int, spread: int, generator: torch.Generator) -> Tensor:
    """Normal numbers [rows, columns], each 16 x 16 of them scaled by a power of two, 2**-spread to 2**spread, of their own."""
    powers = torch.randint(-spread, spread + 1, (-(-rows // 16), -(-columns // 16)), generator=generator)
    x = torch.randn(rows, columns, generator=generator)
    return torch.ldexp(x, powers.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
