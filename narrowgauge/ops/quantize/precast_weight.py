"""Cast of a weight that the optimizer's step writes, and that the next forward pass reads.

The kernel of the step has every new weight in a register. With one scale per tensor it can save
reads of the weight:

    current scaling    it leaves the tensor's largest magnitude; `quantize_precast` casts by it: one
                       read instead of two
    delayed scaling    it also leaves codes of w and w.T by the scale of the next step;
                       `quantize_precast` records the largest magnitude in the amax state, as a cast
                       would, and does not read the weight

The step must predict that scale, because the amax history advances only after it
(`nn.amax_history`). The predicted amax is stored beside the codes, and `quantize_precast` compares
it on the device with the amax in use. If they differ, because another history was loaded or the
step was not ended, it recomputes the codes. On the host the weight must be the one that the step
wrote (`addresses.validity`), and each precast is used once.

A write that leaves `_version` unchanged (`weight.data.clamp_()` after the step) is not detected at
once. That would need a read of the weight, which the precast saves. Every eighth step compares a
sample of the weight on the device (`ops.fingerprint`). `nn.step_end` reports a change at the end of
a later step, and the layer casts its weight itself from then on.

`refuse` says which casts are supported. Rows, blocks and MX share a scale among elements that no
program of the step has together in both orientations. Rotations mix elements before the cast.
Learned steps change after the weight is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.ops.fingerprint import Sampled
from narrowgauge.ops.quantize import check_of, definition, tile_amax, triton
from narrowgauge.ops.quantize.amax_state import IN_USE, AmaxBuffers, update_amax
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Refusal, Registry
from narrowgauge.ops.triton import cast_constants
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, CurrentScaling, DelayedScaling
from narrowgauge.scaling import WHOLE

CHECK_EVERY = 8  # steps between two samples of the weight
PARTS = 64  # slots for the largest magnitude: few enough to read, enough to avoid contention


@dataclass(kw_only=True, eq=False)
class PrecastWeight:
    """Precast of one weight [N, K]; see the module.

    cast        the cast
    buffers     amax buffers of delayed scaling; None: current scaling
    maxima      int32 [PARTS], bits of magnitudes; the largest one is the weight's amax
    plain       codes of w [N, K], as the format stores them; None under current scaling
    turned      codes of w.T [K, N], likewise
    expected    [1] the predicted amax by which the codes were written
    refused     clause that says why the step does not write them, or ''
    left        number of times the step wrote them
    taken       number of times a forward pass used them
    """

    cast: Cast
    buffers: AmaxBuffers | None
    maxima: Tensor
    plain: Tensor | None = None
    turned: Tensor | None = None
    expected: Tensor | None = None
    refused: str = ""
    left: int = 0
    taken: int = 0
    _written: bool = field(default=False, init=False)
    _weight: Key | None = field(default=None, init=False)
    _sample: Sampled | None = field(default=None, init=False)
    _changed: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, weight: Tensor, cast: Cast, buffers: AmaxBuffers | None) -> PrecastWeight:
        """Allocate a precast: 256 bytes, and with delayed scaling two bytes per weight."""
        made = cls(cast=cast, buffers=buffers, maxima=weight.new_zeros(PARTS, dtype=torch.int32))
        if buffers is not None:
            made.plain, made.turned = (
                weight.new_empty(x.shape, dtype=cast.format.storage) for x in (weight, weight.T)
            )
            made.expected = weight.new_zeros(1, dtype=torch.float32)
        return made

    @property
    def codes(self) -> tuple[Tensor, Tensor] | None:
        return None if self.plain is None or self.turned is None else (self.plain, self.turned)

    def mark_written(self) -> None:
        """Record that the step's kernel wrote the precast."""
        self._written = True

    def commit(self, weight: Tensor) -> None:
        """End the step: tie a precast that the kernel wrote to the weight's new version."""
        self._weight = validity(weight) if self._written else None
        # A sample reads the memory in order, so it needs a contiguous weight.
        is_compared = self._written and self.left % CHECK_EVERY == 0 and weight.is_contiguous()
        self._sample = Sampled(weight) if is_compared else None
        self.left += self._written
        self._written = False

    def disable(self, reason: str) -> None:
        """Stop precasting, and free the codes."""
        self.refused, self.plain, self.turned, self._weight = reason, None, None, None

    def forget(self) -> None:
        """Discard the precast of this step."""
        self._weight = self._sample = None

    def take(self) -> None:
        """Use the precast, once."""
        self.taken += 1
        # is_same() launches the comparison and always returns True; its result stays on the device.
        if self._sample is not None and self._sample.is_same():
            self._changed = self._sample.changed
        self.forget()

    def taken_changed(self) -> Tensor | None:
        """Return whether the weight was written between the step and its use, once.

        The result is a bool [] on the device, or None if no sample was compared.
        """
        changed, self._changed = self._changed, None
        return changed

    def matches(self, weight: Tensor, cast: Cast, amax_state: Tensor | None) -> bool:
        """Return True if the precast is valid for this weight, cast and amax state.

        It is never valid during CUDA graph capture, because replays would use it again.
        """
        if self._weight is None or self._weight != validity(weight) or self.cast != cast:
            return False
        live = None if self.buffers is None else self.buffers.live
        # Identity, not equality: another layer's state may hold the same numbers.
        return live is amax_state and not (
            weight.is_cuda and torch.cuda.is_current_stream_capturing()
        )


