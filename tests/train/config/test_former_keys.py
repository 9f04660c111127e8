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
from narrowgauge.train.config.merged_settings import MERGED
from narrowgauge.train.config.rules import former_path, path_of
from narrowgauge.train.config.settings import TABLE, TrainConfig, key_of, key_of_name, resolved
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
    """(full, shortest) name in a file of a field, or of a part as "columns.text" or "betas.beta1"."""
    for key, part in toml.EARLIER.items():
        if part == name:
            return key, key
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
    assert each.default == default or part or each.type is TABLE or field == "epsilon"
    if name == "columns":
        assert default in {TASKS[task].columns[part].default for task in tasks_with(part)}
    assert former_path(path) == key
    former = toml.settings(f"{key} = {text}", "flat.toml")
    assert values(former) == values(toml.settings(f"{path} = {text}", "x")) == {field: value}
    words = toml.former_keys(former)
    now = path if name not in MERGED else key_of_name(field)
    assert (f"{key} (now {now})" in words) == (key not in (path, shortest))


@pytest.fixture
def given(monkeypatch) -> list[dict[str, object]]:
    """Collects what `narrowgauge train` has read from its flags, and trains nothing."""
    given: list[dict[str, object]] = []
    monkeypatch.setattr(train, "configuration", lambda path, flags: given.append(flags))
    monkeypatch.setattr("narrowgauge.train.first_look.refuse", lambda settings: None)
    monkeypatch.setattr(train, "refuse_unknown_recipes", lambda settings: None)
    monkeypatch.setattr(
        "narrowgauge.lab.training", SimpleNamespace(run=lambda settings: 0), raising=False
    )
    return given


def typed(name: str, value: object) -> list[str]:
    """The setting of that name on the command line."""
    flag = cli_flags.flag(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, "a=b" if value == {"a": "b"} else str(value)]


@pytest.mark.parametrize("named", ["former", "path", "key"])
def test_former_flags_set_what_they_set(named, given):
    """All at once: reading the flags of one call takes a tenth of a second, however many there are."""
    name_of = {
        "former": lambda key, field: key,
        "path": lambda key, field: paths(field)[0],
        "key": lambda key, field: paths(field)[1],
    }[named]
    wholes = {field for _, field, _ in FLAT}
    for is_part in (False, True):  # apart: a part may contradict its setting
        rows = [
            each for each in FLAT if (each[1].partition(".")[0] in wholes - {each[1]}) is is_part
        ]
        wanted = {field: other(default)[1] for _, field, default in rows}
        words = [
            word for key, field, _ in rows for word in typed(name_of(key, field), wanted[field])
        ]
        assert rows and cli.main(["train", *words]) == 0
        assert values(cli_flags.from_flags(given.pop())) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("key", "field", "default"), FLAT, ids=[each[0] for each in FLAT])
def test_a_former_flag_alone_sets_what_it_set(key, field, default, given):
    _, value = other(default)
    for name in {key, *paths(field)}:
        assert cli.main(["train", *typed(name, value)]) == 0
        assert values(cli_flags.from_flags(given.pop())) == {field: value}


MERGES = [
    ("beta2 = 0.999", {"betas": (-1.0, 0.999)}),
    ("[optimizer]\nbeta1 = 0.8\nbeta2 = 0.99", {"betas": (0.8, 0.99)}),
    ("crop_padding = 4", {"augment": "crop=4"}),
    ("[data]\nflip = true\ncrop_padding = 2", {"augment": "crop=2,flip"}),
    ("crop_padding = 0\nflip = false", {"augment": ""}),
    ("step_in_backward = true\nheld_gradients = '16bit'", {"held_gradients": "none"}),
    ("[optimizer]\nstep_in_backward = false\nheld_gradients = 'fp8'", {"held_gradients": "fp8"}),
    ("[optimizer]\nstep_in_backward = false", {"held_gradients": "16bit"}),
]


@pytest.mark.parametrize(("text", "expected"), MERGES, ids=[text for text, _ in MERGES])
def test_settings_that_are_one_now_mean_what_they_meant(text, expected):
    others = {"clip": toml.Entry(0.0, "--optimizer.clip")}
    if "augment" in expected:
        others |= {"task": toml.Entry("image-classification", "-"), "data": toml.Entry("d", "-")}
    config = toml.build(toml.settings(text, "x"), others)
    assert {name: getattr(config, name) for name in expected} == expected
    assert toml.former_keys(toml.settings(toml.dump(resolved(config)), "x")) == ""


