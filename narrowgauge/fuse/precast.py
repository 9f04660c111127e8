"""Fused forward of a norm or activation: compute it, quantize it, and cache the cast for readers.

With a kernel, the function is one autograd function:

    forward   y and the first reader's cast in one pass; the cast is cached for y (`nn.cast_sources`)
    backward  gradients of the inputs, and their casts for the Linears that produced these inputs

Without a kernel, the module's own code computes y, and the cast is made as the reader would.

On a CPU the kernels compute values alone (values.py): readers cast y themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import in_memory, type_of
from narrowgauge.fuse.forward import OWN_CODE, FusedForward, Fusion
from narrowgauge.fuse.saving import RecomputedOutput, SavedLayout, quantize_input
from narrowgauge.fuse.values import ValueKernels
from narrowgauge.nn import transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.nn.cast_sources import CacheStats
from narrowgauge.nn.keep_policy import RecomputeSource, SavePolicy, producer_policy
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.observer import needs_x
from narrowgauge.nn.operands import Casts, Operand
from narrowgauge.nn.rotation import NONE
from narrowgauge.ops.norm_act import BACKWARD, FORWARD, CastRequest, Kind, NormActSpec
from narrowgauge.ops.norm_act.definition import ACTIVATIONS
from narrowgauge.ops.norm_act.spec import NARROW, Given, StoredAsCodes
from narrowgauge.ops.registry import device_facts
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import DelayedScaling, LearnedStep


@dataclass(eq=False)
class FusedModule(FusedForward):
    """Fused forward of a norm or an activation.

    kind     the function
    readers  layers that read its output; the first one that quantizes determines the cast
    sources  layers whose outputs only this function reads: gate and up of SwiGLU, the Linear of a
             GELU
    stats    number of casts produced, and of casts used by layers
    private  only Linears read the output; see `ValueKernels`
    """

    kind: Kind
    readers: tuple[nn.Module, ...]
    sources: tuple[nn.Module, ...] = ()
    stats: CacheStats = field(default_factory=CacheStats, init=False)
    private: bool = field(default=False, kw_only=True)

    @cached_property
    def values(self) -> ValueKernels:
        """Kernels of a CPU, which compute without casts."""
        return ValueKernels(self.kind, self.private, self)

    def __call__(self, *given: Any, **options: Any) -> Any:
        # Under torch.compile the compiler fuses by itself, and caches of casts are bypassed.
        # Functional transforms (torch.func) need the module's own differentiable code.
        if (
            len(given) != 1
            or options
            or torch.compiler.is_compiling()
            or transforms.is_active(*given)
        ):
            return self.module_forward(*given, **options)
        return self.forward(given[0])

    def forward(self, x: Tensor) -> Tensor:
        """Compute the module's function in eager mode."""
        return self.compute((x, *self._parameters()), lambda: self.module_forward(x))

    @property
    def is_active(self) -> bool:
        """True if a reader has a recipe and is not suspended."""
        return any(
            isinstance(each, QLinear) and each.recipe is not None and not each.is_suspended
            for each in self.readers
        )

    def reader(self) -> QLinear | None:
        """Return the first layer that quantizes its input, or None.

        None too if an observer needs the layers' inputs.
        """
        for layer in self.readers:
            if isinstance(layer, QLinear) and refuse_reader(layer) is None:
                return layer
        return None

    def compute(self, tensors: Sequence[Tensor], fallback: Callable[[], Tensor]) -> Tensor:
        """Return y of the tensors.

        tensors   inputs and parameters of the function, the main input first
        fallback  computes y without a kernel
        """
        x = tensors[0]
        if type_of(x.device) == "cpu" and self.save is None and self.is_active:
            y = self.values(tensors)
            if y is not None:
                return y
        reader = self.reader()
        if reader is None or x.numel() == 0:
            return fallback()
        operand, kernel = _operand(reader, x), None
        policy = self.save_policy(operand)
        requested = _requested_cast(operand, policy)
        request = requested if isinstance(requested, CastRequest) else None
        # Without a cast or a saved form to gain, the module's own code stays.
        if request is not None or self.save is not None:
            kernel = self.kernel(FORWARD, NormActSpec.of(self.kind, tensors, (request,)))
        if kernel is None:
            y = fallback()
            operand = _operand(reader, y)
        else:
            flat = tuple(
                each.reshape(-1, x.shape[-1]) if each.ndim > 1 else each for each in tensors
            )
            y = _Function.apply(self, policy, request, kernel, operand, *flat).reshape(x.shape)
        self._hand_over(y, reader, operand)
        return y

    def save_policy(self, operand: Operand) -> SavePolicy:
        """Choose the tensors to save for backward, from the first reader's operand."""
        shares_codes = (
            self.save in NARROW
            and self.kind.is_norm
            and operand.saves_codes
            and operand.plan.transposes
        )
        return producer_policy(operand.context.keep.grads, shares_codes, operand.is_recomputable)

    @torch.no_grad()
    def _hand_over(self, y: Tensor, reader: QLinear, operand: Operand) -> None:
        """Cache the casts of y for its readers; quantize y first if no kernel did.

        Readers with the same recipe get the first reader's amax state.
        """
        # The cache goes by the tensor itself, so y must be the object that the readers receive.
        inputs = None if reader.state.shared_inputs is None else reader.state.shared_inputs.of(y)
        if inputs is None or y.shape[-1] != reader.in_features:
            return
        if operand.casts.is_empty:
            fill(operand, y.detach().reshape(-1, y.shape[-1]))
        inputs.put(operand, self.stats)
        if operand.state is None or not operand.context.records:
            return
        others = [each for each in self.readers if each is not reader and isinstance(each, QLinear)]
        # Readers with another recipe quantize y themselves and record their own amax.
        same_recipe = [
            each for each in others if each.recipe == reader.recipe and refuse_reader(each) is None
        ]
        amax_states = [each for layer in same_recipe if (each := layer.amax_state("x")) is not None]
        if amax_states:
            # One launch for all histories.
            torch._foreach_copy_(amax_states, [operand.state] * len(amax_states))

    def gradient_requests(self, tensors: Sequence[Given]) -> list[CastRequest | None]:
        """Return a cast per input gradient for its source layer; None if the kernel cannot add it."""
        requested: list[CastRequest | None] = []
        for layer in self.sources or (None,) * (1 if self.kind.is_norm else len(tensors)):
            request = _gradient_request(layer)
            spec = NormActSpec.of(self.kind, tensors, [*requested, request])
            requested.append(
                None if request is None or self.kernel(BACKWARD, spec) is None else request
            )
        return requested

    def fusion(self, name: str, readers: tuple[str, ...]) -> Fusion:
        """Return the report, for the first reader's device and the dtype of its weight."""
        reader = self.reader()
        if (backend := self._value_backend()) is not None:
            return Fusion(
                name=name,
                readers=readers,
                function=self.kind.name,
                backend=backend,
                saved="keeps its inputs",
            )
        if reader is None:
            reasons = [refuse_reader(each) for each in self.readers if isinstance(each, QLinear)]
            reason = next((each for each in reasons if each), "no reader was converted")
            return Fusion(name=name, readers=readers, reason=reason)
        weight = reader.weight
        # The report describes training, also when called under no_grad.
        with torch.enable_grad():
            operand = _operand(reader, weight)
        policy = self.save_policy(operand)
        requested = _requested_cast(operand, policy)
        if isinstance(requested, str) and self.save is None:
            backend = f"own code ({requested})"
        else:
            device = device_facts(weight.device.type, weight.device.index)
            casts = () if isinstance(requested, str) else ((requested.cast, requested.transposed),)
            dtypes = (weight.dtype, *(each.dtype for each in self._parameters()))
            spec = NormActSpec(self.kind, device, dtypes, reader.in_features, casts)
            backend = self.describe_backend(FORWARD, spec)

        same_recipe_readers = sum(
            isinstance(each, QLinear) and each.recipe == reader.recipe for each in self.readers
        )
        stats = self.stats
        # Each produced cast can be used once by every reader with the same recipe.
        unused_cast_share = (
            None
            if not stats.made
            else max(0.0, 1 - stats.taken / (stats.made * same_recipe_readers))
        )
        saved = "" if backend.startswith(OWN_CODE) else self.describe_saved(policy)
        return Fusion(
            name=name,
            readers=readers,
            function=self.kind.name,
            backend=backend,
            saved=saved,
            unused_cast_share=unused_cast_share,
        )

    def _value_backend(self) -> str | None:
        """Describe the kernel that computes values alone; None if a cast decides."""
        like = next((each.weight for each in self.readers if isinstance(each, QLinear)), None)
        on_cpu = like is not None and type_of(like.device) == "cpu"
        if like is None or not on_cpu or self.save is not None or not self.is_active:
            return None
        dtypes = (like.dtype, *(each.dtype for each in self._parameters()))
        device, columns = device_facts(like.device.type, like.device.index), like.shape[-1]
        kernel = self.values.kernel(NormActSpec(self.kind, device, dtypes, columns))
        return None if kernel is None else f"{kernel.name}, values alone"

    def _parameters(self) -> Iterator[Tensor]:
        """Weight and bias of a norm."""
        found = (getattr(self.module, each, None) for each in ("weight", "bias"))
        return (each for each in found if each is not None and self.kind.is_norm)

    def describe_saved(self, policy: SavePolicy) -> str:
        """Describe the tensors saved for backward."""
        suffix = "; what its readers read is made again" if policy == "inputs" else ""
        if policy == "outputs":
            return "keeps the codes that its readers keep"
        if self.save not in NARROW:
            return f"keeps its inputs{suffix}"
        if not self.kind.is_norm:
            return f"keeps its inputs as {NARROW[self.save]}{suffix}"
        return f"keeps its input in its own type, since no reader keeps codes by one scale for all{suffix}"


