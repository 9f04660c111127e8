"""The model of a run, spread over its ranks: copies under DistributedDataParallel, shards under fully_shard, layers cut by tp, or as it is.

    loss = sum of -log p / targets of the whole step, all ranks and micro-batches          so gradients are summed, not averaged

With W ranks of M micro-batches each, a rank's micro-batch number t is number t W + rank of the step. One process with W M micro-batches
draws the same ones, and with W = 2, M = 1 computes the same sum to the bit; else the order of the sum differs. Ranks that share matrix
products (`tensor`) count as one of the W: they read the same micro-batches.

Whatever computes with the model is called through `Spread`, a module around it: under fully_shard its parameters are whole only then,
and noise is keyed by its forward passes (`narrowgauge.distribute`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.conversion import advance
from narrowgauge.distributed import distribute, distributed_state
from narrowgauge.distributed.state import DistributedState
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.nn.float32_modules import kept_modules
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.train.config.parallel_syntax import Layout
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Objective
from narrowgauge.train.parallel import digest, tensor
from narrowgauge.train.parallel.pipeline import Key, Pipeline
from narrowgauge.train.parallel.ranks import Ranks

T = TypeVar("T")


class Spread(nn.Module):
    """Calls functions that compute with the model, which it holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return compute(*given, **named)


