"""Who may have the casts of an operand already, asked about one role in this order:

    InputCasts       x    what computed it cast it as well (`fuse`), or a sister layer that reads the same tensor did: q, k and v
    PrecastSource    w    the optimizer's step left them beside the weight (`ops.quantize.precast_weight`)
    WeightCache      w    made earlier in this optimizer step; what nobody has is made now, and kept here
    GradientCasts    gy   what computed the gradient cast it as well

`lookup(operand)` gives the casts that there are, to which those are added that are made now, or None for an unknown tensor. Another source
(gathered codes, a message's) is one more object with it in a context's `sources`.

All of them go by one key, `addresses.validity`. It contains `_version`, which misses writes through `.data`, NumPy and raw pointers.
A forward pass therefore reuses casts of a weight only if the bytes of the weight are the same (`ops.fingerprint`):

    CPU             compares all bytes, so every write is detected, in training and evaluation
    other devices   "recast", the default, keeps no codes. "step" reuses codes in training alone, compares a sample of the weight in
                    every eighth step and reports a change at the end of a later one (`step_end`)
    backward        takes the casts of its own forward pass; where these are not kept, it casts the weight as it is then

Casts are kept from one optimizer step to the next only, and a forward pass without gradients never reads a kept one. Copies and
pickles begin empty. torch.compile bypasses caches: its code casts weights at every call.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.ops.fingerprint import Fingerprint, Sampled, fingerprint

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight


NUMBERS = itertools.count()  # of inputs


CHECK_EVERY = 8  # steps, between two samples of a weight on a GPU


@dataclass(eq=False)
class WeightCache:
    """The casts of one weight, from one optimizer step to the next.

    casts     those that there are
    is_given  they were made by others, once per step, as a CUDA graph does: valid whatever the weight's version says, and none is added
    key       of the weight, and of what its casts depend on besides
    held      keeps the memory of the weight: freed, its address could come back as another weight's
    recasts   casts that can be made again to the bit are not kept, only the keys of their noise: backward makes them anew
    seen      the fingerprint of the weight that was cast; None: a second forward pass casts it again
    expects_more  whether fingerprints are taken, as the last step had a second forward pass: loops of one per step pay for none
    was_reread    whether this step had one
    step      counts optimizer steps
    """

    casts: Casts = field(default_factory=Casts)
    is_given: bool = False
    key: Key | None = None
    held: Tensor | None = None
    recasts: bool = False
    seen: Fingerprint | None = None
    expects_more: bool = True
    was_reread: bool = False
    step: int = 0
    is_gathered: ClassVar[bool] = False  # from other ranks: then the tensor has no numbers

    def renewed(self, recasts: bool) -> WeightCache:
        """The cache of the next optimizer step, empty."""
        expects_more = self.expects_more if self.key is None else self.was_reread
        return WeightCache(recasts=recasts, expects_more=expects_more, step=self.step + (self.key is not None))

    def lookup(self, operand: Operand) -> Casts | None:
        """For a forward pass: casts to read and to add to."""
        if self.is_given:
            return replace(self.casts)
        if (valid := validity(operand.tensor)) is None:
            return None
        context = operand.context
        key = (valid, context.plan, context.out_dtype, context.steps_version)
        keeps = not self.recasts or self._keeps_noise(operand)
        if key != self.key:
            self._begin(operand, Casts(), keeps)
            self.key = key
        elif keeps:
            self.was_reread = self.expects_more = True
            if not self._is_unchanged(operand):
                self._begin(operand, Casts(keys=self.casts.keys), keeps)
        return self.casts if keeps else Casts(keys=self.casts.keys)

    def _begin(self, operand: Operand, casts: Casts, keeps: bool) -> None:
        # The fingerprint comes before the cast: a write by another thread in between is then detected, not missed.
        draws = not all(
            operand.plan.serves_a_step
        )  # their noise is drawn once a step: what is cast first must be found again
        self.seen = fingerprint(operand.tensor) if keeps and (self.expects_more or draws) else None
        self.held, self.casts = operand.tensor.detach(), casts

    def _is_unchanged(self, operand: Operand) -> bool:
        """Whether the weight has the bytes that were cast; on a GPU assumed in training, see the module."""
        if isinstance(self.seen, Sampled):
            if not operand.context.records:
                return False
            return self.step % CHECK_EVERY != 0 or self.seen.is_same()
        return self.seen is not None and self.seen.is_same()

    def may_add(self, casts: Casts) -> bool:
        """Whether backward may add a cast of the weight as it is now to the casts of a forward pass.

        Not if later forward passes could find it there and the weight was written since: it may be restored until then.
        """
        if casts is not self.casts or self.is_given or self.seen is None:
            return True
        return self.seen.is_same() if self.seen.is_exact else True

    @property
    def changed(self) -> Tensor | None:
        """bool [] on the device, whether a weight was written behind casts that were reused; None if that was not compared."""
        return None if self.seen is None or self.seen.is_exact else self.seen.changed

    def kept_for_backward(self, casts: Casts) -> Casts:
        """What a forward pass leaves to its backward pass."""
        return Casts(keys=casts.keys) if self.recasts and casts is not self.casts else casts

    def _keeps_noise(self, operand: Operand) -> bool:
        """Whether a cast could be made again with a number of noise per element alone, which is more than its codes."""
        if all(operand.plan.serves_a_step):
            return False
        from narrowgauge.ops.random import draws_keys

        return not draws_keys(operand.tensor.device)


@dataclass(eq=False)
class PrecastSource:
    """What the optimizer's step left of a weight's cast; what is taken lies in the cache from then on."""

    precast: PrecastWeight
    cache: WeightCache

    def lookup(self, operand: Operand) -> Casts | None:
        plan, tensor, state = operand.plan, operand.tensor, operand.state
        if not plan.pairs or not operand.context.records:  # evaluation leaves it to training
            return None
        assert plan.rows is not None
        if not self.precast.matches(tensor, plan.rows, state):
            return None
        casts = self.cache.lookup(operand)
        if casts is None or casts.rows is not None:
            return casts
        from narrowgauge.ops.quantize.precast_weight import quantize_precast

        casts.rows, casts.cols, casts.amax = quantize_precast(tensor, self.precast, state, records=True)
        return casts


@dataclass(eq=False)
class CacheStats:
    """made: casts that were handed over; taken: how often a layer took one."""

    made: int = 0
    taken: int = 0


@dataclass(eq=False)
class InputCasts:
    """The casts of one input.

    made     (key, casts, who counts them) of what computed it, then of layers that read it, which nobody counts
    readers  the layers (by id) that took a share, in order
    number   its own, which no other input has
    """

    input: weakref.ref[Tensor]
    key: Key
    made: list[tuple[Key, Casts, CacheStats | None]] = field(default_factory=list)
    readers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    number: int = field(default_factory=NUMBERS.__next__)

    def lookup(self, operand: Operand) -> Casts | None:
        """operand: of the input as [T, K], another object than the one that this goes by."""
        shared = operand.share_key()
        for key, casts, stats in self.made:
            if key == (shared if stats is None else _precast_key(operand)):
                if stats is not None:
                    stats.taken += 1
                return casts
        if shared is None:
            return None
        self.made.append((shared, Casts(), None))
        return self.made[-1][1]

    def was_read(self, reader: Any) -> None:
        """By a layer, which found what it needs; casts that nobody else read when it was last here go now, not with the input."""
        if reader.reads_last:
            self.made.clear()

    def close(self) -> None:
        """Another input comes: who read this one last will know it next time."""
        readers = [each for found in self.readers.values() if (each := found()) is not None]
        for each in readers:
            # Past torch's `__setattr__`, which fails while the interpreter ends: an input may go after torch's names have gone.
            each.__dict__["reads_last"] = each is readers[-1]

    def put(self, operand: Operand, stats: CacheStats) -> None:
        """Hands over the operand's casts with the input, for every layer whose operand is like this one."""
        self.made.append((_precast_key(operand), operand.casts, stats))
        stats.made += 1


