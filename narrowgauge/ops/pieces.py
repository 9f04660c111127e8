"""Rows of a matrix in pieces, for definitions in plain torch on a GPU.

A definition's intermediate tensors (float32 copies, ratios, noise in int64) are each as large as its input. A layer with a large
hidden width would need more memory for that moment than bfloat16 needs for its whole step. Pieces of PIECE float32 numbers take
16 MiB for each intermediate, and a kernel launch is short beside reading 16 MiB. Tensors of more than MOST_PIECES * PIECE numbers
are cut into larger pieces, not into more pieces. Only row-wise work is cut, so results are bit-identical. A CPU and compiled code
take the whole tensor: a CPU has memory enough, and a compiler fuses the intermediates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.addresses import PIECE, is_compiling, type_of

# A planner pretends batches of a whole card, whose hidden states have 200 * PIECE numbers. It runs every
# operator of every piece: without this limit one answer took five minutes.
MOST_PIECES = 32


def cuts(x: Tensor, rows_together: int = 1) -> list[slice]:
    """At most MOST_PIECES slices of x's rows, or one where x stays whole.

    A slice has about PIECE numbers or more; its rows, but for the last slice's, are a multiple of `rows_together`.
    """
    rows, columns = x.shape
    if is_compiling() or type_of(x.device) != "cuda" or x.numel() <= PIECE:
        return [slice(0, rows)]
    least = -(-rows // MOST_PIECES // rows_together)
    size = max(PIECE // columns // rows_together, least, 1) * rows_together
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def by_rows(work: Callable[[Tensor], Tensor], x: Tensor, rows_together: int = 1) -> Tensor:
    """work(x), whose first axis is x's or a share of it, made piece by piece."""
    slices = cuts(x, rows_together)
    return work(x) if len(slices) == 1 else torch.cat([work(x[each]) for each in slices])
