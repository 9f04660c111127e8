"""Training on many devices, on torch's own engine: what travels between ranks, in which numbers, and the proof that nothing drifts.

    model = narrowgauge.convert(model, "fp8-current")
    model = DistributedDataParallel(model)          # or fully_shard, parallelize_module, a stage of a pipeline, and their combinations
    model = narrowgauge.distribute(model)

From then on the ranks that hold a layer agree on its amax windows, learned steps and samplers at the end of each step, and draw random
numbers by the layer's name and the global number of the micro-batch: two ranks compute what one process computes with the same
micro-batches, to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.agreement import ATTRIBUTE, Agreement, Peers
from narrowgauge.distributed.alike import refuse_others
from narrowgauge.distributed.gradient_state import Numbers, Reduce
from narrowgauge.distributed.topology import Topology, plain_name
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.structure import require_module

__all__ = ["Agreement", "Peers", "Topology", "agreement_of", "distribute"]

Weights = Literal["16bit", "codes"]
Activations = Literal["16bit", "fp8"]


def distribute(
    model: nn.Module,
    *,
    weights: Weights = "16bit",
    gradients: Numbers = "16bit",
    activations: Activations = "16bit",
    reduce: Reduce = "mean",
    nodes: DeviceMesh | None = None,
    replicas: dist.ProcessGroup | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Arranges what ranks have to agree on for the layers of `model`, once, after it was parallelised; returns the model.

    model        converted; wrapped in DistributedDataParallel, or passed to fully_shard, parallelize_module, a pipeline's stage, as usual
    weights      "codes": `fully_shard` gathers the codes that the products read (weights.py); "16bit": what torch gathers
    gradients    "fp8" or "fp8-lm": messages of one byte per number, summed in float32 (gradients.py); "16bit": torch's own
    activations  "fp8": messages of sequence parallelism carry codes (tensor_parallel.py); "16bit": torch's own
    reduce       "mean" over the ranks, as DDP and fully_shard do; "sum" for a loss that was divided by the targets of all ranks
    nodes        a mesh (nodes, ranks of a node), for narrow messages between nodes too
    replicas     the ranks that read other data, where no wrapper of torch says it: a framework will wrap the model later, as the Trainer
                 of transformers does, or the loop reduces gradients by itself. `torch.distributed.group.WORLD`: all ranks
    seed         of the random numbers of recipes, equal on all ranks; None: that of torch's generator on rank 0

    Works without a process group too, as one rank: the run that others are compared with. Calling it again arranges all anew, after
    another `convert` for instance. `agreement_of(model)` counts steps and messages, and has the state for a checkpoint. Costs one
    small all-reduce per group of ranks in each `advance`, which every rank must reach. Raises ConfigError, on all ranks, for what
    cannot be had and where ranks ask for different things.
    """
    require_module(model, "distribute")
    for name, value, known in (("weights", weights, Weights), ("activations", activations, Activations)):
        if value not in get_args(known):
            raise ConfigError(f"distribute: {name} is {value!r}; choose one of {', '.join(get_args(known))}.")
    if replicas is not None and not dist.is_initialized():
        raise ConfigError(
            "distribute: replicas needs a process group. Call torch.distributed.init_process_group first."
        )
    agreement = Agreement(seed=_agreed_seed(seed), arrange=partial(_arrange, replicas=replicas))
    topology = agreement.attach(model)
    refuse_others({"weights": weights, "activations": activations}, topology.replicas, topology.device(model))
    if topology.ddp or topology.fsdp or gradients != "16bit" or reduce != "mean":
        from narrowgauge.distributed.gradients import install as install_gradients

        agreement.gradients = install_gradients(model, gradients=gradients, reduce=reduce, mesh=nodes)
        agreement.tells.append(agreement.gradients.sends)
    if topology.fsdp and weights == "16bit":
        agreement.tells.append(_gathers_whole)
    if activations == "fp8" or any(isinstance(each, DTensor) for each in model.parameters()):
        from narrowgauge.distributed.tensor_parallel import install as install_activations

        install_activations(model, activations)
    return model


def _arrange(agreement: Agreement, model: nn.Module, *, replicas: dist.ProcessGroup | None) -> Topology:
    """For the model as it is parallelised now; again in its first forward pass, if a framework wrapped it after `distribute`."""
    topology = Topology.of(model, replicas)
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    recipes = tuple(f"{plain_name(name)}: {_recipe_words(layer)}" for layer, name in layers.items())
    refuse_others({"layers and their recipes": recipes}, topology.replicas, topology.device(model))
    agreement.replica = topology.replica
    agreement.layers = {
        layer: Peers(agreement, plain_name(name), topology.groups_of(layer)) for layer, name in layers.items()
    }
    for layer, peers in agreement.layers.items():
        layer.peers = peers
    topology.leave_out_of_broadcasts(model, layers)
    return topology


def _gathers_whole(layer: QLinear) -> str:
    """What fully_shard gathers of a weight, in words."""
    weight = layer.weight
    if not isinstance(weight, DTensor):
        return ""
    form, count = str(weight.dtype).removeprefix("torch."), weight.numel() * weight.element_size()
    return f'weight as {form}, or as mp_policy says: {count:,} bytes a gather (weights="16bit" was asked for)'


def _recipe_words(layer: QLinear) -> str:
    recipe = layer.recipe
    if recipe is None:
        return "no recipe"
    products = ", ".join(f"{name} {gemm}" for name, gemm in recipe.gemms().items())
    return f"{recipe.name} ({products}, {recipe.save}, {recipe.backward})"


def agreement_of(model: nn.Module) -> Agreement:
    """What `distribute` arranged for the model. Raises ConfigError if nothing."""
    found = model.__dict__.get(ATTRIBUTE)
    if not isinstance(found, Agreement):
        raise ConfigError(
            f"agreement_of: this {type(model).__name__} was not distributed. Pass the module that distribute was given."
        )
    return found


def _agreed_seed(seed: int | None) -> int:
    """Rank 0's, on all ranks. Raises ConfigError on all ranks if one has another."""
    own = torch.initial_seed() if seed is None else seed
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    gathered: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None if seed is None else own)
    if len(set(gathered)) > 1:
        raise ConfigError(f"distribute: ranks have seeds {gathered}. Pass the same on all of them.")
    if seed is not None:
        return own
    found = [own]
    dist.broadcast_object_list(found, src=0)
    return found[0]
