"""Audit: do the last steps of a check compute according to their recipe?

Needs neither a reference run nor statistics.

A BF16 probe starts from the same weights, so it cannot show earlier losses. For example, codes of
an outdated weight hold a run on a plateau that BF16 does not leave either. The audit therefore
compares the numbers themselves, during the run's own steps:

    weight codes    of every layer, as forward and backward read them, with a fresh cast of the
                    weight, bit for bit (with a rotation: within blame's limits), from any cache,
                    optimizer step or collective
    casts           of x in output and of gy in both backward GEMMs, with a fresh cast and the same
                    noise
    GEMMs           with the product of their own codes in high precision
    random numbers  of stochastic rounding with the random numbers of the previous step

The last three are compared for at most LAYERS layers per check, other layers at the next check.
The matrices of one parameter of experts count as one layer: each expert multiplies its own rows, so
together they cost k dense products, k experts a token. At most EXPERTS of them are compared.
Measures and limits are those used by blame (`recast`, `measure`). In sound runs all differences are
zero, so one check is enough. Only the first call of a layer in a step is compared.

Observers only read, so the run stays bit-identical. Fused producers compute as in any step, and
their casts are compared. `unseen` lists the rest: compiled code, layers with a replaced forward,
and weights gathered from other ranks as codes. x in grad_weight is left to blame.

Costs, in STEPS steps per check: a cast of each weight and, for LAYERS layers, a high-precision GEMM
for each of their GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from narrowgauge.diagnose.format_text import percent, plural
from narrowgauge.lab.blame.measure import exact_float32, kernel_distance
from narrowgauge.lab.blame.recast import BIAS, Recast
from narrowgauge.lab.blame.watch import OPERANDS, converted
from narrowgauge.lab.guard.result import KERNEL, STALE, STUCK, UNCAST
from narrowgauge.nn.narrow_layer import unknown_layers, unobserved
from narrowgauge.nn.plan import PRODUCTS
from narrowgauge.qtensor import QTensor

if TYPE_CHECKING:
    from narrowgauge.nn.narrow_layer import NarrowLayer

STEPS = 2  # audited steps at the end of a check
LAYERS = 16  # layers per check whose GEMMs are recomputed
EXPERTS = 16  # matrices of one parameter of experts, per check
# Random numbers compared per cast; two independent draws are equal with a probability of 2^-1536.
SAMPLE = 64

Key = tuple[str, str, str]  # (layer, GEMM, role)


@dataclass
class Audited:
    """Result of an audit, in JSON's types, so that a checkpoint can hold it.

    unlike    "layer:GEMM" -> (kind, detail), see `result.Unlike`
    compared  GEMMs with at least one comparison
    unseen    layers with a recipe that were not compared
    carried   unseen layers whose weights arrive as codes
    hidden    layers of another library that cannot be observed or are not known -> the reason
    """

    unlike: dict[str, tuple[str, str]] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    hidden: dict[str, str] = field(default_factory=dict)

    def take(self, other: Audited) -> None:
        """Merge another step or another rank."""
        for name, found in other.unlike.items():
            self.unlike.setdefault(name, found)
        self.compared = sorted({*self.compared, *other.compared})
        self.carried = sorted({*self.carried, *other.carried})
        self.hidden.update(other.hidden)
        seen = {name.rpartition(":")[0] for name in self.compared}
        self.unseen = sorted({*self.unseen, *other.unseen} - seen)

    def event(self) -> dict[str, Any]:
        """Keys for the check's event."""
        return {
            "unlike": dict(self.unlike),
            "compared": len(self.compared),
            "unseen": self.unseen_words(),
        }

    def unseen_words(self) -> str:
        """Sentences on layers that could not be compared, or ''."""
        said = []
        if self.unseen:
            said.append(
                f"The numbers of {plural(len(self.unseen), 'layer')} were not compared with their recipe, {self.unseen[0]} the first: they "
                "were not called, are compiled, have a replaced forward, or another observer."
            )
        if self.carried:
            said.append(
                f"The weights of {plural(len(self.carried), 'layer')} come as codes, {self.carried[0]} the first, and were not compared."
            )
        for reason in sorted(set(self.hidden.values())):
            own = [name for name, each in self.hidden.items() if each == reason]
            said.append(
                f"The numbers of {plural(len(own), 'layer')} were not compared, {own[0]} the first: {reason}."
            )
        return " ".join(said)