def _precast_key(operand: Operand) -> Key:
    """What layers that may take the same casts of x have in common."""
    plan = operand.plan
    cols = plan.cols if operand.keeps_codes else None
    return plan.rows, plan.rows_expand, cols, cols is not None and plan.transposes


class SharedInputs:
    """The casts of the input that the layers of one model saw last (`convert` installs it).

    It serves only the very tensor object with its numbers unchanged, and each layer once: a layer that reads it again is in another forward
    pass, and it may have been refilled where its version does not show it. The entry goes when the tensor goes, when another comes, and
    when `advance` ends the step; it is replaced as a whole, so threads see the old one or the new one.
    """

    def __init__(self) -> None:
        self._entry: InputCasts | None = None
        self.gradients = GradientCasts()

    def of(self, x: Tensor, reader: object | None = None, owner: Tensor | None = None) -> InputCasts | None:
        """What there is of x for the layer `reader`, or for what made x; None for a tensor without a version.

        owner: the tensor that x is a view of, if x is another object for each reader.
        """
        if (key := validity(x)) is None:
            return None
        entry, x = self._entry, x if owner is None else owner
        if entry is None or entry.input() is not x or entry.key != key or id(reader) in entry.readers:
            if entry is not None:
                entry.close()
            entry = self._entry = InputCasts(weakref.ref(x, self._forget), key)
        if reader is not None:
            entry.readers[id(reader)] = weakref.ref(reader)
        return entry

    def clear(self) -> None:
        """Forgets the entry, and the gradients."""
        if self._entry is not None:
            self._entry.close()
        self._entry = None
        self.gradients.clear()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry.input is gone:
            entry.close()
            self._entry = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()


class GradientCasts(dict[Key, tuple[Tensor, Casts]]):
    """The casts of gradients that a backward pass has computed and not read yet.

    A gradient comes back through views and as another object, so it is known by its memory, which is held until its casts are taken or the
    step ends, and by its version, which every view of it shares.
    """

    def put(self, gradient: Tensor, casts: Casts) -> None:
        """Hands over `casts` with a gradient, contiguous, that nobody else holds."""
        if (key := validity(gradient.view(-1))) is not None:
            self[key] = gradient, casts

    def lookup(self, operand: Operand) -> Casts | None:
        """Once, if the tensor is a view of the same elements, unchanged."""
        key = validity(operand.tensor.view(-1)) if self and operand.tensor.is_contiguous() else None
        return None if key is None or key not in self else self.pop(key)[1]