class Parallel:
    """A model over the ranks of a run.

    whole       to be called with what computes with the model; in stages, those of this rank
    layout      ranks along each axis
    mesh        of the ranks that share the model, or the same stages of it; None for copies (dp) alone, and for stages alone
    agreements  what the ranks agree on at the end of a step, of each stage; none with CUDA graphs, whose noise is torch's
    pipeline    of a model in stages, else None
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        ranks: Ranks,
        objective: Objective,
        probe: Callable[[], Mapping[str, Any]],
    ) -> None:
        """probe: inputs of a micro-batch, the same on all ranks."""
        self.ranks, self.layout = ranks, ranks.layout
        refuse(config, self.layout)
        mesh = _mesh(self.layout, next(model.parameters()).device.type)
        self.mesh = None if mesh is None else _without_stages(mesh)
        if self.layout.world > self.layout.dp:  # afterwards no other rank has what one has
            digest.refuse_drift(model.state_dict(), "before the first step", next(model.parameters()).device)
        products: tensor.Shared | None = None
        if self.mesh is not None and self.layout.tp > 1:
            products = tensor.cut(model, self.mesh["tp"], probe(), self.layout.sp)
        self.whole: nn.Module = Spread(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            _sum_within_blocks(model)
        self.agreements: list[DistributedState] = []
        self.pipeline: Pipeline | None = None
        if mesh is not None and self.layout.pp > 1:
            turns = config.micro_batches // self.layout.data
            self.pipeline = Pipeline(config, model, objective, mesh.get_group("pp"), turns)
            self.whole = nn.ModuleList(self.pipeline.modules.values())
        if self.mesh is not None and self.layout.data > 1:
            self._shard(model, self.mesh)
        elif self.layout.dp > 1:
            learns_steps = any(isinstance(each, LearnedSteps) for each in model.modules())
            self.whole = _copies(self.whole, has_spare=bool(config.model) or learns_steps)
        if not config.cuda_graph:
            messages: dict[str, Any] = {}
            if self.layout.data > 1:
                messages = {"gradients": config.gradients, "weights": config.weights, "reduce": "sum"}
            if self.pipeline is not None:
                messages["activations"] = config.activations
                distribute(self.pipeline.stages(), seed=config.seed, **messages)
            else:
                if self.layout.sp:
                    messages["activations"] = config.activations
                distribute(self.whole, seed=config.seed, **messages)
            modules = [self.whole] if self.pipeline is None else self.pipeline.modules.values()
            self.agreements = [distributed_state(module) for module in modules]
            for each in self.agreements:
                each.counts_micro_batches = not each.layers  # else ranks would leave out the same elements by dropout
        if products is not None:
            parts = [model] if self.pipeline is None else [each.model for each in self.pipeline.modules.values()]
            for part, state in zip(parts, self.agreements, strict=True):
                tensor.per_rank_dropout(part, products, state)

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Blocks one by one, and what is around them, of each stage, together; of each what stays in float32 beside 16 bits apart.

        Stages stay gathered through a step: they are not gathered for each micro-batch, and a schedule that splits the backward pass
        finds the parameters whose gradients it computes; of others it would compute none.
        """
        _refuse_types(model)
        readers = mesh["dp", "fsdp"] if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
        parts: list[tuple[nn.Module, Iterable[nn.Module]]] = []
        if self.pipeline is None:
            parts.append((self.whole, find_blocks(model, verb="parallel").values()))
        else:
            parts += [(module, self.pipeline.blocks(number)) for number, module in self.pipeline.modules.items()]
        for around, blocks in parts:
            for module in (*blocks, around):
                for each in (_wide_parts(module), module):
                    if each:
                        fully_shard(each, mesh=readers, reshard_after_forward=None if self.pipeline is None else False)

    def __call__(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """`compute(*given, **named)` inside a forward pass of the model."""
        if self.pipeline is not None:
            return compute(*given, **named)  # which calls the stages
        return self.whole(compute, *given, **named)

    def advance(self, model: nn.Module) -> None:
        """After an optimizer step: `narrowgauge.advance` of the model, and the end of what is counted where no layer is converted."""
        advance(model)
        for each in self.agreements:
            if each.counts_micro_batches:
                each.end_step(())

    @property
    def stages_group(self) -> Any:
        """The ranks that hold other parameters of one copy of the model; None: each holds, or shares, all."""
        return None if self.pipeline is None else self.pipeline.group

    @property
    def knows_losses(self) -> bool:
        """Whether this rank computes losses, or another one that has the last stage."""
        return self.pipeline is None or self.pipeline.has_last

    def of_all(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """By names of layers, what all stages have, in the order of the model."""
        return dict(own) if self.pipeline is None else self.pipeline.of_all(own)

    def follows(self, is_last: bool) -> None:
        """Before the forward pass of a micro-batch: gradients travel with the last one of a step."""
        if isinstance(self.whole, DistributedDataParallel):
            self.whole.require_backward_grad_sync = is_last
        elif isinstance(self.whole, FSDPModule):
            self.whole.set_requires_gradient_sync(is_last)

    def release(self) -> None:
        """After forward passes without a backward pass: stages stay gathered no longer."""
        for each in self.whole.modules() if self.pipeline is not None else ():
            if isinstance(each, FSDPModule):
                each.reshard()

    def words(self) -> str:
        """For the console, or ''."""
        if self.ranks.world == 1:
            return ""
        sizes, parts = self.layout, list[str]()
        if self.pipeline is not None:
            parts.append(self.pipeline.words())
        if sizes.tp > 1:
            own_tokens = ", and the tokens between products (sp)" if sizes.sp else ""
            parts.append(f"each matrix product shared by {sizes.tp} (tp){own_tokens}")
        if sizes.data > 1:
            part = "a shard of the model each (fsdp)" if sizes.fsdp > 1 else "a copy of the model each (dp)"
            if sizes.fsdp > 1 and sizes.dp > 1:
                part = f"{sizes.dp} copies of the model, each in {sizes.fsdp} shards (dp, fsdp)"
            parts.append(f"of {sizes.data} such groups {part}" if parts else part)
        return f"{self.ranks.world} ranks, {'; '.join(parts)}."


def shared(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """The settings of a step of all ranks: `micro_batches` of each become those of the step.

    Raises ConfigError if they do not divide the batch.
    """
    return replace(config, micro_batches=parts_of(config, ranks.layout))


def parts_of(config: TrainConfig, sizes: Layout) -> int:
    """Micro-batches of a step of all ranks. Raises ConfigError if they do not divide the batch."""
    copies = sizes.data
    parts = config.micro_batches * copies
    if copies > 1 and not config.token_budget and config.batch_size % parts:
        raise ConfigError(
            f"batch_size = {config.batch_size}: must be a multiple of {parts}, the micro-batches of {copies} ranks with "
            f"micro_batches = {config.micro_batches} each. Change one of them."
        )
    return parts


def refuse(config: TrainConfig, sizes: Layout) -> None:
    """ConfigError for settings that do not work on these ranks."""
    if sizes.world == 1:
        return
    if config.cuda_graph:
        raise ConfigError(
            f"cuda_graph = true: does not capture the messages of {sizes.world} ranks. Train without --cuda-graph."
        )
    if config.weights != "16bit" and sizes.fsdp == 1:
        raise ConfigError(
            f"weights = {config.weights!r}: with parallel = {str(sizes)!r} no weights are gathered. Take parallel = 'fsdp', or leave "
            f"weights out.{_branch(config, 'weights')}"
        )
    if config.compile and config.weights != "16bit":
        raise ConfigError(
            f"compile = true: was not tried with weights = {config.weights!r}, which this command would compile as one model. "
            "Take weights = '16bit', or leave compile out."
        )
    if sizes.pp == 1 and not sizes.sp and config.activations != "16bit":
        raise ConfigError(
            f"activations = {config.activations!r}: no activations travel so with parallel = {str(sizes)!r}. Take pp=2, or tp=2,sp, whose "
            f"ranks send tokens to each other; or leave it out.{_branch(config, 'activations')}"
        )
    if sizes.pp > 1 and sizes.sp:
        raise ConfigError(
            f"parallel = {str(sizes)!r}: stages hand on all tokens, so ranks of a stage have no tokens of their own. Leave out sp, or pp."
        )
    if config.gradients != "16bit" and sizes.fsdp == 1 and sizes.dp > 1 and sizes.tp * sizes.pp > 1:
        raise ConfigError(
            f"gradients = {config.gradients!r}: copies (dp) beside tp or pp add up their gradients as torch sends them. Take fsdp in the "
            f"place of dp, or leave gradients out.{_branch(config, 'gradients')}"
        )
    if config.gradients != "16bit" and sizes.data == 1:
        raise ConfigError(
            f"gradients = {config.gradients!r}: ranks that all read the same data send none. Leave it out, or add fsdp to parallel."
            f"{_branch(config, 'gradients')}"
        )
    if sizes.tp * sizes.pp > 1 and config.compile:
        raise ConfigError(
            "compile = true: does not work with parts of layers (tp) or stages (pp). Take parallel = 'dp' or 'fsdp', or leave it out."
        )
    if sizes.tp * sizes.pp > 1 and config.precision == "amp-fp16":
        raise ConfigError(
            "precision = 'amp-fp16': an overflow in one stage, or part of a layer, must be known to all, and torch's GradScaler does not "
            "see to that. Take precision amp-bf16, or fsdp."
        )
    if sizes.tp > 1 and config.fuse:
        raise ConfigError(
            "fuse = true: hands whole tensors to layers that have a part of their features under tp. Leave it out."
        )


def _branch(config: TrainConfig, key: str) -> str:
    """How a run goes on without a setting, which a resumed one has from its folder."""
    if not config.resume:
        return ""
    return f" The run in {config.output!r} was started with it: branch it, with --from {config.output} --{key} 16bit --output NEW."


def _sum_within_blocks(model: nn.Module) -> None:
    """Each block sums the gradients of what it reads before they leave it, as fully_shard has it, in one process and in copies too.

    All blocks of a decoder read the encoder's output, in two products each. fully_shard puts an autograd function of its own around
    the inputs of a block (RegisterPostBackwardFunction), so the sum there is (k1 + v1) + (k0 + v0), and without it
    ((k1 + v1) + k0) + v0: other last bits. Where no stack has two blocks there is one order alone.
    """
    try:
        blocks = find_blocks(model, verb="parallel")
    except ConfigError:
        return
    for block in blocks.values():
        block.register_forward_pre_hook(_own_inputs, with_kwargs=True)


def _own_inputs(
    block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_own, given)), {key: _own(value) for key, value in named.items()}


def _own(value: Any) -> Any:
    """A tensor that gradients flow to, as a node of its own in the graph."""
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def _copies(whole: nn.Module, has_spare: bool) -> nn.Module:
    """has_spare: parameters may take no part in the loss: those of a pooler that a task does not use, learned steps in BF16."""
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    key = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"  # until torch 2.12
    options: dict[str, Any] = {key: False, "find_unused_parameters": has_spare}
    return DistributedDataParallel(whole, init_sync=False, gradient_as_bucket_view=True, **options)


def _mesh(sizes: Layout, device: str) -> DeviceMesh | None:
    """Of the axes that are needed, in the order in which ranks are numbered; None for copies alone.

    Copies of cut layers, and of stages, are shards in one piece: torch's DDP takes no DTensors, and sums no gradient that a schedule
    without bubbles computes.
    """
    if sizes.fsdp * sizes.tp * sizes.pp == 1:
        return None
    axes = {"pp": sizes.pp, "dp": sizes.dp, "fsdp": sizes.fsdp, "tp": sizes.tp}
    kept = {name: size for name, size in axes.items() if size > 1 or (name == "fsdp" and sizes.dp > 1)}
    return init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _without_stages(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks that have the stages of this one."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
    return mesh[names] if names else None


def _refuse_types(model: nn.Module) -> None:
    """Of what is gathered together: not of what stays in float32 beside 16 bits."""
    wide = {id(parameter) for module in kept_modules(model).values() for parameter in module.parameters()}
    types = {parameter.dtype for parameter in model.parameters() if id(parameter) not in wide}
    if len(types) > 1:
        learned = any(isinstance(each, LearnedSteps) for each in model.modules())
        why = ": learned steps are float32" if learned else ""
        raise ConfigError(
            f"parallel: fully_shard takes parameters of one type, and this model has {', '.join(sorted(map(str, types)))}{why}. "
            "Take precision amp-bf16, or parallel = 'dp'."
        )


def _wide_parts(module: nn.Module) -> list[nn.Module]:
    """What stays in float32 beside 16 bits, and is not of a block that was sharded already."""
    kept = kept_modules(module).values()
    return [each for each in kept if next(each.parameters(), None) is not None and not isinstance(each, FSDPModule)]
