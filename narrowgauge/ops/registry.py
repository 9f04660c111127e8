"""Who computes an op: an ordered list of kernels, each of which refuses a call with a code for programs and a text for people.

The last of them, `reference` (of optimizers `torch`), is the definition in plain torch and never refuses. The first kernel that does not
refuse is taken. The refusals of the others are kept, for `describe` and `narrowgauge info`. A kernel that the caller names is taken or
raises BackendError; it is never replaced by another. Four refusals are the registry's own: of a type of device that the kernel is not
made for; of tensors whose memory is elsewhere (`addresses.wrapper`), by every kernel that does not say that it computes by torch's
operators alone; of a device on which the kernel fails its check (selfcheck.py); and of one on which it was not measured to be
faster, if it asks for that. A kernel's own module is imported where it is first asked (`imported`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on, wrapper
from narrowgauge.errors import BackendError, closest
from narrowgauge.recipe import Cast

Spec = TypeVar("Spec")
# Whether torch.compile hands frozen dataclasses to functions whose results it takes as constants (`constant_while_compiling`).
TAKES_DATACLASSES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_CANNOT_NAME = (
    f"it cannot be checked while torch {torch.__version__} traces, for formats and scale rules that are not narrowgauge's own; "
    "torch 2.13 or eager mode can"
)

# What a kernel refuses for. "operands": it is made for others, which says nothing of what this machine lacks.
Code = Literal[
    "operands", "device", "capability", "toolchain", "compiling", "wrapper", "failed-check", "slower",
    "dtype", "shape", "tile", "format", "scale", "rounding", "calibration", "expanded", "noise", "caller",
]  # fmt: skip


class Refusal(NamedTuple):
    """Why a kernel does not compute a call: a code for programs, a clause for people."""

    code: Code
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Device:
    """What matters about a device when a kernel is chosen. capability is (0, 0) off CUDA.

    bf16_gemm, int8_gemm  (CPU) whether the processor has instructions for it; without them such a GEMM is slower than float32
    cuda                  the CUDA version that torch was built for, (0, 0) off CUDA
    index                 which one it is, of devices that are here and on which kernels are checked (ops/selfcheck.py);
                          None: kernels are taken by their word
    wrapper               what hides the memory of the tensors there (`addresses.wrapper`), or ""
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    bf16_gemm: bool = True
    int8_gemm: bool = True
    cuda: tuple[int, int] = (0, 0)
    index: int | None = None
    wrapper: str = ""


def constant_while_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compiler.assume_constant_result does (torch 2.11 to 2.13), without its import of all of Dynamo.

    That import takes a second, brings numpy, and configures logging: too much for `import narrowgauge`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_compiling
def device_facts(device_type: str, index: int | None) -> Device:
    """The Device behind a torch.device."""
    if (pretended := dry_run_on()) is not None:
        return pretended
    if device_type == "cuda" and torch.version.hip is None:
        return cuda_facts(index)
    if device_type == "cpu":
        return cpu_facts()
    return Device(device_type)


def device_of(x: Tensor, *others: Tensor | None) -> Device:
    """The Device of x, for a call with x and the others."""
    return facts_of(x.device, wrapper(x, *others))


def facts_of(device: torch.device, hidden_by: str) -> Device:
    """The Device behind a torch.device, of tensors that are hidden by a wrapper or, with "", plain."""
    if not hidden_by or dry_run_on() is not None:
        return device_facts(device.type, device.index)
    if device.type == "cuda" and not torch.cuda.is_available():  # fake tensors may name devices that are not here
        return Device("cuda", wrapper=hidden_by)
    return replace(device_facts(device.type, device.index), wrapper=hidden_by)


def onednn_without_vnni(environment: Mapping[str, str]) -> bool:
    """Whether a variable holds oneDNN back from VNNI: without it, its sums of INT8 products saturate at 16 bits."""
    held = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
    return held.upper() in ("SSE41", "AVX", "AVX2", "AVX512_CORE")


@cache
def cpu_facts() -> Device:
    """The CPU that runs this process, as oneDNN uses it (ONEDNN_MAX_CPU_ISA may hold it back)."""
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    int8 = torch.cpu._is_vnni_supported() and not onednn_without_vnni(os.environ)
    return Device("cpu", bf16_gemm=bf16, int8_gemm=int8)


def cuda_facts(index: int | None) -> Device:
    return _cuda_facts(torch.cuda.current_device() if index is None else index)


