"""Flags and keys of other trainers: understood where they mean the same, else answered (exact)."""

from __future__ import annotations

import inspect
import re

import pytest

from narrowgauge import cli
from narrowgauge.cli import flags
from narrowgauge.cli.plan import plan
from narrowgauge.cli.study import OF_STUDY, study
from narrowgauge.cli.train import train
from narrowgauge.errors import ConfigError
from narrowgauge.train.config import toml
from narrowgauge.train.config.foreign_names import (
    FOREIGN,
    Answer,
    Depends,
    Same,
    answer,
    documented,
    understood,
)
from narrowgauge.train.config.rules import former_path
from narrowgauge.train.config.settings import TrainConfig, path_of
from tests.processes import ROOT
from tests.raising import raises

# As typed elsewhere -> as it is read here.
MEANS = {
    "--lr 2e-4": "--optimizer.learning-rate=2e-4",
    "--lr=-1": "--optimizer.learning-rate=-1",
    "--bf16": "--recipe=bf16",
    "--bf16 True": "--recipe=bf16",
    "--fp8": "--recipe=fp8-current",
    "--num-train-epochs 3": "--training.epochs=3",
    "--num_train_epochs=3": "--training.epochs=3",
    "--max-steps 70": "--training.steps=70",
    "--lr-scheduler-type linear": "--optimizer.schedule=linear",
    "--lr_scheduler_type constant_with_warmup": "--optimizer.schedule=constant",
    "--save-steps 40": "--checkpoint.every=40",
    "--save-total-limit 3": "--checkpoint.keep=3",
    "--eval-steps 20": "--evaluation.every=20",
    "--logging-steps 5": "--log.every=5",
    "--report-to wandb": "--log.to=wandb",
    "--report_to none": "--log.to=",
    "--report-to tensorboard": "--log.tensorboard=true",
    "--report_to wandb,tensorboard": "--log.to=wandb --log.tensorboard=true",
    "--per-device-train-batch-size 8": "--batch.size=8",
    "--per_device_train_batch_size 8 --gradient-accumulation-steps 4": "--batch.size=32 --batch.micro-batches=4",
    "--gradient_accumulation_steps 4 --micro_batch_size 2": "--batch.micro-batches=4 --batch.size=8",
    "--global-batch-size 32 --grad-accum 4": "--batch.size=32 --batch.micro-batches=4",
    "--gradient-accumulation-steps 1": "",
    "--num-train-epochs 3.0": "--training.epochs=3",
    "--max_steps -1": "",
    "--warmup_ratio 0": "--optimizer.warmup-steps=0",
    "--resume-from-checkpoint": "--resume=true",
    "--resume_from_checkpoint True": "--resume=true",
    "--resume_from_checkpoint None": "",
    "--max-seq-length 512": "--model.sequence-length=512",
    "--cutoff_len 512": "--model.sequence-length=512",
    "--optim adamw_bnb_8bit": "--optimizer=adamw --optimizer.states=8bit",
    "--adam_beta2 0.95": "--optimizer.betas=0.9,0.95",
    "--adam_beta1 0.8 --adam_beta2 0.95": "--optimizer.betas=0.8,0.95",
    "--fp16": "--recipe=none --recipe.precision=amp-fp16",
    "--fp16 False": "",
    "--mixed_precision no": "--recipe=none --recipe.precision=fp32",
    "--eval_strategy steps --eval_steps 20": "--evaluation.every=20",
    "--save_strategy no": "--checkpoint.every=0",
    "--do_train": "",
    "--use-peft --lora-r 4": "--lora.r=4",
    "--output-dir runs/mine": "--output=runs/mine",
    "--model-name-or-path some/model": "--model=some/model",
    "--tokenizer_name some/model": "--data.tokenizer=some/model",
    "--train-file a.jsonl": "--data=a.jsonl",
    "--val-data b.jsonl": "--data.validation-data=b.jsonl",
    "--val_set_size 0.1": "--data.validation-fraction=0.1",
    "--lora-r 4": "--lora.r=4",
    "--lora_alpha 32": "--lora.alpha=32",
    "--lora_target all": "--lora.targets=all-linear",
    "--use_dora": "--lora.dora=true",
    "--gradient-checkpointing": "--memory.checkpointing=full",
    "--gradient_checkpointing False": "--memory.checkpointing=none",
    "--torch-compile": "--device.compile=true",
    "--max-grad-norm 0.5": "--optimizer.clip=0.5",
    "--num_warmup_steps 7": "--optimizer.warmup-steps=7",
    "--optim adamw_torch_fused": "--optimizer=adamw",
    "--min-lr 1e-5": "--optimizer.min-learning-rate=1e-5",
    "--lora-target-modules q_proj,v_proj": "--lora.targets=q_proj+v_proj",
    "--n-layer 2": "--model.layers=2",
    "--n_embd 64": "--model.hidden-size=64",
    "--n-head 4": "--model.heads=4",
    "--block-size 64": "--model.sequence-length=64",
    "--group-by-length": "--batch.order=length",
    "--no_cuda": "--device=cpu",
    "--data_seed 5": "--training.seed=5",
    "--global-batch-size 32": "--batch.size=32",
}
# What a flag has an effect with.
NEEDS = {
    "--val-data b.jsonl": "--task classification --data a.jsonl ",
    "--group-by-length": "--task classification --data a.jsonl ",
}
# As typed elsewhere -> what the answer names.
ANSWERED = {
    "--gradient-accumulation-steps 4": "--batch.micro-batches 4",
    "--warmup-ratio 0.03": "--optimizer.warmup-steps",
    "--resume-from-checkpoint runs/a": "--resume",
    "--load-in-8bit": "--base int8",
    "--load_in_4bit True": "nvfp4",
    "--lr-scheduler-type polynomial": "--optimizer.schedule",
    "--bf16 false": "--recipe none",
    "--deepspeed zero3.json": "--parallel fsdp",
    "--early-stopping-patience 3": "--task.best",
    "--lr": "value",
    "--num-train-epochs 0.5": "--training.steps",
    "--eval-steps 0.1": "--evaluation.every",
    "--optim paged_adamw_8bit": "--optimizer.states 8bit",
    "--save_strategy epoch": "--checkpoint.every",
    "--use-peft": "--lora r=16",
    "--max-seq-length long": "--data.max-length long",
    "--report-to all": "--log.tensorboard",
    "--trust-remote-code": "never runs",
    "--num-generations 4": "convert_trainer",
    "--adam_beta2 0.9 --optimizer.betas 0.9,0.95": "--optimizer.betas 0.9,0.9",
    "--batch-size 8 --micro-batch-size 8": "--batch.micro-batches 4",
    "--output_dir -x": "value",
    "--gradient-accumulation-steps 0": "--batch.micro-batches N",
    "--per-device-train-batch-size=-8": "--batch.size 4 x N",
}


