"""recipe="auto": the fastest recipe for each Linear's sizes on this device.

No layer becomes slower than in bfloat16, which is a candidate.

    tokens M, in K, out N  ->  seconds of forward + backward + casts, per candidate  ->  the fastest

Candidates on a GPU are bf16, fp8-block, fp8-row and fp8-current, from the most to the least
accurate: with fewer elements per scale, fewer elements underflow. On a CPU they are bf16 and int8.
Of the candidates within 2 % of the fastest, or within the error of predicted times, the most accurate
wins. Recipes that the device would emulate are excluded, since emulation multiplies in bfloat16 and casts in addition.
Delayed scaling is excluded: it has state, which users have to ask for. `int8` is excluded on a GPU, with its
reason on 9.x and 10.x: passes of their own scale its INT32 sums, so it is slower than bfloat16.

    measured         now (measure.py): half a second per candidate, more if compiled
    measured before  from the cache file, for this device, these versions and sizes
    predicted        if the device has too little memory to measure: counted operations at the rates
                     of the card (predict.py)
    no choice        only bf16 is native here; nothing is measured

For bf16 on a GPU the Linear stays an nn.Linear. The result is
`layer.decision`, which `describe` prints.

narrowgauge has no kernels for AMD, Apple and Intel GPUs. There the choice is bf16 without a measurement,
and `convert` warns (`warn_without_kernels`). It warns too of a choice for the CPU of a machine with
such a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion import measure
from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import ERROR, predicted
from narrowgauge.errors import ConfigError, warn
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm import why_emulated, why_not_int8
from narrowgauge.ops.mm.spec import gpu_without_kernels, without_kernels
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.timing.cards import of_device
from narrowgauge.structure import features

CANDIDATES = ("bf16", "fp8-block", "fp8-row", "fp8-current")  # on a GPU, the most accurate first
ON_CPU = ("bf16", "int8")
ALL = (*CANDIDATES, "int8")
TIE = 0.02


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The recipe of a layer, and the reason.

    recipe    name
    tokens    rows of x
    how       see the module docstring; "given" if the caller passed `choices`
    seconds   candidate -> forward and backward of one layer
    excluded  recipe -> reason why it was no candidate
    """

    recipe: str
    tokens: int
    how: str
    seconds: dict[str, float] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """ "auto, measured at 8,192 tokens: fp8-row 1.23 ms, bf16 1.90 ms; not fp8-block: Triton is not installed" """
        return "; ".join(filter(None, (self.choice, self.no_candidates)))

    @property
    def choice(self) -> str:
        """Return the kind of the decision and the times of the candidates."""
        return ": ".join(filter(None, (self.way, self.times)))

    @property
    def way(self) -> str:
        """Return the kind of the decision and the number of tokens."""
        is_given = self.how == "given"
        return (
            f"auto, {'as decided before' if is_given else f'{self.how} at {self.tokens:,} tokens'}"
        )

    @property
    def times(self) -> str:
        """Times of the candidates, the fastest first; '' if none was measured."""
        fastest_first = sorted(self.seconds.items(), key=lambda item: item[1])
        return ", ".join(
            f"{name} {s * 1e3:.3g} ms" if s < 1 else f"{name} {s:.3g} s"
            for name, s in fastest_first
        )

    @property
    def no_candidates(self) -> str:
        """Return the excluded recipes and the reasons: "not fp8-row, fp8-block: cpu has no FP8 units"."""
        if self.how == "given":
            return ""
        return "; ".join(
            f"not {', '.join(name for name, why in self.excluded.items() if why == reason)}: {reason}"
            for reason in dict.fromkeys(self.excluded.values())
        )


def preferred(seconds: Mapping[str, float], tie: float = TIE) -> str:
    """Return the most accurate candidate within 2 % of the fastest, or within `tie`."""
    limit = min(seconds.values()) * (1 + tie)
    return next(name for name in ALL if name in seconds and seconds[name] <= limit)


def decide(
    workload: LinearWorkload,
    device: torch.device,
    cache: Path | None = None,
    measured: Callable[..., tuple[dict[str, float], dict[str, str]]] = measure.measured,
) -> Decision:
    """Choose the recipe for one Linear.

    cache     file of measurements; None: the file in the user's cache folder
    measured  function that measures: (workload, candidates, device) -> (seconds, reasons of
              failures)

    Raises the errors of measuring plain bf16, except OutOfMemoryError.
    """
    excluded = {}
    on_cpu = device_facts(device.type, device.index).type == "cpu"
    for name in (ALL if on_cpu else CANDIDATES)[1:]:
        reasons = [why_emulated(gemm, device) for gemm in recipes.get(name).gemms().values()]
        if why := next(filter(None, reasons), None):
            excluded[name] = why
    names = [name for name in (ON_CPU if on_cpu else CANDIDATES) if name not in excluded]
    if why := why_not_int8(device):
        excluded["int8"] = why
    if names == ["bf16"]:
        return Decision(recipe="bf16", tokens=workload.tokens, how="no choice", excluded=excluded)
    # The candidates are part of the key: a new native recipe invalidates the entry.
    cache = measure.user_cache() if cache is None else cache
    key = measure.key(workload, names, device)
    how, seconds, tie = "measured before", measure.cached(cache).get(key, {}), TIE
    if set(seconds) != set(names):
        try:
            how = "measured"
            seconds, failed = measured(workload, names, device)
            excluded |= failed
            if not failed:  # a failure may be temporary, so the key is measured again next time
                measure.keep(cache, key, seconds)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            how, seconds = "no memory to measure with, and unknown rates of this GPU", {}
            if card := of_device(torch.cuda.get_device_name(device)):
                tie = ERROR
                how = f"predicted within {tie:.0%} (no memory to measure with)"
                seconds = predicted(workload, names, card)
    recipe = preferred(seconds, tie) if seconds else "bf16"
    return Decision(
        recipe=recipe, tokens=workload.tokens, how=how, seconds=seconds, excluded=excluded
    )


