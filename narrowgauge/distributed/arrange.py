"""Implementation of `distribute`: detect how the model is parallelized and set up its messages.

Every check compares ranks, so that a wrong argument on one rank raises on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from narrowgauge.distributed import Activations, Model, Weights, pipeline, tensor_parallel
from narrowgauge.distributed import gradients as gradient_messages
from narrowgauge.distributed import weights as weight_gathers
from narrowgauge.distributed.same_settings import require_same
from narrowgauge.distributed.state import DistributedState, Peers
from narrowgauge.distributed.topology import Topology
from narrowgauge.distributed.torch_private import enclosing_ddp
from narrowgauge.errors import ConfigError, PeerError, Reason, warn
from narrowgauge.nn.linear import QLinear
from narrowgauge.structure import plain_name

if TYPE_CHECKING:
    from narrowgauge.distributed.gradient_state import GradientFormat, Reduce

# Seconds in which the slowest rank must begin its first forward pass.
FIRST_FORWARD_S = 300.0


def arrange(
    model: Model, *, weights: Weights, gradients: GradientFormat, activations: Activations, reduce: Reduce, nodes: DeviceMesh | None,
    replicas: dist.ProcessGroup | None, seed: int | None,
) -> Model:  # fmt: skip
    """Implement `distribute`; see there for the arguments."""
    stages: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    are_stages = bool(stages) and all(pipeline.is_stage(each) for each in stages)
    error = _argument_error(
        model,
        weights,
        activations,
        replicas,
        seed,
        is_model=are_stages or isinstance(model, nn.Module),
    )
    agreed_seed, states = _agreed_seed(seed, error), []
    for module in [each.submod for each in stages] if are_stages else stages:
        state = DistributedState(
            seed=agreed_seed,
            detect=partial(_detect, replicas=replicas, weights=weights, is_stage=are_stages),
        )
        topology = state.attach(module)
        # Ranks with different formats would run different collectives and deadlock.
        require_same(
            {"weights": weights, "activations": activations},
            topology.replicas,
            topology.device(module),
        )
        # A single unwrapped process sends nothing, but keeps the settings for its state_dict.
        is_single_rank = not dist.is_initialized() or dist.get_world_size() == 1
        if is_single_rank and not (topology.ddp or topology.fsdp):
            state.gradients = gradient_messages.single_rank_gradients(gradients, reduce)
        elif topology.ddp or topology.fsdp or gradients != "16bit" or reduce != "mean":
            state.gradients = gradient_messages.install(
                module, gradients=gradients, reduce=reduce, mesh=nodes
            )
            if dist.is_initialized() and dist.get_world_size() > 1:
                state.describe_traffic["gradient"] = state.gradients.describe_traffic
        if not are_stages and (
            activations == "fp8" or any(isinstance(each, DTensor) for each in module.parameters())
        ):
            tensor_parallel.install(module, activations)
        states.append(state)
    if are_stages:
        pipeline.install(stages, states, activations)
    return model


def _detect(
    state: DistributedState, model: nn.Module, *, replicas: dist.ProcessGroup | None, weights: Weights, is_stage: bool,
    is_running: bool = False,
) -> Topology:  # fmt: skip
    """Set up layers, peers and weight gathers for the model as it is parallelized now.

    is_running  called from the first training forward pass, for models that a framework wrapped
                after `distribute`
    """
    # `distribute` may have been called before DDP, or on the module inside it. Without this look
    # the ranks would stay independent and draw the same random numbers.
    ddp = enclosing_ddp(model) if is_running else None
    topology = Topology.detect(model if ddp is None else ddp, replicas)
    _require_fully_shard(topology, model, weights)
    if is_running and not is_stage:
        _warn_about_one_replica(topology, model)

    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    for layer, name in layers.items():
        if layer.frozen is not None and isinstance(layer.parameter, DTensor):
            raise ConfigError(
                f"distribute: the weight of {name!r} is kept as codes (memory.freeze), which fully_shard and tensor parallelism do not "
                "divide. Call narrowgauge.memory.thaw(model) before the model is sharded, or train copies by DistributedDataParallel.",
                code="distribute.frozen-codes",
            )
    # Strings: recipes are compared by digest, and shown in the error message.
    recipes = tuple(
        f"{plain_name(name)}: {_describe_recipe(layer)}" for layer, name in layers.items()
    )
    _require_same_recipes(state, topology, model, recipes, is_running)
    topology.require_reduced_step_sizes(layers)

    state.replica = topology.replica
    several = dist.is_initialized() and dist.get_world_size() > 1
    # Stages of a pipeline may run no forward pass of their own in a step, so they are exempt.
    state.blocking_wrapper = topology.wrapper if several and not is_stage else ""
    state.layers = {
        layer: Peers(state, plain_name(name), topology.groups_of(layer), topology.shard_of(layer))
        for layer, name in layers.items()
    }
    for layer, peers in state.layers.items():
        layer.state.peers = peers

    topology.exclude_from_broadcasts(model, layers)
    if weights == "codes":
        gathers = weight_gathers.install(model, topology, state)
        if dist.is_initialized() and dist.get_world_size() > 1:
            state.describe_traffic["weight"] = lambda layer: f"weight as {gathers.traffic(layer)}"
    else:
        # An earlier `distribute` may have set up gathers of codes.
        weight_gathers.uninstall(state)
        if topology.fsdp and dist.get_world_size() > 1:
            state.describe_traffic["weight"] = _describe_16bit_gather
    return topology


def _require_same_recipes(
    state: DistributedState,
    topology: Topology,
    model: nn.Module,
    recipes: tuple[str, ...],
    is_running: bool,
) -> None:
    """Raise ConfigError on all ranks if the converted layers or their recipes differ.

    is_running  compare again only if this rank's layers, recipes or groups changed since
                `distribute`. A rank without a batch runs no forward pass, and the others would wait
                for it. PeerError after FIRST_FORWARD_S.
    """
    settings = (recipes, topology.replicas)
    if is_running and settings == state.compared_settings:
        return
    state.compared_settings = settings
    if not is_running:
        require_same(
            {"layers and their recipes": recipes}, topology.replicas, topology.device(model)
        )
        return
    try:
        require_same(
            {"layers and their recipes": recipes},
            topology.replicas,
            topology.device(model),
            FIRST_FORWARD_S,
        )
    except RuntimeError as error:
        raise PeerError(
            f"distribute: rank {dist.get_rank()} is in its first forward pass since the model was wrapped or converted, and "
            f"another rank has not begun its own within {FIRST_FORWARD_S:g} s: {str(error).splitlines()[0][:200]} Give every "
            "rank a batch in every step, or call distribute after the model was wrapped.",
            code="distribute.first-forward",
        ) from error


def _require_fully_shard(topology: Topology, model: nn.Module, weights: Weights) -> None:
    if (
        weights == "codes"
        and not topology.fsdp
        and dist.is_initialized()
        and dist.get_world_size() > 1
    ):
        raise ConfigError(
            f'distribute: weights="codes" says how fully_shard gathers, and {type(model).__name__} was not passed to it. Call '
            "fully_shard first, on this model, or leave weights out.",
            code="distribute.codes-without-fsdp",
        )


def _warn_about_one_replica(topology: Topology, model: nn.Module) -> None:
    """Warn if several ranks train but no wrapper, group or DTensor connects them."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if (
        several
        and not topology.replicas
        and not any(isinstance(each, DTensor) for each in model.parameters())
    ):
        warn(
            f"{dist.get_world_size()} ranks train, and narrowgauge.distribute found neither DistributedDataParallel nor fully_shard nor "
            f"tensor parallelism around this {type(model).__name__}: each rank stands alone, with the same random numbers as the others. "
            "Call it after the model was parallelised; where the loop reduces gradients by itself, pass replicas, the group that reads "
            "other data (torch.distributed.group.WORLD: all ranks).",
            code="distribute.one-replica",
            stacklevel=2,
        )


