"""Correctness of one kernel and form, at the size of the self-check and at training's.

A form is one example of a `KernelCheck`: a cast with its dtype and way of calling, a pair of casts
of a product, a norm with its casts, a kind of optimizer step. First the kernel has to accept the
call as training asks it, which runs its self-check (10 to 15 programs). Then the comparisons of
`KernelCheck.large` run: more programs than the card holds at once, in the binaries of training.
The references are computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any

import torch

from narrowgauge.lab.card.process import (
    FAULT,
    REFUSED,
    WRONG,
    CardJob,
    Tell,
    device_error,
)
from narrowgauge.ops.registry import Device, Kernel, Registry, device_facts
from narrowgauge.ops.selfcheck import RESULTS, CheckResult, examine
from narrowgauge.recipe import Cast

# In the order in which they are checked: what a training step uses most comes first.
REGISTRIES = (
    ("narrowgauge.ops.quantize.pair", "KERNELS"),
    ("narrowgauge.ops.hadamard.casting", "KERNELS"),
    ("narrowgauge.ops.mm", "KERNELS"),
    ("narrowgauge.ops.quantize.precast_weight", "KERNELS"),
    ("narrowgauge.ops.quantize", "KERNELS"),
    ("narrowgauge.optim.backends", "KERNELS"),
    ("narrowgauge.ops.rotary", "KERNELS"),
    ("narrowgauge.ops.hadamard.encoding", "KERNELS"),
    ("narrowgauge.ops.norm_act", "FORWARD"),
    ("narrowgauge.ops.norm_act", "BACKWARD"),
    ("narrowgauge.ops.attention", "KERNELS"),
    ("narrowgauge.ops.grouped", "KERNELS"),
)
# A first compilation takes seconds, the reference on the CPU up to ten, four at a time.
CHECK_S, PROBE_S = 90.0, 30.0
NUMBERS = 1 << 20  # of the probe
ON_CPU = ("native-cpp", "native-int8-cpp")  # kernels that read the memory of the CPU


def registries() -> dict[str, Registry[Any]]:
    """Registry of each operator that has kernels for a GPU."""
    found = [getattr(import_module(module), name) for module, name in REGISTRIES]
    return {registry.op: registry for registry in found}


def jobs(card: Device, device: str = "cuda:0") -> list[CardJob]:
    """A job for each kernel and form that is made for such a card.

    card  properties of the card, without an index, so that nothing is checked here. A kernel that
          is made for other operands gets no job; one that the card cannot run gets one, whose line
          says why
    """
    found: dict[str, CardJob] = {}
    for op, registry in registries().items():
        for kernel, number, spec in _forms(registry):
            refusal = kernel.refuse(replace(spec, device=card))
            # Of another number format: there is nothing to say about this card.
            if refusal is not None and refusal.code in ("operands", "device"):
                continue
            name = f"{op}, {kernel.name}: {form(spec)}"
            # Numbers that the words leave out, such as a smoothing constant, tell them apart.
            if name in found:  # forms whose words are alike
                name += f" ({number})"
            found[name] = CardJob(
                name=name, part="checks", run="narrowgauge.lab.card.checks:check", limit_s=CHECK_S,
                arguments={"op": op, "kernel": kernel.name, "number": number, "device": device},
            )  # fmt: skip
    return list(found.values())


def _forms(registry: Registry[Any]) -> Iterator[tuple[Kernel[Any], int, Any]]:
    for kernel in registry.kernels:
        if kernel.check is not None and kernel.on != "cpu" and kernel.name not in ON_CPU:
            for number, spec in enumerate(kernel.check().examples()):
                yield kernel, number, spec


def check(tell: Tell, op: str, kernel: str, number: int, device: str) -> dict[str, Any]:
    """Ask the kernel for a form, and compare its results with the definition's."""
    registry = registries()[op]
    chosen = next(each for each in registry.kernels if each.name == kernel)
    assert chosen.check is not None
    how, there = chosen.check(), torch.device(device)
    spec = list(how.examples())[number]
    tell("self-check")
    refusal = chosen.refuse(replace(spec, device=device_facts(there.type, there.index)))
    # Read from the dictionary that the registry's own check has filled.
    small = next((each for key, each in RESULTS.items() if key[:2] == (op, kernel)), None)
    found: dict[str, Any] = {"stage": "self-check", "form": form(spec)}
    if small is not None:
        found |= {"small_s": small.elapsed_s, "small_worst": small.worst}
    # A kernel that is only slower here computes for whoever names it, so its numbers are compared.
    if refusal is not None and refusal.code != "slower":
        if refusal.code == "failed-check" and small is not None:
            return found | _failed(small)
        return found | {"status": REFUSED, "why": f"{refusal.text} ({refusal.code})"}
    if how.large is None:
        return found
    tell("full grid")
    large = examine(op, chosen.run, how, how.kind(spec), there, large=True)
    found |= {"stage": "full grid", "large_s": large.elapsed_s, "large_worst": large.worst}
    if large.reason is not None:
        return found | _failed(large)
    if (error := device_error()) is not None:
        return found | {"status": FAULT, "why": error}
    return found


def _failed(result: CheckResult) -> dict[str, Any]:
    """Status of a check that did not pass: wrong numbers, a fault, or a refusal of the driver."""
    if not result.raised:
        return {"status": WRONG, "why": result.reason}
    error = device_error()
    return {"status": REFUSED if error is None else FAULT, "why": result.reason}


def probe(tell: Tell, device: str) -> dict[str, Any]:
    """A sign of life: memory, one kernel and a copy back."""
    tell("probe")
    x = torch.ones(NUMBERS, device=device)
    # Copied back, which waits for whatever the card still does.
    total = float((x + x).sum())
    if total != 2 * NUMBERS:
        return {"status": WRONG, "why": f"{NUMBERS} times 2 gave {total}"}
    return {}


# --- words for a form ---


def form(spec: Any) -> str:
    """Words for the parts of a spec that tell it from the op's others."""
    words = (
        f"{field.name} {value}" if isinstance(value, int) else _words(value)
        for field in fields(spec)
        if field.name not in ("device", "shape", "rule")
        and (value := getattr(spec, field.name)) not in (None, "", ())
        and value is not False
    )
    return ", ".join(words).replace(" True", "")


def _words(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(filter(None, map(_words, value)))
    if value is None or isinstance(value, bool | float):
        return ""
    if is_dataclass(value) and not isinstance(value, Cast):
        if name := getattr(value, "name", ""):
            return str(name)
        return _words([getattr(value, each.name) for each in fields(value)])
    return str(value).removeprefix("torch.")
