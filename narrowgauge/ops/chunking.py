"""Row-wise processing of a matrix in chunks, for definitions in plain torch on a GPU.

A definition's intermediate tensors (float32 copies, ratios, noise in int64) are each as large as
its input. A layer with a large hidden width would temporarily need more memory for them than
bfloat16 needs for its whole step. With chunks of PIECE float32 numbers each intermediate takes 16
MiB. A kernel launch is short compared with the time to read 16 MiB.

Only row-wise work is split, so results are bit-identical. The whole tensor is processed at once on
a CPU, which has enough memory, and in compiled code, where the compiler fuses the intermediates.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.addresses import PIECE, is_compiling, type_of

# The planner traces batches that fill a whole card: their hidden states have 200 * PIECE numbers,
# and fake tensors run every operator of every chunk. Without this limit one plan took five minutes.
# Larger tensors get larger chunks instead.
MAX_CHUNKS = 32


def row_chunks(x: Tensor, multiple_of: int = 1) -> list[slice]:
    """Return at most MAX_CHUNKS slices of x's rows; a single slice if x is processed whole.

    Each slice has about PIECE numbers or more. The number of rows of each slice but the last is a
    multiple of `multiple_of`.
    """
    rows, columns = x.shape
    if is_compiling() or x.numel() <= PIECE or type_of(x.device) != "cuda":
        return [slice(0, rows)]
    least = -(-rows // MAX_CHUNKS // multiple_of)
    size = max(PIECE // columns // multiple_of, least, 1) * multiple_of
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
