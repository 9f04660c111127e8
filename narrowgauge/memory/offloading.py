"""Saved activations on the host: copied to pinned memory while forward goes on, and back when backward needs them.

The copy out runs on a stream of its own, behind what computed the tensor; the tensor's device memory is free once it is done. The
copy back is queued on backward's stream before the operation that reads it. Nothing is rounded: gradients are the same to the last bit.

`torch.autograd.graph.save_on_cpu` also copies parameters, small tensors, and a tensor once for each operation that saves it: of a
Llama block 1.4 times the bytes. It copies on the stream that computes, and drops strides.

What pays: large blocks on a device whose link to the host (PCIe, NVLink-C2C) moves a block's activations in less time than the
block computes. Not yet run on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, refuse_other_saving, set_saving
from narrowgauge.memory.measure import note
from narrowgauge.memory.saved_tensors import around_saves

SMALLEST_BYTES = 2**20  # below it the launch of two copies costs more than the memory is worth


@dataclass
class Offload:
    """The technique on a model's blocks; `moved_bytes` counts what went to the host since `reset`."""

    name = "offload"

    smallest_bytes: int
    moved_bytes: int = 0

    def reset(self) -> None:
        self.moved_bytes = 0

    @contextmanager
    def around(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        moved: dict[Any, tuple[OnHost, StorageWeakRef]] = {}  # the reference keeps the address from being given away

        def pack(tensor: Tensor) -> Tensor | OnHost:
            storage = tensor.untyped_storage()
            is_whole = tensor.nbytes == storage.nbytes()  # of a part the rest would stay behind
            if tensor.nbytes < self.smallest_bytes or not is_whole or storage._cdata in working.exact_storages:
                note(tensor)
                return tensor
            key = (storage._cdata, tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
            if key not in moved:
                moved[key] = (to_host(tensor), StorageWeakRef(storage))
                self.moved_bytes += tensor.nbytes
            return moved[key][0]

        with around_saves(block, args, kwargs, self.name, _unpack) as (working, hooks):
            try:
                with hooks(pack):
                    yield
            finally:
                moved.clear()  # autograd keeps `pack` with every saved tensor


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
    found = find_blocks(model, blocks, "offload")
    refuse_other_saving(found, Offload)
    for name, parameter in model.named_parameters() if enabled else ():
        if parameter.device.type != "cuda":
            raise ConfigError(
                f"offload: {name} is on {parameter.device}; activations can move to the host only from a CUDA device. "
                "On the CPU use checkpoint or compress_activations."
            )
    technique = Offload(smallest_bytes) if enabled else None
    for block in found.values():
        set_saving(block, technique)
    return technique


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(eq=False)
class OnHost:
    """A tensor in pinned memory, and the event after which it is whole."""

    copy: Tensor
    device: torch.device
    arrived: torch.cuda.Event

    def back(self) -> Tensor:
        torch.cuda.current_stream(self.device).wait_event(self.arrived)
        return self.copy.to(self.device, non_blocking=True)


def to_host(tensor: Tensor) -> OnHost:
    """Queues the copy; the tensor's memory is not given away before it is done."""
    stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return OnHost(copy, tensor.device, stream.record_event())


def _unpack(kept: Tensor | OnHost) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()
