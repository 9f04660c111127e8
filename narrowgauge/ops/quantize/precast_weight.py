"""The cast of a weight that the optimizer's step leaves beside it, and what the next forward pass makes of that.

The kernel of the step has every new weight in a register. With one scale per tensor it can leave there what a cast would read for:

    current scaling    the tensor's largest magnitude; `quantize_stepped` casts by it, one read of the weight instead of two
    delayed scaling    that, and the codes of w and of w.T by the scale that the next step will use; `quantize_stepped` notes the
                       largest magnitude in the window, as casting would, and reads no weight at all

Which scale that is the step has to foretell, for the window moves on only after it (`delayed.roll`). So the amax that it counted on
stays beside the codes, and `quantize_stepped` compares it on the device with the one that is in use: where another was loaded, or
the step was not ended, the codes are written anew. On the host the weight must be the one that the step left, by its address and
version, and each is taken once. So a cast that is out of date is never used; but a weight that is written through `.data` or a raw
pointer afterwards looks as before, as in every cache (`QLinear.empty_cache` forgets it).

Which weights: `refuse`. Rows, blocks and MX share a scale among elements that no program of the step has together in both
orientations; rotations mix elements before they are cast; stochastic rounding draws anew at every forward pass; learned steps change
after the weight has been written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.ops.quantize import definition, selfcheck, tile_amax, triton
from narrowgauge.ops.quantize.amax_state import IN_USE, AmaxWindow, observe
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Kernel, Registry, device_facts
from narrowgauge.ops.triton import cast_constants
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current, Window
from narrowgauge.tiles import WHOLE

PARTS = 64  # places that programs share for the largest magnitude: few enough to read, enough not to queue


@dataclass(kw_only=True, eq=False)
class Stepped:
    """See the module; of one weight [N, K].

    cast, window   by which; window None: current scaling
    maxima         int32 [PARTS], bits of magnitudes: the largest is the weight's amax
    plain, turned  codes of w [N, K] and of w.T [K, N], as the format stores them; None with current scaling
    expected       [1] the window's amax by which the codes were written
    refused        why the step does not write them after all, a clause, or ''
    left, taken    how often the step wrote them, and how often a forward pass took them
    """

    cast: Cast
    window: AmaxWindow | None
    maxima: Tensor
    plain: Tensor | None = None
    turned: Tensor | None = None
    expected: Tensor | None = None
    refused: str = ""
    left: int = 0
    taken: int = 0
    _written: bool = field(default=False, init=False)
    _weight: tuple[Any, ...] | None = field(default=None, init=False)

    @classmethod
    def of(cls, weight: Tensor, cast: Cast, window: AmaxWindow | None) -> Stepped:
        """With its memory: 256 bytes, and with delayed scaling 2 for each weight."""
        n, k = weight.shape
        maxima = torch.zeros(PARTS, dtype=torch.int32, device=weight.device)
        if window is None:
            return cls(cast=cast, window=None, maxima=maxima)
        plain, turned = (weight.new_empty(shape, dtype=cast.format.storage) for shape in ((n, k), (k, n)))
        expected = torch.zeros(1, dtype=torch.float32, device=weight.device)
        return cls(cast=cast, window=window, maxima=maxima, plain=plain, turned=turned, expected=expected)

    @property
    def codes(self) -> tuple[Tensor, Tensor] | None:
        return None if self.plain is None or self.turned is None else (self.plain, self.turned)

    def wrote(self) -> None:
        """Called by the kernel that writes them."""
        self._written = True

    def leave(self, weight: Tensor) -> None:
        """The step is over and the weight's version raised: what was written is of this one, if anything was."""
        self._weight = _key(weight) if self._written else None
        self.left += self._written
        self._written = False

    def give_up(self, reason: str) -> None:
        """The step cannot leave anything here; the memory for it is given back."""
        self.refused, self.plain, self.turned, self._weight = reason, None, None, None

    def forget(self) -> None:
        """Nothing is taken before the next step."""
        self._weight = None

    def serves(self, weight: Tensor, cast: Cast, live: Tensor | None) -> bool:
        """Whether the weight is as the step left it, and wanted by this cast and window."""
        if self._weight is None or weight.is_inference() or self._weight != _key(weight) or self.cast != cast:
            return False
        if (None if self.window is None else self.window.live) is not live:
            return False
        return not (
            weight.is_cuda and torch.cuda.is_current_stream_capturing()
        )  # a graph would take it again and again


