"""Distributed training of converted models on top of DDP, FSDP2, tensor parallelism and pipelining.

    model = narrowgauge.convert(model, "fp8-current")
    model = DistributedDataParallel(model)  # or fully_shard, parallelize_module, PipelineStage
    model = narrowgauge.distribute(model)

After `distribute`, the ranks that hold a layer synchronize its state at the end of each step: amax
histories, learned step sizes and sampling statistics. Random numbers are keyed by the layer's name
and the global index of the micro-batch. Two ranks therefore compute results bit-identical to one
process that reads the same micro-batches.

Optional 8-bit messages: gathered FSDP2 weights (weights.py), reduced gradients (gradients.py),
activations of sequence parallelism (tensor_parallel.py) and of pipeline stages (pipeline.py).

`leave_multiprocessors_free` restricts the casts of a GPU, so that collectives run beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.ops.triton.grids import leave_multiprocessors_free
from narrowgauge.structure import DISTRIBUTED_STATE

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from narrowgauge.distributed.gradient_state import GradientFormat, Reduce
    from narrowgauge.distributed.state import DistributedState

__all__ = ["distribute", "distributed_state", "leave_multiprocessors_free"]

Weights = Literal["16bit", "codes"]
Activations = Literal["16bit", "fp8"]

Model = TypeVar("Model")


def distribute(
    model: Model,
    *,
    weights: Weights = "16bit",
    gradients: GradientFormat = "16bit",
    activations: Activations = "16bit",
    reduce: Reduce = "mean",
    nodes: DeviceMesh | None = None,
    replicas: dist.ProcessGroup | None = None,
    seed: int | None = None,
) -> Model:
    """Synchronize the quantization state of `model` across ranks; call once, after parallelizing it.

    model        a converted model, after DistributedDataParallel, fully_shard or parallelize_module
                 was applied as usual; or a PipelineStage of torch.distributed.pipelining, or the
                 list of stages on this rank
    weights      "codes": `fully_shard` gathers the quantized codes that the GEMMs read
                 (weights.py); "16bit": torch's all-gather is unchanged
    gradients    "fp8" or "fp8-lm": messages of one byte per element, summed in float32
                 (gradients.py); "16bit": torch's own reduction
    activations  "fp8": 8-bit messages in sequence parallelism (tensor_parallel.py) and between
                 pipeline stages (pipeline.py); "16bit": torch's own messages
    reduce       "mean" over the ranks, as in DDP and fully_shard; "sum" for a loss that is divided
                 by the number of targets on all ranks
    nodes        DeviceMesh (nodes, ranks of a node), so that messages between nodes are 8-bit too
    replicas     process group of the data-parallel ranks, needed only if no torch wrapper defines
                 it: the loop reduces gradients itself, or a framework such as transformers' Trainer
                 wraps the model later. `torch.distributed.group.WORLD` means all ranks
    seed         of the recipes' random numbers, equal on all ranks; None: rank 0's torch seed

    Without a process group the model is set up as a single rank; distributed runs are compared with
    that run. A second call, for instance after another `convert`, replaces all earlier settings.
    Weights that were once gathered as codes must stay so.

    `distributed_state(model)` counts steps and messages and has the state to checkpoint.

    Cost: one small all-reduce per process group in each `advance`, which every rank must reach.
    Raises ConfigError on all ranks if a setting is unsupported or differs between ranks.
    """
    # Lazy: torch.distributed.fsdp and torch.distributed.tensor take a second to import.
    from narrowgauge.distributed.arrange import arrange

    return arrange(
        model, weights=weights, gradients=gradients, activations=activations, reduce=reduce, nodes=nodes, replicas=replicas, seed=seed
    )  # fmt: skip


def distributed_state(model: nn.Module) -> DistributedState:
    """Return the state that `distribute` attached to the model; ConfigError if there is none."""
    found: DistributedState | None = model.__dict__.get(DISTRIBUTED_STATE)
    if found is None:
        raise ConfigError(
            f"distributed_state: this {type(model).__name__} was not distributed. Pass the module that distribute was given.",
            code="distribute.not-distributed",
        )
    return found
