"""Backends of the optimizer step: the registry takes the first backend that accepts a tensor.

    triton    NVIDIA GPUs: one launch for many tensors, states decoded and encoded in registers
              (triton/launch.py)
    native    CPUs: step.cpp, compiled once per machine (cpp/binding.py)
    torch     every device: plain torch in chunks, several times slower; the reference definition
              (step.py)

All backends are bit-identical. `computed_by` and `state_bytes` report the chosen backend and the
reason why a faster backend refused. A RuntimeWarning is issued once if plain torch replaces a
kernel that the device should have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from narrowgauge.addresses import dry_run_on
from narrowgauge.errors import BackendError, Reason, SlowerWarning, warn
from narrowgauge.ops.cpp import counts_unbuilt
from narrowgauge.ops.registry import (
    Device,
    Kernel,
    KernelChoice,
    Refusal,
    Registry,
    device_facts,
    device_of,
)
from narrowgauge.ops.selfcheck import KernelCheck
from narrowgauge.ops.triton import refuse as refuse_triton
from narrowgauge.optim import rules
from narrowgauge.optim.cpp import binding
from narrowgauge.optim.selfcheck import EXAMPLES, LARGE, StepKind, compare
from narrowgauge.optim.step import ParamStep, step_in_torch

if TYPE_CHECKING:
    from narrowgauge.optim.rules import Rule
    from narrowgauge.optim.skipped_steps import SkippedSteps


@dataclass(frozen=True)
class BackendSpec:
    """Facts about one parameter by which a backend is chosen.

    device  device of the parameter, its gradient and its states
    rule    update rule; a kernel refuses rules that it does not implement
    kind    dtypes, formats and alignment of the step, or None without a gradient. A Triton
            kernel is checked with this kind before its first use (selfcheck.py)
    """

    device: Device
    rule: Rule
    kind: StepKind | None = None


def _refuse_rule(spec: BackendSpec, backend: str) -> Refusal | None:
    return Refusal("operands", reason) if (reason := rules.refuse(spec.rule, backend)) else None


def _refuse_triton(spec: BackendSpec) -> Refusal | None:
    return refuse_triton(spec.device.type, spec.device.capability) or _refuse_rule(spec, "triton")


def _refuse_native(spec: BackendSpec) -> Refusal | None:
    if spec.device.type != "cpu":
        return Refusal("device", f"computes on the CPU, the tensor is on {spec.device.type}")
    if (refusal := _refuse_rule(spec, "native")) is not None:
        return refusal
    reason = "" if counts_unbuilt() else binding.refuse()
    return Refusal("toolchain", reason) if reason else None


CHECK: KernelCheck[BackendSpec] = KernelCheck(
    lambda spec: None if spec.kind is None else (spec.kind,),
    compare,
    lambda: (BackendSpec(Device("cpu"), kind.rule, kind) for kind in EXAMPLES.values()),
    large=partial(compare, times=LARGE),
)


def _step_by_triton(
    param_steps: Sequence[ParamStep], kept: dict[Any, Any], skipped: SkippedSteps | None = None
) -> None:
    from narrowgauge.optim.triton import launch

    launch.step(param_steps, kept, skipped)


def _step_by_native(
    param_steps: Sequence[ParamStep], kept: dict[Any, Any], skipped: SkippedSteps | None = None
) -> None:
    # On a CPU the host reads found_inf itself, so no step is skipped inside the kernel.
    assert skipped is None or dry_run_on() is not None
    binding.step(param_steps)


def _step_by_torch(
    param_steps: Sequence[ParamStep], kept: dict[Any, Any], skipped: SkippedSteps | None = None
) -> None:
    step_in_torch(param_steps, skipped)


KERNELS: Registry[BackendSpec] = Registry("optim")
KERNELS.register(
    Kernel("triton", _refuse_triton, lambda *call: _step_by_triton(*call), check=lambda: CHECK)
)
KERNELS.register(Kernel("native", _refuse_native, _step_by_native))
KERNELS.register(Kernel("torch", lambda spec: None, _step_by_torch, by_torch=True))
NAMES = tuple(kernel.name for kernel in KERNELS.kernels)


def choose(param_step: ParamStep, backend: str) -> KernelChoice[BackendSpec]:
    """Choose the backend of one step. The gradient and the constants of the step must be set.

    Raises BackendError if `backend` names a backend that refuses the step. If no available kernel
    can also write the cast of the new weight, `param_step.stepped` is disabled and keeps the
    reason.
    """
    if param_step.stepped is not None:
        triton = next(kernel for kernel in KERNELS.kernels if kernel.name == "triton")
        named = Refusal("caller", f'the optimizer was built with backend = "{backend}"')
        refusal = triton.refuse(_spec(param_step)) if backend in ("auto", triton.name) else named
        if refusal is None:
            return KernelChoice(triton, ())
        param_step.stepped.disable(Reason(refusal.code, refusal.text))
        # `native` caches a compiled form that depends on the cast, so it is built again.
        param_step.stepped = param_step.native = None
    choice = _choice(_spec(param_step), backend)
    if backend == "auto" and choice.kernel.name == "torch":
        tell_once(words(choice))
    return choice


def _choice(spec: BackendSpec, backend: str) -> KernelChoice[BackendSpec]:
    """Return the registry's choice, or the named backend without querying the others.

    Querying `native` compiles its C++ library, so a named backend is asked first.
    """
    named = [kernel for kernel in KERNELS.kernels if kernel.name == backend]
    if named and named[0].refuse(spec) is None:
        return KernelChoice(named[0], ())
    return KERNELS.choose(spec, None if backend == "auto" else backend)


def _spec(param_step: ParamStep) -> BackendSpec:
    device = device_of(param_step.source, param_step.gradient, *param_step.tensors)
    if device.type != "cuda" or device.wrapper or rules.refuse(param_step.rule, "triton"):
        return BackendSpec(device, param_step.rule)
    from narrowgauge.optim.triton.launch import kind_of

    return BackendSpec(device, param_step.rule, kind_of(param_step))


def words(choice: KernelChoice[BackendSpec]) -> str:
    """Reasons why faster backends refused, joined by semicolons.

    Refusals for another device are left out. The result is '' if the device's own kernel was
    chosen.
    """
    return "; ".join(dict.fromkeys(why.text for _, why in choice.refusals if why.code != "device"))


@cache
def tell_once(reason: str) -> None:
    """Warn once per reason that plain torch computes the step."""
    warn(
        f"narrowgauge.optim steps in plain torch, several times slower: {reason or 'no kernel is for this device.'}",
        code="optim.plain-torch",
        stacklevel=2,
        category=SlowerWarning,
    )


class ComputedBy(NamedTuple):
    """Backend of one tensor's step.

    kernel  name of the backend; '' for an optimizer of another library
    why     reason why no faster backend was chosen, if plain torch was chosen automatically;
            else ''
    """

    kernel: str
    why: str

    def __str__(self) -> str:
        return self.kernel + (f" ({self.why})" if self.why else "")


def computed_by(
    param_step: ParamStep | None, device: torch.device, backend: str, rule: Rule
) -> ComputedBy:
    """Return the backend in use for a tensor, or the backend that would be chosen now."""
    if param_step is not None and param_step.backend is not None:
        choice: KernelChoice[BackendSpec] = param_step.backend[1]
    else:
        choice = _choice(BackendSpec(device_facts(device.type, device.index), rule), backend)
    why = words(choice) if backend == "auto" and choice.kernel.name == "torch" else ""
    return ComputedBy(choice.kernel.name, why)


def refuse(backend: str, device: torch.device, rule: Rule) -> str:
    """Reason why `backend` cannot compute `rule` on `device`, or ''."""
    try:
        computed_by(None, device, backend, rule)
    except BackendError as error:
        return str(error)
    return ""
