"""Saved activations on the host: copied to pinned memory while forward goes on, and back when backward needs them.

The copy out runs on a stream of its own, behind what computed the tensor; the tensor's device memory is free once it is done. The
copy back is queued on backward's stream before the operation that reads it. A tensor that several operations save moves once each
way per block. Nothing is rounded: gradients are the same to the last bit.

What pays: large blocks on a device whose link to the host (PCIe, NVLink-C2C) moves a block's activations in less time than the
block computes. Not yet run on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, refuse_other_saving, set_saving
from narrowgauge.memory.measure import note
from narrowgauge.memory.saving import Working, saving

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
        with saving(block, args, kwargs, self.name, _unpack) as (working, hooks):
            mover = _Mover(self, working)
            try:
                with hooks(mover.pack):
                    yield
            finally:
                mover.forget()


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
    if enabled:
        for name, parameter in model.named_parameters():
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
class _Moved:
    """A tensor on the host, and the event after which it is whole."""

    host: Tensor
    device: torch.device
    arrived: torch.cuda.Event


@dataclass
class _Mover:
    """One pass through one block."""

    offload: Offload
    working: Working
    references: list[StorageWeakRef] = field(default_factory=list)
    known: dict[Any, _Moved] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor | _Moved:
        storage = tensor.untyped_storage()
        is_whole = tensor.nbytes == storage.nbytes()  # of a part the rest would stay behind
        if tensor.nbytes < self.offload.smallest_bytes or not is_whole or storage._cdata in self.working.exact_storages:
            note(tensor)
            return tensor
        key = (storage._cdata, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.known:
            self.references.append(StorageWeakRef(storage))
            self.known[key] = self._moved(tensor)
        return self.known[key]

    def _moved(self, tensor: Tensor) -> _Moved:
        stream = _STREAMS.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        tensor.record_stream(stream)  # its memory is not given away before the copy is done
        self.offload.moved_bytes += tensor.nbytes
        return _Moved(host, tensor.device, arrived)

    def forget(self) -> None:
        self.references.clear()
        self.known.clear()


def _unpack(kept: Tensor | _Moved) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
    return kept.host.to(kept.device, non_blocking=True)
