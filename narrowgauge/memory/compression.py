"""Compress saved activations: E4M3 codes with a scale per 128 elements.

    pack    codes, scales = quantize(x, cast)   tiles of (1, group) along the innermost axis
    unpack  x' = decode(codes) * scale

Forward is exact; only gradients that read a saved tensor use x'. The error of an element is at most
2^-4 of its magnitude, or half the smallest subnormal of the format times the scale.

Compressed are inputs of Linears, norms, activation functions and gating products, in any
architecture. Attention and softmax keep exact tensors: their gradients combine saved tensors with
exact statistics. The rules are in `narrowgauge.memory.saved_tensors`.

A tensor saved by several operations is encoded once. Cost: one encoding per saved tensor in
forward, one decoding per use in backward, and 8.25 bits per element with groups of 128. Rounding is
deterministic.
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
from narrowgauge.memory.saved_tensors import Restore, SavedActivations, blocks_for, report_saved
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import POW2

# Elements. For smaller tensors the overhead of codes equals the saving.
SMALLEST = 4096


@dataclass
class Compression(SavedActivations):
    """Compression of a model's saved activations, with counts since `reset`; `print` it.

    cast            the cast of saved tensors
    smallest        tensors of fewer elements are saved unchanged
    tensors         number of tensors encoded
    original_bytes  bytes before encoding
    stored_bytes    bytes of codes and scales
    """

    name = "compress_activations"
    rounds = True

    cast: Cast
    smallest: int
    tensors: int = 0
    original_bytes: int = 0
    stored_bytes: int = 0

    def reset(self) -> None:
        self.tensors = self.original_bytes = self.stored_bytes = 0

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.numel() >= self.smallest

    def store(self, tensor: Tensor) -> Restore:
        """Quantize the tensor in rows of its innermost axis.

        If that axis is shorter than a group, rows of one group each are formed across it.
        """
        inner, group = tensor.shape[-1], self.cast.tile[1]
        # A tile never spans rows, so short rows would each pay for a padded tile.
        columns = group if 0 < inner < group and tensor.numel() % group == 0 else inner
        codes = quantize(tensor.reshape(-1, columns), self.cast)
        # quantize pads to full tiles and returns a view. Without this copy, an axis of 32 with
        # tiles of 128 would store four bytes per element.
        if codes.data.untyped_storage().nbytes() > codes.data.nbytes:
            codes = replace(codes, data=codes.data.clone(memory_format=torch.contiguous_format))
        self.tensors += 1
        self.original_bytes += tensor.nbytes
        self.stored_bytes += codes.nbytes
        report_saved(codes.data, codes.scale)
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
    """Store what a model's blocks save for backward as low-precision codes, in place; None undoes it.

    cast      name of a format, for tiles of (1, group) with power-of-two scales; or a Cast with
              current scaling and rounding to nearest; None: off
    group     elements of the innermost axis that share a scale
    smallest  tensors of fewer elements are saved unchanged
    blocks    patterns of the modules to use as blocks; None finds them by structure (`find_blocks`)
    ->        the Compression, which counts bytes as the model runs; None if off

    With `checkpoint` on the same block, the inputs of the recomputed block are compressed. Eager
    mode only.

    ConfigError for a stochastic or delayed cast and for blocks with offloading; a compiled model
    raises it in forward.
    """
    found = blocks_for(Compression, model, blocks)
    if isinstance(cast, str):
        if group < 1:
            raise ConfigError(
                f"compress_activations: group = {group}; it must be at least 1 element. Choose 128.",
                code="compression.group",
            )
        # Power-of-two scales: a tensor that already has E4M3 values (an operand that a recipe saves
        # quantized) is encoded without a second rounding.
        cast = Cast(format=formats.get(cast), tile=(1, group), scale=POW2)
    if not (cast is None or isinstance(cast, Cast)) or type(smallest) is not int:
        raise ConfigError(
            f"compress_activations: cast = {cast!r} and smallest = {smallest!r}; they must be a format's name, as 'e4m3', a Cast or None, "
            "and a number of elements.",
            code="compression.arguments",
        )
    if cast is not None and (cast.rounding != "nearest" or cast.calibrate != CURRENT):
        raise ConfigError(
            f"compress_activations: cast '{cast}' is random or remembers earlier steps; kept tensors are encoded once, "
            "with their own scales. Use rounding='nearest' and current scaling.",
            code="compression.cast",
        )
    compression = None if cast is None else Compression(cast, smallest)
    for block in found:
        set_technique(block, "saving", compression)
    return compression
