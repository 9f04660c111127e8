"""The casts of a weight within one optimizer step, for further forward passes and for backward (`caches` says who is asked when).

The key of a weight, `addresses.validity`, contains `_version`, which misses writes through `.data`, NumPy and raw pointers.
A forward pass therefore reuses casts of a weight only if the bytes of the weight are the same (`ops.fingerprint`):

    CPU             compares all bytes, so every write is detected, in training and evaluation
    other devices   "recast", the default, keeps no codes. "step" reuses codes in training alone, compares a sample of the weight in
                    every eighth step and reports a change at the end of a later one (`step_end`)
    backward        takes the casts of its own forward pass; where these are not kept, it casts the weight as it is then
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.ops.fingerprint import Fingerprint, fingerprint

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight

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
        self.held, self.casts = operand.tensor.detach(), casts
        self.seen = fingerprint(self.held) if keeps and (self.expects_more or draws) else None

    def _is_unchanged(self, operand: Operand) -> bool:
        """Whether the weight has the bytes that were cast; on a GPU assumed in training, see the module."""
        seen = self.seen
        if seen is None or seen.is_exact:
            return seen is not None and seen.is_same()
        return operand.context.records and (self.step % CHECK_EVERY != 0 or seen.is_same())

    def may_add(self, casts: Casts, weight: Tensor) -> bool:
        """Whether backward may add a cast of the weight as it is now to the casts of a forward pass.

        Not if later forward passes could find it there and the weight was written since, or `.data` points to another memory:
        both may be undone until then.
        """
        if casts is not self.casts or self.is_given or self.seen is None:
            return True
        if self.key is None or validity(weight) != self.key[0]:
            return False
        return not self.seen.is_exact or self.seen.is_same()

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
