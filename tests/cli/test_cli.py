"""The command line: quick, strict, and no traceback for what a user can mend (exact)."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowgauge import cli
from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import BusyError, CheckpointError, ConfigError
from narrowgauge.train.config import toml
from narrowgauge.train.config.rules import has_effect
from narrowgauge.train.config.settings import (
    NUMBERS,
    TABLE,
    TASKS,
    OneOf,
    TrainConfig,
    by_path,
    former_key,
    key_of,
    key_of_name,
    path_of,
    resolved,
)
from narrowgauge.train.config.task_entries import column_help, tasks_with
from narrowgauge.train.run_folder import RunFolder
from tests.processes import ROOT
from tests.selection import quick

pytest.importorskip("cyclopts")
from narrowgauge.cli import flags as cli_flags  # isort: skip
from narrowgauge.cli.recipes import LEGEND  # isort: skip
from tests.raising import cli_raises


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "narrowgauge", *arguments],
        capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, check=False,
    )  # fmt: skip


@pytest.fixture
def loop(monkeypatch) -> list[TrainConfig]:
    """Stands for the training loop, and collects the configurations it was called with."""
    calls: list[TrainConfig] = []
    stub = SimpleNamespace(run=lambda config: calls.append(config) or 0)
    recipes = SimpleNamespace(get=known_recipe, names=lambda: ("bf16", "fp8-current"), AUTO="auto")
    monkeypatch.setattr("narrowgauge.lab.training", stub, raising=False)
    monkeypatch.setattr("narrowgauge.recipes", recipes, raising=False)
    # Settings alone are tested here; their models and data need not be there.
    monkeypatch.setattr("narrowgauge.train.first_look.refuse", lambda config: None)
    return calls


def known_recipe(name: str) -> str:
    if name not in ("bf16", "fp8-row", "fp8-current"):
        raise ConfigError(f"stub: no recipe {name!r}. Closest: 'fp8-row'.")
    return f"the recipe {name}"


# Speed


@pytest.mark.parametrize(
    "arguments",
    [["--help"], [], ["--version"], ["train", "--help"], ["report", "--help"], ["trian"]],
)
def test_help_imports_neither_torch_nor_what_takes_as_long(arguments):
    program = (
        "import sys\nfrom narrowgauge.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'datasets', 'tensorboard'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_front_imports_the_standard_library_alone():
    program = (
        "import sys\nfrom narrowgauge.cli import main\nmain(['--help'])\n"
        "assert not {'cyclopts', 'rich', 'attrs'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True)


# The front


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8-block", []),
        ("fp8", ["fp8"]),
        ("int4-hq-bs", ["int4", "4bit"]),
        ("", ["fp8", "int4", "4bit"]),
    ],
)
def test_recipes_explain_the_shorthands_of_what_they_list(name, said, capsys):
    assert cli.main(["recipes", *([name] if name else [])]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"(\w+) stands for", printed) == said
    assert ("auto chooses" in printed) == (not name) and LEGEND in printed


def test_help_lists_every_verb_and_each_has_its_file(capsys):
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb}" in listed
        assert (ROOT / "narrowgauge" / "cli" / f"{verb.replace('-', '_')}.py").exists()
    assert cli.main([]) == 0 and capsys.readouterr().out == listed


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("narrowgauge")


@pytest.mark.parametrize(
    ("verb", "near"),
    [("trian", "train"), ("reports", "report"), ("recipe", "recipes"), ("inf", "info")],
)
def test_an_unknown_verb_gets_the_closest(capsys, verb, near):
    assert cli.main([verb]) == 2
    assert (
        capsys.readouterr().err == f"narrowgauge: {verb!r} is not a command. Closest: {near!r}.\n"
    )


def test_an_unknown_verb_unlike_any_is_sent_to_the_help(capsys):
    cli_raises(["../../etc"], ConfigError, "cli.command", "'../../etc'", "narrowgauge --help")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2), (ModuleNotFoundError("no", name="cyclopts"), 2), (CheckpointError("no"), 4),
        (BusyError("no"), 7), (OSError(28, "No space left on device"), 8), (MemoryError(), 9),
        (KeyboardInterrupt(), 130), (BrokenPipeError(), 141),
    ],
    ids=repr,
)  # fmt: skip
def test_an_expected_error_is_a_message_and_a_code(monkeypatch, capfd, error, code):
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setattr(cli, "_forget_output", lambda: None)
    assert cli.main(["train"]) == code
    assert "Traceback" not in capfd.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    ours = ModuleNotFoundError("no", name="narrowgauge.lost")
    for error in (ZeroDivisionError(), FileNotFoundError(2, "No such file", "x"), ours):
        monkeypatch.setattr(
            cli, "_dispatch", lambda arguments, error=error: (_ for _ in ()).throw(error)
        )
        with pytest.raises(type(error)):
            cli.main([])


def test_the_module_exits_with_the_code():
    done = run("train", "--model.layers", "0")
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.decode() == "narrowgauge: --model.layers 0: must be from 1 to 4096.\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_a_closed_pipe_is_no_traceback(arguments):
    program = f'"{sys.executable}" -m narrowgauge {" ".join(arguments)} | true; echo ${{PIPESTATUS[0]}} >&2'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, cwd=ROOT, env=environment, check=True
    )
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    assert int(done.stderr.split()[-1]) in (1, 141)  # rich, which prints a verb's help, says 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_a_storage_error():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "narrowgauge", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (
        done.returncode == 8 and b"Traceback" not in done.stderr and b"No space left" in done.stderr
    )


def test_a_closed_standard_output_is_no_traceback():
    program = f'"{sys.executable}" -m narrowgauge --help >&-'
    done = subprocess.run(["bash", "-c", program], stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=pytest.mark.slow),
    ],
)
def test_output_is_ascii_where_the_encoding_is(locale):
    for arguments in (["train", "--help"], ["train", "--data", ""], ["t\u00e9st"], ["--help"]):
        done = run(*arguments, **locale)
        assert done.returncode in (0, 2) and b"Traceback" not in done.stderr
        assert (done.stdout + done.stderr).isascii()


def test_a_file_name_that_is_no_utf8_is_no_traceback():
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"narrowgauge", b"train", b"\xff.toml"],
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2 and b"cannot be read" in done.stderr


# train


def test_defaults_are_resolved_before_the_loop_sees_them(loop):
    assert cli.main(["train"]) == 0
    assert loop == [resolved(TrainConfig())]
    assert loop[0].kv_heads == 8


def test_every_setting_has_a_flag_that_the_help_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # long flags wrap in a narrow terminal
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in str(cli_flags.FILE.help).split())
    flags = {cli_flags.flag(key_of(each)) for each in by_path().values()}
    assert set(re.findall(r"(?m)^│ (--[a-z.0-9-]+)", shown)) - PARTS == flags
    # The file comes first, then the tables in the order in which a file has them.
    assert re.findall(r"─ ([a-z.]+) ─", shown)[:2] == ["file", "run"]
    groups = [shown.index(f"─ {group} ─") for group in ("file", "run", *toml.TABLES)]
    assert groups == sorted(groups)


def test_a_parent_without_a_name_is_no_new_run(loop, tmp_path, monkeypatch, capsys):
    """As of a variable that was never set: the run would begin anew, with default settings."""
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--from", "", "--output", "runs/b"]
    cli_raises(arguments, ConfigError, "train.from-empty", "--from ''")
    assert loop == [] and not (tmp_path / "runs").exists()


def other_value(each) -> tuple[str, object]:
    """A flag's text and the value it must become, other than the default."""
    special: dict[str, object] = {
        "columns": {"prompt": "x y=z é"}, "switch": "bf16@82%:forward",
        "parallel": "dp=2,fsdp", "timeout_s": 30.0,
        "device": "cuda:1", "precision": "bf16-o2", "keep_float32": "norms,*.mlp.*",
        "save": "quantized", "kv_heads": 2, "intermediate_size": 64, "micro_batches": 2, "clip_by": "", "guard": "",
        "optimizer": "lion", "states": "8bit", "embedding_states": "same", "master": "bf16-remainder", "checkpointing": "full",
        "hidden_size": 512, "heads": 4, "recipe": "bf16", "compare": "bf16", "betas": (0.5, 0.75), "augment": "crop=4,flip",
        "validation_fraction": 0.25, "rate_schedule": "warmup-stable-decay", "warmup_steps": 30, "decay_steps": 40,
        "lora": "", "base": "", "log_to": "mlflow",
    }  # fmt: skip
    value = special.get(each.name, {int: 300, float: 0.0003, str: "x y=z é"}.get(each.type))
    if isinstance(each.metadata["rule"], OneOf) and each.name not in special:
        value = next(name for name in each.metadata["rule"].names if name and name != each.default)
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text, value


