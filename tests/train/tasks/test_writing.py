"""Samples: from a generator of their own, and without a trace in the model (exact)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from narrowgauge import advance, convert
from narrowgauge.train.tasks.text import NOT_FINITE, sample
from tests.compare import assert_same


class Letters:
    """A tokenizer of the 26 letters and an end."""

    eos_token_id = 26

    def __len__(self):
        return 27

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids if i < 26)


class Model(nn.Module):
    """Logits of 32 entries, 5 more than the tokenizer knows; those are the likeliest, and must never be drawn."""

    def __init__(self, ends=False):
        super().__init__()
        self.embed, self.head, self.dropout = (
            nn.Embedding(32, 32),
            nn.Linear(32, 32),
            nn.Dropout(0.5),
        )
        self.ends, self.poison, self.lengths = ends, False, []
        self.eval()

    def forward(self, input_ids, use_cache):
        self.lengths.append(input_ids.shape[1])
        logits = self.head(self.dropout(self.embed(input_ids)))
        logits = (
            logits
            + 50 * (torch.arange(32) > 26)
            + (100 * (torch.arange(32) == 26) if self.ends else 0)
        )
        return SimpleNamespace(logits=logits * float("nan") if self.poison else logits)


def test_equal_seeds_give_equal_text_and_others_do_not():
    model = Model()
    texts = [sample(model, Letters(), "abc", 20, longest=8, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) <= 20 and set(texts[0]) <= set("abcdefghijklmnopqrstuvwxyz")


def test_the_context_is_never_longer_than_a_sequence():
    model = Model()
    sample(model, Letters(), "abcdef", 10, longest=8, seed=0)
    assert model.lengths[:3] == [6, 7, 8] and max(model.lengths) == 8


def test_an_empty_prompt_starts_at_the_end_of_a_text():
    model = Model()
    assert sample(model, Letters(), "", 3, longest=8, seed=0)
    assert model.lengths[0] == 1


def test_the_end_of_a_text_ends_the_sample():
    model = Model(ends=True)
    assert sample(model, Letters(), "abc", 10, longest=8, seed=0) == ""
    assert len(model.lengths) == 1


def test_logits_that_are_not_finite_end_the_sample_in_words():
    model = Model()
    model.poison = True
    assert sample(model, Letters(), "abc", 10, longest=8, seed=0) == NOT_FINITE


def test_nothing_is_left_behind():
    model = convert(Model(), "fp8-delayed")
    model.train()(
        input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False
    ).logits.sum().backward()
    advance(model)
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    sample(model, Letters(), "abc", 5, longest=8, seed=0)
    assert_same(model.state_dict(), before)
    assert_same(torch.get_rng_state(), generator)


def test_ids_may_stand_for_the_text():
    assert sample(Model(), Letters(), [0, 1], 0, longest=8, seed=0) == ""
    model = Model()
    texts = [sample(model, Letters(), start, 5, longest=8, seed=0) for start in ("ab", [0, 1])]
    assert texts[0] == texts[1] != ""
