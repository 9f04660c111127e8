"""Configurations: every rule refuses what breaks it, every mistake in a file has its line, and files round-trip (exact)."""

import dataclasses
import math
import re
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import ConfigError
from narrowgauge.optim.rules import RULES
from narrowgauge.train.config import toml
from narrowgauge.train.config.optimizer_settings import UNSET
from narrowgauge.train.config.parallel_syntax import names
from narrowgauge.train.config.rules import NUMBERS, Range, TwoNumbers, has_effect
from narrowgauge.train.config.settings import (
    FUSED_SAVES,
    TABLE,
    OneOf,
    OneOrPair,
    TrainConfig,
    by_path,
    key_of,
    resolved,
)
from narrowgauge.train.config.task_entries import TASKS
from tests.raising import coded, raises
from tests.selection import quick

FIELDS = dataclasses.fields(TrainConfig)
PATHS = by_path()


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        toml.build(toml.settings(text, "tiny.toml"))
    return str(caught.value)


def test_defaults_are_valid_and_frozen():
    config = TrainConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 1  # type: ignore[misc]
    assert hash(config) == hash(TrainConfig())


def test_every_setting_has_a_name_of_its_own_and_a_sentence():
    assert len(PATHS) == len(FIELDS)
    for each in FIELDS:
        assert each.metadata["help"].endswith("."), each.name


WRONG_TYPES = {
    bool: [0, 1, "true", None, 1.0, []],
    int: [True, 2.0, "8", None, math.nan, math.inf, [1], 2**63, -(2**63), 10**400],
    float: [True, "0.1", None, math.nan, math.inf, -math.inf, 10**400, [0.1]],
    NUMBERS: [
        0.9,
        "0.9,0.95",
        None,
        (0.9,),
        [0.9, 0.95],
        (0.9, 0.9, 0.9),
        (0.9, "a"),
        (math.nan, 0.9),
    ],
    str: [None, 1, True, b"x", ["x"], "zero\0byte", "lone\ud800surrogate"],
    TABLE: [
        None,
        "lm_head=bf16",
        [("a", "b")],
        {"a": 1},
        {1: "a"},
        {"": "bf16"},
        {"a": ""},
        {"a": {"b": "bf16"}},
    ],
}


@pytest.mark.parametrize("each", FIELDS, ids=lambda each: each.name)
def test_a_wrong_type_is_refused_with_key_and_rule(each):
    for value in WRONG_TYPES[each.type]:
        if (each.name, value) == ("columns", {"a": ""}):
            continue  # a column with an empty name in the table is a rule of its task
        with pytest.raises(ConfigError) as caught:
            TrainConfig(**{each.name: value})
        assert re.search(rf"{key_of(each)}(\.a)? = .*: must ", str(caught.value)), repr(value)


def just_outside(each: dataclasses.Field) -> list:
    """The nearest values beyond each end of a range; words that are close to allowed ones."""
    rule = each.metadata["rule"]
    if isinstance(rule, TwoNumbers):
        return [(0.9, 1.0), (-math.ulp(0), 0.9), (math.nextafter(-1, 0), 0.9)]
    if not isinstance(rule, Range):
        if each.type is int:
            return [0, 3]
        candidates = ["", "FP32", "nonsense", "gpu", "cuda:", "cuda:x"] if rule else []
        return [value for value in candidates if rule.refuse(value)]
    if each.type is int:
        return [rule.low - 1, rule.high + 1]
    below = rule.low if rule.open_low else math.nextafter(rule.low, -math.inf)
    return [below, rule.high if rule.open_high else math.nextafter(rule.high, math.inf)]


