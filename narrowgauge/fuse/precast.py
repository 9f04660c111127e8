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
from narrowgauge.autograd_rules import no_double_backward
from narrowgauge.nn.caches import CacheStats, SharedInputs
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import Casts, Operand, Rotation
from narrowgauge.nn.plan import LinearContext, OperandPlan
from narrowgauge.ops.norm_act import CastRequest, CastResult, Kind, NormActSpec, backward_of, forward_of
from narrowgauge.ops.registry import Choice, device_facts
from narrowgauge.recipe import LearnedStep, Window


@dataclass(eq=False)
class FusedCast:
    """What is handed from a function to the layers around it.

    kind      the function
    readers   the layers that read it; the first that casts decides about the cast
    sources   the layers whose outputs are its inputs, read by nobody else: swiglu's gate and up, gelu's Linear
    backend   the kernel to take ("triton", "reference"); None: the first that does not refuse, and no function without "triton"
    stats     casts handed over, and how often a layer took one
    """

    kind: Kind
    readers: tuple[nn.Module, ...]
    sources: tuple[nn.Module, ...] = ()
    backend: str | None = None
    stats: CacheStats = field(default_factory=CacheStats)
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
        context = reader.context(tensors[0])
        wanted_cast = self._wanted_cast(reader, context)
        choice = None if wanted_cast is None else self._choice(wanted_cast, context, tensors)
        if choice is None:
            y = otherwise()
            self._hand_over(y, reader, None, reader.context(y))
            return y
        shape = tensors[0].shape
        flat = tuple(each.reshape(-1, shape[-1]) if each.ndim > 1 else each for each in tensors)
        made: list[CastResult] = []
        y = _Function.apply(self, wanted_cast, choice, made, *flat).reshape(shape)
        self._hand_over(y, reader, made[0], context)
        return y

    def _choice(
        self, wanted_cast: CastRequest, context: LinearContext, tensors: Sequence[Tensor]
    ) -> Choice[NormActSpec] | None:
        """The kernel that computes y; None: the module's own code, which the reference would only repeat."""
        x = tensors[0]
        key = (
            id(context.plan.recipe),
            x.device,
            wrapper(*tensors),
            x.shape[-1],
            wanted_cast.transposed,
            *(each.dtype for each in tensors),
        )
        if key not in self._choices:
            self._choices[key] = forward_of(self.kind).choose(
                NormActSpec.of(self.kind, tensors, (wanted_cast,)), self.backend
            )
        found = self._choices[key]
        return found if self.backend is not None or found.kernel.name != "reference" else None

    def backend_words(self, reader: QLinear) -> str:
        """Which kernel computes the function on the reader's device, and why no other, for tensors of its weight's dtype."""
        like = reader.weight.new_empty(1, reader.in_features, device="meta")
        wanted_cast = self._wanted_cast(reader, reader.context(reader.weight))
        if wanted_cast is None:
            return f"own code ({self.refuse(reader)})"
        device = device_facts(reader.weight.device.type, reader.weight.device.index)
        spec = NormActSpec(
            self.kind, device, (like.dtype,), (1, reader.in_features), ((wanted_cast.cast, wanted_cast.transposed),)
        )
        found = forward_of(self.kind).choose(spec, self.backend)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.refusals)
        return found.kernel.name if found.kernel.name != "reference" else f"own code ({reasons})"

    def refuse(self, reader: QLinear) -> str | None:
        """Why no kernel casts for this reader, whatever the device; None if one may."""
        return refuse_cast(_input_of(reader, reader.context(reader.weight)))

    def _wanted_cast(self, reader: QLinear, context: LinearContext) -> CastRequest | None:
        operand, cast = _input_of(reader, context), context.plan.x.rows
        if cast is None or refuse_cast(operand) is not None:
            return None
        live = operand.state if isinstance(cast.calibrate, Window) else None
        return CastRequest(cast, live, context.records, operand.keeps_codes)

    def _hand_over(self, y: Tensor, reader: QLinear, made: CastResult | None, context: LinearContext) -> None:
        """Puts the cast of y where its readers look, and the window's state with those who have one of their own."""
        shared = reader.shared_inputs
        inputs = None if shared is None else shared.of(y)
        if inputs is None or y.shape[-1] != reader.in_features:
            return
        operand = _input_of(reader, context, y.detach().reshape(-1, y.shape[-1]))
        if made is None or made.plain is None:
            with torch.no_grad():
                operand.read()
                operand.rows(Rotation())
                operand.saved()
        else:
            operand.casts = Casts(made.plain, made.transposed if operand.keeps_codes else None, made.amax)
        inputs.put(operand, self.stats)
        self._follow(reader, context)

    @torch.no_grad()
    def _follow(self, reader: QLinear, context: LinearContext) -> None:
        """The windows of the other readers: they saw the tensor that the first one's saw."""
        leader = reader.amax_state("x")
        if leader is None or not context.records:
            return
        others = [each for each in self.readers if each is not reader and isinstance(each, QLinear)]
        states = [
            each.amax_state("x") for each in others if each.recipe == reader.recipe and refuse_reader(each) is None
        ]
        own = [state for state in states if state is not None]
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
        ctx: Any,
        fused: FusedCast,
        wanted_cast: CastRequest | None,
        choice: Choice[NormActSpec],
        out: list[CastResult],
        *tensors: Tensor,
    ) -> Tensor:
        """out: takes what comes out besides y."""
        made, statistics = choice.kernel.run(fused.kind, tensors, wanted_cast)
        out.append(made)
        ctx.save_for_backward(*tensors, *statistics)
        ctx.count, ctx.fused = len(tensors), fused
        value: Tensor = made.value
        return value

    @staticmethod
    @no_double_backward("a fused norm or activation", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        fused: FusedCast = ctx.fused
        tensors, statistics = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        count = 1 if fused.kind.is_norm else len(tensors)  # of what has a gradient that a layer casts
        wanted = fused.gradient_requests() or [(None, None)] * count
        wanted_casts: list[CastRequest | None] = []
        for (
            wanted_cast,
            _,
        ) in wanted:  # each that a kernel casts beside those before it; the others are left to their layers
            wanted_casts.append(
                wanted_cast
                if wanted_cast is not None and _computes(fused, tensors, [*wanted_casts, wanted_cast])
                else None
            )
        choice = backward_of(fused.kind).choose(NormActSpec.of(fused.kind, tensors, wanted_casts), fused.backend)
        made, of_parameters = choice.kernel.run(fused.kind, tensors, statistics, gy.contiguous(), wanted_casts)
        for each, (_, shared) in zip(made, wanted, strict=True):
            if shared is not None and each.plain is not None and each.transposed is not None:
                shared.gradients.put(each.value, Casts(each.plain, each.transposed, each.amax))
        return None, None, None, None, *(each.value for each in made), *of_parameters


def _computes(fused: FusedCast, tensors: Sequence[Tensor], wanted_casts: Sequence[CastRequest | None]) -> bool:
    """Whether a kernel makes these casts of gradients in one pass."""
    found = backward_of(fused.kind).choose(NormActSpec.of(fused.kind, tensors, wanted_casts), fused.backend)
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


def _input_of(reader: QLinear, context: LinearContext, tensor: Tensor | None = None) -> Operand:
    """What the reader will ask its sources for."""
    needs = (True, reader.weight.requires_grad)
    return Operand(tensor, context.plan.x, context, needs, reader.amax_state("x"))  # type: ignore[arg-type]


def refuse_cast(operand: Operand) -> str | None:
    """Why a kernel does not make the cast of x that is asked for, whatever the device; None if one may."""
    plan = operand.plan
    if plan.rows is None or isinstance(plan.rows.calibrate, LearnedStep):
        return "the input is not cast, or by a learned step"
    if plan.rows_expand is not None:
        return "products are emulated, which reads decoded values"
    if operand.keeps_codes and not plan.transposes:
        return "another cast of x.T is kept"
    return None


def _gradient_request(layer: nn.Module) -> tuple[CastRequest | None, SharedInputs | None]:
    """The cast that a layer wants of the gradient of its output, if one serves both of its products."""
    if not isinstance(layer, QLinear) or layer.recipe is None or layer.is_suspended or layer.observer is not None:
        return None, None
    gy, shared = layer.plan(layer.weight.device).gy, layer.shared_inputs
    if shared is None or gy.rows is None or not _wants_one_cast(gy) or not layer.weight.requires_grad:
        return None, None
    state = layer.amax_state("gy") if isinstance(gy.rows.calibrate, Window) else None
    return CastRequest(gy.rows, state, layer.training, transposed=True), shared


def _wants_one_cast(gy: OperandPlan) -> bool:
    """Whether both products read codes of the same cast of gy and of gy.T, unrotated and all rows of it."""
    same = gy.kind is Operand and gy.rows is not None and gy.rows == gy.cols and gy.rows.rounding == "nearest"
    return same and gy.rows_rotate is gy.cols_rotate is None and not _is_emulated(gy)


def _is_emulated(gy: OperandPlan) -> bool:
    """Whether a product that reads gy wants decoded values, which no kernel leaves."""
    return gy.rows_expand is not None or gy.cols_expand is not None
