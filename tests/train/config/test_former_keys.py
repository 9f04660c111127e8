"""Every flat key and flag from before the tables sets the same value (exact).

`flat_keys.json` holds [key, field or part of a field, default] of each of them, as the last tree
without tables had it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.train.checkpoint_ref import settings_of
from narrowgauge.train.config import toml
from narrowgauge.train.config.rules import former_path, path_of
from narrowgauge.train.config.settings import TABLE, TrainConfig, key_of, key_of_name
from narrowgauge.train.config.task_entries import TASKS, tasks_with
from tests.raising import raises

pytest.importorskip("cyclopts")
from narrowgauge import cli
from narrowgauge.cli import flags as cli_flags
from narrowgauge.cli import train

FLAT = json.loads((Path(__file__).parent / "flat_keys.json").read_text(encoding="utf-8"))
FIELDS = TrainConfig.__dataclass_fields__
RUN = Path(__file__).parents[2] / "compatibility" / "tree_2026_11_24" / "delayed"


def other(default: object) -> tuple[str, object]:
    """TOML text of a value that is not the default, and the value."""
    value = {"a": "b"} if default == {} else not default if isinstance(default, bool) else None
    if value is None:
        value = default + 1 if isinstance(default, int | float) else f"{default}x"
    text = '{ a = "b" }' if value == {"a": "b"} else json.dumps(value)
    return text, value


def paths(name: str) -> tuple[str, str]:
    """(full, shortest) name in a file of a field, or of a part as "columns.text"."""
    field, _, part = name.partition(".")
    return (key_of_name(name),) * 2 if part else (path_of(FIELDS[field]), key_of(FIELDS[field]))


def values(given: toml.Given) -> dict[str, object]:
    return {name: entry.value for name, entry in given.items()}


@pytest.mark.parametrize(("key", "field", "default"), FLAT, ids=[each[0] for each in FLAT])
def test_a_former_key_sets_what_it_set(key, field, default):
    """It has its default and value, and is named with its new key."""
    text, value = other(default)
    name, _, part = field.partition(".")
    each, (path, shortest) = FIELDS[name], paths(field)
    # The betas and epsilon of the rule have had their values written out since then.
    assert each.default == default or each.type is TABLE or field in ("beta1", "beta2", "epsilon")
    assert not part or default in {TASKS[task].columns[part].default for task in tasks_with(part)}
    assert former_path(path) == key
    former = toml.settings(f"{key} = {text}", "flat.toml")
    assert values(former) == values(toml.settings(f"{path} = {text}", "x")) == {field: value}
    words = toml.former_keys(former)
    assert (f"{key} (now {path})" in words) == (key not in (path, shortest))


@pytest.mark.parametrize(("key", "field", "default"), FLAT, ids=[each[0] for each in FLAT])
def test_a_former_flag_sets_what_it_set(key, field, default, monkeypatch):
    given = []
    monkeypatch.setattr(train, "configuration", lambda path, flags: given.append(flags))
    monkeypatch.setattr(train, "refuse_unknown_recipes", lambda settings: None)
    monkeypatch.setattr(
        "narrowgauge.lab.training", SimpleNamespace(run=lambda settings: 0), raising=False
    )
    _, value = other(default)
    text = "a=b" if value == {"a": "b"} else str(value)
    for name in {key, *paths(field)}:
        flag = cli_flags.flag(name)
        own = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, text]
        assert cli.main(["train", *own]) == 0
        assert values(cli_flags.from_flags(given.pop())) == {field: value}


def test_two_keys_of_one_setting_agree_or_are_refused():
    same = toml.settings("layers = 2\n[model]\nlayers = 2", "tiny.toml")
    assert toml.build(same).layers == 2
    with raises(
        ConfigError,
        "config.both-keys",
        "tiny.toml:1: layers = 2",
        "model.layers, which is 3 (tiny.toml:3)",
    ):
        toml.settings("layers = 2\n[model]\nlayers = 3", "tiny.toml")
    with raises(ConfigError, "config.both-keys", "--layers = 2", "--model.layers, which is 3"):
        cli_flags.from_flags({"layers": 3, f"{cli_flags.FORMERLY}layers": 2})
    # A flag overrides the file, whichever key either of them uses.
    for text, flag in (
        ("layers = 2", "layers"),
        ("model.layers = 2", f"{cli_flags.FORMERLY}layers"),
    ):
        file = toml.settings(text, "tiny.toml")
        assert toml.build(file, cli_flags.from_flags({flag: 3})).layers == 3


def test_former_names_are_told_once_on_stderr(tmp_path, capsys, monkeypatch):
    file = tmp_path / "flat.toml"
    file.write_text("batch_size = 4\nsteps = 3\nrecipe = 'bf16'\n[recipes]\nlm_head = 'bf16'\n")
    config = cli_flags.configuration(str(file), {f"{cli_flags.FORMERLY}warmup_steps": 1})
    assert (config.batch_size, config.steps, config.warmup_steps) == (4, 3, 1)
    assert config.layers_recipe == {"lm_head": "bf16"}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("narrowgauge: former names of settings")
    for words in (
        "--warmup-steps (now --optimizer.warmup-steps)",
        "batch_size (now batch.size)",
        "steps (now training.steps)",
        "recipes (now recipe.layers)",
    ):
        assert words in said
    monkeypatch.setenv("RANK", "1")  # torchrun: one rank says it for all
    cli_flags.configuration(str(file), {})
    assert capsys.readouterr().err == ""


def test_parts_of_guard_and_parallel_are_keys_and_flags_of_their_own():
    written = toml.build(
        toml.settings("[guard]\nevery = 40\nsteps = 4\nmargin = '0.25%'\non_spike = 'warn'", "x")
    )
    assert (written.guard, written.on_spike) == ("every=40,steps=4,margin=0.25%", "warn")
    layout = toml.build(toml.settings("[parallel]\nfsdp = 2\ntp = 2\nsp = true", "x"))
    assert layout.parallel == "fsdp=2,tp=2,sp"
    # A part overrides that part of the whole; the whole overrides all parts that were given before.
    file = toml.settings("guard = 'every=40,steps=4,then=stay'", "x")
    flags = cli_flags.from_flags({f"guard{cli_flags.PART}every": "60"})
    assert toml.build(file, flags).guard == "steps=4,then=stay,every=60"
    assert toml.build(flags, file).guard == "every=40,steps=4,then=stay"


def test_a_former_config_is_read_and_written_in_tables(capsys):
    """The config.toml of a run of the tree before."""
    config = settings_of(RUN)
    assert (config.hidden_size, config.guard) == (16, "every=5,steps=2")
    assert config.layers_recipe == {"lm_head": "bf16"}
    text = toml.dump(config)
    assert "[model]\n" in text and '[recipe.layers]\n"lm_head" = "bf16"' in text
    assert toml.build(toml.settings(text, "x")) == config
    assert capsys.readouterr().err == ""
