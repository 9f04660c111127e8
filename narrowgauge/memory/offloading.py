"""Offload saved activations: copy them to pinned host memory in forward, and back in backward.

The copy to the host runs on its own stream, after the tensor was computed. The tensor's device
memory is free once the copy is done. The copy back is queued on backward's stream before the
operation that reads it. Nothing is rounded: gradients are bit-identical.

`torch.autograd.graph.save_on_cpu` also copies parameters, small tensors, and a tensor once per
operation that saves it. For a Llama block that is 1.4 times the bytes. It copies on the compute
stream and drops strides.

Offloading pays off for large blocks, if the link to the host (PCIe, NVLink-C2C) moves a block's
activations faster than the block computes. This project has not run it on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import set_technique
from narrowgauge.memory.saved_tensors import Restore, SavedActivations, blocks_for

# Below it, launching two copies costs more than the memory is worth.
SMALLEST_BYTES = 2**20
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass
class Offload(SavedActivations):
    """Offloading of a model's saved activations.

    smallest_bytes  smaller tensors stay on the device
    moved_bytes     bytes copied to the host since `reset`
    """

    name = "offload"
    rounds = False

    smallest_bytes: int
    moved_bytes: int = 0

    def reset(self) -> None:
        self.moved_bytes = 0

    def accepts(self, tensor: Tensor) -> bool:
        """Accept large tensors that fill their storage; a view's storage would stay on the device."""
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
    """Store what a model's blocks save for backward in host memory, in place.

    enabled         False or None: undo it
    smallest_bytes  smaller tensors stay on the device
    blocks          patterns of the modules to use as blocks; None finds them by structure
                    (`find_blocks`)
    ->              the Offload, or None if not enabled

    With `checkpoint` on the same block, the inputs of the recomputed block are offloaded. Raises
    ConfigError unless all parameters are on a CUDA device, and for blocks with compressed
    activations.
    """
    found = blocks_for(Offload, model, blocks)
    for name, parameter in model.named_parameters() if enabled else ():
        if parameter.device.type != "cuda":
            raise ConfigError(
                f"offload: {name} is on {parameter.device}; activations can move to the host only from a CUDA device. "
                "On the CPU use checkpoint or compress_activations.",
                code="offload.device",
            )
    technique = Offload(smallest_bytes) if enabled else None
    for block in found:
        set_technique(block, "saving", technique)
    return technique


def to_host(tensor: Tensor) -> Restore:
    """Queue the copy to pinned memory; return a function that copies the tensor back."""
    device = tensor.device
    if (stream := _STREAMS.get(device)) is None:
        stream = _STREAMS.setdefault(device, torch.cuda.Stream(device))
    # The side stream starts after the kernels that compute the tensor.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Only pinned memory is copied asynchronously.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
    # The allocator must not reuse the tensor's memory before the copy on the side stream is done.
    tensor.record_stream(stream)
    arrived = stream.record_event()

    def back() -> Tensor:
        # Waits on the GPU, not on the host.
        torch.cuda.current_stream(device).wait_event(arrived)
        return copy.to(device, non_blocking=True)

    return back
