"""Distribution of the model: DistributedDataParallel, fully_shard, tensor and pipeline parallelism.

    loss = sum of -log p / targets of the whole step, all ranks and micro-batches

Gradients are therefore summed over ranks, not averaged. With W ranks of M micro-batches each,
micro-batch t of a rank is number t W + rank of the step. One process with W M micro-batches draws
the same ones. For W = 2, M = 1 the sum is bit-identical; otherwise the order of summation differs.
A tp or pp group counts as a single rank in W, because its ranks read the same micro-batches.

All computation with the model runs inside the forward pass of `Spread`, a module around it. Under
fully_shard the parameters are gathered only there, and random numbers are keyed by its forward
passes (`narrowgauge.distribute`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import distribute, distributed_state
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.nn.converted_model import advance
from narrowgauge.nn.float32_modules import kept_modules
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.train.parallel import digest, tensor
from narrowgauge.train.parallel.pipeline import Key, Pipeline

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState
    from narrowgauge.train.config.parallel_syntax import Layout
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Objective
    from narrowgauge.train.parallel.ranks import Ranks

T = TypeVar("T")


class Spread(nn.Module):
    """Wraps the model; its forward pass calls a function that computes with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return compute(*given, **named)


class Parallel:
    """The model, distributed over the ranks of a run.

    whole       module to call: a `Spread` in its DDP or FSDP wrapper; a list of this rank's stages
                under pp
    layout      sizes of dp, fsdp, tp and pp
    mesh        ranks that share the model, or the same stages; None for dp alone and pp alone
    agreements  per stage, state that ranks reduce at the end of a step (`DistributedState`); empty with
                CUDA graphs, which draw noise from torch's generators
    pipeline    pipeline stages, or None
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Any,
        ranks: Ranks,
        objective: Objective,
        probe: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Distributes `model` in place.

        probe  returns the inputs of a micro-batch, equal on all ranks, to test tp on
        """
        self.ranks, self.layout = ranks, ranks.layout
        refuse(config, self.layout)
        mesh = _mesh(self.layout, next(model.parameters()).device.type)
        self.mesh = None if mesh is None else _without_stages(mesh)
        # Before sharding, while every rank still has the whole model to compare.
        if self.layout.world > self.layout.dp:
            digest.refuse_drift(
                model.state_dict(), "before the first step", next(model.parameters()).device
            )
        products: tensor.Shared | None = None
        if self.mesh is not None and self.layout.tp > 1:
            # tp first: fully_shard then shards the DTensors that tp leaves.
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
                messages = {
                    "gradients": config.gradients,
                    "weights": config.weights,
                    "reduce": "sum",
                }
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
                # Without converted layers, nothing else keys dropout by micro-batch, and all ranks
                # would drop the same elements.
                each.counts_micro_batches = not each.layers
        if products is not None:
            parts = (
                [model]
                if self.pipeline is None
                else [each.model for each in self.pipeline.modules.values()]
            )
            for part, state in zip(parts, self.agreements, strict=True):
                tensor.per_rank_dropout(part, products, state)

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Applies fully_shard to each block, then to the rest of each stage.

        Float32 modules in a 16-bit model form their own FSDP groups, since a group has one dtype.

        Pipeline stages stay gathered for a whole step. That avoids a gather for each micro-batch.
        Schedules that split the backward pass also need it. They look up the parameters whose
        gradients they compute, and found none for resharded blocks (decisions/ranks.md, "several ranks").
        """
        _refuse_types(model)
        # Two axes make HSDP: sharded along fsdp, replicated along dp.
        readers = mesh["dp", "fsdp"] if "dp" in (mesh.mesh_dim_names or ()) else mesh["fsdp"]
        parts: list[tuple[nn.Module, Iterable[nn.Module]]] = []
        if self.pipeline is None:
            parts.append((self.whole, find_blocks(model, verb="parallel").values()))
        else:
            parts += [
                (module, self.pipeline.blocks(number))
                for number, module in self.pipeline.modules.items()
            ]
        for around, blocks in parts:
            for module in (*blocks, around):
                for each in (_wide_parts(module), module):
                    if each:
                        fully_shard(
                            each,
                            mesh=readers,
                            reshard_after_forward=None if self.pipeline is None else False,
                        )

    def __call__(self, compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Calls `compute(*given, **named)` inside a forward pass of the model."""
        if self.pipeline is not None:
            return compute(*given, **named)  # `compute` calls the stages itself
        return self.whole(compute, *given, **named)

    def advance(self, model: nn.Module) -> None:
        """Ends an optimizer step: advances the model's quantizers and the agreements' counters."""
        advance(model)
        for each in self.agreements:
            # States with converted layers end their step inside `advance`.
            if each.counts_micro_batches:
                each.end_step(())

    @property
    def stages_group(self) -> Any:
        """Process group of the ranks that hold other stages of one model copy; None without pp."""
        return None if self.pipeline is None else self.pipeline.group

    @property
    def knows_losses(self) -> bool:
        """True if this rank computes losses; under pp, only the rank with the last stage does."""
        return self.pipeline is None or self.pipeline.has_last

    def of_all(self, own: Mapping[Key, T]) -> dict[Key, T]:
        """Merges dicts keyed by layer name over all stages, in model order."""
        return dict(own) if self.pipeline is None else self.pipeline.of_all(own)

    def follows(self, is_last: bool) -> None:
        """Prepares a micro-batch's forward pass; gradients are reduced in a step's last one."""
        if isinstance(self.whole, DistributedDataParallel):
            self.whole.require_backward_grad_sync = is_last
        elif isinstance(self.whole, FSDPModule):
            self.whole.set_requires_gradient_sync(is_last)

    def release(self) -> None:
        """Frees gathered stages after forward passes without a backward pass."""
        for each in self.whole.modules() if self.pipeline is not None else ():
            if isinstance(each, FSDPModule):
                each.reshard()

    def words(self) -> str:
        """Description for the console; '' for one rank."""
        if self.ranks.world == 1:
            return ""
        sizes, parts = self.layout, list[str]()
        if self.pipeline is not None:
            parts.append(self.pipeline.words())
        if sizes.tp > 1:
            own_tokens = ", and the tokens between products (sp)" if sizes.sp else ""
            parts.append(f"each matrix product shared by {sizes.tp} (tp){own_tokens}")
        if sizes.data > 1:
            part = (
                "a shard of the model each (fsdp)"
                if sizes.fsdp > 1
                else "a copy of the model each (dp)"
            )
            if sizes.fsdp > 1 and sizes.dp > 1:
                part = f"{sizes.dp} copies of the model, each in {sizes.fsdp} shards (dp, fsdp)"
            parts.append(f"of {sizes.data} such groups {part}" if parts else part)
        return f"{self.ranks.world} ranks, {'; '.join(parts)}."


