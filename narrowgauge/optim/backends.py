"""Who computes an optimizer's step: the first of these that does not refuse a tensor.

    triton    NVIDIA GPUs: one launch for many tensors, states decoded and encoded in registers (triton_step.py)
    native    CPUs: step.cpp, compiled once per machine (cpp/binding.py)
    torch     everywhere: plain torch in chunks, several times slower; the definition (update.py)

All compute the same bits. Which one it is, and why not a faster one, is what `computed_by` and `state_bytes` of an optimizer tell; a
warning says it once where plain torch stands in for a kernel that should have been there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from narrowgauge.errors import BackendError
from narrowgauge.ops.registry import Choice, Device, Kernel, Refusal, Registry, device_facts, device_of
from narrowgauge.ops.selfcheck import Check
from narrowgauge.ops.triton import refuse as refuse_triton
from narrowgauge.optim import rules
from narrowgauge.optim.cpp import binding
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.selfcheck import Kind, compare
from narrowgauge.optim.step import ParamStep, step_in_torch


@dataclass(frozen=True)
class Spec:
    """What a backend is chosen by.

    rule  a kernel has to know it
    kind  of tensor and rule, if there is a gradient to know it by; then a Triton kernel is checked with it (selfcheck.py)
    """

    device: Device
    rule: Rule
    kind: Kind | None = None


def _refuse_triton(spec: Spec) -> Refusal | None:
    return refuse_triton(spec.device.type, spec.device.capability) or _refuse_rule(spec.rule)


def _refuse_rule(rule: Rule) -> Refusal | None:
    return Refusal("operands", rules.refuse(rule)) if rules.refuse(rule) else None


def _check(run: Callable[..., None], kind: tuple[Kind], device: torch.device) -> list[str]:
    """What differs from the definition."""
    reason = compare(lambda tasks: run(tasks, {}), kind[0], device)[1]
    return [] if reason is None else [reason]


# Its examples are those of tests/ops/triton/stepped.py.
CHECK: Check[Spec] = Check(lambda spec: None if spec.kind is None else (spec.kind,), _check, lambda: ())


def _refuse_native(spec: Spec) -> Refusal | None:
    if spec.device.type != "cpu":
        return Refusal("device", f"computes on the CPU, the tensor is on {spec.device.type}")
    if (refusal := _refuse_rule(spec.rule)) is not None:
        return refusal
    return Refusal("toolchain", binding.refuse()) if binding.refuse() else None


def _step_by_triton(tasks: Sequence[ParamStep], kept: dict[Any, Any]) -> None:
    from narrowgauge.optim.triton import launch

    launch.step(tasks, kept)


def _step_in_torch(tasks: Sequence[ParamStep], kept: dict[Any, Any]) -> None:
    for task in tasks:
        step_in_torch(task)


KERNELS: Registry[Spec] = Registry("optim")
KERNELS.register(
    Kernel("triton", _refuse_triton, lambda tasks, kept: _step_by_triton(tasks, kept), check=lambda: CHECK)
)
KERNELS.register(Kernel("native", _refuse_native, lambda tasks, kept: binding.step(tasks)))
KERNELS.register(Kernel("torch", lambda spec: None, _step_in_torch, by_torch=True))
NAMES = tuple(kernel.name for kernel in KERNELS.kernels)


def choose(task: ParamStep, backend: str) -> Choice[Spec]:
    """The backend of a task, whose gradient and constants are known. Raises BackendError if the one named `backend` refuses it.

    Where no kernel leaves the cast of the new weight, the task asks for none any more, and its `stepped` says why.
    """
    if task.stepped is not None:
        triton = next(kernel for kernel in KERNELS.kernels if kernel.name == "triton")
        asked = backend in ("auto", triton.name)
        named = Refusal("caller", f'the optimizer was built with backend = "{backend}"')
        refusal = triton.refuse(_spec(task)) if asked else named
        if refusal is None:
            return Choice(triton, ())
        task.stepped.disable(refusal.text)
        task.stepped = task.native = None
    choice = _choice(_spec(task), backend)
    if backend == "auto" and choice.kernel.name == "torch":
        tell_once(words(choice))
    return choice


def _choice(spec: Spec, backend: str) -> Choice[Spec]:
    """As the registry chooses; one that is named without asking the others, of which one would build a library to answer."""
    named = [kernel for kernel in KERNELS.kernels if kernel.name == backend]
    if named and named[0].refuse(spec) is None:
        return Choice(named[0], ())
    return KERNELS.choose(spec, None if backend == "auto" else backend)


def _spec(task: ParamStep) -> Spec:
    device = device_of(task.source, task.gradient, *task.state)
    if device.type != "cuda" or device.wrapper or rules.refuse(task.rule):
        return Spec(device, task.rule)
    from narrowgauge.optim.triton.launch import kind_of

    return Spec(device, task.rule, kind_of(task))


def words(choice: Choice[Spec]) -> str:
    """Why the choice is not a faster one, without the backends that are for other devices; '' if it is the device's own."""
    return "; ".join(dict.fromkeys(why.text for _, why in choice.refusals if why.code != "device"))


@cache
def tell_once(reason: str) -> None:
    """That the slow backend is in use, and why."""
    warnings.warn(
        f"narrowgauge.optim steps in plain torch, several times slower: {reason or 'no kernel is for this device.'}",
        RuntimeWarning,
        stacklevel=2,
    )


class ComputedBy(NamedTuple):
    """Who steps a tensor; why: of plain torch, unless it was asked for, why no faster one does, else ''."""

    kernel: str
    why: str

    def __str__(self) -> str:
        return self.kernel + (f" ({self.why})" if self.why else "")


def computed_by(task: ParamStep | None, device: torch.device, backend: str, rule: Rule) -> ComputedBy:
    """Which backend steps a tensor, by its task if it has stepped."""
    if task is not None and task.backend is not None:
        choice: Choice[Spec] = task.backend[1]
    else:
        choice = _choice(Spec(device_facts(device.type, device.index), rule), backend)
    why = words(choice) if backend == "auto" and choice.kernel.name == "torch" else ""
    return ComputedBy(choice.kernel.name, why)


def refuse(backend: str, device: torch.device, rule: Rule) -> str:
    """Why this backend cannot compute the rule on the device, or ''."""
    try:
        _choice(Spec(device_facts(device.type, device.index), rule), backend)
    except BackendError as error:
        return str(error)
    return ""