@pytest.mark.parametrize(
    "each", [each for each in FIELDS if just_outside(each)], ids=lambda each: each.name
)
def test_a_value_outside_its_rule_is_refused_with_value_and_rule(each):
    for value in just_outside(each):
        with pytest.raises(ConfigError) as caught:
            TrainConfig(**{each.name: value})
        said = str(caught.value)
        assert "must be" in said and str(each.metadata["rule"]) in said, repr(value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_size": 100},
            "model.hidden_size = 100: must be a multiple of 16, twice model.heads",
        ),
        ({"hidden_size": 24, "heads": 8}, "multiple of 16, twice model.heads"),
        ({"heads": 8, "kv_heads": 3}, "model.kv_heads = 3: must divide model.heads = 8"),
        (
            {"batch_size": 16, "micro_batches": 3},
            "batch.micro_batches = 3: must divide batch.size = 16",
        ),
        (
            {"learning_rate": 1e-4, "min_learning_rate": 1e-3},
            "optimizer.min_learning_rate = 0.001: must not exceed",
        ),
        ({"from_scratch": True}, "from_scratch"),
        ({"model": "m", "layers": 2}, "model.layers = 2: has no effect with model = 'm'"),
        (
            {"cuda_graph": True, "checkpointing": "full"},
            "device.cuda_graph = true: does not work with memory.checkpointing = 'full'",
        ),
        (
            {"held_gradients": "none"},
            "optimizer.held_gradients = 'none': optimizer.clip = 1.0 wants the norm of the whole gradient",
        ),
        (
            {"held_gradients": "fp8", "cuda_graph": True},
            "optimizer.held_gradients = 'fp8': does not work with device.cuda_graph = true",
        ),
        (
            {"clip_by": "previous"},
            "optimizer.clip_by = 'previous': has no effect with optimizer.held_gradients = '16bit'",
        ),
        (
            {"held_gradients": "none", "clip": 0.0, "clip_by": "previous"},
            "optimizer.clip_by = 'previous': has no effect with optimizer.clip = 0.0",
        ),
        (
            {"held_gradients": "none", "clip_by": "two-pass", "compile": True},
            "does not work with device.compile = true, whose",
        ),
        (
            {"held_gradients": "none", "clip_by": "two-pass", "precision": "amp-fp16"},
            "with recipe.precision = 'amp-fp16', whose loss scaling",
        ),
        (
            {"recipe": "auto", "checkpointing": "auto"},
            "checkpointing =",
        ),
        (
            {"tokenizer": "t", "vocab_size": 512},
            "data.vocab_size = 512: has no effect with data.tokenizer = 't'",
        ),
    ],
)
def test_rules_between_values(changes, words):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**changes)
    assert words in str(caught.value)


def test_all_broken_rules_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(layers=0, betas=(1.0, 0.9), precision="fp8")
    assert len(str(caught.value).splitlines()) == 3


def test_resolved_writes_out_the_sizes_that_depend_on_others():
    config = resolved(TrainConfig(hidden_size=128, heads=4, output="runs/a"))
    assert (config.kv_heads, config.intermediate_size, config.cache) == (4, 384, "runs/cache")
    assert resolved(config) == config
    assert resolved(TrainConfig(model="gpt2")).kv_heads == 0


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_unset_numbers_of_the_first_three_rules_stay_as_they_were(rule):
    """Files of earlier runs contain these numbers, and a run without them computed with these (exact)."""
    config = resolved(TrainConfig(optimizer=rule))
    assert (config.betas, config.epsilon) == ((0.9, 0.95), 1e-8)
    assert resolved(TrainConfig(optimizer=rule, betas=(0.9, 0.95), epsilon=1e-8)) == config


def test_unset_numbers_of_another_rule_are_its_own(monkeypatch):
    options = {"betas": (0.8, 0.9999), "eps": 1e-6}
    other = dataclasses.replace(RULES["lion"], options=options, run_options={})
    monkeypatch.setitem(RULES, "lion", other)
    config = resolved(TrainConfig(optimizer="lion", betas=(0.0, UNSET)))
    assert (config.betas, config.epsilon) == ((0.0, 0.9999), 1e-6)
    with raises(ConfigError, "config.optimizer.betas", "or -1"):
        TrainConfig(betas=(0.9, -0.5))


def test_every_rule_with_two_moments_may_give_each_its_format(monkeypatch):
    other = dataclasses.replace(RULES["lion"], moments=("exp_avg", "exp_avg_sq"))
    with raises(ConfigError, "config.states", "names two moments, and lion keeps one"):
        TrainConfig(optimizer="lion", states="8bit/fp16")
    monkeypatch.setitem(RULES, "lion", other)
    assert TrainConfig(optimizer="lion", states="8bit/fp16").states == "8bit/fp16"


