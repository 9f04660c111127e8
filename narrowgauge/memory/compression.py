"""Saved activations as narrow codes: what blocks keep for backward, in E4M3 with a scale for each 128 elements.

    pack    codes, scales = quantize(x, cast)         tiles of (1, group) along the innermost axis
    unpack  x' = decode(codes) * scale

Forward is untouched; only the gradients that read a kept tensor see x'. With round to nearest each element of a tile is off by at
most 2^-4 of itself, or half the smallest step of the format times the scale. Compressed are the inputs of Linears, norms,
activations and products of gates, whatever the architecture calls them; `narrowgauge.memory.saved_tensors` says what stays exact:
attention and softmax keep theirs, because their gradients mix what they saved with exact statistics.

A tensor that several operations save is encoded once. Nothing is random. Costs an encoding per kept tensor in forward, a decoding
per use in backward, and 8.25 bits per element for groups of 128. Scales are powers of two, so that what already holds E4M3 values (an
operand that a recipe keeps quantized) is encoded without a second rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge import formats
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, refuse_other_saving, set_saving
from narrowgauge.memory.measure import note
from narrowgauge.memory.saved_tensors import SavedTensorMode, around_saves
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import POW2

SMALLEST = 4096  # elements; below it the codes' own overhead is no less than what they save


@dataclass
class Compression:
    """The technique on a model's blocks, with counts since `reset`; `print` it.

    cast              what kept tensors are encoded with
    smallest          elements; smaller tensors are kept as they are
    tensors           number encoded, each once
    original_bytes    of these tensors as they were
    stored_bytes      of their codes and scales
    """

    name = "compress_activations"

    cast: Cast
    smallest: int
    tensors: int = 0
    original_bytes: int = 0
    stored_bytes: int = 0

    def reset(self) -> None:
        self.tensors = self.original_bytes = self.stored_bytes = 0

    @contextmanager
    def around(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        with around_saves(block, args, kwargs, self.name, _unpack) as (working, hooks):
            packer = _Packer(self, working)
            try:
                with hooks(packer.pack):
                    yield
            finally:
                packer.forget()

    def __str__(self) -> str:
        return (
            f"kept activations as {self.cast}: {self.tensors:,} tensors, {self.original_bytes / 2**20:.1f} MiB "
            f"in {self.stored_bytes / 2**20:.1f} MiB"
        )


def compress_activations(
    model: nn.Module,
    cast: Cast | str | None = "e4m3",
    *,
    group: int = 128,
    smallest: int = SMALLEST,
    blocks: str | Iterable[str] | None = None,
) -> Compression | None:
    """Keeps what a model's blocks save for backward as narrow codes, in place; None takes that off again.

    cast      name of a format, for tiles of (1, group) scaled by powers of two; or a Cast of current scaling, rounding to nearest
    group     elements of the innermost axis that share a scale
    smallest  tensors of fewer elements are kept as they are
    blocks    patterns of the modules to treat as blocks; None finds them by structure (see `find_blocks`)
    ->        the Compression, which counts bytes as the model runs

    With `checkpoint` on the same block it is the inputs of the recomputed block that are encoded. Eager mode only: a compiled
    model raises ConfigError, as do a stochastic or delayed cast and blocks whose activations are offloaded.
    """
    found = find_blocks(model, blocks, "compress_activations")
    refuse_other_saving(found, Compression)
    compression = None if cast is None else Compression(_cast(cast, group), smallest)
    for block in found.values():
        set_saving(block, compression)
    return compression


def _cast(cast: Cast | str, group: int) -> Cast:
    if isinstance(cast, str):
        if group < 1:
            raise ConfigError(f"compress_activations: group = {group}; it must be at least 1 element. Choose 128.")
        return Cast(format=formats.get(cast), tile=(1, group), scale=POW2)
    if cast.rounding != "nearest" or cast.calibrate != CURRENT:
        raise ConfigError(
            f"compress_activations: cast '{cast}' is random or remembers earlier steps; kept tensors are encoded once, "
            "with their own scales. Use rounding='nearest' and current scaling."
        )
    return cast


@dataclass(eq=False)
class _Packed:
    """A kept tensor: codes of its memory as a matrix, and the shape and order of axes to restore it."""

    codes: QTensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]


@dataclass
class _Packer:
    """One pass through one block."""

    compression: Compression
    working: SavedTensorMode
    references: list[StorageWeakRef] = field(default_factory=list)  # keep addresses from being given away
    known: dict[Any, QTensor] = field(default_factory=dict)
    kept_exact: set[int] = field(default_factory=set)

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        storage = tensor.untyped_storage()
        if tensor.numel() < self.compression.smallest or storage._cdata in self.kept_exact:
            note(tensor)
            return tensor
        if not self.working.is_activation(tensor):
            self.kept_exact.add(storage._cdata)  # another operation that saves it gains nothing by codes
            self.references.append(StorageWeakRef(storage))
            note(tensor)
            return tensor
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis)))
        in_memory = tensor.permute(order)
        if not in_memory.is_contiguous() or in_memory.shape[-1] < 2:  # a part of something larger, or statistics
            note(tensor)
            return tensor
        return _Packed(self._codes(tensor, in_memory), tensor.dtype, tuple(in_memory.shape), order)

    def forget(self) -> None:
        """Autograd holds on to the hook as long as to the graph; codes are to go with the operation that needs them."""
        self.references.clear()
        self.known.clear()

    def _codes(self, tensor: Tensor, in_memory: Tensor) -> QTensor:
        storage = tensor.untyped_storage()
        origin = self.working.origins.get(storage._cdata, storage._cdata)
        key = (origin, tensor.storage_offset(), tensor.numel(), in_memory.shape[-1], tensor.dtype, tensor._version)
        if key not in self.known:
            codes = _encoded(in_memory, self.compression.cast)
            self.references.append(StorageWeakRef(storage))
            self.known[key] = codes
            self.compression.tensors += 1
            self.compression.original_bytes += tensor.nbytes
            self.compression.stored_bytes += codes.nbytes
            note(codes.data, codes.scale)
        return self.known[key]


def _encoded(x: Tensor, cast: Cast) -> QTensor:
    """A contiguous tensor as rows of its innermost axis, or of whole groups where that axis is shorter than one."""
    inner, group = x.shape[-1], cast.tile[1]
    columns = group if 0 < inner < group and x.numel() % group == 0 else inner
    codes = quantize(x.reshape(-1, columns), cast)
    if codes.data.untyped_storage().nbytes() > codes.data.nbytes:  # a view of what was filled up to whole tiles
        codes = replace(codes, data=codes.data.clone(memory_format=torch.contiguous_format))
    return codes


def _unpack(kept: Tensor | _Packed) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    inverse = [kept.order.index(axis) for axis in range(len(kept.order))]
    return dequantize(kept.codes, kept.dtype).reshape(kept.shape).permute(inverse)
