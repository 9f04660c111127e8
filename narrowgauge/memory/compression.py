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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from narrowgauge import formats
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import set_technique
from narrowgauge.memory.measure import note
from narrowgauge.memory.saved_tensors import Restore, SavedActivations, blocks_for
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import POW2

SMALLEST = 4096  # elements; below it the codes' own overhead is no less than what they save


@dataclass
class Compression(SavedActivations):
    """The technique on a model's blocks, with counts since `reset`; `print` it."""

    name = "compress_activations"
    rounds = True

    cast: Cast  # what kept tensors are encoded with
    smallest: int  # elements; smaller tensors are kept as they are
    tensors: int = 0  # number encoded, each once
    original_bytes: int = 0  # of these tensors as they were
    stored_bytes: int = 0  # of their codes and scales

    def reset(self) -> None:
        self.tensors = self.original_bytes = self.stored_bytes = 0

    def takes(self, tensor: Tensor) -> bool:
        return tensor.numel() >= self.smallest

    def store(self, tensor: Tensor) -> Restore:
        """Codes of its rows, or of whole groups where the innermost axis is shorter than one."""
        inner, group = tensor.shape[-1], self.cast.tile[1]
        columns = group if 0 < inner < group and tensor.numel() % group == 0 else inner
        codes = quantize(tensor.reshape(-1, columns), self.cast)
        if codes.data.untyped_storage().nbytes() > codes.data.nbytes:  # a view of what was filled up to whole tiles
            codes = replace(codes, data=codes.data.clone(memory_format=torch.contiguous_format))
        self.tensors += 1
        self.original_bytes += tensor.nbytes
        self.stored_bytes += codes.nbytes
        note(codes.data, codes.scale)
        return partial(dequantize, codes, tensor.dtype)

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
    found = blocks_for(Compression, model, blocks)
    if isinstance(cast, str):
        if group < 1:
            raise ConfigError(f"compress_activations: group = {group}; it must be at least 1 element. Choose 128.")
        cast = Cast(format=formats.get(cast), tile=(1, group), scale=POW2)
    if not (cast is None or isinstance(cast, Cast)) or type(smallest) is not int:
        raise ConfigError(
            f"compress_activations: cast = {cast!r} and smallest = {smallest!r}; they must be a format's name, as 'e4m3', a Cast or None, "
            "and a number of elements."
        )
    if cast is not None and (cast.rounding != "nearest" or cast.calibrate != CURRENT):
        raise ConfigError(
            f"compress_activations: cast '{cast}' is random or remembers earlier steps; kept tensors are encoded once, "
            "with their own scales. Use rounding='nearest' and current scaling."
        )
    compression = None if cast is None else Compression(cast, smallest)
    for block in found:
        set_technique(block, "saving", compression)
    return compression
