"""Attention in FP8 of whole models: which get it, what stays, and the way back (exact)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import narrowgauge as ng
from narrowgauge.conversion import attention_precision
from narrowgauge.conversion.coverage import coverage
from narrowgauge.errors import ConfigError
from narrowgauge.nn.fp8_attention import fp8_states
from tests.compare import assert_same
from tests.raising import raises

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.arange(96).reshape(2, 48) % 64


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **settings)
    return transformers.LlamaForCausalLM(config)


def logits(model: Any, **given: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS, use_cache=False, **given).logits
    return found


@pytest.fixture
def converted() -> Any:
    return ng.convert(llama(), "bf16", attention="fp8")


def test_it_computes_in_fp8_and_leaves_when_it_is_told(converted):
    narrow, plain = logits(converted), llama()
    with ng.suspended(converted):
        assert_same(logits(converted), logits(plain))
    assert_same(logits(converted), narrow)
    ng.convert(plain, "bf16")
    assert not torch.equal(narrow, logits(plain))
    ng.convert(converted, None)
    assert converted.config._attn_implementation == "sdpa"
    assert_same(logits(converted), logits(llama()))


def test_another_call_of_convert_keeps_it(converted):
    narrow = logits(converted)
    ng.convert(converted, "bf16")
    assert_same(logits(converted), narrow)
    ng.convert(converted, "bf16", attention="fp8")
    assert_same(logits(converted), narrow)
    ng.convert(converted, None)
    assert converted.config._attn_implementation == "sdpa"


def test_copies_have_it_and_a_saved_model_does_not(converted, tmp_path):
    assert_same(logits(copy.deepcopy(converted)), logits(converted))
    converted.save_pretrained(tmp_path)
    assert "fp8" not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same(logits(again), logits(llama()))


def test_models_that_share_a_configuration_stay_apart():
    one = llama()
    other = transformers.LlamaForCausalLM(one.config)
    expected = logits(other)
    ng.convert(one, "bf16", attention="fp8")
    assert_same(logits(other), expected)


def test_the_configuration_of_another_converted_model_is_no_way_back(converted):
    """A model built from a copy of it begins with the name of FP8, and is converted and restored as any other."""
    other = transformers.LlamaForCausalLM(copy.deepcopy(converted.config)).eval()
    ng.convert(other, "bf16", attention="fp8")
    with ng.suspended(other):
        wide = logits(other)
    assert not torch.equal(wide, logits(other))
    ng.convert(other, None)
    assert other.config._attn_implementation == "sdpa"
    assert_same(logits(other), wide)


def test_what_is_changed_in_the_configuration_later_is_told(converted):
    converted.set_attn_implementation("eager")
    [words] = attention_precision.attention_words(converted)
    assert "'eager'" in words and "E4M3" not in words


def test_packed_rows_do_not_see_each_other(converted):
    """The same documents in one row and in two give the same numbers (bounded: other blocks)."""
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    together = converted(IDS[:1], position_ids=positions, use_cache=False).logits
    with ng.suspended(converted):
        exact = converted(IDS[:1], position_ids=positions, use_cache=False).logits
    assert (together - exact).norm() < 0.05 * exact.norm()
    changed = IDS[:1].clone()
    changed[0, 3] += 1
    # The scale of a block spans documents, so only what is attended to must stay the same.
    again = converted(changed, position_ids=positions, use_cache=False).logits
    assert (again[:, 20:] - together[:, 20:]).norm() < 0.05 * exact.norm()
    assert not torch.equal(again[:, 3:20], together[:, 3:20])


@pytest.mark.parametrize("kind", ["Mistral", "Bert"])
def test_windows_and_padding(kind):
    """A sliding window, and padding seen from both sides, change the numbers as in 16 bits."""
    sizes = (
        {"attention_probs_dropout_prob": 0.0}
        if kind == "Bert"
        else {"sliding_window": 8, "num_key_value_heads": 2}
    )
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    mask = torch.ones_like(IDS)
    mask[1, 30:] = 0
    ng.convert(model, "bf16", attention="fp8")
    narrow = model(IDS, attention_mask=mask).last_hidden_state[mask.bool()]
    with ng.suspended(model):
        wide = model(IDS, attention_mask=mask).last_hidden_state[mask.bool()]
    assert 0 < (narrow - wide).norm() < 0.05 * wide.norm()


def test_every_parameter_gets_a_gradient(converted):
    logits(converted).square().mean().backward()
    assert all(each.grad is not None and each.grad.any() for each in converted.parameters())


def test_a_cache_is_read(converted):
    """Token by token as in one pass, up to other blocks of the cast (bounded)."""
    converted.eval()
    whole = converted(IDS[:, :12], use_cache=False).logits
    first = converted(IDS[:, :11], use_cache=True)
    last = converted(IDS[:, 11:12], past_key_values=first.past_key_values).logits
    assert (last[:, 0] - whole[:, 11]).norm() < 0.05 * whole[:, 11].norm()


@pytest.mark.parametrize(
    ("kind", "settings", "code"),
    [
        ("GPT2LMHeadModel", {}, "attention-dropout"),
        ("T5ForConditionalGeneration", {}, "attention-terms"),
        ("Gemma2ForCausalLM", {}, "attention-terms"),
        ("LlamaForCausalLM", {"attn_implementation": "flex_attention"}, "attention-kernel"),
    ],
)
def test_models_that_lack_something_are_refused_whole(kind, settings, code):
    with torch.device("meta"):
        model_class = getattr(transformers, kind)
        model = model_class(model_class.config_class(num_hidden_layers=1, **settings))
    before = model.config._attn_implementation
    with raises(ConfigError, "convert.attention"):
        ng.convert(model, "bf16", attention="fp8")
    module = next(iter(attention_precision._attentions(model)))
    assert attention_precision.reason_to_leave(module).code == code
    assert model.config._attn_implementation == before
    assert not any(isinstance(each, ng.QLinear) for each in model.modules())


def test_a_part_that_lacks_something_stays_and_is_named():
    """CLIP's towers have a configuration each."""
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.CLIPConfig(
        text_config=tower | {"attention_dropout": 0.1},
        vision_config=tower | {"image_size": 16, "patch_size": 4},
    )
    model = transformers.CLIPModel(config)
    ng.convert(model, "bf16", attention="fp8")
    assert len(list(fp8_states(model.vision_model))) == 1
    assert not list(fp8_states(model.text_model))
    narrow, wide = ng.describe(model).attention
    assert "FP8" in narrow and "0.1" in wide
    text = " ".join(str(ng.describe(model)).split())  # long sentences go on in the next line
    assert narrow in text and wide in text