@cache
def _cuda_facts(index: int) -> Device:
    """Asked for at every cast: of a device that is here they do not change."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return Device("cuda", torch.cuda.get_device_capability(index), cuda=(int(major), int(minor)), index=index)


@dataclass(frozen=True)
class Kernel(Generic[Spec]):
    """One way to compute an op. refuse(spec) is None when it can.

    on        the type of the devices that it is made for; elsewhere it is refused unasked. None: it says itself
    by_torch  whether it computes by torch's operators alone, which know wrappers; else it reads memory, and is never given one
    check     loads the `selfcheck.Check` by which it is examined on a device before it is first taken there; None of definitions
    replays   whether what it launches follows from the forms of its tensors alone, so that `ops.triton.replay` may make it again
    slower    (type, index) of a device -> why a later kernel is taken there, by a measurement, or None. A caller may still name this one
    """

    name: str
    refuse: Callable[[Spec], Refusal | None]
    run: Callable[..., Any]
    on: str | None = None
    by_torch: bool = False
    check: Callable[[], Any] | None = None
    replays: bool = False
    slower: Callable[[str, int | None], str | None] | None = None


def imported(module: str, function: str) -> Callable[..., Any]:
    """The function of a module that is imported at the first call."""

    def call(*given: Any) -> Any:
        return getattr(sys.modules.get(module) or import_module(module), function)(*given)

    return call


@dataclass(frozen=True)
class Choice(Generic[Spec]):
    """The kernel taken, and (name, refusal) for each one before it in the order."""

    kernel: Kernel[Spec]
    refusals: tuple[tuple[str, Refusal], ...]

    @property
    def relevant(self) -> list[tuple[str, Refusal]]:
        """The refusals of kernels that are made for such operands."""
        return [(name, refusal) for name, refusal in self.refusals if refusal.code != "operands"]

    @property
    def reasons(self) -> list[str]:
        """The texts of these, each once."""
        return list(dict.fromkeys(refusal.text for _, refusal in self.relevant))


class Registry(Generic[Spec]):
    """The kernels of one op, fastest first. A spec is a Device or has one as `device`."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.kernels: list[Kernel[Spec]] = []

    def register(self, *kernels: Kernel[Spec]) -> None:
        """Adds kernels, with the registry's own refusals where they concern them."""
        for kernel in kernels:
            guarded = not kernel.by_torch or kernel.check is not None or kernel.on is not None
            self.kernels.append(replace(kernel, refuse=self._guarded(kernel)) if guarded else kernel)

    def _guarded(self, kernel: Kernel[Spec]) -> Callable[[Spec], Refusal | None]:
        """kernel.refuse, which refuses wrappers too, and a device on which the kernel is wrong."""

        @constant_while_compiling
        def failure(device_type: str, index: int, *kind: Hashable) -> str | None:
            assert kernel.check is not None
            reason: str | None = kernel.check().failure(self.op, kernel, kind, torch.device(device_type, index))
            return reason

        def refuse(spec: Spec) -> Refusal | None:
            device: Device = spec if isinstance(spec, Device) else spec.device  # type: ignore[attr-defined]
            if (refusal := cannot(spec, device)) is not None or kernel.slower is None:
                return refusal
            reason = kernel.slower(device.type, device.index)
            return None if reason is None else Refusal("slower", reason)

        def cannot(spec: Spec, device: Device) -> Refusal | None:
            if device.wrapper and not kernel.by_torch:
                hides = f"a {device.wrapper} hides the memory of the tensors, which it reads by address"
                return Refusal("wrapper", hides)
            if kernel.on is not None and device.type != kernel.on:
                return Refusal("device", f"needs a {kernel.on.upper()} device, the tensor is on {device.type}")
            refusal = kernel.refuse(spec)
            if refusal is not None or kernel.check is None or device.index is None:
                return refusal
            kind = kernel.check().kind(spec)
            if kind is None:
                return None
            if not TAKES_DATACLASSES and torch.compiler.is_compiling() and any(isinstance(each, Cast) for each in kind):
                return Refusal("compiling", _CANNOT_NAME)
            reason = failure(device.type, device.index, *kind)
            return None if reason is None else Refusal("failed-check", reason)

        return refuse

    def choose(self, spec: Spec, forced: str | None = None) -> Choice[Spec]:
        """The first kernel that does not refuse, or the one called `forced`. Raises BackendError if that one refuses."""
        names = [kernel.name for kernel in self.kernels]
        if forced is not None and forced not in names:
            near = closest(forced, names) or ", ".join(names)
            raise BackendError(f"{self.op}: no kernel {forced!r}. Closest: {near}.")
        refusals: list[tuple[str, Refusal]] = []
        for kernel in self.kernels:
            refusal = kernel.refuse(spec)
            named = forced == kernel.name
            if (refusal is None and (named or forced is None)) or (
                named and refusal is not None and refusal.code == "slower"
            ):
                return Choice(kernel, tuple(refusals))
            if refusal is not None:
                refusals.append((kernel.name, refusal))
            if refusal is not None and named:
                others = [other.name for other in self.kernels if other.refuse(spec) is None]
                raise BackendError(f"{self.op}: {forced} refused: {refusal.text}. Available here: {', '.join(others)}.")
        raise AssertionError(f"{self.op}: the reference refused {spec}")
