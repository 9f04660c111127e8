"""The setting attention: what a run says and computes with it, and where it is another run (exact)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.conversion.attention_precision import use_fp8_attention
from narrowgauge.errors import ConfigError
from narrowgauge.lab import training
from narrowgauge.lab.study.plan import Study
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.fp8_attention import fp8_states
from narrowgauge.train.attention import (
    FP8_WHOLE_ROWS,
    use_attention_of_whole_rows,
    use_float32_attention,
)
from narrowgauge.train.model import build
from tests.compare import assert_same
from tests.raising import raises
from tests.train import tiny


def test_a_run_says_that_attention_is_in_fp8(make, capsys):
    config = make(attention="fp8", eval_every=6, eval_wide=True)
    assert training.run(config) == 0
    said = capsys.readouterr().err
    assert "fp8-current with fp8 in attention" in said
    assert "Attention: FP8 by its definition in torch, backward in 16 bits, in 2 calls." in said
    folder = Path(config.output)
    run = json.loads((folder / "run.json").read_bytes())
    assert run["attention"] == "fp8" and "FP8" in run["coverage"]["attention"]
    [evaluated] = tiny.events(folder, "eval")
    assert evaluated["wide"]["loss"] != evaluated["loss"]
    assert "fp8" not in (folder / "final" / "config.json").read_text()


@pytest.mark.slow
def test_it_changes_the_numbers_and_none_means_as_before(make):
    losses = []
    for attention in ("", "fp8"):
        config = make(attention or "plain", recipe="none", attention=attention)
        assert training.run(config) == 0
        losses.append(tiny.losses(Path(config.output))[6])
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0]


def test_it_belongs_to_the_numbers_of_a_run(make):
    config = make(attention="fp8", checkpoint_every=3, steps=3)
    training.run(config)
    with raises(ConfigError, "resume.changed", "recipe.attention = ''"):
        training.run(replace(config, resume=True, attention="", steps=6))


def test_a_study_compares_it_with_a_reference_that_has_none(make, tmp_path):
    study = Study(
        config=make(attention="fp8"), recipes=("bf16", "fp8-current"), seeds=(0, 1), output=tmp_path
    )
    assert {job.recipe: study.settings_of(job).attention for job in study.jobs()} == {
        "bf16": "",
        "fp8-current": "fp8",
        "positive-control": "",
    }


def test_a_suspended_pass_computes_the_attention_from_before(make):
    """On a CPU without bfloat16 instructions that is float32 attention."""
    config = make(recipe="none", attention="fp8", precision="fp32")
    made = build(config, llama, torch.device("cpu"), 64, None)
    assert all(state.before == "sdpa" for state in fp8_states(made))
    model, ids = llama().bfloat16(), torch.arange(32)[None]
    use_float32_attention(model)
    expected = model(ids).logits
    use_fp8_attention(model)
    with suspended(model):
        assert_same(model(ids).logits, expected)
    assert not torch.equal(model(ids).logits, expected)


def test_whole_rows_need_no_mask_here_either():
    model, ids = llama(), torch.arange(32)[None]
    use_fp8_attention(model)
    expected = model(input_ids=ids).logits
    assert use_attention_of_whole_rows(model, {"input_ids": ids})
    assert model.config._attn_implementation == FP8_WHOLE_ROWS
    assert_same(model(input_ids=ids).logits, expected)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )  # fmt: skip
