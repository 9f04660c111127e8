"""The language of `lora`, and the rules between it, `base`, `merge` and other settings (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.train.config import lora_syntax, toml
from narrowgauge.train.config.adapter_settings import BASES
from narrowgauge.train.config.settings import InvalidSettings, TrainConfig, resolved
from tests.raising import raises

LORA = {"model": "m", "lora": "r=16,alpha=32,targets=all-linear"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("r=16,alpha=32,targets=all-linear", lora_syntax.Lora(r=16, alpha=32)),
        ("r=4", lora_syntax.Lora(r=4, alpha=8)),
        ("alpha=2.5", lora_syntax.Lora(r=8, alpha=2.5)),
        (
            " r = 2 , targets = q_proj+v_proj ",
            lora_syntax.Lora(r=2, alpha=4, targets=("q_proj", "v_proj")),
        ),
        (
            "dora,rslora,dropout=0.25,init=gaussian",
            lora_syntax.Lora(dora=True, rslora=True, dropout=0.25, init="gaussian"),
        ),
    ],
)
def test_a_text_describes_adapters_and_they_describe_themselves(text, found):
    assert lora_syntax.parse(text) == found
    assert lora_syntax.parse(str(found)) == found and not lora_syntax.problems(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rank=4", "'rank'"),
        ("r=0", "'r=0'"),
        ("r=1.5", "'r=1.5'"),
        ("r", "'r'"),
        ("alpha=0", "'alpha=0'"),
        ("dropout=1", "'dropout=1'"),
        ("dora=1", "'dora=1'"),
        ("r=1,r=2", "'r'"),
        ("init=zeros", "pissa"),
        ("targets=", "'targets='"),
        ("targets=all-linear+q_proj", "'targets=all-linear+q_proj'"),
        ("targets=q proj", "'targets=q proj'"),
    ],
)
def test_a_text_that_describes_none_is_refused(text, value):
    assert len(lora_syntax.problems(text)) == 1
    with raises(ConfigError, "config.lora", value):
        lora_syntax.parse(text)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"lora": "", "base": "int8"}, "base"),
        ({"lora": "", "merge": True}, "merge"),
        ({"model": ""}, "lora"),
        ({"from_scratch": True}, "lora"),
        ({"task": "classification", "data": "a.csv"}, "lora"),
        ({"freeze": "layers.0"}, "lora"),
        ({"parallel": "fsdp"}, "lora"),
        ({"embedding_codes": "int8"}, "lora"),
        ({"fuse": True}, "lora"),
        ({"base": "nvfp4", "recipe": "fp8-row"}, "lora"),
        ({"base": "int8", "switch": "bf16@80%"}, "lora"),
        ({"base": "int8", "lora": "init=pissa"}, "lora"),
        ({"base": "int3"}, "base"),
    ],
)
def test_what_excludes_adapters_is_refused(changes, first):
    with pytest.raises(InvalidSettings) as caught:
        TrainConfig(**{**LORA, **changes})
    assert caught.value.problems[0][0][0] == first


@pytest.mark.parametrize("base", BASES)
def test_the_base_is_the_recipe_of_the_products(base):
    config = resolved(TrainConfig(**LORA, base=base))
    assert config.recipe == base and resolved(config) == config
    assert toml.build(toml.settings(toml.dump(config), "x")) == config


def test_a_table_of_a_file_and_flags_make_one_text():
    text = 'base = "int8"\n[model]\nname = "m"\n[lora]\nr = 16\ndora = true\n'
    config = toml.build(toml.settings(text, "x"))
    assert lora_syntax.parse(config.lora) == lora_syntax.Lora(r=16, alpha=32, dora=True)