# Flags for the parts of a setting that has a language of its own.
PARTS = {
    cli_flags.flag(key_of_name(f"{name}.{part}"))
    for name, parts in toml.PARTS.items()
    for part in parts
}
# Settings whose effect depends on the task, or that only runs on examples read.
OF_TASKS = [
    each
    for each in by_path().values()
    if each.metadata["table"] == "task"
    or (each.metadata["tasks"] and "text" not in each.metadata["tasks"])
    or each.name in ("length_buckets", "epochs")
]
TASK = {"task": "causal-lm", "model": "m", "data": "a.csv"}
NEEDED = {
    "train_on": {"columns": {"messages": "m"}}, "patch_size": {"model": ""},
    "beams": {"translate": 8}, "bleu_words": {"translate": 8},
}  # fmt: skip


# Former names of all settings at once: tests/train/config/test_former_keys.py
@pytest.mark.parametrize("name_of", quick([key_of], [key_of, former_key]))
@pytest.mark.parametrize("each", OF_TASKS, ids=key_of)
def test_every_flag_of_a_task_reaches_its_setting(loop, each, name_of):
    """Each with a task in which it means something, by its own name and by its former one."""
    task = next((task for task in list(TASKS)[1:] if has_effect(each, task)), "")
    known = {"packing": ("48", 48), "beams": ("4", 4), "stratify": ("", False)}
    text, value = known.get(each.name) or other_value(each)
    settings = {**TASK, "task": task, **NEEDED.get(each.name, {}), each.name: value}
    flags = [
        part
        for name, given in settings.items()
        if name not in (each.name, "columns")
        for part in (cli_flags.flag(name_of(TrainConfig.__dataclass_fields__[name])), str(given))
    ]
    flags += ["--messages-column", "m"] if "columns" in settings else []
    own = cli_flags.flag(name_of(each))
    flag = f"--no-{own[2:]}" if value is False else own
    assert cli.main(["train", *flags, flag, *([text] if text else [])]) == 0
    settings["packing"] = int(settings.get("packing", 0))
    assert loop == [resolved(TrainConfig(**settings))]


