"""Registry that chooses a kernel for each call and records why others were refused.

An operator has an ordered list of kernels. Each one accepts a call or refuses it with a code (for
programs) and a text (for people). The first kernel that accepts is used. The refusals before it are
shown by `describe` and `narrowgauge info`. The last kernel, `reference` (`torch` for optimizers),
is the definition in plain torch and never refuses. If the caller forces a kernel by name, it is
used or BackendError is raised; no other kernel replaces it.

The registry adds four refusals of its own:

    device        the kernel is made for another type of device
    wrapper       a wrapper hides the tensors' memory (`addresses.wrapper`), and the kernel is not
                  made of torch operators
    failed-check  the kernel fails its self-check on this device (selfcheck.py)
    slower        a measurement did not show the kernel to be faster on this device

A kernel's module is imported when it is first needed (`imported`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on, wrapper
from narrowgauge.errors import BackendError, closest

Spec = TypeVar("Spec")
# True if torch.compile can pass frozen dataclasses to functions whose results it treats as
# constants (`constant_while_compiling`).
TAKES_DATACLASSES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_CANNOT_NAME = (
    f"it cannot be checked while torch {torch.__version__} traces, for formats and scale rules that are not narrowgauge's own; "
    "torch 2.13 or eager mode can"
)

# Reasons for a refusal. "operands" means that the kernel is made for other operands, so nothing is
# missing on this machine.
Code = Literal[
    "operands", "device", "capability", "toolchain", "compiling", "wrapper", "failed-check", "slower",
    "dtype", "shape", "tile", "tile-transposed", "amax", "format", "scale", "rounding", "calibration", "expanded", "noise", "caller",
]  # fmt: skip


class Refusal(NamedTuple):
    """Reason why a kernel does not compute a call: a code for programs and a clause for people."""

    code: Code
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Device:
    """Properties of a device that decide which kernel is chosen.

    type        type of the torch.device
    capability  compute capability, (0, 0) off CUDA
    bf16_gemm   (CPU) True if the processor has bfloat16 instructions; otherwise float32 GEMMs are
                faster
    int8_gemm   (CPU) True if the processor has VNNI instructions and torch uses them; otherwise
                torch's INT8 GEMM is slower than float32
    cuda        CUDA version that torch was built for, (0, 0) off CUDA
    index       index of a GPU that is present, on which kernels are checked (ops/selfcheck.py);
                None: a CPU, or a device that is absent, on which no kernel is checked
    wrapper     kind of tensor wrapper that hides the memory (`addresses.wrapper`), or ""
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    bf16_gemm: bool = True
    int8_gemm: bool = True
    cuda: tuple[int, int] = (0, 0)
    index: int | None = None
    wrapper: str = ""


def constant_while_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as constant for Dynamo.

    The mark is the one that torch.compiler.assume_constant_result sets (torch 2.11 to 2.13).
    torch's function imports all of Dynamo, which takes a second, imports numpy and configures
    logging. That is too much for `import narrowgauge`.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_compiling
def device_facts(device_type: str, index: int | None) -> Device:
    """Return the Device for a type and an index; in a dry run, the pretended one."""
    if (pretended := dry_run_on()) is not None:
        return pretended
    if device_type == "cuda" and torch.version.hip is None:
        return cuda_facts(index)
    if device_type == "cpu":
        return cpu_facts()
    return Device(device_type)


def device_of(x: Tensor, *others: Tensor | None) -> Device:
    """Return the Device of x, for a call with x and the other tensors."""
    return facts_of(x.device, wrapper(x, *others))


def facts_of(device: torch.device, hidden_by: str) -> Device:
    """Return the Device for tensors in the wrapper `hidden_by`, or for plain tensors ("")."""
    if not hidden_by or dry_run_on() is not None:
        return device_facts(device.type, device.index)
    # Fake tensors may name absent devices.
    if device.type == "cuda" and not torch.cuda.is_available():
        return Device("cuda", wrapper=hidden_by)
    return replace(device_facts(device.type, device.index), wrapper=hidden_by)


