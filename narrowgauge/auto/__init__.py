"""recipe="auto": for each Linear the recipe that is fastest at its sizes on this device, so that none is slower than bfloat16.

    tokens M, in K, out N  ->  seconds of forward and backward with all casts, per candidate  ->  the fastest

Candidates are bf16, fp8-block, fp8-row and fp8-current, the more accurate first: the fewer elements share a scale, the fewer become zero.
Of those within 2 % of the fastest the most accurate is taken. One that this device would emulate is no candidate: emulation multiplies
in bfloat16 as well and casts besides. Delayed scaling is none either: it has memory, which is to be asked for.

    measured         here and now, on a CUDA device (measure.py): half a second per candidate, more where code is compiled
    measured before  the same device, versions and sizes are in the cache (store.py)
    predicted        the device has no memory left to measure with: a roofline (roofline.py)
    no choice        no candidate but bf16 runs on units of its own; nothing is measured, on a CPU for one

bf16 leaves a Linear on a GPU as it is. What was decided is `layer.decision`, and `describe` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from narrowgauge import recipes
from narrowgauge.auto import measure, roofline
from narrowgauge.auto.store import Store
from narrowgauge.ops.mm import plan

CANDIDATES = ("bf16", "fp8-block", "fp8-row", "fp8-current")  # the most accurate first
TIE = 0.02


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which recipe a layer got, and why.

    seconds   candidate -> forward and backward of one layer
    excluded  candidate -> why it was none
    how       see the module; "given" for choices that were handed in
    """

    recipe: str
    tokens: int
    how: str
    seconds: dict[str, float] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """ "auto, measured at 8,192 tokens: fp8-row 1.23 ms, bf16 1.90 ms; not fp8-block: Triton is not installed" """
        if self.how == "given":
            return "auto, as decided before"
        words = f"auto, {self.how} at {self.tokens:,} tokens"
        if self.seconds:
            fastest_first = sorted(self.seconds.items(), key=lambda item: item[1])
            words += ": " + ", ".join(f"{name} {_duration(seconds)}" for name, seconds in fastest_first)
        reasons: dict[str, list[str]] = {}
        for name, reason in self.excluded.items():
            reasons.setdefault(reason, []).append(name)
        return "; ".join([words, *(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())])


def preferred(seconds: dict[str, float]) -> str:
    """The most accurate of the candidates within 2 % of the fastest."""
    limit = min(seconds.values()) * (1 + TIE)
    return next(name for name in CANDIDATES if seconds.get(name, limit * 2) <= limit)


def decide(
    problem: measure.Problem,
    device: torch.device,
    store: Store | None = None,
    measured: Callable[..., tuple[dict[str, float], dict[str, str]]] = measure.measured,
) -> Decision:
    """The recipe for one Linear. Raises what the measurement of plain bf16 raises, but for want of memory.

    store     where measurements are kept; None: the user's cache folder
    measured  what measures: (problem, candidates, device) -> seconds, and reasons of those that failed
    """
    excluded = {name: reason for name in CANDIDATES[1:] if (reason := _refusal(name, device)) is not None}
    names = [name for name in CANDIDATES if name not in excluded]
    if names == ["bf16"]:
        return Decision(recipe="bf16", tokens=problem.tokens, how="no choice", excluded=excluded)
    store = Store.of_user() if store is None else store
    key = measure.key(problem, names, device)
    how, found = "measured before", store.get(key, names)
    if found is None:
        try:
            how = "measured"
            found, failed = measured(problem, names, device)
            excluded |= failed
            if not failed:
                store.put(key, found)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            card = roofline.card(torch.cuda.get_device_name(device))
            if card is None:
                words = "no memory to measure with, and the rates of this GPU are not known"
                return Decision(recipe="bf16", tokens=problem.tokens, how=words, excluded=excluded)
            how = "predicted (no memory to measure with)"
            found = {
                name: roofline.seconds(name, problem.tokens, problem.outputs, problem.inputs, card) for name in names
            }
    return Decision(recipe=preferred(found), tokens=problem.tokens, how=how, seconds=found, excluded=excluded)


def _refusal(name: str, device: torch.device) -> str | None:
    """Why the device would emulate a product of the recipe, or None."""
    for gemm in recipes.get(name).gemms().values():
        choice = plan(gemm, device).choice
        if choice.kernel.name == "reference":
            reasons = [reason for _, reason in choice.refusals if not reason.startswith("needs two")]
            return "; ".join(dict.fromkeys(reasons)) or "emulated"
    return None


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