OF_TRAIN = inspect.signature(train).parameters


def config_of(words: str):
    """What `narrowgauge train` would train with; nothing runs."""
    found = []

    def keep(config: str = "", **given):
        found.append(flags.configuration(config, given))
        return 0

    keep.__signature__ = train.__signature__
    cli._call(keep, "train", words.split())
    return found[0]


@pytest.mark.parametrize("words", MEANS)
def test_what_means_the_same_is_understood(words):
    before, after = ["--steps", "3"], ["--resume"]
    typed = words.split()
    found, said = flags.of_others("train", [*before, *typed, *after], OF_TRAIN)
    assert found == [*before, *MEANS[words].split(), *after]
    # Each flag is said, with its value.
    names = [word.partition("=")[0] for word in typed if word.startswith("--")]
    assert [each.split()[0] for each in said] == names
    assert all(" as " in each for each in said)


@pytest.mark.slow  # 0.3 s of processor time each
@pytest.mark.parametrize("words", [each for each in MEANS if each != "--lr=-1"])
def test_what_is_understood_starts_a_run(words):
    """The settings are those that the flags here give. A model, so that an adapter has one."""
    extra = "" if "--model" in MEANS[words] else "--model m "
    extra += NEEDS.get(words, "")
    assert config_of(extra + words) == config_of(extra + MEANS[words])


def test_a_refused_value_is_answered_alike():
    for words in ("--lr=-1", MEANS["--lr=-1"]):
        with raises(ConfigError, "config.learning_rate", "--optimizer.learning-rate", "-1"):
            config_of(words)