# Files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training.steps = 3\nlayres = 3",
            "tiny.toml:2: 'layres' is not a setting. Closest: 'model.layers'.",
        ),
        ("training.steps = 3\n'my key' = 3", "tiny.toml:2: 'my key' is not a setting."),
        (
            "Hidden-Size = 3",
            "tiny.toml:1: 'Hidden-Size' is not a setting. Closest: 'model.hidden_size'.",
        ),
        (
            "# a comment\n\nmodel.layers = '3'",
            "tiny.toml:3: model.layers = '3': must be a whole number",
        ),
        ("training.steps = 1e3", "tiny.toml:1: training.steps = 1000.0: must be a whole number"),
        ("training.seed = true", "tiny.toml:1: training.seed = true: must be a whole number"),
        (
            "learning_rate = nan",
            "tiny.toml:1: optimizer.learning_rate = nan: must be a finite number",
        ),
        ("device.compile = 1", "tiny.toml:1: device.compile = 1: must be true or false"),
        (
            'evaluation.prompt = """\nmodel.layers = 0\n"""\nmodel.layers = 0',
            "tiny.toml:4: model.layers = 0: must be from 1",
        ),
        ("training.steps = 1\r\nmodel.layers = 0\r\n", "tiny.toml:2: model.layers = 0"),
        (
            "model.heads = 7\nmodel.hidden_size = 256",
            "tiny.toml:2: model.hidden_size = 256: must be a multiple of 14, twice model.heads",
        ),
        (
            "model.layers = 1\ntraining.steps = 2\nmodel.layers = 2",
            "tiny.toml:3: this key was given before",
        ),
        ("model.layers = 1\nlayers.x = 2", "tiny.toml:2: "),
        ("model.layers = ", "tiny.toml:1: Invalid value"),
        ("model.layers = 1\nrecipe = bf16", "tiny.toml:2: Invalid value"),
        ("\ntraining.steps = [\n1,", "tiny.toml:3: Invalid value"),
        ("[model]\nlayers = 0", "tiny.toml:2: model.layers = 0: must be from 1"),
        (
            "[modle]\nlayers = 3",
            "tiny.toml:1: [modle] is not a table of the configuration. Closest: 'model'.",
        ),
        (
            "[model]\nlayres = 3",
            "tiny.toml:2: 'layres' is not a setting of [model]. Closest: 'layers'.",
        ),
        (
            "[training]\nlayers = 3",
            "tiny.toml:2: 'layers' is not a setting of [training]. Closest: 'model.layers'.",
        ),
        (
            "[data.columns]\ntxt = 'a'",
            "tiny.toml:2: data.columns.txt = 'a': has no effect with task = 'text'. Running text has no such columns",
        ),
        ("training = 3", "tiny.toml:1: [training] is a table, and not 3. Its settings are steps,"),
        ("[guard]\nstep = 3", "tiny.toml:2: 'step' is not a setting of [guard]. Closest: 'steps'."),
        (
            "[guard]\nevery = 2\nsteps = 4",
            "tiny.toml:3: guard = 'every=2,steps=4': a stretch of 4 steps",
        ),
        (
            "[guard]\nevery = '2,then=stay'",
            "tiny.toml:2: guard.every = '2,then=stay': must be one number or word",
        ),
        (
            "layers = 2\n[model]\nlayers = 3",
            "tiny.toml:1: layers = 2: is the same setting as model.layers, which is 3 (tiny.toml:3)",
        ),
        ("recipe.layers = 3", "tiny.toml:1: recipe.layers = 3: must be a table"),
        (
            "training.steps = 3\n[recipes]\nlayers.0.up = 'bf16'",
            'write a pattern with dots in quotes: "layers..." = "bf16"',
        ),
        (
            "training.steps = 3\n[recipes]\nlm_head = 3\n",
            "tiny.toml:2: recipe.layers = {'lm_head': 3}: must be text",
        ),
        (
            'training.steps = 3\nrecipe.layers = ["lm_head"]',
            "tiny.toml:2: recipe.layers: 'lm_head' is not 'pattern=recipe'",
        ),
        ('recipe.layers = ["up=bf16:gradweight"]', "'gradweight' is none. Closest: 'grad_weight'"),
        (
            "[recipes]\nup = 'auto:output'",
            "must name a recipe with numbers of its own before the colon of 'auto:output'",
        ),
        ("model.layers = " + "[" * 5000, "tiny.toml: cannot be read as TOML"),
        ("model.layers = " + "9" * 5000, "tiny.toml: cannot be read as TOML"),
    ],
)
def test_a_mistake_has_its_file_and_line(text, expected):
    assert expected in refusal(text)


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path):
    for name, data, words in [
        (
            "latin.toml",
            b"training.steps = 3\nevaluation.prompt = '\xe9'",
            coded("config.utf8", "toml:2", "-8"),
        ),
        ("large.toml", b"#" * 2**17, coded("config.too-large")),
    ]:
        path = tmp_path / name
        path.write_bytes(data)
        with raises(ConfigError, words):
            toml.load(path)
    for path in (tmp_path / "missing.toml", tmp_path, Path("zero\0byte")):
        with raises(ConfigError, "config.unreadable"):
            toml.load(path)