COLUMNS = [(task, name) for task, entry in TASKS.items() for name in entry.columns]


@pytest.mark.parametrize(("task", "name"), COLUMNS)
def test_every_flag_of_a_column_reaches_its_task(loop, capsys, task, name):
    """By its own flag, by its former one if it had one, and in a table; another task refuses it with its columns."""
    flags = ["--model", "m", "--data", "a.csv"]
    needed = {"spans": "s"} if (task, name) == ("tagging", "text") else {}
    flags += [f"--data.columns.{other}={column}" for other, column in needed.items()]
    columns = {**needed, name: "x y=z é"}
    expected = TrainConfig(task=task, model="m", data="a.csv", columns=columns)
    assert expected.column_of(name) == "x y=z é"
    former = [f"--{name}-column", "x y=z é"]
    for given in (
        [f"--data.columns.{name}", "x y=z é"],
        *([former] if f"{name}_column" in FORMER else []),
        ["--data.columns", f"{name}=x y=z é"],
    ):
        assert cli.main(["train", "--task", task, *flags, *given]) == 0
        assert loop.pop() == resolved(expected)
    other = next(each for each in TASKS if each not in ("text", *tasks_with(name)))
    capsys.readouterr()
    flags = flags[:4]
    assert cli.main(["train", "--task", other, *flags, f"--data.columns.{name}", "x"]) == 2
    refused = capsys.readouterr().err
    assert f"--data.columns.{name} 'x': has no effect with --task '{other}'" in refused
    assert ", ".join(TASKS[other].columns) in refused and ", ".join(tasks_with(name)) in refused


def test_the_help_tells_each_tasks_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, words in column_help().items():
        assert re.search(rf"--data\.columns\.{name} STR +{re.escape(words)} +│", shown)
        assert all(task in words for task in tasks_with(name))