@pytest.mark.parametrize("words", ANSWERED)
def test_the_rest_is_answered_with_what_to_type(words):
    with raises(ConfigError, "cli.foreign", ANSWERED[words]):
        flags.of_others("train", words.split(), OF_TRAIN)


def test_a_command_of_another_trainer_trains(capsys):
    """Several at once, and own flags beside them; each is said."""
    found = config_of(
        "--model-name-or-path a/model --train-file a.jsonl --lr 1e-4 --training.steps 9 --bf16 --save_steps 4 --lora-r 2 --lora_alpha 4 "
        "--gradient-checkpointing --torch-compile --report_to none"
    )
    assert (found.model, found.data, found.learning_rate) == ("a/model", "a.jsonl", 1e-4)
    assert (found.steps, found.recipe, found.checkpoint_every) == (9, "bf16", 4)
    assert (found.lora, found.checkpointing, found.compile) == ("r=2,alpha=4", "full", True)
    said = capsys.readouterr().err
    assert said.count(" as ") == 11 and said.count("\n") == 1


def test_a_share_of_warmup_takes_the_steps_of_the_command():
    for steps in ("--max_steps 110", "--training.steps 110", "--steps 110"):
        assert config_of(f"--warmup-ratio 0.03 {steps}").warmup_steps == 4  # rounded up
    with raises(ConfigError, "cli.foreign", "--optimizer.warmup-steps"):
        config_of("--warmup-ratio 0.03")


def test_an_answer_ends_the_command():
    with raises(ConfigError, "cli.foreign", "--base int8"):
        config_of("--lr 1e-4 --load-in-8bit")