# --- The Linears of a model ---


def decisions(
    layers: Mapping[str, nn.Module],
    tokens: int | None,
    compiled: bool,
    choices: Mapping[str, str] | None,
) -> dict[str, Decision]:
    """Layer -> decision; measures once per shape.

    tokens   rows of x in a forward pass: sequences of a micro-batch times their length; 0 or None
             with `choices`, as an export has no batch
    choices  layer -> recipe, from `chosen` in an earlier run: nothing is measured

    Raises ConfigError if a layer is missing in `choices`, and without either.
    """
    rows = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else 0
    if choices is None and rows < 1:
        raise ConfigError(
            f"convert: 'auto' chooses by the sizes of the products, but tokens is {tokens!r}. "
            "Pass tokens=, the sequences of a micro-batch times their length.",
            code="auto.tokens",
        )
    if not isinstance(choices, Mapping | None):
        raise ConfigError(
            f"convert: choices = {choices!r} is no mapping. Pass what auto.chosen(model) gave, layer -> recipe.",
            code="auto.choices",
        )
    # Blocks repeat, so layers of one shape, dtype and device are measured once.
    made: dict[tuple[torch.device, LinearWorkload], Decision] = {}
    found = {}
    for name, layer in layers.items():
        if choices is not None:
            if choices.get(name) not in ALL:
                raise ConfigError(
                    f"convert: the choice for {name!r} is {choices.get(name)!r}; it must be one of {', '.join(ALL)}. "
                    "Pass the choices made for this model, or none to choose again.",
                    code="auto.choice",
                )
            found[name] = Decision(recipe=choices[name], tokens=rows, how="given")
            continue
        weight: Any = layer.weight
        inputs, outputs = features(layer)
        workload = LinearWorkload(
            tokens=rows, inputs=inputs, outputs=outputs, dtype=weight.dtype,
            biased=layer.bias is not None, trains=weight.requires_grad, compiled=compiled,
        )  # fmt: skip
        if (weight.device, workload) not in made:
            made[weight.device, workload] = decide(workload, weight.device)
        found[name] = made[weight.device, workload]
    return found


def warn_without_kernels(model: nn.Module, names: Iterable[str]) -> None:
    """Warn once of decisions on a GPU without kernels, or on the CPU of a machine with one.

    names  layers that `auto` decided about in this call
    """
    wanted = set(names)
    found: list[tuple[str, str]] = [
        (layer.weight.device.type, decision.recipe)
        for name, layer, decision in _decided(model)
        if name in wanted and decision.how != "given"
    ]
    here = next((device for device, _ in found if without_kernels(device)), "")
    is_on_cpu = bool(found) and all(device == "cpu" for device, _ in found)
    device = here or (gpu_without_kernels() if is_on_cpu else "")
    if not device:
        return
    choices = ", ".join(dict.fromkeys(recipe for _, recipe in found))
    place = device if here else f"the CPU and not on {device}"
    step = (
        "`narrowgauge info` lists what the CPU computes." if here else "Keep the model on the CPU."
    )
    warn(
        f"convert: 'auto' chose {choices} on {place}, where low precision is only emulated: {without_kernels(device)}. {step}",
        code="auto.no-kernels",
        stacklevel=3,
    )


def chosen(model: nn.Module) -> dict[str, str]:
    """Layer -> recipe as `auto` decided; pass it as `convert(..., choices=...)`."""
    return {name: decision.recipe for name, _, decision in _decided(model)}


def summary(model: nn.Module) -> list[str]:
    """Return one line per shape and decision, then the excluded recipes with the reasons.

    "4096 -> 14336 (32 layers): fp8-row (auto, measured at 8,192 tokens: fp8-row 1.23 ms, bf16 1.9 ms)"
    """
    decided = _decided(model)
    groups = Counter(
        (f"{layer.in_features} -> {layer.out_features}", f"{decision.recipe} ({decision.choice})")
        for _, layer, decision in decided
    )
    reasons = dict.fromkeys(decision.no_candidates for *_, decision in decided)
    return [
        f"{shape} ({n} layer{'s' if n > 1 else ''}): {what}" for (shape, what), n in groups.items()
    ] + [f"{words[0].upper()}{words[1:]}." for words in reasons if words]


def _decided(model: nn.Module) -> list[tuple[str, QLinear, Decision]]:
    return [
        (name, layer, layer.decision)
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and isinstance(layer.decision, Decision)
    ]
