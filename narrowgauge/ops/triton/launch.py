"""Launch kernels, and structure their arguments.

The structures are a matrix, one orientation of a result, and an amax state. Triton flattens named
tuples when it compiles. Each pointer and number keeps its own alignment, and None disappears. A
kernel can therefore test `codes is not None`, and needs no flag beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on, refuse_wrappers, tell_launch
from narrowgauge.ops.triton.replay import RECORDING
from narrowgauge.ops.triton.workspaces import drop, of_stream


class KernelName:
    """Name of a kernel, for a dry run, which reports it instead of launching it."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__, self.__name__ = module, name


class Kernels:
    """The kernels of a module that imports Triton, as attributes.

    The module is imported at the first launch.

    In a dry run, which launches nothing, an attribute is a `KernelName`: memory is predicted
    without Triton too.
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if dry_run_on() is not None:
            return KernelName(self.module, name)
        return getattr(sys.modules.get(self.module) or import_module(self.module), name)


class Matrix(NamedTuple):
    """A matrix argument.

    data    [rows, columns]; the elements of a row are contiguous
    stride  distance of two rows in elements
    """

    data: Any
    rows: Any
    columns: Any
    stride: Any

    @classmethod
    def of(cls, x: Tensor) -> Matrix:
        return cls(x, x.shape[0], x.shape[1], x.stride(0))


class Orientation(NamedTuple):
    """Outputs for a matrix, or for its transpose, each row-major; None: not requested."""

    codes: Any = None  # uint8 codes, or decoded values
    scales: Any = None  # float32
    maxima: Any = None  # int32, bits of the largest magnitudes, if they are known before the cast
    key: Any = None  # int64 [2], key of the noise
    units: Any = None  # uint8, `QTensor.units`; then no `scales`


class AmaxState(NamedTuple):
    """Buffers of delayed scaling.

    live    [3] amax state
    maxima  int32 [PARTS] of this tensor
    amax    [1] float32, the amax that sets the scale
    scale   [1] float32, the scale
    """

    live: Any
    maxima: Any
    amax: Any
    scale: Any


def zeroed_workspace(count: int, device: torch.device, written: int = 0) -> Tensor:
    """Return int32 [count] of zeros, which a kernel uses as counters and resets to zero.

    No launch has to clear them. There is one buffer per stream, since the kernels of a stream run
    one after another. In a CUDA graph there is one per launch, because replays may run on any
    stream. A launch that raises drops all buffers (`workspaces`).

    written  number of leading elements that the kernel writes before it reads them; they need not
             be zero
    """
    if (recording := RECORDING.get()) is not None:
        return recording.made(partial(of_stream, count, device, written, {}))
    return of_stream(count, device, written, {})


def launch(
    kernel: Any, programs: int, *arguments: Any, warps: int, reached: Callable[[], Iterable[Tensor]] = list, **constants: Any
) -> None:  # fmt: skip
    """Launch `kernel` with so many programs and warps, on the device of its tensors.

    reached  returns the tensors whose addresses the kernel finds in a table, for a dry run

    Nothing is launched for zero programs.
    """
    if programs == 0:
        return
    tensors = list(_tensors(arguments))
    if dry_run_on() is not None:
        tell_launch(f"{kernel.__module__}.{kernel.__name__}", [*tensors, *reached()])
        return
    refuse_wrappers(*tensors)
    # No contraction of products and sums: it is on by default in Triton 3.9 and off in 3.10, and
    # would change roundings.
    options = {"num_warps": warps, "enable_fp_fusion": False, **constants}
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(tensors[0]):
        try:
            if (recording := RECORDING.get()) is not None:
                recording.launch(kernel, programs, arguments, options)
            else:
                kernel[(programs,)](*arguments, **options)
        except BaseException:
            drop()  # an earlier launch of this call may have left maxima
            raise


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments, including those in tuples."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)