def test_columns_of_a_file_and_flags_are_one_table(loop, tmp_path, capsys):
    file = tmp_path / "a.toml"
    file.write_text(
        "model.name = 'm'\ntask.name = 'classification'\n[data]\nsource = 'a'\n"
        "[data.columns]\ntext = 'body'\npair = 'title'\n"
    )
    assert cli.main(["train", str(file), "--data.columns.text", "sentence"]) == 0
    [config] = loop
    assert config.columns == {"text": "sentence", "pair": "title", "label": "label"}
    # Unknown to all tasks: with its line, the nearest column and all columns of the task.
    file.write_text(file.read_text() + "lable = 'mark'\n")
    assert cli.main(["train", str(file)]) == 2
    refused = capsys.readouterr().err
    assert "a.toml:8: data.columns.lable = 'mark': has no effect" in refused
    assert "text, pair, label. Closest: 'label'." in refused
    arguments = ["train", "--prompt-column", "a", "--data.columns.prompt", "b"]
    cli_raises(arguments, ConfigError, "config.both-keys", "--prompt-column = 'a'")


@pytest.mark.parametrize("name", ["--log-to", "--log.to"])
def test_trackers_have_two_flags(loop, name):
    assert cli.main(["train", name, "wandb,trackio"]) == 0
    assert [each.log_to for each in loop] == ["wandb,trackio"]


@pytest.mark.parametrize("name_of", [key_of, former_key, path_of])
def test_every_flag_reaches_its_setting(loop, name_of):
    plain = [
        each
        for each in by_path().values()
        if each.type not in (bool, TABLE)
        and each.name not in ("model", "tokenizer", "parent")
        and each not in OF_TASKS
    ]
    expected = {each.name: other_value(each)[1] for each in plain}
    arguments = [
        text for each in plain for text in (cli_flags.flag(name_of(each)), other_value(each)[0])
    ]
    switches = [
        "--log.tensorboard",
        "--device.compile",
        "--recipe.layers",
        "lm_head=bf16",
        "--recipe.layers",
        "layers.*.up=fp8-row",
    ]
    assert cli.main(["train", *arguments, *switches]) == 0
    table = {"lm_head": "bf16", "layers.*.up": "fp8-row"}
    assert loop == [TrainConfig(**expected, tensorboard=True, compile=True, layers_recipe=table)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--learnin-rate", "1"],
            "Unknown option: --learnin-rate. Did you mean --learning-rate?",
        ),
        (
            ["--model.layers", "2.5"],
            "Invalid value for --model.layers: '2.5' is not a whole number.",
        ),
        (["--model.layers", "2.0"], "'2.0' is not a whole number"),
        (["--model.layers", "true"], "'true' is not a whole number"),
        (["--model.layers", "0x10"], "'0x10' is not a whole number"),
        (["--model.layers", "9" * 5000], "9" * 5000),
        (["--training.seed", "1e3"], "'1e3' is not a whole number"),
        (["--optimizer.learning-rate", "fast"], "'fast' is not a number"),
        (
            ["--optimizer.learning-rate", "nan"],
            "--optimizer.learning-rate nan: must be a finite number",
        ),
        (
            ["--optimizer.learning-rate", "1e400"],
            "--optimizer.learning-rate inf: must be a finite number",
        ),
        (["--model.layers", "-1"], "--model.layers -1: must be from 1"),
        (["--model.layers"], "--model.layers requires an argument"),
        (["--model.layers", "2", "--model.layers", "3"], "--model.layers specified multiple times"),
        (["--resume=maybe"], "--resume"),
        (["--recipe.layers", "lm_head"], "'lm_head' is not 'pattern=recipe'"),
        (["--recipe.layers", "a=bf16", "--recipe.layers", "a=fp8-row"], "'a=fp8-row'"),
        (
            ["--recipe.precision", "amp"],
            "--recipe.precision 'amp': must be one of",
        ),
        (["a.toml", "b.toml"], "b.toml"),
        (["absent.toml"], "absent.toml: cannot be read as a configuration: No such file"),
        (["--recipe", "fp8-rwo"], "--recipe 'fp8-rwo': stub: no such recipe. Closest: 'fp8-row'"),
        (["--recipe.layers", "lm_head=fp9"], "--recipe.layers 'fp9'"),
        (["--compare", "bf61"], "--compare 'bf61'"),
        (["--output", ""], "--output '': must be not empty"),
    ],
)
def test_a_wrong_flag_is_refused_with_code_2(loop, capsys, arguments, words):
    assert cli.main(["train", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert loop == []


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p, each in by_path().items() if each.type is not TABLE])
def test_a_bad_value_is_answered_with_the_flag_or_the_key(path, tmp_path, capsys):
    """Of every setting with a rule, typed and in a file. A file's answer has its line."""
    each = by_path()[path]
    flag, file = cli_flags.flag(path), tmp_path / "a.toml"
    bad = "\0" if each.type is str else "nan" if each.type is float else "-99999"
    if each.type is bool:
        literal, typed = "3", [f"{flag}=3"]
    elif each.type is NUMBERS:
        literal, typed = "[3, 4]", [flag, "3,4"]
    else:
        literal, typed = (r'"\u0000"' if each.type is str else bad), [f"{flag}={bad}"]
    assert cli.main(["train", *typed]) == 2
    assert re.match(rf"narrowgauge: (train: .*)?{flag}\b", capsys.readouterr().err)
    file.write_text(f"{path} = {literal}\n")
    assert cli.main(["train", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"narrowgauge: {file}:1: ") and flag not in said
    assert path in said or f"{key_of(each)} = " in said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--recipe.save", "exact"], "--recipe.save 'exact': says"),
        (["--recipe.save", "exact"], "Add --recipe.fuse, or"),
        (["--steps", "0"], "--steps 0: must"),
        (["--model.heads", "3"], "--model.hidden-size 320: must be a multiple of 6, twice --model.heads."),
        (["a.toml", "--model.heads", "3"], "model.hidden_size = 320: must be a multiple of 6, twice --model.heads."),
        (["--batch.size", "5", "--batch.micro-batches", "2"], "--batch.micro-batches 2: must divide --batch.size 5."),
        (["a.toml"], "a.toml:2: training.steps = 0"),
    ],
)  # fmt: skip
def test_a_sentence_names_settings_as_they_were_given(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(f"[training]\nsteps = {0 if len(typed) == 1 else 9}\n")
    assert cli.main(["train", *typed]) == 2
    assert said in capsys.readouterr().err


def test_nearly_every_typo_of_a_flag_gets_the_right_suggestion(capsys):
    """A letter deleted or two swapped in the middle of every third flag; at least 95 % suggested rightly."""
    right = total = 0
    known = {key_of(field) for field in by_path().values()}
    for key in sorted(known)[::3]:
        middle = len(key) // 2
        for typo in {
            key[:middle] + key[middle + 1 :],
            key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :],
        }:
            if typo not in known:
                total += 1
                assert cli.main(["train", cli_flags.flag(typo) + "=1"]) == 2
                right += f"Did you mean {cli_flags.flag(key)}?" in capsys.readouterr().err
    assert total > 25 and total - right <= max(2, 0.05 * total)


