"""Batches of tensors, exactly: what is padding and what is not, in widths of the plan."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from narrowgauge.data.batches import IGNORED
from narrowgauge.data.collate import Collator
from narrowgauge.data.epochs import Batching
from narrowgauge.data.sampler import LengthBatchSampler
from narrowgauge.errors import ConfigError, DataError
from tests.raising import raises


def example(*ids, **more):
    return {"input_ids": np.array(ids), "labels": np.array(ids), **more}


def test_a_padded_batch():
    batch = Collator(pad_id=9, multiple=4, tokens_multiple=8, position_ids=True)(
        [example(1, 9), example(9, 2, 3)]
    )
    assert batch["input_ids"].tolist() == [[1, 9, 9, 9], [9, 2, 3, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[1, 9, IGNORED, IGNORED], [9, 2, 3, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert {values.dtype for values in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (2, 8), (3, 16), (4, 8)])
def test_rows_times_width_is_a_multiple(rows, width):
    assert Collator(pad_id=0)([example(1, 2, 3)] * rows)["input_ids"].shape == (rows, width)


def test_classes_and_token_types():
    rows = [
        {"input_ids": [1, 2], "token_type_ids": [0, 1], "labels": 2},
        {"input_ids": [3], "token_type_ids": [0], "labels": 0},
    ]
    batch = Collator(pad_id=0)(rows)
    assert batch["labels"].tolist() == [2, 0]
    assert batch["token_type_ids"][0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_the_decoder_has_a_width_of_its_own():
    rows = [{"input_ids": [1, 2], "labels": list(range(11))}, {"input_ids": [3], "labels": [4]}]
    batch = Collator(pad_id=0, widths=(8, 24))(rows)
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"].shape == (2, 24)
    assert (batch["labels"][1, 1:] == IGNORED).all()


def test_a_packed_batch():
    collate = Collator(pad_id=0, widths=(16,))
    batch = collate([[example(1, 2, 3), example(4, 5)], [example(6)]])
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5] + [0] * 11
    assert batch["labels"][0, :6].tolist() == [IGNORED, 2, 3, IGNORED, 5, IGNORED]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, *range(11)]
    assert batch["attention_mask"].shape == (2, 1, 16, 16)
    flat = Collator(pad_id=0, widths=(16,), attention="varlen")(
        [[example(1, 2, 3), example(4, 5)], [example(6)]]
    )
    assert flat["input_ids"].shape == (1, 32)
    assert flat["cu_seq_lens_q"].tolist() == [0, 3, 5, 16, 17, 32]
    assert flat["max_length_k"] == 15
    assert "attention_mask" not in Collator(pad_id=0, attention="positions")([[example(1, 2)]])


@pytest.mark.parametrize("labels", [1, np.array([1, 2, 3])])
def test_what_is_no_causal_example_is_not_packed(labels):
    with raises(ConfigError, "collator.labels"):
        Collator(pad_id=0)([[{"input_ids": [1, 2], "labels": labels}]])


def test_what_cannot_be_collated_is_refused():
    with raises(DataError, "collator.empty"):
        Collator(pad_id=0)([])
    with raises(DataError, "collator.mixed"):
        Collator(pad_id=0)([example(1), [example(2), example(3)]])
    with raises(DataError, "collator.widths", "9 tokens", "at 8"):
        Collator(pad_id=0, widths=(8,))([example(*range(9))])
    with raises(ConfigError, "collator.attention", "'flash'"):
        Collator(pad_id=0, attention="flash")
    with raises(ConfigError, "collator.pad-id", "pad_id -1"):
        Collator(pad_id=-1)


@pytest.mark.parametrize("packed", [False, True])
def test_in_a_loader_the_shapes_are_those_of_the_plan(packed):
    lengths = np.random.default_rng(0).integers(3, 60, 200)

    class Data:
        def __getitem__(self, index):
            return (
                [self[one] for one in index]
                if packed and isinstance(index, tuple)
                else example(*range(lengths[index]))
            )

    batching = Batching(token_budget=512, row_length=128 if packed else None)
    sampler = LengthBatchSampler(lengths, batching)
    loader = DataLoader(
        Data(), batch_sampler=sampler, collate_fn=Collator(pad_id=0, widths=sampler.widths)
    )
    shapes = [batch["input_ids"].shape for batch in loader]
    assert sum(shape.numel() for shape in shapes) == sampler.plan.padding.planned.positions
    assert all(shape.numel() % 16 == 0 and shape.numel() <= 512 for shape in shapes)