@dataclass(eq=False)
class FusedMlp(FusedModule):
    """Fused forward of a gated MLP; `names` are its Linears gate, up and down."""

    names: tuple[str, ...] = field(kw_only=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP in eager mode: down(act(gate(x)) * up(x))."""
        gate, up, down = (self.module.get_submodule(name) for name in self.names)
        g, u = gate(x), up(x)
        y: Tensor = down(self.compute((g, u), lambda: self.activated(g) * u))
        return y

    def activated(self, g: Tensor) -> Tensor:
        """Apply the MLP's own activation module (its rounding may differ), or torch's function."""
        own = next(
            (
                each
                for name in ("act_fn", "act", "activation_fn")
                if callable(each := getattr(self.module, name, None))
            ),
            None,
        )
        y: Tensor = (own or ACTIVATIONS[self.kind.activation])(g)
        return y


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: FusedModule, policy: SavePolicy, request: CastRequest | None, kernel: Any, operand: Operand,
        *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        """Compute y with the kernel; other results are stored in `operand`."""
        outputs, statistics = kernel.run(fused.kind, tensors, request)
        value: Tensor = outputs.value
        casts = operand.casts
        casts.rows, casts.cols, casts.amax = outputs.plain, outputs.transposed, outputs.amax
        ctx.fused, ctx.recomputed = (
            fused,
            RecomputedOutput(fused.kind, fused.kernel) if policy == "inputs" else None,
        )
        saved: Sequence[Given] = tensors
        if fused.save in NARROW and not fused.kind.is_norm:
            saved = [quantize_input(each, NARROW[fused.save]) for each in tensors]

        ctx.layout, flat = SavedLayout.of(saved), SavedLayout.flatten(saved, statistics)
        if ctx.recomputed is not None:
            ctx.recomputed.layout = ctx.layout
            # Detached: cached tensors must not keep the autograd graph alive.
            casts.source = RecomputeSource(
                tuple(None if each is None else each.detach() for each in flat), ctx.recomputed
            )
        fill(operand, value)
        if policy == "outputs":
            assert isinstance(casts.cols, QTensor)
            saved = [StoredAsCodes(casts.cols, tensors[0].dtype, turned=True), *tensors[1:]]
            ctx.layout, flat = (
                SavedLayout.of(saved),
                SavedLayout.flatten(saved, (None, statistics[1])),
            )
        ctx.save_for_backward(*flat)
        return value

    @staticmethod
    @no_double_backward(
        "a fused norm or activation", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        fused: FusedModule = ctx.fused
        # Read once: under torch's non-reentrant checkpoint saved tensors can be unpacked only once.
        tensors, statistics = ctx.layout.unflatten(ctx.saved_tensors)
        if ctx.recomputed is not None:
            ctx.recomputed.clear()
        requests = fused.gradient_requests(tensors)
        kernel = (
            fused.kernel(BACKWARD, NormActSpec.of(fused.kind, tensors, requests))
            or BACKWARD.kernels[-1]
        )
        # Kernels read raw memory: resolve lazily negated views and zeros without storage first.
        gradients, parameter_gradients = kernel.run(
            fused.kind, tensors, statistics, in_memory(gy).contiguous(), requests
        )
        for layer, each in zip(fused.sources, gradients, strict=False):
            if each.plain is not None:
                assert isinstance(layer, QLinear) and layer.state.shared_inputs is not None
                # The source's backward finds the cast by this gradient tensor.
                layer.state.shared_inputs.gradients.put(
                    each.value, Casts(each.plain, each.transposed, each.amax)
                )
        return (
            None,
            None,
            None,
            None,
            None,
            *(each.value for each in gradients),
            *parameter_gradients,
        )


def refuse_reader(layer: QLinear) -> str | None:
    """Return the reason why a layer cannot use a cast made elsewhere, or None."""
    if layer.recipe is None or layer.is_suspended:
        return "computes as an ordinary Linear"
    if layer.recipe.output.lhs is None:
        return f"recipe {layer.recipe.name} does not cast its input"
    if layer.recipe.backward == "straight-through":
        return f"recipe {layer.recipe.name} works on the codes of a rotated or learned cast"
    # Fused functions may not save x. Other observers see the tensors of the actual step: refusing
    # those would make an observed step differ from an unobserved one.
    if needs_x(layer.observer):
        return "an observer needs its input in backward"
    if layer.state.shared_inputs is None:
        return "shares no inputs"
    rotates_saved_input = (
        layer.recipe.save == "quantized" and layer.recipe.grad_weight.rotate is not None
    )
    if layer.recipe.output.rotate is not None or rotates_saved_input:
        return f"recipe {layer.recipe.name} rotates its input"
    return None


def _operand(reader: QLinear, x: Tensor) -> Operand:
    """Build the Operand by which `reader` looks up casts of an input like x."""
    context, trains = reader.context(x), reader.weight.requires_grad
    return Operand(x, context.plan.x, context, (True, trains), reader.amax_state("x"))


def fill(operand: Operand, y: Tensor) -> None:
    """Add the missing casts of y [T, K] to `operand`, as the reader's own forward would."""
    operand.tensor = y
    if operand.casts.rows is None:
        operand.read()
        operand.rows(NONE)
    if operand.casts.source is None:
        operand.saved()


def _requested_cast(operand: Operand, policy: SavePolicy) -> CastRequest | str:
    """Return the cast of y for a kernel, or the reason why no kernel on any device can make it."""
    plan, cast, transposed = (
        operand.plan,
        operand.plan.rows,
        operand.saves_codes and policy != "inputs",
    )
    if cast is None or isinstance(cast.calibrate, LearnedStep):
        return "the input is not cast, or by a learned step"
    if plan.rows_expand is not None:
        return "products are emulated, which reads decoded values"
    live = operand.state if isinstance(cast.calibrate, DelayedScaling) else None
    return CastRequest(cast, live, operand.context.records, transposed and plan.transposes)


def _gradient_request(layer: nn.Module | None) -> CastRequest | None:
    """Return the cast of a layer's output gradient, if one cast serves both of its GEMMs."""
    if (
        not isinstance(layer, QLinear)
        or layer.recipe is None
        or layer.is_suspended
        or needs_x(layer.observer)
    ):
        return None
    gy = layer.plan(layer.weight.device).gy
    if layer.state.shared_inputs is None or not layer.weight.requires_grad:
        return None
    if not gy.pairs or gy.rows is None or gy.rows.rounding != "nearest":
        return None
    state = layer.amax_state("gy") if isinstance(gy.rows.calibrate, DelayedScaling) else None
    return CastRequest(gy.rows, state, layer.training, transposed=True)
