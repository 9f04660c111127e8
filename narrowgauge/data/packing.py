"""Packs several short examples into one row, and makes the arrays that keep them apart.

Best fit decreasing: the longest example first, each into the fullest row that still holds it; at most 11/9 of the fewest
rows possible, plus one (Johnson 1974). A row of two documents (3 and 2 tokens) and 3 positions of padding:

    input_ids       a0 a1 a2 b0 b1 p p p
    position_ids     0  1  2  0  1 0 1 2     restart in each document and in the padding
    document_ids     0  0  0  1  1 2 2 2     padding counts as a document, so no row of the attention mask is empty
    labels           - a1 a2  - b1 - - -     (unshifted) the first token of a document is no target

Tokens attend to each other only if their document ids are equal. A model that ignores these arrays, or whose convolution or recurrence
crosses documents, raises no error; the loss only gets a little worse. `collate.check_packing` finds out before training.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from narrowgauge.data.order import Indices
from narrowgauge.errors import DataError


def pack(lengths: Sequence[int] | Indices, row_length: int) -> list[list[int]]:
    """Rows of at most `row_length` tokens as lists of example indices: best fit decreasing, ties in the given order.

    Every index is in exactly one row. O(N log N), about 1 us per example. Raises DataError if an example is longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > row_length:
        raise DataError(
            f"pack: {int((sizes > row_length).sum())} of {len(sizes)} examples are longer than row_length {row_length}; the "
            f"longest has {int(sizes.max())} tokens. Pass a longer row, or truncate or skip them first."
        )
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # tokens left -> rows that have as many
    rooms: list[int] = []  # its keys, ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            rows.append([])
            room, row = row_length, len(rows) - 1
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(index)
        if room - size not in by_room:
            insort(rooms, room - size)
            by_room[room - size] = []
        by_room[room - size].append(row)
    return rows


def positions(document_lengths: Sequence[int], row_length: int) -> tuple[Tensor, Tensor]:
    """(position_ids, document_ids), each [row_length] int64, of one row; the padding is one more document."""
    sizes = [*document_lengths, row_length - sum(document_lengths)]
    position = torch.cat([torch.arange(size) for size in sizes])
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return position, document


def block_mask(document_ids: Tensor, *, causal: bool = True) -> Tensor:
    """[rows, row_length] document ids -> [rows, 1, queries, keys] bool, True where a query attends to a key.

    The four-dimensional `attention_mask` of transformers with sdpa attention; row_length ** 2 bytes per row.
    """
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return mask.tril() if causal else mask


def cumulative_lengths(document_ids: Tensor) -> tuple[Tensor, int]:
    """(cu_seqlens [documents + 1] int32, longest document) of all rows concatenated, for variable-length attention."""
    flat = document_ids.flatten()
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    starts[:: document_ids.shape[1]] = True
    bounds = torch.cat([starts.nonzero().flatten(), torch.tensor([len(flat)], device=flat.device)])
    return bounds.int(), int(bounds.diff().max()) if len(flat) else 0
