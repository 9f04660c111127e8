"""Packed rows, exactly: each document once and whole, in few rows, with positions, ids and masks that keep it apart."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data.rows import block_mask, cumulative_lengths, pack, positions
from narrowgauge.errors import DataError
from tests.raising import raises


def best_fit_by_search(lengths, row_length):
    """The definition: every row is looked at."""
    rows, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            rows.append([])
            rooms.append(row_length)
            fitting = [len(rows) - 1]
        row = min(fitting, key=rooms.__getitem__)
        rows[row].append(index)
        rooms[row] -= lengths[index]
    return rows, rooms


@given(st.lists(st.integers(1, 600), max_size=120), st.integers(600, 1200))
def test_packing_is_best_fit_decreasing(lengths, row_length):
    """As many rows, filled equally, as the definition gives; which of two equally full rows is taken may differ."""
    rows = pack(lengths, row_length)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    rooms = [row_length - sum(lengths[index] for index in row) for row in rows]
    assert sorted(rooms) == sorted(best_fit_by_search(lengths, row_length)[1])
    assert min(rooms, default=0) >= 0
    assert len(rows) <= 11 / 9 * math.ceil(sum(lengths) / row_length) + 1 or not any(
        room > row_length / 2 for room in rooms[:-1]
    )


def test_many_documents_fill_their_rows():
    lengths = np.random.default_rng(0).integers(10, 900, 20_000)
    rows = pack(lengths, 2048)
    assert len(rows) * 2048 / lengths.sum() < 1.001


def test_a_document_longer_than_a_row_is_refused():
    with raises(DataError, "packing.too-long", "of 2", "row_length 8", "has 9"):
        pack([9, 3], 8)


def test_positions_restart_and_the_padding_is_a_document():
    position, document = positions([3, 2], 8)
    assert position.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert document.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    position, document = positions([4], 4)
    assert (position.tolist(), document.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])


def test_the_mask_is_block_diagonal_and_no_row_is_empty():
    document = torch.stack([positions([3, 2], 8)[1], positions([1, 1, 1], 8)[1]])
    mask = block_mask(document)
    for row in range(2):
        for query in range(8):
            for key in range(8):
                allowed = document[row, query] == document[row, key] and key <= query
                assert mask[row, 0, query, key] == allowed
    assert mask.any(-1).all()
    assert (block_mask(document, causal=False) == block_mask(document, causal=False).mT).all()


def test_cumulative_lengths_bound_each_document_and_each_row():
    document = torch.stack([positions([3, 2], 8)[1], positions([8], 8)[1]])
    bounds, longest = cumulative_lengths(document)
    assert bounds.tolist() == [0, 3, 5, 8, 16]
    assert bounds.dtype == torch.int32
    assert longest == 8