def test_models_of_torch_and_odd_names_are_refused():
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with raises(ConfigError, "convert.no-attention"):
        ng.convert(encoder, "bf16", attention="fp8")
    for recipe, attention in (("bf16", "int8"), (None, "fp8")):
        with raises(ConfigError, "convert.attention-name", attention):
            ng.convert(llama(), recipe, attention=attention)


def test_a_call_with_dropout_is_refused(converted):
    for module in converted.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with raises(ConfigError, "fp8-attention.call", 0.1):
        logits(converted.train())


def test_coverage_counts_the_forward_products(converted):
    """Both products of the forward pass are in 8 bits, the four of backward in 16 (exact)."""
    counted = coverage(converted, IDS)
    plain = coverage(ng.convert(llama(), "bf16"), IDS)
    tokens, width = IDS.shape[1], SIZES["hidden_size"]
    forward = 2 * 2 * 2 * IDS.shape[0] * tokens * tokens * width
    assert counted.operations == plain.operations
    assert counted.narrow[8] == pytest.approx(forward / counted.operations)
    attention = {kind: parts.get("attention") for kind, parts in plain.wide.items()}
    left = {kind: parts.get("attention") for kind, parts in counted.wide.items()}
    assert left["fp32"] == pytest.approx(attention["fp32"] * 2 / 3)
    assert "FP8" in counted.attention and "2 calls" in counted.attention