def test_flags_override_the_file(loop, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(
        'training.steps = 5\nmodel.layers = 2\nrecipe = "fp8-row"\n[recipes]\nlm_head = "bf16"\n'
    )
    assert cli.main(["train", str(file), "--model.layers", "3", "--no-device.compile"]) == 0
    assert cli.main(["train", "--config", str(file), "--recipe.layers", "q=bf16"]) == 0
    assert (loop[0].steps, loop[0].layers, loop[0].recipe, loop[0].layers_recipe) == (
        5,
        3,
        "fp8-row",
        {"lm_head": "bf16"},
    )
    assert loop[1].layers_recipe == {"q": "bf16"}


def test_a_mistake_in_the_file_is_told_with_its_line(loop, capsys, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text("training.steps = 5\nlayres = 2\n")
    assert cli.main(["train", str(file)]) == 2
    assert (
        f"{file}:2: 'layres' is not a setting. Closest: 'model.layers'." in capsys.readouterr().err
    )


def a_run(path: Path, **changes: object) -> TrainConfig:
    config = resolved(TrainConfig(output=str(path), **changes))
    with RunFolder.claim(path, resume=False) as folder:
        folder.write_config(config)
    return config


def test_resume_takes_the_configuration_of_the_run(loop, tmp_path):
    stored = a_run(tmp_path / "run", layers=2, steps=10, layers_recipe={"lm_head": "bf16"})
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    assert cli.main(["train", "--resume", "--output", str(moved), "--training.steps", "20"]) == 0
    assert (loop[0].layers, loop[0].steps, loop[0].resume, loop[0].output) == (
        2,
        20,
        True,
        str(moved),
    )
    assert loop[0].layers_recipe == stored.layers_recipe


def test_resume_of_a_folder_without_a_run_is_refused_if_nothing_else_is_asked(
    loop, capsys, tmp_path
):
    """A mistyped folder. With a CONFIG or a setting it is a new run: what starts a job again after a preemption says --resume always."""
    assert cli.main(["train", "--resume", "--output", str(tmp_path / "mistyped")]) == 2
    assert (
        "mistyped' holds no run (no config.toml) to go on with" in capsys.readouterr().err
        and not loop
    )
    assert (
        cli.main(["train", "--resume", "--output", str(tmp_path / "new"), "--model.layers", "2"])
        == 0
    )
    assert loop[0].layers == 2


def test_resume_as_another_run_is_refused(loop, capsys, tmp_path):
    a_run(tmp_path, layers=2)
    assert cli.main(["train", "--resume", "--output", str(tmp_path), "--model.layers", "3"]) == 2
    assert "cannot resume with --model.layers 3, but the run has 2" in capsys.readouterr().err
    file = tmp_path / "other.toml"
    file.write_text(toml.dump(TrainConfig(layers=2, seed=1)))
    assert cli.main(["train", str(file), "--resume", "--output", str(tmp_path)]) == 2
    assert "training.seed = 1, but the run has 0" in capsys.readouterr().err
    file.write_text(toml.dump(TrainConfig(layers=2, seed=1, resume=True, output=str(tmp_path))))
    assert cli.main(["train", str(file)]) == 2
    assert "training.seed = 1, but the run has 0" in capsys.readouterr().err
    assert loop == []


def test_resume_of_a_run_that_never_began_begins_it(loop, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(toml.dump(TrainConfig()))
    assert cli.main(["train", str(file), "--resume", "--output", str(tmp_path / "new")]) == 0
    assert loop[0].resume


def test_the_exit_code_of_the_loop_is_the_commands(monkeypatch, loop):
    monkeypatch.setattr("narrowgauge.lab.training", SimpleNamespace(run=lambda config: 75))
    assert cli.main(["train"]) == 75


# The other verbs


def test_recipes_lists_all_or_explains_one(capsys):
    from narrowgauge import recipes

    assert cli.main(["recipes"]) == 0
    heads = [
        line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()
    ]
    assert heads[:-1] == list(recipes.names())  # the last line is the legend
    assert cli.main(["recipes", "fp8-row"]) == 0
    shown = capsys.readouterr().out.splitlines()[:4]
    assert shown[0].startswith("fp8-row: ") and [line.split()[0] for line in shown[1:]] == list(
        recipes.get("fp8-row").gemms()
    )
    assert all("e4m3" in line for line in shown[1:])
    assert cli.main(["recipes", "fp8-rwo"]) == 2
    assert "Closest: 'fp8-row'" in capsys.readouterr().err


def test_report_prints_the_path_of_the_page(monkeypatch, capsys):
    monkeypatch.setattr("narrowgauge.report.page.write", lambda folder: folder / "report.html")
    assert cli.main(["report", "runs/a"]) == 0
    assert cli.main(["report"]) == 0
    assert (
        capsys.readouterr().out
        == f"{Path('runs/a/report.html')}\n{Path('runs/latest/report.html')}\n"
    )


def test_info_prints_what_the_hardware_page_says(monkeypatch, capsys):
    monkeypatch.setattr(
        "narrowgauge.diagnose.machine", SimpleNamespace(info=lambda: "cpu: exact"), raising=False
    )
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == "cpu: exact\n"


@pytest.mark.parametrize("verb", ["info", "report", "recipes"])
def test_other_verbs_refuse_what_they_do_not_know(capsys, verb):
    assert cli.main([verb, "--fro", "x"]) == 2
    assert "Unknown option: --fro" in capsys.readouterr().err
    assert cli.main([verb, "a", "b"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["debug", "r", "--at", "5.5"],
        ["blame", "r", "--at", "1e1"],
        ["evaluate", "r", "--limit", "2.0"],
    ],
)
def test_no_verb_rounds_a_number(arguments, capsys):
    assert cli.main(arguments) == 2
    assert (
        f"Invalid value for {arguments[2]}: {arguments[3]!r} is not a whole number."
        in capsys.readouterr().err
    )


def test_flags_are_read_where_another_package_has_imported_pydantic(tmp_path):
    """cyclopts checks values by pydantic once it is imported; a table and a pair are not of the type that is typed."""
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    absent = f"--data={tmp_path / 'none'}"
    assert cli.main(["study", absent, f"--output={tmp_path / 'study'}"]) == 3  # not 2: arguments
    settings = ["--recipe.layers", "lm_head=bf16", "--optimizer.betas", "0.9,0.95", "--device=cpu"]
    assert cli.main(["train", absent, f"--output={tmp_path / 'run'}", *settings]) == 3
