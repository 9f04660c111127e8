"""Cooperative grids of casts: why none is launched, and how many multiprocessors they leave free.

A cooperative grid finds the largest magnitude and casts in one launch (`ops.quantize.triton_launch`).
Its programs wait for each other, so all of them must be resident at once. By default they fill every
multiprocessor, and nothing else runs beside them. `leave_multiprocessors_free` restricts the grids of
a GPU to fewer. A program then has 1,024 threads, so a multiprocessor holds one, and the others stay
whole: a kernel of NCCL has 544 threads or more and finds no place in a quarter of a multiprocessor.
No GPU has run a grid beside a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch

from narrowgauge.errors import ConfigError, SlowerWarning, warn

# Device index -> first line of the driver's refusal of a cooperative grid.
_NO_GRIDS: dict[int | None, str] = {}
# cuLaunchKernelEx: CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (720) and NOT_SUPPORTED (801).
_GRID_REFUSALS = ("cooperative launch", "operation not supported")
# Device index -> multiprocessors that grids leave free. Replaced at each change, never modified.
_FREE: Mapping[int | None, int] = MappingProxyType({})


def leave_multiprocessors_free(count: int, device: torch.device | str | int | None = None) -> None:
    """Restrict the cooperative grids of casts on a GPU to all multiprocessors but `count`.

    count   from 0, the default, to one less than the GPU has. With 0 grids fill the GPU, and casts
            take two launches while a process group of several ranks exists. Above 0 they launch a
            grid beside collectives too, so it should be at least the number of channels that NCCL
            uses (NCCL_MAX_CTAS): programs of a grid that found no place would wait for the collective
    device  a CUDA device; None: the current one

    It applies to the process, to casts launched from now on, with equal results. Call it before the
    first cast, so that the self-check runs the same kernels, and before a CUDA graph is captured.
    A refusal of the driver is forgotten: a smaller grid may fit, as in a green context.
    Raises ConfigError for another count, and for a device that is no GPU of this machine.
    """
    global _FREE
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(
            f"leave_multiprocessors_free: count = {count!r}; it is an integer from 0 on. Pass the multiprocessors to leave free, or 0.",
            code="grids.count",
        )
    index = _index_of(device)
    if count >= (present := multiprocessors(index)):
        raise ConfigError(
            f"leave_multiprocessors_free: count = {count}, and cuda:{index} has {present} multiprocessors. "
            f"Pass at most {present - 1}, so that casts keep one.",
            code="grids.too-many",
        )
    _NO_GRIDS.pop(index, None)
    _FREE = MappingProxyType({**_FREE, index: count})


def _index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a CUDA device."""
    if isinstance(device, int):  # torch.device(0) raises where there is no GPU
        device = torch.device("cuda", device)
    chosen = torch.device(device or "cuda")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type != "cuda" or (chosen.index or 0) >= present:
        raise ConfigError(
            f"leave_multiprocessors_free: device = {str(chosen)!r}, and PyTorch has {present} CUDA devices here. "
            "Name one of these, or leave the call out: casts on a CPU launch no grid.",
            code="grids.device",
        )
    return torch.cuda.current_device() if chosen.index is None else chosen.index


def free_by_device() -> Mapping[int | None, int]:
    """Return {device index: multiprocessors left free}: the same object until a setting changes."""
    return _FREE


def free_multiprocessors(index: int | None) -> int:
    """Return how many multiprocessors grids leave free on a device."""
    return _FREE.get(index, 0)


@cache
def multiprocessors(index: int | None) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def why_no_grids(index: int | None) -> str:
    """Return a clause that says why no cooperative grid is launched on a device, or ''.

    The programs of a cooperative grid take every multiprocessor and wait for each other. Beside
    a collective they start after it has ended, so it is no longer hidden. Two ranks could even
    wait for each other, each with half of its multiprocessors; pytorch issue 170162 is such a
    deadlock. Hence no grid is launched while a process group of several ranks exists, unless it
    leaves multiprocessors free. The group may hold other devices, which costs a second launch and
    no correctness.
    """
    if index in _NO_GRIDS:
        return f"the driver refused a cooperative grid here: {_NO_GRIDS[index]}"
    group = torch.distributed
    if free_multiprocessors(index) or not (group.is_available() and group.is_initialized()):
        return ""
    if (ranks := group.get_world_size()) > 1:
        return f"a process group of {ranks} ranks exists, whose collectives a cooperative grid would wait for"
    return ""


def launched_as_grid(start: Callable[[], None], index: int | None) -> bool:
    """Call `start`, which launches a cooperative grid, and return True.

    False if grids are ruled out on the device (`why_no_grids`), or if the driver refuses this one,
    as under MPS and in green contexts. A refusal is remembered and warned of once.
    """
    if why_no_grids(index):
        return False
    try:
        start()
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        if not any(each in words.lower() for each in _GRID_REFUSALS):
            raise
        _NO_GRIDS[index] = words
        warn(
            f"quantize: casts take two launches, because {why_no_grids(index)}. End what shares the GPU, or go on.",
            code="cast.no-grids",
            stacklevel=2,
            category=SlowerWarning,
        )
        return False
    return True