class Audit:
    """Audit of one check.

    Call `begin` before each of its last STEPS steps, `end` after each, then `found`.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        """Prepare an audit. number: of the check, from 0.

        It selects the layers whose GEMMs are compared.
        """
        self._model, self._number = model, number
        self._watches: list[_LayerAudit] = []
        self._unknown = {name: str(each) for name, each in unknown_layers(model).items()}
        self._noise: dict[Key, Tensor] = {}
        self._found = Audited()

    def begin(self) -> None:
        """Observe the next step."""
        self.end()
        layers = converted(self._model)
        chosen = self._chosen(layers)
        for name, layer in layers:
            watch = _LayerAudit(name, layer, name in chosen, self._noise)
            self._watches.append(watch)
            # A user's observer is not displaced; the layer then counts as unseen.
            if layer.observer is None:
                layer.observer = watch

    def _chosen(self, layers: Sequence[tuple[str, NarrowLayer]]) -> set[str]:
        """Names of the layers whose GEMMs are compared in this check."""
        units: dict[Any, list[str]] = {}
        for name, layer in layers:
            # The parameter of an expert's matrix is that of all experts.
            shared = getattr(layer, "parameter", None) if _is_expert(layer) else None
            units.setdefault(name if shared is None else id(shared), []).append(name)
        found = _window(list(units.values()), LAYERS, self._number)
        # By laps over all units: moved at every check, the experts of a unit that comes up at
        # every second one might always be the same.
        lap = self._number // max(-(-len(units) // LAYERS), 1)
        return {name for unit in found for name in _window(unit, EXPERTS, lap)}

    def end(self) -> None:
        """Stop observing, after the step or after its failure."""
        watches, self._watches = self._watches, []
        if not watches:
            return
        step = Audited()
        for each in watches:
            if each.layer.observer is each:
                each.layer.observer = None
            step.unlike.update(each.unlike)
            step.compared += sorted(each.compared)
            if reason := unobserved(each.layer):
                step.hidden[each.name] = str(reason)
            elif each.layer.code_source is not None:
                step.carried.append(each.name)
            elif not each.compared:
                step.unseen.append(each.name)
            # Samples of this step, to be compared with those of the next one.
            self._noise.update(each.drawn)
        self._found.take(step)

    def found(self) -> Audited:
        """Result over all audited steps and all ranks; a collective call."""
        found, self._found = self._found, Audited()
        found.hidden.update(self._unknown)
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return found
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, found)
        total = Audited()
        for each in told:
            total.take(each)
        return total


def _is_expert(layer: NarrowLayer) -> bool:
    return bool(getattr(layer, "is_expert", False))


def _window(found: list[Any], length: int, number: int) -> list[Any]:
    """At most `length` entries, which move from check to check and wrap around."""
    first = number * length % max(len(found), 1)
    return [*found[first:], *found[:first]][:length]


class _LayerAudit:
    """Observer of a layer for one step (`nn.observer.ProductObserver`)."""

    # With True, backward would save x where the recipe saves codes, and the step would draw other
    # noise.
    keeps_inputs = False

    def __init__(
        self, name: str, layer: NarrowLayer, is_chosen: bool, before: Mapping[Key, Tensor]
    ) -> None:
        """before: random numbers of the previous step."""
        self.name, self.layer, self.is_chosen, self._before = name, layer, is_chosen, before
        self.unlike: dict[str, tuple[str, str]] = {}
        self.compared: set[str] = set()
        self.drawn: dict[Key, Tensor] = {}
        self._noise: dict[tuple[str, str], Tensor] = {}
        self._codes: dict[tuple[str, str], QTensor | Tensor] = {}
        self._done: set[tuple[str, str]] = set()

    def drew(self, gemm: str, role: str, noise: Tensor) -> None:
        self._noise[gemm, role] = noise

    @_disable_dynamo
    @torch.no_grad()
    def __call__(self, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        noise = self._noise.pop((gemm, role), None)
        if (gemm, role) in self._done:
            return
        self._done.add((gemm, role))
        if self.is_chosen:
            self._codes[gemm, role] = operand
            if noise is not None:
                self._compare_noise((self.name, gemm, role), noise)
        # x in grad_weight: `original` may be its decoded codes there.
        is_x_of_backward = role == "x" and gemm == "grad_weight"
        is_gathered = role == "w" and self.layer.code_source is not None
        if (
            isinstance(operand, QTensor)
            and not is_x_of_backward
            and not is_gathered
            and (self.is_chosen or role == "w")
        ):
            self._compare(
                gemm, role, original if PRODUCTS[role][0] == gemm else original.T, operand, noise
            )

    def _compare(
        self, gemm: str, role: str, original: Tensor, operand: QTensor, noise: Tensor | None
    ) -> None:
        recast = Recast()
        with torch.autocast(original.device.type, enabled=False):
            recast.add(original, operand, noise)
        if not recast.count or not math.isfinite(recast.size) or not math.isfinite(recast.apart):
            return  # such as a step that float16 loss scaling skips
        self.compared.add(f"{self.name}:{gemm}")
        # With a rotation, and for the arithmetic of other libraries, only blame's limits hold.
        is_exact = (
            role == "w"
            and isinstance(self.layer, nn.Module)
            and getattr(self.layer.recipe, gemm).rotate is None
        )
        if recast.over > 1 or (is_exact and recast.differ):
            self._tell(gemm, STALE if role == "w" else UNCAST, _detail(role, recast))

    def _compare_noise(self, key: Key, noise: Tensor) -> None:
        sample = noise.flatten()[:SAMPLE].to("cpu", copy=True)
        self.drawn[key] = sample
        before = self._before.get(key)
        if before is not None and len(sample) >= SAMPLE // 8 and torch.equal(before, sample):
            self._tell(key[1], STUCK, f"rounding of {key[2]}")

    @_disable_dynamo
    @torch.no_grad()
    def multiplied(self, gemm: str, bias: Tensor | None, result: Tensor) -> None:
        codes = tuple(self._codes.pop((gemm, role), None) for role in OPERANDS[gemm])
        lhs, rhs = codes
        if lhs is None or rhs is None:
            return
        recipe = self.layer.recipe
        fast = recipe is not None and getattr(recipe, gemm).fast_accumulate
        with exact_float32(result.device):
            off, coded, explained = kernel_distance((lhs, rhs), bias, result.detach(), fast)
        self.compared.add(f"{self.name}:{gemm}")
        if math.isfinite(coded) and not off <= explained**2:
            share, most = (
                value / math.sqrt(coded) if coded > 0 else math.inf
                for value in (math.sqrt(off), explained)
            )
            self._tell(
                gemm, KERNEL, f"{share:.2g} of its norm off, of which rounding explains {most:.1g}"
            )

    def _tell(self, gemm: str, kind: str, detail: str) -> None:
        self.unlike.setdefault(f"{self.name}:{gemm}", (kind, detail))


def _detail(role: str, recast: Recast) -> str:
    """Clause on the distance of codes from a fresh cast."""
    parts = []
    if recast.differ:
        parts.append(
            f"{percent(recast.differ / recast.count)} of the codes differ, by {recast.distance:.1g} of the norm"
        )
    if recast.scale_off:
        parts.append(f"a scale is off by {percent(recast.scale_off)}")
    if abs(recast.slope - recast.own_slope) > BIAS:
        parts.append(f"slope {recast.slope:.4f} for {recast.own_slope:.4f}")
    return f"{role}: {', '.join(parts)}"