def _key(weight: Tensor) -> tuple[Any, ...]:
    return weight._version, weight.device, identity(weight), weight.dtype, weight.shape, weight.stride()


def refuse(cast: Cast) -> str | None:
    """Why the step cannot leave what such a cast needs, a clause, or None."""
    if cast.tile != (WHOLE, WHOLE):
        return f"tiles of {cast.tile} share a scale among elements that no program of the step has together in both orientations"
    if cast.rounding != "nearest":
        return "stochastic rounding draws anew at every forward pass"
    if not isinstance(cast.calibrate, Current | Window):
        return f"the scale is not of the largest magnitude but by {cast.calibrate}"
    if cast.format.codes_per_byte > 1:
        return "two codes share a byte, in one orientation those of two rows"
    if cast.has_global_scale:
        return "a second number scales the tensor"
    return cast_constants.refuse(cast)


def refuse_here(weight: Tensor, cast: Cast) -> str:
    """Why no kernel takes up on the weight's device what the step leaves, a clause, or ''. May prove a kernel."""
    choice = STEPPED.choose(Spec.of(weight, cast))
    return "; ".join(why for _, why in choice.refusals) if choice.kernel.name == "reference" else ""


@torch.no_grad()
def foreseen(window: AmaxWindow) -> Tensor:
    """[1] the amax that the window will give in the next step, if `delayed.roll` ends this one as it is. The definition."""
    in_use, seen, _ = window.live.unbind()
    settings = window.window
    newest = seen
    if settings.algorithm == "max" and settings.length > 1:
        newest = torch.maximum(seen, window.history[:-1].amax())
    return torch.where(seen > 0, newest * 2.0**settings.margin, in_use).reshape(1)


@torch.no_grad()
def write(stepped: Stepped, weight: Tensor) -> None:
    """What the step's kernel writes, made of the new weight by the reference. The definition, and of use in proofs and tests."""
    stepped.maxima.zero_()
    stepped.maxima[:1] = tile_amax(weight, (WHOLE, WHOLE)).view(torch.int32).reshape(1) & 0x7FFFFFFF
    if stepped.window is not None:
        assert stepped.expected is not None and stepped.plain is not None and stepped.turned is not None
        stepped.expected.copy_(foreseen(stepped.window))
        if float(stepped.expected) > 0:
            for codes, x in ((stepped.plain, weight), (stepped.turned, weight.T)):
                made = definition.quantize(x, stepped.cast, stepped.expected.reshape(1, 1), None, None)
                codes.view(torch.uint8).copy_(made.data.view(torch.uint8))
    stepped.wrote()


Both = tuple[QTensor, QTensor, Tensor | None]


def _in_turn(x: Tensor, stepped: Stepped, live: Tensor | None, records: bool) -> Both:
    own = stepped.maxima.amax().view(torch.float32).reshape(1, 1)
    cast, codes = stepped.cast, stepped.codes
    if live is None or codes is None:
        return definition.quantize(x, cast, own, None, None), definition.quantize(x.T, cast, own, None, None), None
    serves = (live[IN_USE] > 0) & (live[IN_USE] == stepped.expected)
    amax = observe(live, own, records=records)
    if not bool(serves):
        return definition.quantize(x, cast, amax, None, None), definition.quantize(x.T, cast, amax, None, None), amax
    scale = cast.scale(amax, cast.format)
    plain = QTensor(data=codes[0], scale=scale, cast=cast, inner=x.shape[1])
    return plain, QTensor(data=codes[1], scale=scale, cast=cast, inner=x.shape[0]), amax


