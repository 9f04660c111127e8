"""Tensor parallelism with sequence parallelism whose messages take one byte per number: styles for torch's `parallelize_module`.

    parallelize_module(block, mesh, {
        "attention_norm": SequenceParallel(),
        "attention": GatherInput(),                                 # x, once for q, k and v
        "attention.q_proj": ColwiseParallel(), ...,
        "attention.o_proj": RowwiseParallel(),                      # partial sums, summed and scattered
    })

                        forward                                         backward
    GatherInput         x: codes gathered along the tokens              gradient of x: parts summed in two steps
    RowwiseParallel     y: parts summed in two steps                    gradient of y: codes gathered along the tokens

A gathered tensor travels as the codes by which its first reader multiplies, and is handed over to all that multiply by the same (the
caches of `nn`): no layer casts it again, and a product that reads it transposed casts the decoded values. Where a reader has no codes of
8 bits (4 bits, 16 bits, rotated or random casts) it travels as E4M3 in tiles of 1 x 128, and what arrives is rounded twice. Parts of a sum
travel as E4M3 in tiles of 1 x 128 to the rank that has the tokens, which decodes them and adds in float32, in the order of the ranks.

With activations="16bit" the styles are torch's own. Not under torch.compile, which has no sources of casts.
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
_ATTRIBUTE = "_narrowgauge_messages"  # of a module that a style parallelised


@dataclass(eq=False)
class SequenceMessages:
    """How the activations of one module travel; `activations` may be changed at any time.

    axis    of the tokens
    sent    bytes of whole messages that this rank gave to collectives, by kind
    """

    module: nn.Module
    mesh: DeviceMesh
    axis: int
    activations: str
    sent: Counter[str] = field(default_factory=Counter)

    def readers(self) -> Iterator[QLinear]:
        """The column-wise layers of the module, in the order in which they were defined."""
        for layer in self.module.modules():
            weight = layer._parameters.get("weight") if isinstance(layer, QLinear) else None
            if isinstance(weight, DTensor) and any(each.is_shard(0) for each in weight.placements):
                yield layer

    def gather_input(self, x: DTensor) -> DTensor:
        """x, cut along the tokens -> all tokens."""
        if self.activations == "16bit" or self.mesh.size() == 1:
            return x.redistribute(placements=(Replicate(),))
        if torch.compiler.is_compiling():
            _refuse_compiling()
        found: DTensor = _GatherInput.apply(x, self)
        return found

    def scatter_output(self, y: DTensor) -> DTensor:
        """y, parts of a sum -> the sum, cut along the tokens."""
        if self.activations == "16bit" or self.mesh.size() == 1:
            return y.redistribute(placements=(Shard(self.axis),))
        if torch.compiler.is_compiling():
            _refuse_compiling()
        found: DTensor = _ScatterOutput.apply(y, self)
        return found

    def gathered(self, x: DTensor, role: str, layers: Iterable[QLinear]) -> DTensor:
        """x, or a gradient of y, of all tokens, with its casts handed over to the layers."""
        return messages.gather(x, self.axis, role, list(layers), self.sent)

    def summed(self, parts: DTensor) -> DTensor:
        return messages.reduce_scatter(parts, self.axis, self.sent)


@constant_while_compiling
def _refuse_compiling() -> None:
    """Called while torch.compile traces: of an error that traced code raises it would make a break of the graph, and go on."""
    raise ConfigError(
        "tensor parallelism: messages in FP8 are sent in eager mode alone. Compile with activations='16bit', or do not compile."
    )


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, via: SequenceMessages) -> DTensor:
        ctx.via = via
        return via.gathered(x, "x", via.readers())

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
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
        cut = gradient if gradient.placements == (along,) else gradient.redistribute(placements=(along,))
        return via.gathered(cut, "gy", [via.module] if isinstance(via.module, QLinear) else []), None


class GatherInput(styles.PrepareModuleInput):
    """PrepareModuleInput for a module whose first input is cut along the tokens, and which reads all of them.

    axis          of the tokens
    activations   "fp8" or "16bit"
    """

    def __init__(self, *, axis: int = 1, activations: str = "fp8", use_local_output: bool = False) -> None:
        super().__init__(
            input_layouts=(Shard(axis),), desired_input_layouts=(Shard(axis),), use_local_output=use_local_output
        )
        self.axis, self.activations = axis, _checked(activations)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        via = _install(module, device_mesh, self.axis, self.activations)

        def gather(
            _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            first = given[0] if given else next(iter(named.values()))
            x = (
                first
                if isinstance(first, DTensor)
                else DTensor.from_local(first, device_mesh, (Shard(self.axis),), run_check=False)
            )
            if x.placements != (Shard(self.axis),):
                x = x.redistribute(placements=(Shard(self.axis),))
            found = via.gather_input(x)
            whole = found.to_local(grad_placements=(Partial(),)) if self.use_local_output else found
            if given:
                return (whole, *given[1:]), named
            return given, named | {next(iter(named)): whole}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class RowwiseParallel(styles.RowwiseParallel):
    """torch's, with output cut along the tokens, for an nn.Linear: messages of FP8.

    axis          of the tokens
    activations   "fp8" or "16bit"
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        axis: int = 1,
        activations: str = "fp8",
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=Partial(), use_local_output=False)
        self.axis, self.activations, self.gives_local = axis, _checked(activations), use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"RowwiseParallel: a {type(module).__name__} is no nn.Linear. Take torch's RowwiseParallel for an embedding."
            )
        super()._apply(module, device_mesh)
        via = _install(module, device_mesh, self.axis, self.activations)

        def scatter(_: nn.Module, __: Any, y: Tensor) -> Tensor:
            assert isinstance(y, DTensor)
            cut = via.scatter_output(y)
            return cut.to_local() if self.gives_local else cut

        module.register_forward_hook(scatter)
        return module


def install(model: nn.Module, activations: str) -> list[SequenceMessages]:
    """Sets how activations travel in all modules that the styles of this file parallelised; what `distribute(activations=...)` calls.

    Raises ConfigError for "fp8" where no module was: torch's own styles send 16 bits.
    """
    found = [each for module in model.modules() if (each := messages_of(module)) is not None]
    if not found and _checked(activations) == "fp8":
        raise ConfigError(
            "distribute: activations='fp8', but no module was parallelised by GatherInput or RowwiseParallel of "
            "narrowgauge.distributed.tensor_parallel. Take those in the plan of parallelize_module, or give distribute the "
            "PipelineStage whose module this is, or take activations='16bit'."
        )
    for each in found:
        each.activations = _checked(activations)
    return found


def messages_of(module: nn.Module) -> SequenceMessages | None:
    """How the activations of a module travel; None for one that no style of this file parallelised."""
    return module.__dict__.get(_ATTRIBUTE)


def _install(module: nn.Module, mesh: DeviceMesh, axis: int, activations: str) -> SequenceMessages:
    if mesh.ndim != 1:
        raise ConfigError(
            f"tensor parallelism: the mesh is {mesh}; pass its one axis of tensor parallelism, as mesh['tp']."
        )
    module.__dict__[_ATTRIBUTE] = found = SequenceMessages(module, mesh, axis, activations)
    return found


def _checked(activations: str) -> str:
    if activations not in ACTIVATIONS:
        raise ConfigError(
            f"tensor parallelism: activations is {activations!r}; it must be one of {', '.join(ACTIVATIONS)}."
        )
    return activations