def test_recipes_of_layers_stand_in_a_list_or_a_table(tmp_path: Path):
    path = tmp_path / "list.toml"
    path.write_text(
        'recipe.layers = ["lm_head=bf16", "layers.1.down_proj=bf16:output+grad_weight"]'
    )
    config = toml.load(path)
    assert config.layers_recipe == {
        "lm_head": "bf16",
        "layers.1.down_proj": "bf16:output+grad_weight",
    }
    path.write_text(toml.dump(config))
    assert toml.load(path) == config


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path):
    path = tmp_path / "windows.toml"
    path.write_bytes("training.steps = 3\r\nevaluation.prompt = 'é'\r\n".encode("utf-8-sig"))
    assert toml.load(path) == TrainConfig(steps=3, prompt="é")


def typos(key: str) -> set[str]:
    """All deletions and swaps, and an insertion at each place."""
    deleted = {key[:i] + key[i + 1 :] for i in range(len(key))}
    swapped = {key[:i] + key[i + 1] + key[i] + key[i + 2 :] for i in range(len(key) - 1)}
    inserted = {key[:i] + letter + key[i:] for i in range(len(key) + 1) for letter in "x"}
    return deleted | swapped | inserted


@pytest.mark.parametrize("each", quick([5], [1, 5]))
def test_every_typo_is_refused_and_nearly_always_the_right_key_suggested(each):
    """All typos of edit distance 1 of the kinds above, of all keys or one in five; at least 95 % suggested rightly."""
    right = total = 0
    for path in sorted(PATHS)[::each]:
        table, _, key = path.rpartition(".")
        known = [other.rpartition(".")[2] for other in PATHS if other.rpartition(".")[0] == table]
        # A typo may be a former key, or a table, or a part of the guard.
        for typo in typos(key) - {*known, *FORMER, *toml.TABLES, *toml.PARTS["parallel"]}:
            total += 1
            text = f'"{typo}" = 1'
            right += f"Closest: '{key}'" in refusal(f"[{table}]\n{text}" if table else text)
    assert total > 1000 // each
    assert right / total >= 0.95


def printable(maximum: int = 12) -> st.SearchStrategy[str]:
    return st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=maximum
    )


def values(each: dataclasses.Field) -> st.SearchStrategy:
    rule = each.metadata["rule"]
    if each.type is bool:
        return st.booleans()
    if isinstance(rule, OneOf):
        return st.sampled_from(rule.names)
    if isinstance(rule, OneOrPair):
        pairs = st.tuples(*[st.sampled_from(rule.parts)] * 2).map("/".join)
        return st.sampled_from((*rule.names, *rule.parts)) | pairs
    if each.name == "device":
        return st.sampled_from(["auto", "cpu", "cuda", "cuda:7"])
    if each.name == "parallel":
        return st.sampled_from(["", "dp", "ddp=2", "dp=2, fsdp=4", "fsdp"])
    if each.name == "switch":
        return st.sampled_from(["", "bf16@50%", "layers.0.*=bf16@50%:forward, fp8-row@99.5%"])
    if each.name == "keep_float32":
        return st.sampled_from(["", "norms", "norms,softmax", "*.mlp.*"])
    if each.name == "checkpointing":
        return st.sampled_from(
            ["none", "full", "every-2", "sqrt", "auto", "selective", "budget:1.5GiB", "budget:9"]
        )
    if each.name == "log_to":
        return st.sampled_from(["", "wandb", "mlflow, trackio"])
    if each.name == "augment":
        return st.sampled_from(["", "flip", "crop=4", "flip, crop=4", "crop=0,flip"])
    if isinstance(rule, TwoNumbers):
        number = st.floats(rule.range.low, rule.range.high, exclude_max=True) | st.just(UNSET)
        return st.tuples(number, number)
    if each.type is int:
        return st.integers(rule.low, rule.high)
    if each.type is float:
        return st.floats(rule.low, rule.high, exclude_min=rule.open_low, exclude_max=rule.open_high)
    if each.type is TABLE:
        names = printable().filter(
            lambda name: name and ":" not in name
        )  # behind a colon stand products
        return st.dictionaries(printable().filter(bool), names, max_size=3)
    return printable().filter(bool) if rule else printable()


