"""Folders of others: what would run code or read a pickle is refused in a sentence, and no pickle is opened (exact)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.pretrained import CAUSAL_LM, pretrained
from tests.raising import raises

SIZES = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=False
)  # fmt: skip


class Trap:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.fixture
def folder(tmp_path):
    """A whole model, and a pickle beside it that leaves a trace."""
    LlamaForCausalLM(SIZES).save_pretrained(tmp_path / "model")
    torch.save({"weight": Trap(tmp_path / "trace")}, tmp_path / "model" / "evil.bin")
    yield tmp_path / "model"
    assert not (tmp_path / "trace").exists()


def load(folder: Path):
    return pretrained(TrainConfig(model=str(folder)), CAUSAL_LM)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def names() -> list[str]:
    return list(LlamaForCausalLM(SIZES).state_dict())


def test_a_whole_model_and_a_sharded_one_load(folder):
    load(folder)
    index(folder, dict.fromkeys(names(), "model-00001-of-00001.safetensors"))
    load(folder)


@pytest.mark.parametrize(
    "file",
    ["evil.bin", "../evil.safetensors", "/etc/passwd", "a/b.safetensors", "x.safetensors.bin", 3],
)
def test_an_index_that_names_something_else_than_safetensors_is_refused(folder, file):
    index(folder, dict.fromkeys(names(), file))
    with raises(ConfigError, "model.file", "model.safetensors.index.json"):
        load(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', "[" * 10000]
)
def test_a_damaged_index_is_refused(folder, text):
    index(folder, {})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no index of weights|is damaged: "):
        load(folder)


@pytest.mark.parametrize(
    "weights",
    ["evil.bin", "adapter_model.bin", "../model.safetensors", "../x.safetensors.index.json"],
)
def test_weights_that_the_configuration_names_are_refused(folder, weights):
    change_config(folder, transformers_weights=weights)
    with raises(ConfigError, "model.file", "config.json"):
        load(folder)


def test_another_index_that_the_configuration_names_is_looked_into(folder):
    change_config(folder, transformers_weights="other.safetensors.index.json")
    (folder / "other.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": "evil.bin"}})
    )
    with raises(ConfigError, "model.file", "other.safetensors.index.json"):
        load(folder)


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_kernel_from_the_hub_is_refused(folder, key):
    change_config(folder, **{key: "somebody/kernel"})
    with raises(ConfigError, "model.file", "'somebody/kernel'"):
        load(folder)


def test_an_adapter_of_pickles_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    shutil.copy(folder / "evil.bin", folder / "adapter_model.bin")
    with raises(ConfigError, "model.file", "adapter_config", "adapter_model"):
        load(folder)


def test_a_pickle_alone_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "evil.bin").rename(folder / "pytorch_model.bin")
    with raises(ConfigError, "model.unloadable"):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_told(folder, bad):
    model = LlamaForCausalLM(SIZES)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = bad
    model.save_pretrained(folder)
    with raises(
        ConfigError, "weights.not-finite", "'lm_head.weight'", "holds 1", "1024", "1 values"
    ):
        load(folder)
