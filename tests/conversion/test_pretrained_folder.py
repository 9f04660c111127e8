"""save_pretrained and convert: a folder that transformers reads without a word, and state that comes back (exact)."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge import memory
from narrowgauge.conversion.pretrained_folder import FILE, take_up
from narrowgauge.errors import ConfigError
from tests.compare import assert_same
from tests.raising import raises

SIZES = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
IDS = torch.arange(16).reshape(2, 8)


def trained(recipe, steps=3):
    torch.manual_seed(0)
    model = ng.convert(LlamaForCausalLM(SIZES), recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def loaded(folder, **options):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-lsq-luq", "int4-hq-lss", "fp8-row"])
def test_state_comes_back_and_nothing_is_unexpected(recipe, tmp_path):
    """Exact: every entry of the state dict, and the next output."""
    model = trained(recipe)
    ng.save_pretrained(model, tmp_path)
    assert (tmp_path / FILE).exists() == (recipe != "fp8-row")
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(LlamaForCausalLM(SIZES).state_dict())
    back = ng.convert(loaded(tmp_path), recipe)
    expected = model.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, each in back.state_dict().items():
        assert_same(each, expected[name])
    with torch.no_grad():
        assert_same(back.eval()(IDS).logits, model.eval()(IDS).logits)


def test_without_the_file_the_histories_are_empty(tmp_path):
    """Control: the state is what the file brings."""
    model = trained("fp8-delayed")
    ng.save_pretrained(model, tmp_path)
    (tmp_path / FILE).unlink()
    back = ng.convert(loaded(tmp_path), "fp8-delayed")
    name = "model.layers.0.mlp.up_proj.scaling.x.history"
    assert model.state_dict()[name].any() and not back.state_dict()[name].any()


def test_bfloat16_weights_are_recognized_in_float32(tmp_path):
    model = trained("fp8-delayed").bfloat16()
    ng.save_pretrained(model, tmp_path)
    back = ng.convert(loaded(tmp_path, dtype=torch.float32), "fp8-delayed")
    assert take_up(back) == 14


def test_other_weights_keep_no_history_and_a_warning_says_so(tmp_path):
    ng.save_pretrained(trained("fp8-delayed"), tmp_path)
    model = loaded(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.warns(UserWarning, match="up_proj") as caught:
        ng.convert(model, "fp8-delayed")
    assert [each.message.code for each in caught] == ["load.other-weights"]
    state = model.state_dict()
    assert not state["model.layers.1.mlp.up_proj.scaling.x.history"].any()
    assert state["model.layers.0.mlp.up_proj.scaling.x.history"].any()


def test_another_recipe_and_a_second_conversion_take_nothing_up(tmp_path):
    ng.save_pretrained(trained("fp8-delayed"), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ng.convert(loaded(tmp_path), "fp8-row")
        ng.convert(model, "fp8-delayed")
    assert not model.state_dict()["model.layers.0.mlp.up_proj.scaling.x.history"].any()


def test_codes_go_out_as_what_they_decode_to(tmp_path):
    model = trained("fp8-block")
    memory.freeze(model, "*layers.0.*", codes=True)
    ng.save_pretrained(model, tmp_path)
    back = loaded(tmp_path)
    for name, each in back.named_parameters():
        assert_same(each.detach(), dict(model.named_parameters())[name].detach().clone())


def test_a_new_save_removes_the_state_of_an_older_one(tmp_path):
    model = trained("fp8-delayed")
    ng.save_pretrained(model, tmp_path)
    ng.save_pretrained(ng.convert(copy.deepcopy(model), None), tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_damaged_file_and_a_model_of_others_are_refused(tmp_path):
    ng.save_pretrained(trained("fp8-delayed"), tmp_path)
    (tmp_path / FILE).write_bytes(b"damaged")
    with raises(ConfigError, "file.safetensors"):
        ng.convert(loaded(tmp_path), "fp8-delayed")
    with raises(ConfigError, "save.not-transformers"):
        ng.save_pretrained(torch.nn.Linear(4, 4), tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    """transformers logs an error and saves nothing."""
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "save.folder"):
        ng.save_pretrained(trained("fp8-row"), tmp_path / "file")
    (tmp_path / "out" / FILE).mkdir(parents=True)
    with raises(ConfigError, "save.folder"):
        ng.save_pretrained(trained("fp8-row"), tmp_path / "out")