def _describe_16bit_gather(layer: QLinear) -> str:
    """Describe the 16-bit all-gather of a layer's weight under fully_shard."""
    weight = layer.weight
    if not isinstance(weight, DTensor):
        return ""
    form, count = str(weight.dtype).removeprefix("torch."), weight.numel() * weight.element_size()
    return f'weight as {form}, or as mp_policy says: {count:,} bytes a gather (weights="16bit" was asked for)'


def _describe_recipe(layer: QLinear) -> str:
    recipe = layer.recipe
    if recipe is None:
        return "no recipe"
    products = ", ".join(f"{name} {gemm}" for name, gemm in recipe.gemms().items())
    return f"{recipe.name} ({products}, {recipe.save}, {recipe.backward})"


def _argument_error(
    model: Any, weights: Any, activations: Any, replicas: Any, seed: Any, is_model: bool
) -> Reason:
    """Return an error sentence, with the next step, for this rank's invalid arguments, or ""."""
    for name, value, choices in (
        ("weights", weights, Weights),
        ("activations", activations, Activations),
    ):
        if value not in get_args(choices):
            return Reason(
                "distribute.choice",
                f"{name} is {value!r}; choose one of {', '.join(get_args(choices))}.",
            )
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        return Reason(
            "distribute.seed",
            f"seed is {seed!r}, no whole number from 0 on. Pass one, or None for that of torch's generator.",
        )
    if replicas is not None and not dist.is_initialized():
        return Reason(
            "distribute.no-process-group",
            "replicas needs a process group. Call torch.distributed.init_process_group first.",
        )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        return Reason(
            "distribute.replicas",
            f"replicas is {replicas!r}, no process group that this rank is in. Pass torch.distributed.group.WORLD, or one of new_group.",
        )
    if not is_model:
        return Reason(
            "distribute.model",
            f"a {type(model).__name__} is no nn.Module and no PipelineStage. Pass the model, a stage, or all of this rank.",
        )
    return Reason("", "")


def _agreed_seed(seed: int | None, error: Reason) -> int:
    """Return rank 0's seed on all ranks.

    Raises ConfigError on all ranks if seeds differ or if any rank reports an error in `error`. The
    error travels with the seed: raising on one rank alone would leave the others in this exchange.
    """
    own = torch.initial_seed() if seed is None else seed
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error:
            raise ConfigError(f"distribute: {error}", code=error.code)
        return own
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, (error, own, seed))
    for rank, (error, _, _) in enumerate(reported):
        if error:
            raise ConfigError(f"rank {rank}: distribute: {error}", code=error.code)
    seeds = [each for _, _, each in reported]
    if len(set(seeds)) > 1:
        raise ConfigError(
            f"distribute: ranks have seeds {seeds}. Pass the same on all of them.",
            code="distribute.seeds",
        )
    return int(reported[0][1])
