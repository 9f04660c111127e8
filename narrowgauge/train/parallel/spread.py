"""The model of a run, spread over its ranks: copies under DistributedDataParallel, shards under fully_shard, or as it is.

    loss = sum of -log p / targets of the whole step, all ranks and micro-batches          so gradients are summed, not averaged

With W ranks of M micro-batches each, a rank's micro-batch number t is number t W + rank of the step. One process with W M micro-batches
draws the same ones, and with W = 2, M = 1 computes the same sum to the bit; else the order of the sum differs.

Whatever computes with the model is called through `Spread`, a module around it: under fully_shard its parameters are whole only then,
and noise is keyed by its forward passes (`narrowgauge.distribute`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import agreement_of, distribute
from narrowgauge.distributed.agreement import Agreement
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.nn.linear import QLinear
from narrowgauge.train.config.parallel_syntax import Layout, layout
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.parallel.ranks import Ranks


class Spread(nn.Module):
    """Calls functions that compute with the model, which it holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return compute(*given, **named)


class Parallel:
    """A model over the ranks of a run.

    whole      to be called with what computes with the model
    layout     ranks along each axis
    agreement  what the ranks agree on at the end of a step; None with CUDA graphs, whose noise is torch's
    """

    def __init__(self, config: TrainConfig, model: Any, ranks: Ranks) -> None:
        self.ranks, self.layout = ranks, layout(config.parallel, ranks.world)
        refuse(config, self.layout, ranks)
        self.whole: nn.Module = Spread(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            _sum_within_blocks(model)
        self.agreement: Agreement | None = None
        if self.layout.fsdp > 1:
            _shard(self.whole, model, self.layout)
        elif self.layout.dp > 1:
            self.whole = _copies(self.whole, has_spare=bool(config.model))
        if not config.cuda_graph:
            messages: dict[str, Any] = {}
            if ranks.world > 1:
                messages = {"gradients": config.gradients, "weights": config.weights, "reduce": "sum"}
            distribute(self.whole, seed=config.seed, **messages)
            self.agreement = agreement_of(self.whole)

    def __call__(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """`compute(*given, **named)` inside a forward pass of the model."""
        return self.whole(compute, *given, **named)

    def follows(self, is_last: bool) -> None:
        """Before the forward pass of a micro-batch: gradients travel with the last one of a step."""
        if isinstance(self.whole, DistributedDataParallel):
            self.whole.require_backward_grad_sync = is_last
        elif isinstance(self.whole, FSDPModule):
            self.whole.set_requires_gradient_sync(is_last)

    def words(self) -> str:
        """For the console, or ''."""
        if self.ranks.world == 1:
            return ""
        how = "a shard of the model each (fsdp)" if self.layout.fsdp > 1 else "a copy of the model each (dp)"
        if self.layout.fsdp > 1 and self.layout.dp > 1:
            how = f"{self.layout.dp} copies of the model, each in {self.layout.fsdp} shards (dp, fsdp)"
        return f"{self.ranks.world} ranks, {how}."


def shared(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The settings of a step of all ranks: `micro_batches` of each become those of the step.

    Raises ConfigError if they do not divide the batch.
    """
    parts = config.micro_batches * ranks.world
    if ranks.world > 1 and not config.token_budget and config.batch_size % parts:
        raise ConfigError(
            f"batch_size = {config.batch_size}: must be a multiple of {parts}, the micro-batches of {ranks.world} ranks with "
            f"micro_batches = {config.micro_batches} each. Change one of them."
        )
    return replace(config, micro_batches=parts)


def refuse(config: TrainConfig, sizes: Layout, ranks: Ranks) -> None:
    """ConfigError for settings that do not work on these ranks."""
    if ranks.world == 1:
        return
    if config.cuda_graph:
        raise ConfigError(
            f"cuda_graph = true: does not capture the messages of {ranks.world} ranks. Train without --cuda-graph."
        )
    if config.weights != "16bit" and sizes.fsdp == 1:
        raise ConfigError(
            f"weights = {config.weights!r}: a rank with a copy of the model gathers none. Take parallel = 'fsdp', or leave it out."
        )
    if config.compile and config.weights != "16bit":
        raise ConfigError(
            f"compile = true: was not tried with weights = {config.weights!r}, which this command would compile as one model. "
            "Take weights = '16bit', or leave compile out."
        )


def _sum_within_blocks(model: nn.Module) -> None:
    """Each block sums the gradients of what it reads before they leave it, as fully_shard has it, in one process and in copies too.

    All blocks of a decoder read the encoder's output, in two products each. fully_shard puts an autograd function of its own around
    the inputs of a block (RegisterPostBackwardFunction), so the sum there is (k1 + v1) + (k0 + v0), and without it
    ((k1 + v1) + k0) + v0: other last bits.
    """
    for block in find_blocks(model, verb="parallel").values():
        block.register_forward_pre_hook(_own_inputs, with_kwargs=True)


def _own_inputs(
    block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_own, given)), {key: _own(value) for key, value in named.items()}


def _own(value: Any) -> Any:
    """A tensor that gradients flow to, as a node of its own in the graph."""
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def _copies(whole: nn.Module, has_spare: bool) -> nn.Module:
    """has_spare: parameters may take no part in the loss, as those of a pooler that a task does not use."""
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    key = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"  # until torch 2.12
    options: dict[str, Any] = {key: False, "find_unused_parameters": has_spare}
    return DistributedDataParallel(whole, init_sync=False, gradient_as_bucket_view=True, **options)


def _shard(whole: nn.Module, model: nn.Module, sizes: Layout) -> None:
    """Blocks one by one, and what is around them together."""
    device = next(model.parameters()).device.type
    shape, names = ((sizes.dp, sizes.fsdp), ("dp", "fsdp")) if sizes.dp > 1 else ((sizes.fsdp,), ("fsdp",))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    types = {parameter.dtype for parameter in model.parameters()}
    if len(types) > 1:
        learned = any(isinstance(each, QLinear) and each.steps is not None for each in model.modules())
        why = ": learned steps are float32" if learned else ""
        raise ConfigError(
            f"parallel: fully_shard takes parameters of one type, and this model has {', '.join(sorted(map(str, types)))}{why}. "
            "Take precision amp-bf16, or parallel = 'dp'."
        )
    for module in (*find_blocks(model, verb="parallel").values(), whole):
        fully_shard(module, mesh=mesh)
