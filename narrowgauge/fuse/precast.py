"""What stands in for the `forward` of a module whose output Linears read: it computes it, casts it, and hands both over.

On the device of a kernel the whole is one autograd function:

    forward    y and the cast that the first reader wants, in one pass; the cast lies in the entry of y (`nn.caches`)
    backward   the gradients of the inputs and the casts that the Linears want that made these inputs

Elsewhere the module's own code computes y, and the cast is what the reader itself would make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import wrapper
from narrowgauge.autograd_rules import first_order_only
from narrowgauge.nn.caches import Handed, Reads, SharedInputs
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import cast_ahead, handed_key
from narrowgauge.nn.plan import Plans, Settings
from narrowgauge.ops.norm_act import CastRequest, CastResult, Kind, NormActSpec, backward_of, forward_of
from narrowgauge.ops.quantize.pair import OneRead
from narrowgauge.ops.registry import Choice, device_facts
from narrowgauge.recipe import Cast, LearnedStep, Window


@dataclass(eq=False)
class FusedCast:
    """What is handed from a function to the layers around it.

    kind      the function
    readers   the layers that read it; the first that casts decides about the cast
    sources   the layers whose outputs are its inputs, read by nobody else: swiglu's gate and up, gelu's Linear
    backend   the kernel to take ("triton", "reference"); None: the first that does not refuse, and no function without "triton"
    reads     casts handed over, and how often a layer took one
    """

    kind: Kind
    readers: tuple[nn.Module, ...]
    sources: tuple[nn.Module, ...] = ()
    backend: str | None = None
    reads: Reads = field(default_factory=Reads)
    _choices: dict[Hashable, Choice[NormActSpec]] = field(default_factory=dict, repr=False)

    def reader(self) -> QLinear | None:
        """The first layer that casts what it reads; None: nobody does, or somebody looks at the operands."""
        for layer in self.readers:
            if isinstance(layer, QLinear) and refuse_reader(layer) is None:
                return layer
        return None

    def __call__(self, tensors: Sequence[Tensor], otherwise: Callable[[], Tensor]) -> Tensor:
        """y of the tensors. otherwise: what computes it without a kernel."""
        reader = None if torch.compiler.is_compiling() else self.reader()
        if reader is None or tensors[0].numel() == 0:
            return otherwise()
        settings = reader.settings(tensors[0])
        request = self._request(reader, settings)
        choice = None if request is None else self._choice(request, settings, tensors)
        if choice is None:
            y = otherwise()
            self._hand_over(y, reader, None, reader.settings(y))
            return y
        shape = tensors[0].shape
        flat = tuple(each.reshape(-1, shape[-1]) if each.ndim > 1 else each for each in tensors)
        y, result = _Function.apply(self, request, choice, *flat)
        y = y.reshape(shape)
        self._hand_over(y, reader, result, settings)
        return y

    def _choice(
        self, request: CastRequest, settings: Settings, tensors: Sequence[Tensor]
    ) -> Choice[NormActSpec] | None:
        """The kernel that computes y; None: the module's own code, which the reference would only repeat."""
        x = tensors[0]
        hidden_by = wrapper(*tensors)
        key = (
            id(settings.recipe),
            x.device,
            hidden_by,
            x.shape[-1],
            request.transposed,
            *(each.dtype for each in tensors),
        )
        if key not in self._choices:
            self._choices[key] = forward_of(self.kind).choose(
                NormActSpec.of(self.kind, tensors, (request,)), self.backend
            )
        found = self._choices[key]
        return found if self.backend is not None or found.kernel.name != "reference" else None

    def backend_words(self, reader: QLinear) -> str:
        """Which kernel computes the function on the reader's device, and why no other, for tensors of its weight's dtype."""
        like = reader.weight.new_empty(1, reader.in_features, device="meta")
        request = self._request(reader, reader.settings(reader.weight))
        if request is None:
            return f"own code ({self.refuse(reader)})"
        device = device_facts(reader.weight.device.type, reader.weight.device.index)
        casts = ((request.cast, request.transposed),)
        spec = NormActSpec(self.kind, device, (like.dtype,), (1, reader.in_features), casts)
        found = forward_of(self.kind).choose(spec, self.backend)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals)
        return found.kernel.name if found.kernel.name != "reference" else f"own code ({reasons})"

    def refuse(self, reader: QLinear) -> str | None:
        """Why no kernel casts for this reader, whatever the device; None if one may."""
        settings = reader.settings(reader.weight)
        return refuse_cast(settings, reader.weight.requires_grad)

    def _request(self, reader: QLinear, settings: Settings) -> CastRequest | None:
        keeps = reader.weight.requires_grad
        if refuse_cast(settings, keeps) is not None:
            return None
        cast = settings.recipe.output.lhs
        assert cast is not None
        live = reader.live("x") if isinstance(cast.calibrate, Window) else None
        transposed = keeps and settings.recipe.save == "quantized"
        return CastRequest(cast, live, settings.records, transposed)

    def _hand_over(self, y: Tensor, reader: QLinear, result: CastResult | None, settings: Settings) -> None:
        """Puts the cast of y where its readers look, and the window's state with those who have one of their own."""
        shared = reader.shared_inputs
        share = None if shared is None else shared.of(y)
        if share is None or share.handed is None or y.shape[-1] != reader.in_features:
            return
        keeps = reader.weight.requires_grad
        if result is None or result.plain is None:
            with torch.no_grad():
                handed = cast_ahead(y.detach().reshape(-1, y.shape[-1]), reader.live("x"), settings, keeps)
        else:
            handed = _handed(result, settings, keeps)
        share.handed[handed_key(settings, keeps)] = handed
        handed.reads = self.reads
        self.reads.made += 1
        self._follow(reader, settings)

    @torch.no_grad()
    def _follow(self, reader: QLinear, settings: Settings) -> None:
        """The windows of the other readers: they saw the tensor that the first one's saw."""
        leader = reader.live("x")
        if leader is None or not settings.records:
            return
        others = [each for each in self.readers if each is not reader and isinstance(each, QLinear)]
        lives = [each.live("x") for each in others if each.recipe == reader.recipe and refuse_reader(each) is None]
        own = [live for live in lives if live is not None]
        if own:
            torch._foreach_copy_(own, [leader] * len(own))

    # --- backward --------------------------------------------------------------------------------------------------------------

    def gradient_requests(self) -> list[tuple[CastRequest | None, SharedInputs | None]]:
        """What the sources want of the gradients of their outputs, and where it is put."""
        return [_gradient_request(layer) for layer in self.sources]

    def __getstate__(self) -> dict[str, Any]:
        """Without the choices: they belong to this process and its recipes."""
        return self.__dict__ | {"_choices": {}}


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: FusedCast, request: CastRequest, choice: Choice[NormActSpec], *tensors: Tensor
    ) -> tuple[Tensor, CastResult]:
        result, statistics = choice.kernel.run(fused.kind, tensors, request)
        ctx.save_for_backward(*tensors, *statistics)
        ctx.count, ctx.fused = len(tensors), fused
        return result.value, result

    @staticmethod
    @first_order_only("a fused norm or activation", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor, of_result: None) -> tuple[Tensor | None, ...]:
        fused: FusedCast = ctx.fused
        tensors, statistics = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        count = 1 if fused.kind.is_norm else len(tensors)  # of what has a gradient that a layer casts
        wanted = fused.gradient_requests() or [(None, None)] * count
        requests: list[CastRequest | None] = []
        for each, _ in wanted:  # each that a kernel casts beside those before it; the others are left to their layers
            requests.append(each if each is not None and _computes(fused, tensors, [*requests, each]) else None)
        choice = backward_of(fused.kind).choose(NormActSpec.of(fused.kind, tensors, requests), fused.backend)
        results, of_parameters = choice.kernel.run(fused.kind, tensors, statistics, gy.contiguous(), requests)
        for result, (_, shared) in zip(results, wanted, strict=True):
            if shared is not None and result.plain is not None and result.transposed is not None:
                shared.gradients.put(result.value, OneRead(result.plain, result.transposed, result.amax))
        return None, None, None, *(each.value for each in results), *of_parameters


