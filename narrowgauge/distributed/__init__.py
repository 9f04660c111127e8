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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.agreement import ATTRIBUTE, Agreement, Peers
from narrowgauge.distributed.pipeline import install, is_stage
from narrowgauge.distributed.topology import Topology, plain_name
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear

__all__ = ["Agreement", "Peers", "Topology", "agreement_of", "distribute"]


Model = TypeVar("Model")


def distribute(
    model: Model, *, replicas: dist.ProcessGroup | None = None, seed: int | None = None, activations: str = "16bit"
) -> Model:
    """Arranges what ranks have to agree on for the layers of `model`, once, after it was parallelised; returns the model.

    model     converted; wrapped in DistributedDataParallel, or passed to fully_shard, parallelize_module, as usual. Or a PipelineStage of
              torch.distributed.pipelining, or a list of those that this rank has
    activations  what stages of a pipeline send to each other, "16bit" (the tensors as they are) or "fp8", on every stage
    replicas  the ranks that read other data, where no wrapper of torch says it: a framework will wrap the model later, as the Trainer of
              transformers does, or the loop reduces gradients by itself. `torch.distributed.group.WORLD`: all ranks
    seed      of the random numbers of recipes, equal on all ranks; None: that of torch's generator on rank 0

    Works without a process group too, as one rank: the run that others are compared with. Calling it again arranges all anew, after
    another `convert` for instance. `agreement_of(model)` counts steps and messages, and has the state for a checkpoint. Costs one
    small all-reduce per group of ranks in each `advance`, which every rank must reach.
    """
    stages: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    are_stages = bool(stages) and all(is_stage(each) for each in stages)
    modules = [each.submod for each in stages] if are_stages else stages
    if not modules or not all(isinstance(each, nn.Module) for each in modules) or (len(modules) > 1 and not are_stages):
        raise ConfigError(
            f"distribute: a {type(model).__name__} is no nn.Module and no PipelineStage. Pass the model, a stage, or all of this rank."
        )
    if activations != "16bit" and not are_stages:
        raise ConfigError(
            f"distribute: activations={activations!r} is for stages of a pipeline, and this is a {type(model).__name__}. "
            "Pass the PipelineStage, which knows its neighbours."
        )
    if replicas is not None and not dist.is_initialized():
        raise ConfigError(
            "distribute: replicas needs a process group. Call torch.distributed.init_process_group first."
        )
    agreed = _agreed_seed(seed)
    agreements = [Agreement(seed=agreed, arrange=partial(_arrange, replicas=replicas)) for _ in modules]
    for module, agreement in zip(modules, agreements, strict=True):
        agreement.attach(module)
    if are_stages:
        install(stages, agreements, activations)
    return model


def _arrange(agreement: Agreement, model: nn.Module, *, replicas: dist.ProcessGroup | None) -> None:
    """For the model as it is parallelised now; again in its first forward pass, if a framework wrapped it after `distribute`."""
    topology = Topology.of(model, replicas)
    layers = {layer: name for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    agreement.replica = topology.replica
    agreement.layers = {
        layer: Peers(agreement, plain_name(name), topology.groups_of(layer)) for layer, name in layers.items()
    }
    for layer, peers in agreement.layers.items():
        layer.peers = peers
    topology.leave_out_of_broadcasts(model, layers)


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
