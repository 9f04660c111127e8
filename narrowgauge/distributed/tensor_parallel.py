"""Tensor and sequence parallelism with 8-bit messages: styles for torch's `parallelize_module`.

    parallelize_module(block, mesh, {
        "attention_norm": SequenceParallel(),
        "attention": GatherInput(),              # x, once for q, k and v
        "attention.q_proj": ColwiseParallel(), ...,
        "attention.o_proj": RowwiseParallel(),   # partial sums, reduced and scattered
    })

                     forward                        backward
    GatherInput      x: all-gather of codes         gradient of x: reduce-scatter
    RowwiseParallel  y: reduce-scatter              gradient of y: all-gather of codes

All-gathers and reduce-scatters are along the token axis. A gathered tensor is sent as the codes
that its first reader's GEMM uses. Its casts are cached for all layers that use the same cast, so no
layer quantizes it again. GEMMs that need the transpose quantize the dequantized values.

Some readers have no 8-bit codes: 4 or 16 bits, rotated or stochastic casts. For them the tensor is
sent as E4M3 in 1 x 128 tiles and rounded twice, by the message and by the layer's own cast.

Partial sums are sent as E4M3 in 1 x 128 tiles to the rank that owns the tokens. That rank adds them
in float32, in rank order.

With activations="16bit" the styles behave like torch's. FP8 messages need eager mode: torch.compile
bypasses the caches of casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as styles

from narrowgauge.distributed import sequence_messages as messages
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import constant_while_compiling

ACTIVATIONS = ("fp8", "16bit")
# Key in the `__dict__` of a module that a style of this file parallelized.
_ATTRIBUTE = "_narrowgauge_messages"


@dataclass(eq=False)
class SequenceMessages:
    """Message format of one module's activations; `activations` may be changed at any time.

    module       the parallelized module
    mesh         one-dimensional mesh of tensor parallelism
    axis         index of the token axis
    activations  "fp8" or "16bit"
    bytes_sent   bytes of complete messages given to collectives by this rank, by kind
    """

    module: nn.Module
    mesh: DeviceMesh
    axis: int
    activations: str
    bytes_sent: Counter[str] = field(default_factory=Counter)

    def readers(self) -> Iterator[QLinear]:
        """Yield the column-wise layers of the module, in order of definition."""
        for layer in self.module.modules():
            weight = layer._parameters.get("weight") if isinstance(layer, QLinear) else None
            # A weight is [N, K], so Shard(0) splits the output features: column-wise.
            if isinstance(weight, DTensor) and any(each.is_shard(0) for each in weight.placements):
                yield layer

    def gather_input(self, x: DTensor) -> DTensor:
        """All-gather x along the token axis."""
        if self.activations == "16bit" or self.mesh.size() == 1:
            return x.redistribute(placements=(Replicate(),))
        if torch.compiler.is_compiling():
            _refuse_compiling()
        found: DTensor = _GatherInput.apply(x, self)
        return found

    def scatter_output(self, y: DTensor) -> DTensor:
        """Reduce-scatter the partial sums y along the token axis."""
        if self.activations == "16bit" or self.mesh.size() == 1:
            return y.redistribute(placements=(Shard(self.axis),))
        if torch.compiler.is_compiling():
            _refuse_compiling()
        found: DTensor = _ScatterOutput.apply(y, self)
        return found

    def gathered(self, x: DTensor, role: str, layers: Iterable[QLinear]) -> DTensor:
        """All-gather x (or an output gradient) as codes, and cache its casts for `layers`."""
        return messages.gather(x, self.axis, role, list(layers), self.bytes_sent)

    def summed(self, parts: DTensor) -> DTensor:
        return messages.reduce_scatter(parts, self.axis, self.bytes_sent)


@constant_while_compiling
def _refuse_compiling() -> None:
    """Raise ConfigError while torch.compile traces.

    Dynamo turns an error raised by traced code into a graph break and continues. A function marked
    constant is called during tracing, so its error reaches the user.
    """
    raise ConfigError(
        "tensor parallelism: messages in FP8 are sent in eager mode alone. Compile with activations='16bit', or do not compile.",
        code="tensor-parallel.compiled",
    )


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, via: SequenceMessages) -> DTensor:
        ctx.via = via
        return via.gathered(x, "x", via.readers())

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        # Column-wise layers leave partial sums. A replicated gradient needs only slicing.
        if gradient.placements[0].is_partial():
            return ctx.via.summed(gradient), None
        return gradient.redistribute(placements=(Shard(ctx.via.axis),)), None


class _ScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor, via: SequenceMessages) -> DTensor:
        ctx.via = via
        return via.summed(y)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        via, along = ctx.via, Shard(ctx.via.axis)
        # The next layer may return a replicated gradient: slice it to this rank's tokens first.
        own = (
            gradient
            if gradient.placements == (along,)
            else gradient.redistribute(placements=(along,))
        )
        return via.gathered(
            own, "gy", [via.module] if isinstance(via.module, QLinear) else []
        ), None


class GatherInput(styles.PrepareModuleInput):
    """PrepareModuleInput for a module that reads all tokens of a token-sharded first input.

    axis              index of the token axis
    activations       "fp8" or "16bit"
    use_local_output  pass the module a plain tensor instead of a DTensor
    """

    def __init__(
        self, *, axis: int = 1, activations: str = "fp8", use_local_output: bool = False
    ) -> None:
        super().__init__(
            input_layouts=(Shard(axis),),
            desired_input_layouts=(Shard(axis),),
            use_local_output=use_local_output,
        )
        self.axis, self.activations = axis, _checked(activations)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        via = _install(module, device_mesh, self.axis, self.activations)

        def gather(
            _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # transformers calls attention modules with keyword arguments only.
            first = given[0] if given else next(iter(named.values()))
            x = (
                first
                if isinstance(first, DTensor)
                else DTensor.from_local(first, device_mesh, (Shard(self.axis),), run_check=False)
            )
            if x.placements != (Shard(self.axis),):
                x = x.redistribute(placements=(Shard(self.axis),))
            found = via.gather_input(x)
            # The module's gradients with respect to x are partial sums over the ranks.
            whole = found.to_local(grad_placements=(Partial(),)) if self.use_local_output else found
            if given:
                return (whole, *given[1:]), named
            return given, named | {next(iter(named)): whole}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class RowwiseParallel(styles.RowwiseParallel):
    """torch's RowwiseParallel with token-sharded output and FP8 messages, for nn.Linear.

    input_layouts     as in torch
    axis              index of the token axis
    activations       "fp8" or "16bit"
    use_local_output  return a plain tensor instead of a DTensor
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        axis: int = 1,
        activations: str = "fp8",
        use_local_output: bool = True,
    ) -> None:
        # torch's style must leave the partial sums alone: `scatter` below reduces them in FP8.
        super().__init__(
            input_layouts=input_layouts, output_layouts=Partial(), use_local_output=False
        )
        self.axis, self.activations, self.returns_local = (
            axis,
            _checked(activations),
            use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"RowwiseParallel: a {type(module).__name__} is no nn.Linear. Take torch's RowwiseParallel for an embedding.",
                code="tensor-parallel.not-linear",
            )
        super()._apply(module, device_mesh)
        via = _install(module, device_mesh, self.axis, self.activations)

        def scatter(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            assert isinstance(y, DTensor)
            own = via.scatter_output(y)
            return own.to_local() if self.returns_local else own

        module.register_forward_hook(scatter)
        return module


def install(model: nn.Module, activations: str) -> list[SequenceMessages]:
    """Set the message format of all modules parallelized by this file's styles.

    Called by `distribute(activations=...)`. Raises ConfigError for "fp8" if there is no such
    module: torch's own styles send 16 bits.
    """
    found = [each for module in model.modules() if (each := messages_of(module)) is not None]
    if not found and _checked(activations) == "fp8":
        raise ConfigError(
            "distribute: activations='fp8', but no module was parallelised by GatherInput or RowwiseParallel of "
            "narrowgauge.distributed.tensor_parallel. Take those in the plan of parallelize_module, or give distribute the "
            "PipelineStage whose module this is, or take activations='16bit'.",
            code="tensor-parallel.no-module",
        )
    for each in found:
        each.activations = _checked(activations)
    return found


def messages_of(module: nn.Module) -> SequenceMessages | None:
    """Return the SequenceMessages of a module; None if no style of this file parallelized it."""
    return module.__dict__.get(_ATTRIBUTE)


def _install(module: nn.Module, mesh: DeviceMesh, axis: int, activations: str) -> SequenceMessages:
    if mesh.ndim != 1:
        raise ConfigError(
            f"tensor parallelism: the mesh is {mesh}; pass its one axis of tensor parallelism, as mesh['tp'].",
            code="tensor-parallel.mesh",
        )
    module.__dict__[_ATTRIBUTE] = found = SequenceMessages(module, mesh, axis, activations)
    return found


def _checked(activations: str) -> str:
    if activations not in ACTIVATIONS:
        raise ConfigError(
            f"tensor parallelism: activations is {activations!r}; it must be one of {', '.join(ACTIVATIONS)}.",
            code="tensor-parallel.activations",
        )
    return activations