def _computes(fused: FusedCast, tensors: Sequence[Tensor], requests: Sequence[CastRequest | None]) -> bool:
    """Whether a kernel makes these casts of gradients in one pass."""
    found = backward_of(fused.kind).choose(NormActSpec.of(fused.kind, tensors, requests), fused.backend)
    return fused.backend is not None or found.kernel.name != "reference"


def refuse_reader(layer: QLinear) -> str | None:
    """Why a layer does not take what is handed over, or None."""
    if layer.recipe is None or layer.is_suspended:
        return "computes as an ordinary Linear"
    if layer.recipe.output.lhs is None:
        return f"recipe {layer.recipe.name} does not cast its input"
    if layer.recipe.backward == "straight-through":
        return f"recipe {layer.recipe.name} works on the codes of a rotated or learned cast"
    if layer.observer is not None:
        return "somebody observes it"
    if layer.shared_inputs is None:
        return "shares no inputs"
    rotated = layer.recipe.output.rotate is not None or _rotates_what_it_keeps(layer)
    return f"recipe {layer.recipe.name} rotates its input" if rotated else None


def _rotates_what_it_keeps(layer: QLinear) -> bool:
    assert layer.recipe is not None
    return layer.recipe.save == "quantized" and layer.recipe.grad_weight.rotate is not None


