"""Saved activations on the host: copied to pinned memory while forward goes on, and back when backward needs them.

The copy out runs on a stream of its own, behind what computed the tensor; the tensor's device memory is free once it is done. The
copy back is queued on backward's stream before the operation that reads it. Nothing is rounded: gradients are the same to the last bit.

`torch.autograd.graph.save_on_cpu` also copies parameters, small tensors, and a tensor once for each operation that saves it: of a
Llama block 1.4 times the bytes. It copies on the stream that computes, and drops strides.

What pays: large blocks on a device whose link to the host (PCIe, NVLink-C2C) moves a block's activations in less time than the
block computes. Not yet run on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import set_technique
from narrowgauge.memory.saved_tensors import Restore, SavedActivations, blocks_for

SMALLEST_BYTES = 2**20  # below it the launch of two copies costs more than the memory is worth
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass
class Offload(SavedActivations):
    """The technique on a model's blocks; `moved_bytes` counts what went to the host since `reset`."""

    name = "offload"
    rounds = False

    smallest_bytes: int
    moved_bytes: int = 0

    def reset(self) -> None:
        self.moved_bytes = 0

    def takes(self, tensor: Tensor) -> bool:
        """Large tensors that are all of their memory: of a part the rest would stay behind."""
        return self.smallest_bytes <= tensor.nbytes == tensor.untyped_storage().nbytes()

    def store(self, tensor: Tensor) -> Restore:
        self.moved_bytes += tensor.nbytes
        return to_host(tensor)


def offload(
    model: nn.Module,
    enabled: bool | None = True,
    *,
    smallest_bytes: int = SMALLEST_BYTES,
    blocks: str | Iterable[str] | None = None,
) -> Offload | None:
    """Keeps what a model's blocks save for backward in host memory, in place; False or None takes that off again.

    smallest_bytes  smaller tensors stay on the device
    blocks          patterns of the modules to treat as blocks; None finds them by structure (see `find_blocks`)

    With `checkpoint` on the same block it is the inputs of the recomputed block that move. Raises ConfigError unless all blocks
    are on a CUDA device, and where activations are compressed.
    """
    found = blocks_for(Offload, model, blocks)
    for name, parameter in model.named_parameters() if enabled else ():
        if parameter.device.type != "cuda":
            raise ConfigError(
                f"offload: {name} is on {parameter.device}; activations can move to the host only from a CUDA device. "
                "On the CPU use checkpoint or compress_activations."
            )
    technique = Offload(smallest_bytes) if enabled else None
    for block in found:
        set_technique(block, "saving", technique)
    return technique


def to_host(tensor: Tensor) -> Restore:
    """Queues the copy to pinned memory; the tensor's memory is not given away before it is done. -> what copies it back."""
    device = tensor.device
    if (stream := _STREAMS.get(device)) is None:
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    arrived = stream.record_event()

    def back() -> Tensor:
        torch.cuda.current_stream(device).wait_event(arrived)
        return copy.to(device, non_blocking=True)

    return back
