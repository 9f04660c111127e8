"""Who may have the casts of an operand already. Each is a CastSource (plan.py), asked in this order:

    InputCasts       x    what computed it cast it as well (`fuse`), or a sister layer that reads the same tensor did: q, k and v
    PrecastSource    w    the optimizer's step left them beside the weight (`ops.quantize.precast_weight`)
    WeightCache      w    made earlier in this optimizer step; what nobody has is made now, and kept here
    GradientCasts    gy   what computed the gradient cast it as well

All of them go by one key, `addresses.validity`. It does not see a tensor that is
written through a raw pointer or `.data`, so casts are kept from one optimizer step to the next only, `advance` forgets them, and a
forward pass without gradients never reads a kept one. Copies and pickles begin empty. torch.compile passes them by: it sees equal
computations itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.plan import OperandRequest
from narrowgauge.recipe import Cast

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight

# --- the weight ------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WeightCache:
    """The casts of one weight, from one optimizer step to the next.

    key   of the weight, and of what its casts depend on besides
    held  keeps the memory of the weight: freed, its address could come back as another weight's
    """

    key: Key | None = None
    held: Tensor | None = None
    casts: Casts = field(default_factory=Casts)

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        if request.plan.role != "w" or (valid := validity(tensor)) is None:
            return None
        context = request.context
        key = (*valid, context.plan, context.out_dtype, context.steps_version)
        if key != self.key:
            self.key, self.held, self.casts = key, tensor.detach(), Casts()
        return request.plan.kind(tensor, request, self.casts)


@dataclass(eq=False)
class StepCasts(WeightCache):
    """Casts that are made once per step by others, such as a CUDA graph: valid whatever the weight's version says.

    What is not among them is made at every call, and not kept.
    """

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        if request.plan.role != "w":
            return None
        made = Casts(self.casts.rows, self.casts.cols, self.casts.amax, self.casts.codes)
        return request.plan.kind(tensor, request, made)


@dataclass(eq=False)
class PrecastSource:
    """What the optimizer's step left of a weight's cast; what is taken lies in the cache from then on."""

    precast: PrecastWeight
    cache: WeightCache

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        plan, context = request.plan, request.context
        if plan.role != "w" or not plan.pairs or not context.records:  # evaluation leaves it to training
            return None
        assert plan.rows is not None
        if not self.precast.matches(tensor, plan.rows, request.state):
            return None
        found = self.cache.lookup(tensor, request)
        if found is None or found.casts.rows is not None:
            return None
        from narrowgauge.ops.quantize.precast_weight import quantize_precast

        casts = found.casts
        casts.rows, casts.cols, casts.amax = quantize_precast(tensor, self.precast, request.state, records=True)
        return found


# --- inputs ----------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CacheStats:
    """made: casts that were handed over; taken: how often a layer took one."""

    made: int = 0
    taken: int = 0


@dataclass(eq=False)
class _Entry:
    """Of one input.

    shared   (key, casts) of layers that read it
    precast  (key, casts, who counts it) of what computed it
    readers  the layers (by id) that took a share
    """

    input: weakref.ref[Tensor]
    key: Key
    shared: list[tuple[Key, Casts]] = field(default_factory=list)
    precast: list[tuple[Key, Casts, CacheStats]] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)


class SharedInputs:
    """The casts of the input that the layers of one model saw last (`convert` installs it).

    It serves only the very tensor object with its numbers unchanged, and each layer once: a layer that reads the same tensor again is
    in another forward pass, and the tensor may have been refilled where its version does not show it. The entry goes when the tensor
    goes, when another comes, and when `advance` ends the step; it is replaced as a whole, so threads see the old one or the new one.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self.gradients = GradientCasts()

    def of(self, x: Tensor, reader: object | None = None) -> InputCasts | None:
        """What there is of x for the layer `reader`, or for what made x; None for a tensor without a version."""
        if (key := validity(x)) is None:
            return None
        entry = self._entry
        if entry is None or entry.input() is not x or entry.key != key or id(reader) in entry.readers:
            entry = self._entry = _Entry(weakref.ref(x, self._forget), key)
        if reader is not None:
            entry.readers.add(id(reader))
        return InputCasts(entry)

    def clear(self) -> None:
        """Forgets the entry, and the gradients."""
        self._entry = None
        self.gradients.clear()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry.input is gone:
            self._entry = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()


@dataclass(eq=False)
class InputCasts:
    """The casts of one input, for the length of one forward call. Closed afterwards: backward keeps the context, not casts."""

    entry: _Entry | None

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        """tensor: the input as [T, K], another object than the one that the entry goes by."""
        if self.entry is None or request.plan.role != "x":
            return None
        for key, casts, stats in self.entry.precast:
            if key == precast_key(request):
                stats.taken += 1
                return request.plan.kind(tensor, request, casts)
        if (own := request.plan.kind.share_key(request)) is None:
            return None
        for key, casts in self.entry.shared:
            if key == own:
                return request.plan.kind(tensor, request, casts)
        self.entry.shared.append((own, Casts()))
        return request.plan.kind(tensor, request, self.entry.shared[-1][1])

    def put(self, request: OperandRequest, casts: Casts, stats: CacheStats) -> None:
        """Hands over casts with the input, for every layer whose request is like this one."""
        if self.entry is not None:
            self.entry.precast.append((precast_key(request), casts, stats))
            stats.made += 1

    def close(self) -> None:
        self.entry = None


def precast_key(request: OperandRequest) -> Key:
    """What layers that may take the same casts of x have in common."""
    plan, kind = request.plan, request.plan.kind
    cols: Cast | None = plan.cols if kind.keeps_codes(request) else None
    return plan.rows, plan.rows_expand, cols, cols is not None and plan.transposes


class GradientCasts:
    """The casts of gradients that a backward pass has computed and not read yet.

    A gradient comes back through views and as another object, so it is known by its memory, which is held until its casts are taken or
    `advance` ends the step, and by its version, which every view of it shares.
    """

    def __init__(self) -> None:
        self._held: dict[Key, tuple[Tensor, Casts]] = {}

    def put(self, gradient: Tensor, casts: Casts) -> None:
        """Hands over `casts` with a gradient, contiguous, that nobody else holds."""
        if (key := validity(gradient.view(-1))) is not None:
            self._held[key] = gradient, casts

    def lookup(self, tensor: Tensor, request: OperandRequest) -> Operand | None:
        """Once, if the tensor is a view of the same elements, unchanged."""
        if request.plan.role != "gy" or not self._held or not tensor.is_contiguous():
            return None
        key = validity(tensor.view(-1))
        if key not in self._held:
            return None
        return request.plan.kind(tensor, request, self._held.pop(key)[1])

    def clear(self) -> None:
        self._held.clear()

    def __reduce__(self) -> tuple[type[GradientCasts], tuple[()]]:
        return GradientCasts, ()
