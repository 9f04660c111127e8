"""Kernels of the operators beside matrix products, for `narrowgauge info`.

    casts              C++
    attention in E4M3  torch: needs a CUDA device, the tensor is on cpu

Each registry chooses for bfloat16 tensors of a usual size: casts and rotations of every recipe, every
norm and activation, steps of every rule. "Triton" and "C++" are narrowgauge's own kernels, and
"native" is a kernel of torch. "torch" is the definition, or torch's own function where an operator
is replaced by a kernel alone. It comes with the first reason of a kernel for this type of device.

The report launches, checks and builds nothing, except to plan the products, which `info` reports too.
A C++ library that is not built yet counts as available if a compiler is installed. Triton kernels are
checked before their first use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from narrowgauge import recipes
from narrowgauge.nn import dropout
from narrowgauge.ops import (
    attention,
    attention16,
    cross_entropy,
    grouped,
    hadamard,
    norm_act,
    quantize,
    rotary,
)
from narrowgauge.ops.cpp import without_building
from narrowgauge.ops.hadamard import casting, encoding
from narrowgauge.ops.mm import plan
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Device, Kernel, KernelChoice, device_facts
from narrowgauge.optim import backends, rules
from narrowgauge.recipe import Cast, CurrentScaling, Gemm, Hadamard, LearnedStep

DTYPE, COLUMNS, HEAD, EXPERTS = torch.bfloat16, 4096, 128, 8
SHAPE = (COLUMNS, COLUMNS)
MOST_NAMES, MOST_REASONS = 3, 2  # more are counted
GROUPED = ("fp8-row", "fp8-block", "mxfp8")  # recipes with a grouped kernel on some GPU
STEP, IN_16_BITS, IN_E4M3 = "optimizer's step", "attention in 16 bits", "attention in E4M3"
# Of a recipe: its name, the GEMM, the cast, and the dtype of decoded values or None.
Operand = tuple[str, Gemm, Cast, "torch.dtype | None"]
# A call: the name of its recipe, kind or rule, and the choice. "" if the family has one call.
Choices = Iterator[tuple[str, KernelChoice[Any]]]


def families(device: torch.device) -> dict[str, str]:
    """Family of operators -> kernels that run on the device, and the reason for plain torch."""
    # Kernels are checked, and so launched, on a device with an index alone.
    facts = replace(device_facts(device.type, device.index), index=None)
    operands = [*_operands(device)]  # before nothing is built: products may build their libraries
    with without_building():
        return {name: _words(name, [*calls(operands, facts)]) for name, calls in FAMILIES.items()}


def _words(family: str, found: list[tuple[str, KernelChoice[Any]]]) -> str:
    """Return "C++; torch for mxfp4: REASON", the most frequent kernel first."""
    groups: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for name, choice in found:
        kernel = _kernel(family, choice.kernel)
        groups[kernel, _reason(choice) if kernel == "torch" else ""][name] = None
    total = len({name for name, _ in found})
    first, *others = sorted(groups, key=lambda group: -len(groups[group]))
    parts = [_part(*first)]
    for kernel, reason in others[:MOST_REASONS]:
        names = groups[kernel, reason]
        listed = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} of {total}"
        parts.append(_part(f"{kernel} for {listed}", reason))
    rest = {name for group in others[MOST_REASONS:] for name in groups[group]}
    return "; ".join([*parts, *([f"torch for {len(rest)} more"] if rest else [])])


def _part(kernel: str, reason: str) -> str:
    return f"{kernel}: {reason}" if reason else kernel


def _kernel(family: str, kernel: Kernel[Any]) -> str:
    if kernel.name in ("reference", "torch"):
        return "torch"
    if kernel.name.startswith("triton"):
        return "Triton"
    # "native" is a kernel of torch, but for steps.
    return "C++" if family == STEP or kernel.name in ("native-cpp", "native-eden") else "native"


def _reason(choice: KernelChoice[Any]) -> str:
    """Return the first reason of a kernel for this type of device, or of any.

    Software that is missing comes before what the kernel is not made for.
    """
    refusals = [refusal for _, refusal in choice.refusals]
    here = [each for each in refusals if each.code != "device"]
    made = [each for each in here if each.code != "operands"]
    missing = [each for each in made if each.code == "toolchain"]
    # The next step of a missing compiler is a sentence of its own, and the last line of `info`.
    return (missing or made or here or refusals)[0].text.partition(". ")[0]


# --- Calls of each family


def _operands(device: torch.device) -> Iterator[Operand]:
    for recipe in recipes.ALL:
        for gemm in recipe.gemms().values():
            expand = plan(gemm, device).expand
            for cast in (gemm.lhs, gemm.rhs):
                if cast is not None:
                    yield recipe.name, gemm, cast, expand


def _casts(operands: list[Operand], facts: Device) -> Choices:
    for name, _, cast, expand in operands:
        if isinstance(cast.calibrate, LearnedStep):
            continue  # encoded by a known scale, see `_rotations`
        has_amax = not isinstance(cast.calibrate, CurrentScaling)
        spec = Spec(facts, DTYPE, SHAPE, cast, amax=has_amax, expand=expand)
        yield name, quantize.KERNELS.choose(spec.with_keys() if cast.draws else spec)


def _rotations(operands: list[Operand], facts: Device) -> Choices:
    for name, gemm, cast, expand in operands:
        if gemm.rotate is not None:
            yield name, _rotation(facts, gemm.rotate, cast, expand)


def _rotation(
    facts: Device, rotate: Hadamard, cast: Cast, expand: torch.dtype | None
) -> KernelChoice[Any]:
    """Return the choice of the kernel that rotates: with the cast, or else alone."""
    if isinstance(cast.calibrate, LearnedStep):
        spec = encoding.EncodingSpec(facts, DTYPE, SHAPE, rotate.block, cast.format)
        fused: KernelChoice[Any] = encoding.KERNELS.choose(spec)
    else:
        fused = casting.KERNELS.choose(
            casting.RotatedSpec(
                facts, DTYPE, SHAPE, cast, "key" if cast.draws else None, expand=expand,
                block=rotate.block, rounds=rotate.rounds, signs=rotate.signs != "none",
            )
        )  # fmt: skip
    if not fused.kernel.by_torch:
        return fused
    alone = hadamard.KERNELS.choose(facts)
    # Off a CPU the reason is why no kernel does both: none rotates alone.
    return alone if facts.type == "cpu" else fused


def _norms(operands: list[Operand], facts: Device) -> Choices:
    for name in norm_act.KINDS:
        kind = norm_act.Kind(name)
        count = 3 if name == "layer-norm" else 2 if kind.is_norm or kind.is_gated else 1
        spec = norm_act.NormActSpec(kind, facts, (DTYPE,) * count, COLUMNS)
        yield name, norm_act.FORWARD.choose(spec)
        yield f"gradients of {name}", norm_act.BACKWARD.choose(spec)


def _rotary(operands: list[Operand], facts: Device) -> Choices:
    yield "", rotary.KERNELS.choose(rotary.RotarySpec(facts, (DTYPE,) * 4, HEAD))


def _attention16(operands: list[Operand], facts: Device) -> Choices:
    spec = attention16.Attention16Spec(facts, (DTYPE,) * 3, HEAD, HEAD)
    yield "", attention16.KERNELS.choose(spec)


def _fp8_attention(operands: list[Operand], facts: Device) -> Choices:
    yield "", attention.KERNELS.choose(attention.AttentionSpec(facts, (DTYPE,) * 3, HEAD, HEAD))


def _dropout(operands: list[Operand], facts: Device) -> Choices:
    # A module with one kernel and no registry: torch's own dropout takes its place.
    refusal = dropout.refuse(DTYPE, facts)
    refusals = () if refusal is None else (("native-cpp", refusal),)
    name = "native-cpp" if refusal is None else "reference"
    yield "", KernelChoice(Kernel(name, lambda spec: None, dropout.dropout), refusals)


def _cross_entropy(operands: list[Operand], facts: Device) -> Choices:
    spec = cross_entropy.CrossEntropySpec(facts, DTYPE)
    yield "losses", cross_entropy.FORWARD.choose(spec)
    yield "gradients", cross_entropy.BACKWARD.choose(spec)


def _experts(operands: list[Operand], facts: Device) -> Choices:
    # Every grouped kernel is for CUDA, so one recipe tells the reason elsewhere.
    for name in GROUPED if facts.type == "cuda" else GROUPED[:1]:
        gemm = recipes.get(name).output
        found = grouped.choose(
            grouped.GroupSpec(gemm.lhs, gemm.rhs, facts, (DTYPE,) * 3, EXPERTS, SHAPE, biased=False)
        )
        yield name, KernelChoice(found.kernel, tuple(found.relevant))


def _steps(operands: list[Operand], facts: Device) -> Choices:
    for rule in rules.RULES.values():
        yield rule.name, backends.KERNELS.choose(backends.BackendSpec(facts, rule))


FAMILIES: dict[str, Callable[[list[Operand], Device], Choices]] = {
    "casts": _casts,
    "rotations": _rotations,
    "norms, activations": _norms,
    "rotary embedding": _rotary,
    IN_16_BITS: _attention16,
    IN_E4M3: _fp8_attention,
    "dropout": _dropout,
    "cross-entropy": _cross_entropy,
    "grouped experts": _experts,
    STEP: _steps,
}