def refuse(cast: Cast) -> Refusal | None:
    """Return the reason why the step cannot write the precast of such a cast, or None."""
    if cast.tile != (WHOLE, WHOLE):
        shared = "share a scale among elements that no program of the step has together in both orientations"
        return Refusal("tile", f"tiles of {cast.tile} {shared}")
    if cast.rounding != "nearest":
        return Refusal(
            "rounding", f"{cast.rounding} rounding depends on random numbers of every forward pass"
        )
    if not isinstance(cast.calibrate, CurrentScaling | DelayedScaling):
        return Refusal(
            "calibration", f"the scale is not of the largest magnitude but by {cast.calibrate}"
        )
    if cast.format.codes_per_byte > 1:
        return Refusal("format", "two codes share a byte, in one orientation those of two rows")
    if cast.has_global_scale:
        return Refusal("scale", "a second number scales the tensor")
    return cast_constants.refuse(cast)


def refuse_here(weight: Tensor, cast: Cast) -> str:
    """Return a clause that says why no kernel on the weight's device uses a precast, or ''.

    May run a self-check.
    """
    choice = KERNELS.choose(Spec.of(weight, cast))
    return (
        "; ".join(why.text for _, why in choice.refusals)
        if choice.kernel.name == "reference"
        else ""
    )


@torch.no_grad()
def next_amax(buffers: AmaxBuffers) -> Tensor:
    """Return [1] the amax in use in the next step, if `roll_history` ends this step as it is.

    Definition.
    """
    in_use, seen, _ = buffers.live.unbind()
    settings = buffers.settings
    newest = seen
    if settings.algorithm == "max" and settings.length > 1:
        newest = torch.maximum(seen, buffers.history[:-1].amax())
    return torch.where(seen > 0, newest * 2.0**settings.margin, in_use).reshape(1)


@torch.no_grad()
def write(precast: PrecastWeight, weight: Tensor) -> None:
    """Definition of the step's kernel: compute the precast from the new weight.

    Checks and tests use it.
    """
    precast.maxima.zero_()
    precast.maxima[:1] = tile_amax(weight, (WHOLE, WHOLE)).view(torch.int32).reshape(1) & 0x7FFFFFFF
    if precast.buffers is not None:
        assert (
            precast.expected is not None
            and precast.plain is not None
            and precast.turned is not None
        )
        precast.expected.copy_(next_amax(precast.buffers))
        # Before the first step there is no scale to predict.
        if float(precast.expected) > 0:
            for codes, x in ((precast.plain, weight), (precast.turned, weight.T)):
                made = definition.quantize(
                    x, precast.cast, precast.expected.reshape(1, 1), None, None
                )
                codes.view(torch.uint8).copy_(made.data.view(torch.uint8))
    precast.mark_written()


Both = tuple[QTensor, QTensor, Tensor | None]


def reference_precast(
    x: Tensor, precast: PrecastWeight, amax_state: Tensor | None, records: bool
) -> Both:
    """Definition of `quantize_precast`."""
    cast, codes = precast.cast, precast.codes
    own, used = precast.maxima.amax().view(torch.float32).reshape(1, 1), None
    if amax_state is not None and codes is not None:
        # bool() synchronizes, which the definition may do; the kernel decides on the device.
        serves = bool((amax_state[IN_USE] > 0) & (amax_state[IN_USE] == precast.expected))
        used = update_amax(amax_state, own, records=records)
        if serves:
            scale = cast.scale(used, cast.format)
            rows = QTensor(data=codes[0], scale=scale, cast=cast, inner=x.shape[1])
            return rows, QTensor(data=codes[1], scale=scale, cast=cast, inner=x.shape[0]), used
    rows, cols = (
        definition.quantize(each, cast, own if used is None else used, None, None)
        for each in (x, x.T)
    )
    return rows, cols, used


KERNELS: Registry[Spec] = Registry("quantize_precast")
KERNELS.register(
    Kernel(
        "triton",
        lambda spec: refuse(spec.cast) or triton.refuse(spec),
        triton.precast,
        check=check_of(KERNELS.op),
    ),
    Kernel("reference", lambda spec: None, reference_precast, by_torch=True),
)


@torch.no_grad()
def quantize_precast(
    x: Tensor,
    precast: PrecastWeight,
    amax_state: Tensor | None,
    *,
    records: bool = True,
    backend: str | None = None,
) -> Both:
    """Return the casts of x and x.T from a precast, and the amax.

    The amax is [1, 1] under delayed scaling, else None.

    x  [N, K] as the step left it, contiguous

    The result is bit-identical to `quantize_pair`. Its codes may be the memory that the next step
    writes.
    """
    kernel = KERNELS.choose(Spec.of(x, precast.cast), backend).kernel
    precast.take()
    both: Both = kernel.run(x.detach(), precast, amax_state, records)
    return both