def refuse_cast(settings: Settings, keeps: bool) -> str | None:
    """Why a kernel does not make the cast of x that these settings want, whatever the device; None if one may."""
    recipe, cast = settings.recipe, settings.recipe.output.lhs
    if cast is None or isinstance(cast.calibrate, LearnedStep):
        return "the input is not cast, or by a learned step"
    if settings.plans.output.expand is not None:
        return "products are emulated, which reads decoded values"
    if keeps and recipe.save == "quantized" and not settings.plans.turn_x:
        return "another cast of x.T is kept"
    return None


def _handed(result: CastResult, settings: Settings, keeps: bool) -> Handed:
    """What a kernel made, as the layer wants it."""
    assert result.plain is not None
    if not keeps or settings.recipe.save != "quantized":
        return Handed(result.plain, None, None, result.amax)
    assert result.transposed is not None
    kept = (result.transposed.data, result.transposed.scale, result.transposed.global_scale)
    return Handed(result.plain, kept, settings.recipe.grad_weight.rhs, result.amax)


def _gradient_request(layer: nn.Module) -> tuple[CastRequest | None, SharedInputs | None]:
    """The cast that a layer wants of the gradient of its output, if one serves both of its products."""
    if not isinstance(layer, QLinear) or layer.recipe is None or layer.is_suspended or layer.observer is not None:
        return None, None
    recipe, shared = layer.recipe, layer.shared_inputs
    cast = recipe.grad_input.lhs
    whole = _wants_one_cast(layer, cast)
    if shared is None or cast is None or not whole or not layer.weight.requires_grad:
        return None, None
    live = layer.live("gy") if isinstance(cast.calibrate, Window) else None
    return CastRequest(cast, live, layer.training, transposed=True), shared


def _wants_one_cast(layer: QLinear, cast: Cast | None) -> bool:
    """Whether grad_input and grad_weight read codes of the same cast of gy and of gy.T, unrotated and all rows of it."""
    recipe = layer.recipe
    assert recipe is not None
    if recipe.backward == "straight-through" or cast is None or cast != recipe.grad_weight.lhs:
        return False
    if cast.rounding != "nearest" or isinstance(cast.calibrate, LearnedStep):
        return False
    plans = layer.settings(layer.weight).plans
    unrotated = recipe.grad_input.rotate is None and recipe.grad_weight.rotate is None
    return unrotated and not _is_emulated(plans)


def _is_emulated(plans: Plans) -> bool:
    """Whether a product that reads gy wants decoded values, which no kernel leaves."""
    return plans.grad_input.expand is not None or plans.grad_weight.expand is not None
