"""Starting a kernel, and what kernels take together: one argument for a matrix, for what is written of it, for the state of a window.

Triton takes named tuples apart when it compiles: each pointer and number keeps its own alignment, and what is None is not there at all,
so a kernel asks `codes is not None` where a flag would say the same twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import cached, dry_run_on, refuse_wrappers, tell_launch
from narrowgauge.ops.triton.replay import RECORDING


class KernelName:
    """The name of a kernel, for a dry run, which counts it instead of launching it."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__, self.__name__ = module, name


class Kernels:
    """The kernels of a module that imports Triton, as attributes. The module is imported at the first one that is launched.

    In a dry run, which launches none, an attribute is the `KernelName`: memory is counted without Triton too.
    """

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if dry_run_on() is not None:
            return KernelName(self.module, name)
        return getattr(sys.modules.get(self.module) or import_module(self.module), name)


class Matrix(NamedTuple):
    """data [rows, columns], rows `stride` elements apart, the elements of a row one after the other."""

    data: Any
    rows: Any
    columns: Any
    stride: Any

    @classmethod
    def of(cls, x: Tensor) -> Matrix:
        return cls(x, x.shape[0], x.shape[1], x.stride(0))


class Orientation(NamedTuple):
    """What is written of a matrix, or of its transpose, in that one's row-major order; None where it is not wanted."""

    codes: Any = None  # uint8, or decoded values
    scales: Any = None  # float32
    maxima: Any = None  # int32, bits of the largest magnitudes by which it is cast, where they are known before
    key: Any = None  # int64 [2] of the noise


class AmaxState(NamedTuple):
    """Delayed scaling: the window's live [3], maxima [PARTS] int32 of this tensor, and [1] float32 each of the amax and scale in use."""

    live: Any
    maxima: Any
    amax: Any
    scale: Any


def zeros_left_zero(count: int, device: torch.device, written: int = 0) -> Tensor:
    """int32 [count], zero: what programs of a kernel count by, and leave zero, so that no launch has to clear it.

    One for each stream, whose kernels run one after another; in a CUDA graph, whose replays may lie on any, one for each launch.
    written: so many in front are no part of that: the kernel writes them before it reads them
    """
    if (recording := RECORDING.get()) is not None:
        return recording.made(partial(_zeros_of_stream, count, device, written, {}))
    return _zeros_of_stream(count, device, written, {})


def _zeros_of_stream(count: int, device: torch.device, written: int, known: dict[int, Tensor]) -> Tensor:
    """known: by stream, for a call that is made again."""
    stream = 0
    if device.type == "cuda":
        if torch._C._cuda_isCurrentStreamCapturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # without a Stream around it
    if (found := known.get(stream)) is None:
        found = _kept_zeros(count, device, written, stream)
        if type(found) is Tensor:
            known[stream] = found
    return found


@cached
def _kept_zeros(count: int, device: torch.device, written: int, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=device)


def launch(
    kernel: Any, programs: int, *arguments: Any, warps: int, reached: Callable[[], Iterable[Tensor]] = list, **constants: Any
) -> None:  # fmt: skip
    """Runs `kernel` by so many programs of so many warps, on the device of its tensors; nothing where there are none.

    Without contraction of products and sums. reached: tensors whose addresses it finds in a table, for a dry run.
    """
    if programs == 0:
        return
    tensors = list(_tensors(arguments))
    if dry_run_on() is not None:
        tell_launch(f"{kernel.__module__}.{kernel.__name__}", [*tensors, *reached()])
        return
    refuse_wrappers(*tensors)
    options = {"num_warps": warps, "enable_fp_fusion": False, **constants}
    with torch.cuda.device_of(tensors[0]):
        if (recording := RECORDING.get()) is not None:
            recording.launch(kernel, programs, arguments, options)
        else:
            kernel[(programs,)](*arguments, **options)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Those among them, and in tuples among them."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from _tensors(each)
