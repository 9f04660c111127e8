"""The check of packing finds what leaks: attention that ignores the mask, positions that run on, a convolution."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from narrowgauge.data.collate import Collator, check_packing
from narrowgauge.errors import ConfigError
from tests.raising import raises

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


class Ignoring(torch.nn.Module):
    """A model that is not given one of its inputs."""

    def __init__(self, model, ignored):
        super().__init__()
        self.model, self.ignored, self.config = model, ignored, model.config

    def forward(self, **inputs):
        return self.model(
            **{name: value for name, value in inputs.items() if name not in self.ignored}
        )


class Convolving(torch.nn.Module):
    """Llama behind a convolution over neighbouring tokens, as in hybrids of attention and recurrence."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.mix = torch.nn.Conv1d(16, 16, 3, padding=2)

    def forward(self, input_ids, **inputs):
        states = self.model.get_input_embeddings()(input_ids)
        states = self.mix(states.mT)[..., : input_ids.shape[1]].mT
        return self.model(inputs_embeds=states, **inputs)


@pytest.mark.parametrize("attention", ["mask", "positions"])
def test_a_model_that_keeps_documents_apart_passes(attention):
    model = llama(attn_implementation="sdpa").train()
    found = check_packing(model, Collator(pad_id=0, attention=attention))
    assert found.noise == found.leak == 0
    assert found.alone < 1e-5
    assert model.training


@pytest.mark.parametrize("attention", ["mask", "positions", "varlen"])
def test_the_rows_are_short_whatever_the_collator_pads_to(attention):
    """Calls of 32 positions at most, though training has rows of 512: the check is to take about a second."""
    shapes = []
    model = llama(attn_implementation="sdpa")
    model.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    collator = Collator(pad_id=0, attention=attention, widths=(512,))
    try:
        check_packing(model, collator)
    except ConfigError:
        assert attention == "varlen"  # no kernel for it here, which one more call makes sure of
        assert shapes.pop() == 32
    assert shapes == [32, 32, 16]


def test_a_global_first_token_is_found():
    """Every document sees the first token of the row, as with attention sinks; its neighbour's change shows nothing there."""

    class Sinking(Ignoring):
        def forward(self, attention_mask, **inputs):
            attention_mask = attention_mask.clone()
            attention_mask[..., 0] = True
            return super().forward(attention_mask=attention_mask, **inputs)

    with raises(ConfigError, "packing.mixes"):
        check_packing(Sinking(llama(attn_implementation="sdpa"), ()), Collator(pad_id=0))


def test_an_encoder_passes_with_a_mask_that_is_not_causal():
    model = BertForMaskedLM(BertConfig(**SIZES, attn_implementation="sdpa"))
    check_packing(model, Collator(pad_id=0, causal=False))


@pytest.mark.parametrize("attention", ["mask", "positions"])
def test_absolute_positions_restart(attention):
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, attn_implementation="sdpa")
    )
    check_packing(model, Collator(pad_id=0, attention=attention))


@pytest.mark.parametrize(
    "model",
    [
        lambda: Ignoring(llama(), ("attention_mask", "position_ids")),
        lambda: Ignoring(llama(), ("attention_mask", "position_ids")).bfloat16(),
        lambda: Convolving(llama()),
    ],
    ids=["ignores", "ignores in bfloat16", "convolves"],
)
def test_a_leak_is_refused(model):
    with raises(ConfigError, "packing.mixes"):
        check_packing(model(), Collator(pad_id=0))


def test_a_cache_turns_positions_into_a_leak():
    """transformers derives the mask from positions only without a cache; so the collator asks for none."""
    with raises(ConfigError, "packing.mixes"):
        check_packing(
            Ignoring(llama(attn_implementation="sdpa"), ("use_cache",)),
            Collator(pad_id=0, attention="positions"),
        )


def test_positions_that_run_on_are_refused():
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2)
    )
    with raises(ConfigError, "packing.positions"):
        check_packing(Ignoring(model, ("position_ids",)), Collator(pad_id=0))


def test_variable_length_arrays_without_a_kernel_for_them_are_refused():
    with raises(ConfigError, "packing.mixes"):
        check_packing(
            Ignoring(
                llama(attn_implementation="sdpa"),
                ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"),
            ),
            Collator(pad_id=0, attention="varlen"),
        )


class InSixteenBits(torch.nn.Module):
    """Logits in bfloat16: of a packed document 1 + 1/128, of the same alone 3 + 1/64."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.config = LlamaConfig(**SIZES)
        self.packed = 0

    def forward(self, input_ids, **_):
        self.packed = max(self.packed, input_ids.shape[1])
        value = 1 + 1 / 128 if input_ids.shape[1] == self.packed else 3 + 1 / 64
        logits = torch.full((*input_ids.shape, 50), value, dtype=torch.bfloat16)
        logits[..., 0] = 100
        return SimpleNamespace(logits=logits)


def test_logits_of_16_bits_are_compared_in_float32():
    """Exact: bfloat16 has no number for the difference of both."""
    found = check_packing(InSixteenBits(), Collator(pad_id=0, attention="positions"))
    assert found.alone == pytest.approx((2 + 1 / 128) / 100, rel=1e-6)