def _in_triton(x: Tensor, stepped: Stepped, live: Tensor | None, records: bool) -> Both:
    from narrowgauge.ops.quantize import triton_launch

    cast, codes = stepped.cast, stepped.codes
    constants = cast_constants.constants_of(cast, device_facts(x.device.type, x.device.index).capability)
    if live is None or codes is None:
        plain, turned = triton_launch.both(x, cast, constants, stepped.maxima.view(torch.float32), None, None)
        return plain, turned, None
    assert stepped.expected is not None
    return triton_launch.stepped_delayed(x, cast, constants, codes, stepped.maxima, stepped.expected, live, records)


def _refuse(spec: Spec) -> str | None:
    return refuse(spec.cast) or triton.refuse(spec)


def check(run: Any, spec: Spec, device: torch.device, x: Tensor, poisoned: bool) -> str | None:
    """For the proof: codes that serve, codes by an amax that is not in use, and a first step; the same bits as casting anew."""
    if x.stride(1) != 1:
        return None  # a weight lies in memory row by row
    delayed = isinstance(spec.cast.calibrate, Window)
    for in_use, expected in ((3.0, 3.0), (3.0, 5.0), (3.0, 0.0), (0.0, 3.0)) if delayed else ((0.0, 0.0),):
        stepped = _sample(x.cpu(), spec.cast, expected, device)
        live = None
        if stepped.window is not None:
            stepped.window.live.copy_(torch.tensor([in_use, 0.5, 0.0]))
            live = stepped.window.live
        plain, turned, used = run(x, stepped, live, True)
        if live is None:
            reason = selfcheck.compare_both(plain, turned, spec, device, x)
        else:
            truth = torch.tensor([in_use, 0.5, 0.0])
            reason = selfcheck.compare_delayed((plain, turned), used, live, truth, spec, device, x, poisoned)
        if reason is not None:
            return f"{reason}, in use {in_use} and expected {expected}"
    return None


def _sample(x: Tensor, cast: Cast, expected: float, device: torch.device) -> Stepped:
    """What the step leaves of x, on the device."""
    window = AmaxWindow(cast.calibrate, x.device) if isinstance(cast.calibrate, Window) else None
    stepped = Stepped.of(x, cast, window)
    if window is not None:
        window.live[IN_USE] = expected
        assert stepped.plain is not None and stepped.turned is not None
        stepped.plain.view(torch.uint8).fill_(1)  # what is not written shall be the same everywhere
        stepped.turned.view(torch.uint8).fill_(1)
    write(stepped, x)

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    return Stepped(
        cast=cast, window=None if window is None else window.to(device), maxima=stepped.maxima.to(device),
        plain=moved(stepped.plain), turned=moved(stepped.turned), expected=moved(stepped.expected),
    )  # fmt: skip


STEPPED: Registry[Spec] = Registry("quantize_stepped")
STEPPED.register(selfcheck.proven("quantize_stepped", Kernel("triton", _refuse, _in_triton), check))
STEPPED.register(Kernel("reference", lambda spec: None, _in_turn, by_torch=True))


@torch.no_grad()
def quantize_stepped(
    x: Tensor, stepped: Stepped, live: Tensor | None, *, records: bool = True, backend: str | None = None
) -> Both:
    """x [N, K] as the step left it, contiguous -> x and x.T quantized, and the amax [1, 1] of the window (None without one).

    The bits of `quantize_both` or `quantize_both_delayed`; see the module. Its codes may be the memory that the next step writes.
    """
    kernel = STEPPED.choose(Spec.of(x, stepped.cast), backend).kernel
    stepped.forget()
    stepped.taken += 1
    both: Both = kernel.run(x.detach(), stepped, live, records)
    return both
