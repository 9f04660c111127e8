"""Cache of a weight's casts within one optimizer step, for later forward passes and for backward.

`cast_sources` lists the order of all caches. The key of a weight, `addresses.validity`, contains
`_version`, which does not change on writes through `.data`, NumPy or raw pointers. A forward pass
therefore reuses casts of a weight only if its bytes are unchanged (`ops.fingerprint`):

    CPU             compares all bytes, so every write is detected, in training and in evaluation
                    with gradients. Without gradients no cache is read (linear.py)
    other devices   "recast", the default, caches no codes. "step" reuses codes in training only. It
                    compares a sample of the weight in every eighth step and reports a change at
                    the end of a later step (`step_end`)
    backward        reads the casts of its own forward pass. If they are not cached, it casts the
                    weight as it is then

In eager code, a layer has a cache after its first step has ended (`step_end`). Each of these makes
the next pass cast again:

    the end of a step
    `eval()`, a change of mode, `.to()` (linear.py); loading a state dict, which raises `_version`
    another plan, output type, autocast type or version of a learned step

After steps of one forward pass, a second forward pass casts once more, since nothing was kept for
it (`expects_more`).
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

CHECK_EVERY = 8  # steps between two samples of a weight on a GPU


@dataclass(eq=False)
class WeightCache:
    """The casts of one weight during one optimizer step.

    casts         the casts made so far
    is_given      casts were made outside, once per step, as by a CUDA graph. They are valid for
                  every version of the weight, and none is added
    key           (validity of the weight, other facts that its casts depend on)
    held          the weight's memory; if it were freed, another weight could get its address
    recasts       keep no casts that backward can repeat bit for bit, only their noise keys
    seen          fingerprint of the weight that was cast; None: a second forward pass casts again
    expects_more  take fingerprints, because the last step had a second forward pass. Loops with one
                  pass per step pay nothing
    was_reread    this step had a second forward pass
    step          number of optimizer steps
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
    is_gathered: ClassVar[bool] = False  # True for codes from other ranks: the weight has no data

    def renewed(self, recasts: bool) -> WeightCache:
        """Return the empty cache of the next optimizer step."""
        expects_more = self.expects_more if self.key is None else self.was_reread
        return WeightCache(
            recasts=recasts, expects_more=expects_more, step=self.step + (self.key is not None)
        )

    def lookup(self, operand: Operand) -> Casts | None:
        """Return casts for a forward pass to read and to add to, or None."""
        if self.is_given:
            return replace(self.casts)  # a copy, so that the given casts stay as they are
        if (valid := validity(operand.tensor)) is None:
            return None
        context = operand.context
        # The plan stands for the recipe. A learned step changes the codes
        # without a write to the weight.
        key = (valid, context.plan, context.out_dtype, context.progress.steps_version)
        keeps = not self.recasts or self._keeps_noise(operand)
        if key != self.key:
            self._begin(operand, Casts(), keeps)
            self.key = key
        elif keeps:
            self.was_reread = self.expects_more = True
            if not self._is_unchanged(operand):
                self._begin(operand, Casts(noise_keys=self.casts.noise_keys), keeps)
        return self.casts if keeps else Casts(noise_keys=self.casts.noise_keys)

    def _begin(self, operand: Operand, casts: Casts, keeps: bool) -> None:
        # The fingerprint comes before the cast: a write by another thread in
        # between is then detected, not missed. Noise of a stochastic cast is
        # drawn once per step, so a second pass must find the first cast.
        draws = not all(operand.plan.serves_a_step)
        self.held, self.casts = operand.tensor.detach(), casts
        self.seen = fingerprint(self.held) if keeps and (self.expects_more or draws) else None

    def _is_unchanged(self, operand: Operand) -> bool:
        """True if the weight has the bytes that were cast; assumed in training on a GPU."""
        seen = self.seen
        if seen is None or seen.is_exact:
            return seen is not None and seen.is_same()
        return operand.context.records and (self.step % CHECK_EVERY != 0 or seen.is_same())

    def may_add(self, casts: Casts, weight: Tensor) -> bool:
        """True if backward may add a cast of the weight to the casts of a forward pass.

        False if the weight was written since the forward pass, or `.data` points to other memory.
        The write may be undone until a later forward pass finds the cast.
        """
        if casts is not self.casts or self.is_given or self.seen is None:
            return True
        if self.key is None or validity(weight) != self.key[0]:
            return False
        return not self.seen.is_exact or self.seen.is_same()

    @property
    def changed(self) -> Tensor | None:
        """bool [] on the device: the weight was written behind reused casts; None: not compared."""
        return None if self.seen is None or self.seen.is_exact else self.seen.changed

    def saved_for_backward(self, casts: Casts) -> Casts:
        """Casts that a forward pass leaves to its backward pass."""
        return (
            Casts(noise_keys=casts.noise_keys)
            if self.recasts and casts is not self.casts
            else casts
        )

    def _keeps_noise(self, operand: Operand) -> bool:
        """True if a recast would need noise per element, which takes more memory than codes."""
        if all(operand.plan.serves_a_step):
            return False
        from narrowgauge.ops.random import draws_keys

        return not draws_keys(operand.tensor.device)


@dataclass(eq=False)
class PrecastSource:
    """Casts of a weight that the optimizer's step left. The cache stores them once used."""

    precast: PrecastWeight
    cache: WeightCache

    def lookup(self, operand: Operand) -> Casts | None:
        plan, tensor, state = operand.plan, operand.tensor, operand.state
        if not plan.pairs or not operand.context.records:  # evaluation leaves them for training
            return None
        assert plan.rows is not None
        if not self.precast.matches(tensor, plan.rows, state):
            return None
        casts = self.cache.lookup(operand)
        if casts is None or casts.rows is not None:
            return casts
        from narrowgauge.ops.quantize.precast_weight import quantize_precast

        casts.rows, casts.cols, casts.amax = quantize_precast(
            tensor, self.precast, state, records=True
        )
        return casts