def shared(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Settings with `micro_batches` counted over all ranks instead of for each rank.

    Raises ConfigError if that number does not divide the batch.
    """
    return replace(config, micro_batches=parts_of(config, ranks.layout))


def parts_of(config: TrainConfig, sizes: Layout) -> int:
    """Micro-batches of a step on all ranks. Raises ConfigError if they do not divide the batch."""
    copies = sizes.data
    parts = config.micro_batches * copies
    if copies > 1 and not config.token_budget and config.batch_size % parts:
        raise ConfigError(
            f"batch.size = {config.batch_size}: must be a multiple of {parts}, the micro-batches of {copies} ranks with "
            f"batch.micro_batches = {config.micro_batches} each. Change one of them.",
            code="parallel.batch-size",
        )
    return parts


def refuse(config: TrainConfig, sizes: Layout) -> None:
    """Raises ConfigError for settings that this parallel layout does not support."""
    if sizes.world == 1:
        return
    if config.cuda_graph:
        raise ConfigError(
            f"device.cuda_graph = true: does not capture the messages of {sizes.world} ranks. Train without --device.cuda-graph.",
            code="parallel.cuda-graph",
        )
    if config.weights != "16bit" and sizes.fsdp == 1:
        raise ConfigError(
            f"parallel.weights = {config.weights!r}: with parallel = {str(sizes)!r} no weights are gathered. Take parallel = 'fsdp', or "
            "leave "
            f"weights out.{_branch(config, 'weights')}",
            code="parallel.weights",
        )
    if config.compile and config.weights != "16bit":
        raise ConfigError(
            f"device.compile = true: was not tried with parallel.weights = {config.weights!r}, which this command would compile as one "
            "model. "
            "Take parallel.weights = '16bit', or leave compile out.",
            code="parallel.compiled-codes",
        )
    if sizes.pp == 1 and not sizes.sp and config.activations != "16bit":
        raise ConfigError(
            f"parallel.activations = {config.activations!r}: no activations travel so with parallel = {str(sizes)!r}. Take pp=2, or "
            "tp=2,sp, whose "
            f"ranks send tokens to each other; or leave it out.{_branch(config, 'activations')}",
            code="parallel.activations",
        )
    if sizes.pp > 1 and sizes.sp:
        raise ConfigError(
            f"parallel = {str(sizes)!r}: stages hand on all tokens, so ranks of a stage have no tokens of their own. Leave out sp, or pp.",
            code="parallel.sp-pp",
        )
    if config.gradients != "16bit" and sizes.fsdp == 1 and sizes.dp > 1 and sizes.tp * sizes.pp > 1:
        raise ConfigError(
            f"parallel.gradients = {config.gradients!r}: copies (dp) beside tp or pp add up their gradients as torch sends them. Take "
            "fsdp in the "
            f"place of dp, or leave gradients out.{_branch(config, 'gradients')}",
            code="parallel.gradients-of-copies",
        )
    if config.gradients != "16bit" and sizes.data == 1:
        raise ConfigError(
            f"parallel.gradients = {config.gradients!r}: ranks that all read the same data send none. Leave it out, or add fsdp to "
            "parallel."
            f"{_branch(config, 'gradients')}",
            code="parallel.no-gradients",
        )
    if sizes.tp * sizes.pp > 1 and config.compile:
        raise ConfigError(
            "device.compile = true: does not work with parts of layers (tp) or stages (pp). Take parallel = 'dp' or 'fsdp', or leave it "
            "out.",
            code="parallel.compiled",
        )
    if sizes.tp * sizes.pp > 1 and config.precision == "amp-fp16":
        raise ConfigError(
            "recipe.precision = 'amp-fp16': an overflow in one stage, or part of a layer, must be known to all, and torch's GradScaler "
            "does not "
            "see to that. Take precision amp-bf16, or fsdp.",
            code="parallel.float16",
        )
    if sizes.tp > 1 and config.fuse:
        raise ConfigError(
            "recipe.fuse = true: hands whole tensors to layers that have a part of their features under tp. Leave it out.",
            code="parallel.fuse",
        )


def _branch(config: TrainConfig, key: str) -> str:
    """Advice for a resumed run, whose settings come from its folder: branch it without `key`."""
    if not config.resume:
        return ""
    return f" The run in {config.output!r} was started with it: branch it, with --from {config.output} --{key} 16bit --output NEW."


def _sum_within_blocks(model: nn.Module) -> None:
    """Makes every layout sum the gradients of a block's inputs in the order of fully_shard.

    All decoder blocks read the encoder's output, in two matmuls each. fully_shard wraps a block's
    inputs in an autograd function (RegisterPostBackwardFunction), so it sums (k1 + v1) + (k0 + v0).
    Plain autograd sums ((k1 + v1) + k0) + v0, with other last bits. The difference was measured on
    Marian: two elements after four steps with 16-bit gradients, half of all encoder gradients in
    float32.
    """
    try:
        blocks = find_blocks(model, verb="parallel")
    # A model without a stack of two blocks has only one order of summation.
    except ConfigError:
        return
    for block in blocks.values():
        block.register_forward_pre_hook(_own_inputs, with_kwargs=True)


def _own_inputs(
    block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_own, given)), {key: _own(value) for key, value in named.items()}


def _own(value: Any) -> Any:
    """View of a tensor that requires gradients: a separate autograd node that sums them."""
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def _copies(whole: nn.Module, has_spare: bool) -> nn.Module:
    """Wraps the module in DistributedDataParallel.

    has_spare  parameters may get no gradient: a pooler that the task does not use, or learned steps
               while the model runs in BF16
    """
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    # Broadcasting buffers would overwrite each rank's amax histories. The argument was named
    # broadcast_buffers up to torch 2.12.
    key = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    options: dict[str, Any] = {key: False, "find_unused_parameters": has_spare}
    # init_sync=False: all ranks have built the same weights; `digest` reports drift instead of
    # overwriting it.
    return DistributedDataParallel(whole, init_sync=False, gradient_as_bucket_view=True, **options)


def _mesh(sizes: Layout, device: str) -> DeviceMesh | None:
    """Device mesh of the axes with more than one rank, in rank order; None for dp alone.

    Under tp or pp, copies (dp) use fully_shard with one shard. torch's DDP accepts no DTensors, and
    does not reduce gradients that a zero-bubble schedule computes.
    """
    if sizes.fsdp * sizes.tp * sizes.pp == 1:
        return None
    axes = {"pp": sizes.pp, "dp": sizes.dp, "fsdp": sizes.fsdp, "tp": sizes.tp}
    kept = {
        name: size for name, size in axes.items() if size > 1 or (name == "fsdp" and sizes.dp > 1)
    }
    return init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _without_stages(mesh: DeviceMesh) -> DeviceMesh | None:
    """Submesh of the ranks with this rank's stages; None if pp is the only axis."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
    return mesh[names] if names else None


def _refuse_types(model: nn.Module) -> None:
    """Raises ConfigError if parameters of one FSDP group would have several dtypes."""
    wide = {
        id(parameter)
        for module in kept_modules(model).values()
        for parameter in module.parameters()
    }
    types = {parameter.dtype for parameter in model.parameters() if id(parameter) not in wide}
    if len(types) > 1:
        learned = any(isinstance(each, LearnedSteps) for each in model.modules())
        why = ": learned steps are float32" if learned else ""
        raise ConfigError(
            f"parallel: fully_shard takes parameters of one type, and this model has {', '.join(sorted(map(str, types)))}{why}. "
            "Take precision amp-bf16, or parallel = 'dp'.",
            code="parallel.mixed-types",
        )


def _wide_parts(module: nn.Module) -> list[nn.Module]:
    """Float32 modules of a 16-bit model, without those that fully_shard has wrapped already."""
    kept = kept_modules(module).values()
    return [
        each
        for each in kept
        if next(each.parameters(), None) is not None and not isinstance(each, FSDPModule)
    ]