def settle_the_task(drawn: dict) -> None:
    """Leaves out what has no effect with the task that was drawn, and with the other settings of it."""
    for each in FIELDS:
        if not has_effect(each, drawn["task"]):
            del drawn[each.name]
    drawn["best"] = (
        drawn["best"] if drawn["best"] in ("", "none", *TASKS[drawn["task"]].metrics) else "loss"
    )
    left_out = {
        "steps": drawn["epochs"], "batch_size": drawn.get("token_budget"), "validation_fraction": drawn.get("validation_data"),
        "train_on": not drawn["columns"].get("messages"),
    }  # fmt: skip
    for key, because in left_out.items():
        if because:
            drawn.pop(key, None)
    if drawn.get("packing"):
        drawn["packing"] = 16
        drawn["token_budget"] = drawn["token_budget"] and max(16, drawn["token_budget"])
    if drawn["task"] != "text":
        drawn |= {"model": drawn["model"] or "m", "data": drawn["data"] + ".csv"}
        drawn |= {"max_length": max(2, drawn["max_length"])} if "max_length" in drawn else {}


def settle_answers_tags_and_choices(drawn: dict) -> None:
    if drawn["task"] in ("question-answering", "multiple-choice"):
        drawn["columns"] |= {name: "c" for name in ("question", "context")}
    if drawn["task"] == "question-answering":
        drawn["too_long"] = "skip"
    if drawn["task"] == "tagging":
        drawn["classes"] = "" if drawn["classes"].strip().isdecimal() else drawn["classes"]
        for name in ("tokens", "tags") if drawn["columns"]["spans"] else ("text",):
            del drawn["columns"][name]
    if drawn["task"] == "causal-lm" and drawn["columns"]["messages"]:
        del drawn["columns"]["prompt"], drawn["columns"]["completion"]


@st.composite
def configurations(draw) -> TrainConfig:
    """Any valid configuration: values drawn at large, and those that depend on each other made to agree."""
    drawn = {each.name: draw(values(each)) for each in FIELDS}
    drawn["columns"] = {
        name: draw(printable() if column.optional else printable().filter(bool))
        for name, column in TASKS[drawn["task"]].columns.items()
    }
    settle_the_task(drawn)
    settle_answers_tags_and_choices(drawn)
    drawn.setdefault("batch_size", 16)
    drawn["guard"] = ""  # checks of its own: lab/guard/settings.py
    drawn |= {"lora": "", "base": "", "merge": False}  # likewise: test_adapter_settings.py
    drawn["micro_batches"] = draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 8) if drawn["batch_size"] % n == 0])
    )
    drawn["switch"] = drawn["switch"] if drawn.get("steps", 2) > 1 else ""
    drawn["min_learning_rate"] = min(drawn["min_learning_rate"], drawn["learning_rate"])
    if drawn["rate_schedule"] == "constant":
        drawn["min_learning_rate"] = 0.0
    is_stable = drawn["rate_schedule"] == "warmup-stable-decay"
    room = drawn.get("steps", 300) - drawn["warmup_steps"]
    drawn["decay_steps"] = max(0, min(drawn["decay_steps"], room)) if is_stable else 0
    drawn["from_scratch"] = drawn["from_scratch"] and bool(drawn["model"])
    drawn["compress_activations"] = drawn["compress_activations"] and not drawn["compile"]
    if drawn.get("save") in FUSED_SAVES and (
        drawn["compile"]
        or not drawn["fuse"]
        or (drawn["save"] != "exact" and drawn["compress_activations"])
    ):
        drawn["save"] = ""
    drawn["cuda_graph"] = drawn["cuda_graph"] and drawn["checkpointing"] == "none"
    drawn["on_spike"] = "" if drawn["cuda_graph"] else drawn["on_spike"]
    excluded = drawn["compile"] or drawn["cuda_graph"] or drawn["precision"] == "amp-fp16"
    if drawn["held_gradients"] == "none" and excluded:
        drawn["held_gradients"] = "16bit"
    if drawn["cuda_graph"] or drawn["precision"] == "amp-fp16":
        drawn["held_gradients"] = "16bit"
    if drawn["held_gradients"] != "none" or not drawn["clip"]:
        drawn["clip_by"] = ""
    elif not drawn["clip_by"]:
        drawn["clip"] = 0.0
    if not drawn["precision"].startswith("bf16-o"):
        drawn["master"] = drawn["keep_float32"] = ""
    if drawn.get("loss") == "slices" and names(drawn["parallel"], "tp"):
        drawn["loss"] = "whole"
    if len(RULES[drawn["optimizer"]].moments) < 2:
        drawn["states"] = drawn["states"].partition("/")[0]
    if drawn["states"] == "fp32":
        drawn["embedding_states"] = "fp32"
    if drawn.get("tokenizer"):
        drawn.pop("vocab_size", None)
    if drawn["model"]:
        for size in (
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "intermediate_size",
            "vocab_size",
            "patch_size",
        ):
            drawn.pop(size, None)
    else:
        drawn["kv_heads"] = draw(st.sampled_from([0, 1, drawn["heads"]]))
        drawn["hidden_size"] = 2 * drawn["heads"] * draw(st.integers(1, 128))
    return TrainConfig(**drawn)


