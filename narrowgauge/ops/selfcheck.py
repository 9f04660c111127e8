"""Check a kernel on a small sample before its first use on a device; refuse wrong kernels.

A kernel that never ran on a device, a layout that a library changed, or a compiler bug raises no
error, and yields plausible numbers. Before a kernel is first used on a device for one kind of call,
it therefore computes a sample there. The definition computes the reference result on the CPU. A
`KernelCheck` says which outputs are compared (selfcheck.py of mm, quantize and norm_act,
hadamard/encoding.py, rotary, optim/backends.py). The registry runs the check before it returns a
kernel.

CPUs have no `Device.index`, so kernels of a CPU are checked by the tests alone.

A check runs once per process, device, kernel and kind of call; later calls find its result in a
dictionary. It has its own random generators and runs without autograd. Absent devices
are not checked either. The tests run every check of every registry on the specs
that `examples` yields.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import BackendError, OutOfMemoryError, SlowerWarning, warn

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Kernel

Spec = TypeVar("Spec")


class OutputComparison(NamedTuple):
    """One output of a kernel and its reference result.

    name   name of the output
    got    output of the kernel, on its device
    truth  reference result, on the CPU
    bound  largest absolute error that is allowed, broadcastable to truth; NaN must occur exactly
           where truth has NaN. None: the outputs must be bit-identical, where all NaN count as
           equal
    """

    name: str
    got: Tensor
    truth: Tensor
    bound: Tensor | float | None = None


# compare(run of the kernel, kind of call, device) yields comparisons, or clauses that say what is
# wrong. The check ends at the first failure.
Compare = Callable[[Callable[..., Any], Any, torch.device], Iterable[OutputComparison | str]]


@dataclass(frozen=True)
class KernelCheck(Generic[Spec]):
    """Check of the kernels of one operator.

    kind      kind(spec) returns the parts of a spec that the numbers depend on, in the form that
              `compare` takes. None: nothing to check. For operators whose kernels are chosen while
              torch.compile traces, the parts must be strings, numbers or unmodified parts of the
              spec
    compare   yields the comparisons, see `Compare`
    examples  specs for which the tests run the check
    large     the same comparisons on a sample of training's size, which starts as many programs as
              a device holds at once, and more: `narrowgauge card-report` runs it. The reference
              takes seconds of CPU time. None: `compare` is all there is
    """

    kind: Callable[[Spec], tuple[Hashable, ...] | None]
    compare: Compare
    examples: Callable[[], Iterable[Spec]]
    large: Compare | None = None

    def failure(
        self, op: str, kernel: Kernel[Spec], kind: tuple[Hashable, ...], device: torch.device
    ) -> str | None:
        """Return the reason why the kernel failed for this kind of call on this device, or None.

        The check runs if it has not run before. A failure also issues a RuntimeWarning, because
        nobody may look at the refusals and the fallback is only slower. Raises BackendError during
        CUDA graph capture: the kernels and the synchronization of a check must not be captured.
        """
        key = (op, kernel.name, kind, device.index)
        if key not in RESULTS:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"{op}: {kernel.name} was never checked on {device}, and it cannot be while a CUDA graph is captured. "
                    "Run one step before the capture.",
                    code="kernel.unchecked",
                )
            RESULTS[key] = examine(op, kernel.run, self, kind, device)
            if (reason := RESULTS[key].reason) is not None:
                words = f"{op}: the {kernel.name} kernel is not used, and a slower one is, because {reason}"
                warn(words, code="kernel.failed-check", stacklevel=2, category=SlowerWarning)
        return RESULTS[key].reason


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    reason     clause that says why the kernel is refused, or None if it passed
    worst      largest error as a fraction of its bound
    elapsed_s  duration, including the first compilation or loading of the kernel
    raised     True if the kernel raised an exception instead of computing a wrong result
    """

    reason: str | None
    worst: float
    elapsed_s: float
    raised: bool = False


# (operator, kernel, kind of call, device index).
RESULTS: dict[tuple[str, str, Hashable, int], CheckResult] = {}


def examine(
    op: str, run: Callable[..., Any], check: KernelCheck[Any], kind: Hashable, device: torch.device,
    *, large: bool = False,
) -> CheckResult:  # fmt: skip
    """Run a check once. A kernel that raises is refused with the text of its exception.

    large  True runs the comparisons of `check.large`

    Raises OutOfMemoryError if the device has too little memory.
    """
    started_at_s = time.perf_counter()
    # The reference result is computed on the CPU, whatever the default device is. Autocast would
    # round its operands.
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            compare = check.large if large and check.large is not None else check.compare
            worst, reason = _first_failure(compare(run, kind, device), device)
            raised = False
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{op}: {device} has no memory left for the check of a kernel, which takes a few MiB. Free some, or "
                f"lower the batch size. ({_first_line(error)})",
                code="memory.kernel-check",
            ) from error
        # Any exception of torch, cuBLAS or Triton is a reason for a refusal.
        except Exception as error:
            worst, reason = (
                float("inf"),
                f"it failed when it was tried on {device}: {_first_line(error)}",
            )
            raised = True
    return CheckResult(reason, worst, time.perf_counter() - started_at_s, raised)


def _first_failure(
    found: Iterable[OutputComparison | str], device: torch.device
) -> tuple[float, str | None]:
    """Return (largest error as a fraction of its bound, reason as a clause or None)."""
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
    """Return the same for one comparison."""
    if bound is None:
        reason = difference(name, got, truth, device)
        return (0.0 if reason is None else float("inf")), reason
    got, truth = got.detach().to("cpu").to(torch.float64), truth.to(torch.float64)
    if got.shape != truth.shape:
        return float(
            "inf"
        ), f"its {name} has the shape {list(got.shape)} on {device}, not {list(truth.shape)}"
    # With a bound of zero a correct element gives 0 / 0. NaN against NaN is correct; the check
    # below finds other NaN.
    worst = float(((got - truth).abs() / bound).nan_to_num(nan=0.0, posinf=float("inf")).max())
    if worst > 1:
        return (
            worst,
            f"its {name} is wrong on {device}: {worst:.2g} times the error that is allowed",
        )
    if not torch.equal(got.isnan(), truth.isnan()):
        what = (
            "hides NaN"
            if int(got.isnan().sum()) < int(truth.isnan().sum())
            else "makes NaN of numbers"
        )
        return float("inf"), f"it {what} on {device}"
    return worst, None


def difference(name: str, got: Tensor, expected: Tensor, device: torch.device) -> str | None:
    """Return a clause that describes the bitwise difference between got and expected, or None.

    All NaN count as equal.
    """
    got, expected = got.detach().to("cpu").contiguous(), expected.detach().contiguous()
    # For example, the definition changed and the kernel did not.
    if got.shape != expected.shape or got.dtype != expected.dtype:
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
    # Compared as integers: equal floats may differ in the sign of zero.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(integer).to(torch.int64) & ((1 << min(8 * x.element_size(), 63)) - 1)


def spread_normal(rows: int, columns: int, spread: int, generator: torch.Generator) -> Tensor:
    """Return normal numbers [rows, columns] with a random power of two per 16 x 16 block.

    The powers lie between 2**-spread and 2**spread.
    """
    powers = torch.randint(
        -spread, spread + 1, (-(-rows // 16), -(-columns // 16)), generator=generator
    )
    x = torch.randn(rows, columns, generator=generator)
    return torch.ldexp(
        x, powers.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