def test_several_ranks_may_share_rows(monkeypatch):
    """The size of a whole step is then for the user to say."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises(ConfigError, "cli.foreign", "--batch.size 32 --batch.micro-batches 4"):
        config_of("--per-device-train-batch-size 8")


@pytest.mark.parametrize(
    ("task", "name", "settings"),
    [
        ("text", "max-seq-length", {"sequence_length": 64, "max_length": 0}),
        ("causal-lm", "max-seq-length", {"max_length": 64, "too_long": "truncate"}),
        ("causal-lm", "sequence-len", {"max_length": 64, "too_long": "skip"}),
        ("question-answering", "max-seq-length", {"max_length": 64, "too_long": "error"}),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_a_length_is_of_a_text_or_of_an_example(tmp_path, task, name, settings, is_file):
    data = "" if task == "text" else "--model m --data a.jsonl "
    path = tmp_path / "a.toml"
    path.write_text(f'task = "{task}"\n')
    given = f"{path} " if is_file else f"--task {task} "
    found = config_of(f"{given}{data}--{name} 64")
    assert {key: getattr(found, key) for key in settings} == settings


def test_a_run_folder_is_resumed_and_another_path_is_answered(tmp_path):
    run = tmp_path / "run"
    with raises(ConfigError, "cli.foreign", "--resume --output"):
        config_of(f"--resume-from-checkpoint {run}")
    run.mkdir()
    (run / "config.toml").write_text("[training]\nsteps = 7\n")
    found = config_of(f"--resume-from-checkpoint {run}")
    assert (found.resume, found.output, found.steps) == (True, str(run), 7)


def test_a_switch_leaves_the_file_behind_it():
    found, _ = flags.of_others("plan", ["--bf16", "examples/demo.toml", "--no_cuda"], OF_TRAIN)
    assert found == ["--recipe=bf16", "examples/demo.toml", "--device=cpu"]


@pytest.mark.parametrize("words", ["--bf16", "--data_seed 4"])
def test_a_study_names_what_was_typed(words):
    """Its runs differ in recipe and seed, so it takes neither."""
    with raises(ConfigError, "cli.foreign", words, "--recipe" if "bf16" in words else "seed"):
        flags.of_others("study", words.split(), inspect.signature(study).parameters)


def test_what_was_read_is_said_before_an_error(capsys):
    with raises(ConfigError, "cli.arguments"):
        config_of("--lr 1e-4 --base-lr 2e-4")
    assert "--lr 1e-4 as --optimizer.learning-rate 1e-4" in capsys.readouterr().err


def test_no_name_stands_for_a_former_one():
    """The next release knows no former names."""
    former = {*toml.EARLIER} | {former_path(key) for key in toml.EARLIER}
    assert not former & {each.key for each in FOREIGN.values() if isinstance(each, Same)}


def test_a_name_of_nobody_is_an_unknown_option():
    for words in ("--nonsense 3", "--lr x"):
        with raises(ConfigError, "cli.arguments"):
            config_of(words)


def test_every_meaning_names_settings_that_exist():
    """At least 80 names. None is a setting here, and no answer names a flag that is none."""
    flags_here = {"--" + key.replace("_", "-") for key in toml.NAMES} | {"--help"}  # fmt: skip
    own = {*toml.NAMES, *toml.FORMER}
    for verb in (train, plan, study):
        own |= {name.replace("-", "_") for name in inspect.signature(verb).parameters}
    assert len(FOREIGN) >= 80
    for name, meaning in FOREIGN.items():
        assert name not in own, name
        words = meaning.words if isinstance(meaning, Answer) else meaning.otherwise
        shown = meaning.shown if isinstance(meaning, Depends) else ""
        words = words.words if isinstance(words, Answer) else words
        for flag in re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", f"{words} {shown}"):
            assert flag in flags_here | {"--tasks", "--nproc-per-node"}, (name, flag)
        if isinstance(meaning, Same):
            assert meaning.key in toml.NAMES, (name, meaning.key)


@pytest.mark.parametrize("name", FOREIGN)
def test_every_name_is_read_or_answered(name):
    """Of a flag without a value, too. A listed value is one that the setting takes."""
    meaning = FOREIGN[name]
    assert answer(name, "", str)
    if isinstance(meaning, Same):
        for value, here in meaning.values.items():
            assert understood(name, value) == ((meaning.key, here),)


@pytest.mark.parametrize("hyphen", ["-", "_"])
def test_no_name_gets_a_wrong_suggestion(hyphen):
    """With any value: flags that exist here, or a sentence that names what was typed."""
    for name in FOREIGN:
        flag = f"--{name.replace('_', hyphen)}"
        for value in ("", "1", "true", "none", "cosine", "0.5", "some/name", "[1"):
            typed = f"{flag} {value}".split()
            try:
                found, _ = flags.of_others("train", typed, OF_TRAIN)
            except ConfigError as error:
                assert error.code == "cli.foreign" and typed[0] in str(error)
            else:
                keys = (
                    each[2:].partition("=")[0].replace("-", "_") for each in found if each != value
                )
                assert all(key in toml.NAMES for key in keys), (typed, found)


def test_the_documents_have_the_table():
    """docs/training.md, between its two marks, is what the table says."""
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    begin, end = (
        page.index("| elsewhere | here |"),
        page.index("\n\n", page.index("| elsewhere | here |")),
    )
    lines = [f"| {names} | {here} |" for here, names in documented().items()]
    assert page[begin:end].splitlines()[2:] == lines


def test_a_file_is_answered_too(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[optimizer]\nlr = 1e-4\n")
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        toml.read(path)
    path.write_text("[training]\nper_device_train_batch_size = 4\n")
    with pytest.raises(ConfigError, match=r"batch\.size = 16, batch\.micro_batches = 4"):
        toml.read(path)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_is_answered_with_keys(name, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(f"[optimizer]\n{name} = 4\n")
    with pytest.raises(ConfigError) as caught:
        toml.read(path)
    said = str(caught.value)
    flags_here = {"--" + key.replace("_", "-") for key in toml.NAMES}
    assert f"{path}:2: " in said and repr(name) in said
    assert not flags_here & {*re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", said)}


@pytest.mark.parametrize("name", sorted({*OF_STUDY} - {"parallel", "output"}))  # flags of its own
def test_a_setting_that_a_study_decides_is_named_as_such(name):
    """Not as an unknown flag with a neighbour's name: --compare is none of --compile's."""
    typed = flags.flag(path_of(TrainConfig.__dataclass_fields__[name]))
    with raises(ConfigError, "cli.of-train", typed):
        flags.of_others("study", [typed, "1"], inspect.signature(study).parameters)