def onednn_without_vnni(environment: Mapping[str, str]) -> bool:
    """Return True if an environment variable keeps oneDNN from using VNNI.

    Without VNNI, oneDNN's INT8 GEMM saturates its sums at 16 bits.
    """
    held = environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or ""
    return held.upper() in ("SSE41", "AVX", "AVX2", "AVX512_CORE")


@cache
def cpu_facts() -> Device:
    """Return the Device of this CPU as oneDNN uses it; ONEDNN_MAX_CPU_ISA may restrict it."""
    bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # torch reports VNNI whatever ONEDNN_MAX_CPU_ISA says, and _int_mm then saturates (torch 2.13).
    int8 = torch.cpu._is_vnni_supported() and not onednn_without_vnni(os.environ)
    return Device("cpu", bf16_gemm=bf16, int8_gemm=int8)


def cuda_facts(index: int | None) -> Device:
    return _cuda_facts(torch.cuda.current_device() if index is None else index)


@cache
def _cuda_facts(index: int) -> Device:
    """Cached: every cast needs the result, and a present device does not change."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return Device(
        "cuda", torch.cuda.get_device_capability(index), cuda=(int(major), int(minor)), index=index
    )


@dataclass(frozen=True)
class Kernel(Generic[Spec]):
    """One implementation of an operator.

    name      name by which a caller can force the kernel
    refuse    refuse(spec) returns the reason for a refusal, or None if the kernel accepts
    run       the implementation
    on        type of device that the kernel is made for; the registry refuses all others, before
              it asks `refuse`. None: `refuse` decides, as in mm, where "operands" must come first:
              `describe` would report the device for products that the kernel is not made for
    by_torch  True if it consists of torch operators, which support wrappers; False if it reads
              memory by address, so it never receives a wrapper
    check     returns the `selfcheck.KernelCheck` that must pass on a GPU before first use; None for
              definitions. On a CPU the tests alone run it
    replays   True if its launches depend only on shapes, dtypes and strides, so `ops.triton.replay`
              may replay them
    instructions
              returns the name of the machine's instructions that the kernel uses, for `describe`;
              None if the name of the kernel says enough
    slower    slower(device type, index) returns the reason why a later kernel is preferred there by
              measurement, or None. A caller can still force this kernel
    """

    name: str
    refuse: Callable[[Spec], Refusal | None]
    run: Callable[..., Any]
    on: str | None = None
    by_torch: bool = False
    check: Callable[[], Any] | None = None
    replays: bool = False
    slower: Callable[[str, int | None], str | None] | None = None
    instructions: Callable[[], str] | None = None


def imported(module: str, function: str) -> Callable[..., Any]:
    """Return a function that imports `module` at its first call and then calls `function` in it."""

    load = constant_while_compiling(lambda: bool(import_module(module)))

    def call(*given: Any) -> Any:
        # Dynamo traces no import, and reads sys.modules once: the module has to be there before.
        if torch.compiler.is_compiling():
            load()
        # import_module takes a lock and several lookups, which is too slow for every call.
        return getattr(sys.modules.get(module) or import_module(module), function)(*given)

    return call


@dataclass(frozen=True)
class KernelChoice(Generic[Spec]):
    """The chosen kernel, and (name, refusal) of each kernel that precedes it in the order."""

    kernel: Kernel[Spec]
    refusals: tuple[tuple[str, Refusal], ...]

    @property
    def relevant(self) -> list[tuple[str, Refusal]]:
        """Refusals of the kernels that are made for such operands."""
        return [(name, refusal) for name, refusal in self.refusals if refusal.code != "operands"]

    @property
    def reasons(self) -> list[str]:
        """Texts of the relevant refusals, without duplicates."""
        return list(dict.fromkeys(refusal.text for _, refusal in self.relevant))


class Registry(Generic[Spec]):
    """Kernels of one operator, fastest first. A spec is a Device or has an attribute `device`."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.kernels: list[Kernel[Spec]] = []

    def register(self, *kernels: Kernel[Spec]) -> None:
        """Append kernels, and add the registry's own refusals to those that need them."""
        for kernel in kernels:
            guarded = not kernel.by_torch or kernel.check is not None or kernel.on is not None
            self.kernels.append(
                replace(kernel, refuse=self._guarded(kernel)) if guarded else kernel
            )

    def _guarded(self, kernel: Kernel[Spec]) -> Callable[[Spec], Refusal | None]:
        """Return kernel.refuse with the registry's own refusals around it."""

        @constant_while_compiling
        def failure(device_type: str, index: int, *kind: Hashable) -> str | None:
            assert kernel.check is not None
            reason: str | None = kernel.check().failure(
                self.op, kernel, kind, torch.device(device_type, index)
            )
            return reason

        def refuse(spec: Spec) -> Refusal | None:
            device: Device = spec if isinstance(spec, Device) else spec.device  # type: ignore[attr-defined]
            if (refusal := cannot(spec, device)) is not None or kernel.slower is None:
                return refusal
            reason = kernel.slower(device.type, device.index)
            return None if reason is None else Refusal("slower", reason)

        def cannot(spec: Spec, device: Device) -> Refusal | None:
            # Wrapper and device come first: kernel.refuse may import the kernel's module or build a
            # library.
            if device.wrapper and not kernel.by_torch:
                hides = (
                    f"a {device.wrapper} hides the memory of the tensors, which it reads by address"
                )
                return Refusal("wrapper", hides)
            if kernel.on is not None and device.type != kernel.on:
                return Refusal(
                    "device", f"needs a {kernel.on.upper()} device, the tensor is on {device.type}"
                )
            refusal = kernel.refuse(spec)
            if refusal is not None or kernel.check is None or device.index is None:
                return refusal
            kind = kernel.check().kind(spec)
            if kind is None:
                return None
            # Before torch 2.13 Dynamo passes a dataclass (a Cast) without its fields to `failure`, a constant
            # function.
            if (
                not TAKES_DATACLASSES
                and torch.compiler.is_compiling()
                and any(is_dataclass(each) for each in kind)
            ):
                return Refusal("compiling", _CANNOT_NAME)
            reason = failure(device.type, device.index, *kind)
            return None if reason is None else Refusal("failed-check", reason)

        return refuse

    def choose(self, spec: Spec, forced: str | None = None) -> KernelChoice[Spec]:
        """Return the first kernel that accepts the call, or the one named `forced`.

        Raises BackendError if the forced kernel refuses. A forced kernel is used even if it was
        measured to be slower.
        """
        names = [kernel.name for kernel in self.kernels]
        if forced is not None and forced not in names:
            near = closest(forced, names) or ", ".join(names)
            raise BackendError(
                f"{self.op}: no kernel {forced!r}. Closest: {near}.", code="kernel.unknown"
            )
        refusals: list[tuple[str, Refusal]] = []
        for kernel in self.kernels:
            refusal = kernel.refuse(spec)
            named = forced == kernel.name
            if (refusal is None and (named or forced is None)) or (
                named and refusal is not None and refusal.code == "slower"
            ):
                return KernelChoice(kernel, tuple(refusals))
            if refusal is not None:
                refusals.append((kernel.name, refusal))
            if refusal is not None and named:
                others = [other.name for other in self.kernels if other.refuse(spec) is None]
                raise BackendError(
                    f"{self.op}: {forced} refused: {refusal.text}. Available here: {', '.join(others)}.",
                    code="kernel.refused",
                    refusal=refusal.code,
                )
        raise AssertionError(f"{self.op}: the reference refused {spec}")