def parsed_as_dumped(config):
    text = toml.dump(config)
    assert toml.build(toml.settings(text, "x")) == config
    given = {name.partition(".")[0] for name in toml.settings(text, "x")}
    assert given | {"columns"} == {each.name for each in FIELDS}
    assert toml.former_keys(toml.settings(text, "x")) == ""
    assert resolved(resolved(config)) == resolved(config)


test_what_is_dumped_is_what_is_parsed = settings(max_examples=20)(
    given(configurations())(parsed_as_dumped)
)
test_whatever_is_dumped_is_what_is_parsed = pytest.mark.slow(
    settings(max_examples=80)(given(configurations())(parsed_as_dumped))
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_file_is_a_configuration_or_a_config_error(data):
    """Nothing but ConfigError comes of a file with random bytes changed, inserted or cut."""
    text = toml.dump(TrainConfig(layers_recipe={"lm_head": "bf16"}, prompt="a\n'b'"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 3))
        text = text[:place] + data.draw(st.text(string.printable, max_size=3)) + text[place + cut :]
    try:
        toml.build(toml.settings(text, "tiny.toml"))
    except ConfigError as error:
        assert "tiny.toml" in str(error)


def test_later_layers_win_and_name_themselves():
    file = toml.settings("training.steps = 5\nmodel.layers = 2\n", "tiny.toml")
    config = toml.build(file, {"layers": toml.Entry(3, "--model.layers")})
    assert (config.steps, config.layers) == (5, 3)
    with pytest.raises(ConfigError, match=r"^--model.layers: model.layers = 0: must"):
        toml.build(file, {"layers": toml.Entry(0, "--model.layers")})


def test_a_keep_list_needs_weights_of_16_bits():
    assert TrainConfig(precision="bf16-o3", keep_float32="norms, layers.0-3.*").keep_float32
    with pytest.raises(
        ConfigError,
        match=r"recipe.keep_float32 = 'norms': has no effect with recipe.precision = 'amp-bf16', whose weights",
    ):
        TrainConfig(precision="amp-bf16", keep_float32="norms")
    with pytest.raises(ConfigError, match="must be names with commas, as 'norms,softmax'"):
        TrainConfig(precision="bf16-o2", keep_float32="norms,,softmax")


def test_a_master_needs_weights_of_16_bits():
    assert TrainConfig(precision="bf16-o2", master="bf16-remainder").master == "bf16-remainder"
    with pytest.raises(
        ConfigError,
        match=r"optimizer.master = 'fp32': has no effect with recipe.precision = 'amp-bf16', whose weights",
    ):
        TrainConfig(precision="amp-bf16", master="fp32")
    with pytest.raises(
        ConfigError,
        match=r"optimizer.embedding_states = 'same': has no effect with optimizer.states = 'fp32'",
    ):
        TrainConfig(embedding_states="same")
