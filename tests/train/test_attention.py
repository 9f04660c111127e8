"""Attention without a mask for batches of whole rows: the bits of transformers' own, and nothing looked at (exact)."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    masking_utils,
)
from transformers import MistralForCausalLM as Mistral

from narrowgauge.train.attention import (
    FLOAT32_WHOLE_ROWS,
    WHOLE_ROWS,
    use_attention_of_whole_rows,
    use_float32_attention,
)
from tests.compare import assert_same

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS = torch.arange(48).reshape(3, 16)
BATCH = {"input_ids": IDS, "labels": IDS}


def llama():
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))


@pytest.mark.parametrize("wide", [False, True], ids=["as it is", "float32"])
@pytest.mark.parametrize(
    "build", [llama, lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))], ids=["llama", "neox"]
)
def test_the_numbers_stay_and_positions_are_not_looked_at(monkeypatch, build, wide):
    """Also where transformers could not look, while a graph is captured, and would make a mask."""
    model = build().to(torch.bfloat16).eval()
    if wide:
        use_float32_attention(model)
    expected = model(input_ids=IDS, use_cache=False).logits
    assert use_attention_of_whole_rows(model, BATCH)
    assert model.config._attn_implementation == (FLOAT32_WHOLE_ROWS if wide else WHOLE_ROWS)

    def refuse(*call, **options):
        raise AssertionError("a GPU would be waited for")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    assert_same(model(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (llama, {**BATCH, "attention_mask": torch.ones(3, 16)}),
        (llama, {**BATCH, "position_ids": IDS % 8}),
        (lambda: Mistral(MistralConfig(num_key_value_heads=2, sliding_window=8, **SIZES)), BATCH),
    ],
    ids=["padded", "packed", "a window"],
)
def test_what_needs_a_mask_keeps_it(build, batch):
    model = build()
    assert (
        not use_attention_of_whole_rows(model, batch)
        and model.config._attn_implementation == "sdpa"
    )


def test_a_saved_model_does_not_ask_for_it(tmp_path):
    model = llama()
    use_attention_of_whole_rows(model, BATCH)
    model.save_pretrained(tmp_path)
    assert WHOLE_ROWS not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
