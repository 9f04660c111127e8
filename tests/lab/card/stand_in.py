"""A card that is played by the CPU, for jobs of card-report: its kernels are the definitions, and a driver may fail as told.

    played(tell, run, arguments, failure)    runs the job's real function in a process whose card is this one

Failures, at the call of a kernel that is reached at `at` ("self-check" or "full grid"; of a timing, its first step):

    fault      the kernel raises a CUDA error, and so does whatever is asked of the device from then on
    crash      the process dies of SIGSEGV
    hang       the kernel never returns, and SIGTERM is ignored
    wrong      one bit of the first result is another
    refused    the driver refuses the launch, and answers as before
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.lab.card import checks, contenders, process
from narrowgauge.ops.registry import Kernel, Refusal, Registry
from narrowgauge.ops.selfcheck import KernelCheck

CPU = torch.device("cpu", 0)
MACHINE = {
    "card": {
        "name": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "memory_bytes": 79 << 30, "processors": 132, "cards": 1,
        "shows": "no card: the CPU plays it",
    },
    "versions": {"cuda": "13.0", "torch": torch.__version__, "narrowgauge": "0"},
}  # fmt: skip
ILLEGAL = "CUDA error: an illegal memory access was encountered"
TOO_MANY = "Triton Error [CUDA]: too many blocks in cooperative launch"


def machine(tell: process.Tell) -> dict[str, Any]:
    return MACHINE


def silent(tell: process.Tell, **arguments: Any) -> dict[str, Any]:
    """A probe that the card does not answer."""
    raise RuntimeError(ILLEGAL)


@dataclass
class Driver:
    """What the kernels of this process call. at: the stage that was told last."""

    failure: str
    fails_at: str
    at: str = ""
    lost: bool = False

    def tell(self, at: str, on: process.Tell) -> None:
        self.at = at
        on(at)

    def synchronize(self, *device: object) -> None:
        if self.lost:
            raise RuntimeError(ILLEGAL)

    def launched(self, run: Callable[..., Any], *given: Any) -> Any:
        self.synchronize()
        failure = self.failure if self.at == self.fails_at else ""
        if failure == "fault":
            self.lost = True
            self.synchronize()
        if failure == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if failure == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
        if failure == "refused":
            raise RuntimeError(TOO_MANY)
        found = run(*given)
        if failure == "wrong":
            first = next(_tensors(found if found is not None else given))
            first.view(torch.uint8).reshape(-1)[first.nbytes // 2] ^= 64
        return found


def _tensors(found: Any):
    if isinstance(found, Tensor):
        if found.numel() > 1:
            yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _tensors(each)
    elif is_dataclass(found):
        yield from _tensors([getattr(found, each.name, None) for each in fields(found)])


def played(
    tell: process.Tell, run: str, arguments: dict[str, Any], failure: str = "", at: str = ""
) -> dict[str, Any]:
    """Runs the function of a job on the played card; this process ends with it, so nothing is put back."""
    driver = Driver(failure, at)
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = driver.synchronize
    original = checks.registries
    checks.registries = lambda: {op: _driven(each, driver) for op, each in original().items()}
    linear = contenders.linear
    contenders.linear = lambda *given: _Driven(linear(*given), driver)
    function = {"check": checks.check, "linear": _timings().linear, "probe": checks.probe}[run]
    return function(partial(driver.tell, on=tell), **arguments)


def _timings():
    from narrowgauge.lab.card import timings

    return timings


class _Driven(nn.Module):
    """A layer whose forward pass the driver launches."""

    def __init__(self, layer: nn.Module, driver: Driver) -> None:
        super().__init__()
        self.layer, self.driver = layer, driver

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.driver.failure == "wrong":
            return -self.layer(x)
        return self.driver.launched(self.layer, x)


def _driven(registry: Registry[Any], driver: Driver) -> Registry[Any]:
    """The registry with its definition under the names of its kernels; their checks are the real ones, at small sizes."""
    found: Registry[Any] = Registry(registry.op)
    definition = registry.kernels[-1]
    for kernel in registry.kernels:
        if kernel.check is not None:
            check = kernel.check()
            how = replace(check, large=check.compare)
            ran = partial(driver.launched, _run_of(definition))
            found.kernels.append(_checked(registry.op, kernel.name, ran, how))
    return found


def _run_of(definition: Kernel[Any]) -> Callable[..., Any]:
    """An optimizer's kernel is given the parameters and what it may keep."""
    if definition.name != "torch":
        return definition.run
    return lambda param_steps, kept: definition.run(param_steps, kept)


def _checked(op: str, name: str, run: Callable[..., Any], how: KernelCheck[Any]) -> Kernel[Any]:
    kernel: Kernel[Any] = Kernel(name, lambda spec: None, run, check=lambda: how)

    def refuse(spec: Any) -> Refusal | None:
        reason = how.failure(op, kernel, how.kind(spec), CPU)
        return None if reason is None else Refusal("failed-check", reason)

    return replace(kernel, refuse=refuse)