def test_flags_of_settings_that_are_one_now_override_their_part_of_a_file(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(train, "configuration", lambda path, flags: given.append(flags))
    monkeypatch.setattr("narrowgauge.train.first_look.refuse", lambda settings: None)
    monkeypatch.setattr(train, "refuse_unknown_recipes", lambda settings: None)
    monkeypatch.setattr(
        "narrowgauge.lab.training", SimpleNamespace(run=lambda settings: 0), raising=False
    )
    stored = toml.settings(
        "[optimizer]\nbetas = [0.8, 0.9]\nclip = 0.0\nheld_gradients = 'none'", "config.toml"
    )
    for flags, expected in (
        (["--optimizer.beta2", "0.99"], ((0.8, 0.99), "none")),
        (["--beta1", "0.5", "--no-optimizer.step-in-backward"], ((0.5, 0.9), "16bit")),
        (
            ["--optimizer.betas", "0.1, 0.2", "--optimizer.held-gradients", "fp8"],
            ((0.1, 0.2), "fp8"),
        ),
        (["--optimizer.betas", "[-1,0.2]"], ((-1.0, 0.2), "none")),
    ):
        assert cli.main(["train", *flags]) == 0
        own = cli_flags.from_flags(given.pop())
        config = toml.build(stored, own)
        assert (config.betas, config.held_gradients) == expected
        is_former = "beta1" in flags[0] or "beta2" in flags[0]
        assert ("(now --optimizer.betas)" in toml.former_keys(own)) == is_former
    assert cli.main(["train", "--optimizer.betas", "0.9;0.95"]) == 2
    assert "'0.9;0.95' is not numbers with commas, as 0.9,0.95" in capsys.readouterr().err


def test_a_wrong_value_of_a_setting_that_is_one_with_others_is_refused_with_its_place():
    for text, words in (
        ("[optimizer]\nbeta2 = 2.0", "x:2: optimizer.betas = [-1.0, 2.0]: must be two numbers"),
        ("beta1 = 'a'", "x:1: beta1 = 'a': must be a number"),
        ("step_in_backward = 1", "x:1: step_in_backward = 1: must be true or false"),
        ("[data]\naugment = 'crop=x'", "x:2: data.augment = 'crop=x': must be 'crop=PIXELS'"),
        ("crop_padding = -1", "x:1: data.augment = 'crop=-1': must be 'crop=PIXELS'"),
        ("flip = 'yes'", "x:1: flip = 'yes': must be true or false"),
    ):
        with pytest.raises(ConfigError) as caught:
            toml.build(toml.settings(text, "x"))
        assert words in str(caught.value)
    with raises(ConfigError, "config.step_in_backward", "'fp8'"):
        toml.build(toml.settings("step_in_backward = true\nheld_gradients = 'fp8'", "x"))


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


@pytest.mark.parametrize(
    ("new", "former"),
    [
        ("optimizer.betas = [0.9, 0.95]", "optimizer.beta1 = 0.5"),
        ('optimizer.held_gradients = "none"', "optimizer.step_in_backward = false"),
        ('data.augment = "flip"', "flip = false"),
        ('data.augment = "crop=2"', "data.crop_padding = 3"),
    ],
)
def test_a_part_that_contradicts_its_setting_is_refused(new, former):
    for lines in ((new, former), (former, new)):
        with raises(ConfigError, "config.both-keys"):
            toml.settings("\n".join(lines), "both.toml")


@pytest.mark.parametrize(
    "text",
    [
        "optimizer.betas = [0.9, 0.95]\noptimizer.beta1 = 0.9",
        'data.augment = "crop=2,flip"\ndata.crop_padding = 2',
    ],
)
def test_a_part_that_says_the_same_is_taken(text):
    toml.settings(text, "same.toml")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('optimizer.step_in_backward = "fp8"', "config.step_in_backward"),
        ("data.flip = 2", "config.flip"),
        ("data.crop_padding = true", "config.crop_padding"),
        ('optimizer.beta1 = "x"', "config.beta1"),
    ],
)
def test_a_former_key_has_its_former_type(text, code):
    with raises(ConfigError, code):
        toml.build(toml.settings(text, "types.toml"))
