"""Training on many devices, on torch's own engine: what travels between ranks, in which numbers, and the proof that nothing drifts.

    model = narrowgauge.convert(model, "fp8-current")
    model = DistributedDataParallel(model)          # or fully_shard, parallelize_module, a stage of a pipeline, and their combinations
    model = narrowgauge.distribute(model)

From then on the ranks that hold a layer agree on its amax windows, learned steps and samplers at the end of each step, and draw random
numbers by the layer's name and the global number of the micro-batch: two ranks compute what one process computes with the same
micro-batches, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from narrowgauge.distributed.agreement import Agreement
    from narrowgauge.distributed.gradient_state import Numbers, Reduce

__all__ = ["agreement_of", "distribute"]

Weights = Literal["16bit", "codes"]
Activations = Literal["16bit", "fp8"]
ATTRIBUTE = "_narrowgauge_agreement"  # of a model that was distributed


Model = TypeVar("Model")


def distribute(
    model: Model,
    *,
    weights: Weights = "16bit",
    gradients: Numbers = "16bit",
    activations: Activations = "16bit",
    reduce: Reduce = "mean",
    nodes: DeviceMesh | None = None,
    replicas: dist.ProcessGroup | None = None,
    seed: int | None = None,
) -> Model:
    """Arranges what ranks have to agree on for the layers of `model`, once, after it was parallelised; returns the model.

    model        converted; wrapped in DistributedDataParallel, or passed to fully_shard, parallelize_module, as usual. Or a PipelineStage
                 of torch.distributed.pipelining, or a list of those that this rank has
    weights      "codes": `fully_shard` gathers the codes that the products read (weights.py); "16bit": what torch gathers
    gradients    "fp8" or "fp8-lm": messages of one byte per number, summed in float32 (gradients.py); "16bit": torch's own
    activations  "fp8": messages of sequence parallelism carry codes (tensor_parallel.py), and so do those between stages of a pipeline
                 (pipeline.py); "16bit": torch's own
    reduce       "mean" over the ranks, as DDP and fully_shard do; "sum" for a loss that was divided by the targets of all ranks
    nodes        a mesh (nodes, ranks of a node), for narrow messages between nodes too
    replicas     the ranks that read other data, where no wrapper of torch says it: a framework will wrap the model later, as the Trainer
                 of transformers does, or the loop reduces gradients by itself. `torch.distributed.group.WORLD`: all ranks
    seed         of the random numbers of recipes, equal on all ranks; None: that of torch's generator on rank 0

    Works without a process group too, as one rank: the run that others are compared with. Calling it again arranges all anew, after
    another `convert` for instance, and nothing of before stays; weights that have travelled as codes must go on so.
    `agreement_of(model)` counts steps and messages, and has the state for a checkpoint. Costs one small all-reduce per group of ranks in
    each `advance`, which every rank must reach. Raises ConfigError, on all ranks, for what cannot be had and where ranks ask for
    different things.
    """
    from narrowgauge.distributed.arrange import arrange  # torch.distributed.fsdp and tensor take a second to import

    return arrange(
        model, weights=weights, gradients=gradients, activations=activations, reduce=reduce, nodes=nodes, replicas=replicas, seed=seed
    )  # fmt: skip


def agreement_of(model: nn.Module) -> Agreement:
    """What `distribute` arranged for the model. Raises ConfigError if nothing."""
    found: Agreement | None = model.__dict__.get(ATTRIBUTE)
    if found is None:
        raise ConfigError(
            f"agreement_of: this {type(model).__name__} was not distributed. Pass the module that distribute was given."
        )
    return found
