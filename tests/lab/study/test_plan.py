"""What a study refuses before anything is trained (exact)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.cli import main
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.lab.study import room
from narrowgauge.lab.study.plan import Study, StudyFolder
from narrowgauge.train.config.settings import TrainConfig, replace
from tests.raising import cli_raises, coded, raises


@pytest.fixture
def make_study(tmp_path):
    def make(recipes=("bf16", "fp8-current"), seeds=(0, 1), config=None, **more):
        values = {"config": config or TrainConfig(), "output": tmp_path / "study"}
        return Study(recipes=recipes, seeds=seeds, **{**values, **more})

    return make


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipes": ("bf16",)}, coded("study.recipe-count")),
        ({"recipes": ("bf16", "mxfp8", "bf16")}, coded("study.recipe-twice", "'bf16'")),
        ({"seeds": (3,)}, coded("study.seed-count")),
        ({"seeds": (3, 3)}, coded("study.seed-count")),
        ({"metric": "mcc"}, coded("study.best", "metric = 'mcc'")),
        ({"metric": "none"}, coded("study.metric")),
        ({"metric": "los"}, coded("study.best", "metric = 'los'")),
        ({"margin": "0"}, coded("study.margin")),
        ({"recipes": ("bf16", "positive-control")}, coded("study.control", "'positive-control'")),
        ({"config": TrainConfig(compare="bf16")}, coded("study.setting", "compare")),
        ({"config": TrainConfig(parallel="fsdp=2")}, coded("study.setting")),
        ({"config": TrainConfig(parent="runs/a@20")}, coded("study.setting", "from = 'runs/a@20'")),
        ({"seeds": tuple(range(6000))}, coded("study.run-count", "10,000")),
    ],
)
def test_what_cannot_be_a_study_is_refused(make_study, changes, said):
    with raises(ConfigError, said):
        make_study(**changes)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seeds=1"], coded("study.seed-count", "'1'")),
        (["--seeds=a"], coded("study.seeds", "'a'")),
        (["--seeds=1,1"], coded("study.seed-count", "1")),
        (["--recipes=bf16,fp8-curent"], coded("recipes.unknown", "'fp8-curent'", "'fp8-current'")),
        (["--recipes=bf16,fp8,fp8-current"], coded("study.same-recipe", "'fp8'", "'fp8-current'")),
        (["--recipes=bf16,auto"], coded("study.auto", "'auto'")),
        (["--parallel=0"], coded("study.parallel", "'0'")),
        (["--parallel=all"], coded("study.parallel", "'all'")),
        (["--training.steps=0"], coded("config.steps", "training.steps = 0")),
        (["--recipe=bf16"], coded("cli.of-train", "--recipe", "--recipes")),
        (["--metric=bleu"], coded("study.best", "bleu")),
    ],
)
def test_the_command_line_refuses_before_data_are_read(tmp_path, flags, expected):
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "a"}\n{')  # damaged behind its first row, which alone is looked at
    study = ["study", f"--data={data}", f"--output={tmp_path / 'study'}"]
    cli_raises([*study, *flags], ConfigError, expected)


def test_data_that_are_not_there_are_an_error_before_the_first_step(tmp_path, capsys):
    assert main(["study", f"--data={tmp_path / 'none'}", f"--output={tmp_path / 'study'}"]) == 3
    assert not list((tmp_path / "study").glob("*-seed*"))


def test_runs_differ_in_recipe_and_seed_alone_and_the_reference_has_no_patterns(make_study):
    config = TrainConfig(layers_recipe={"lm_head": "mxfp8"}, switch="bf16@80%", threads=3, steps=50)
    study = make_study(config=config, recipes=("bf16", "fp8-current"), seeds=(4, 5))
    reference, narrow, control = (study.settings_of(job) for job in study.jobs()[:3])
    assert [(job.recipe, job.seed) for job in study.jobs()] == [
        ("bf16", 4),
        ("fp8-current", 4),
        ("positive-control", 4),
        ("bf16", 5),
        ("fp8-current", 5),
        ("positive-control", 5),
    ]
    assert (
        replace(control, recipe="bf16", output=reference.output) == reference
    )  # the recipe alone differs
    without = make_study(config=config, control=False)
    assert {job.recipe for job in without.jobs()} == {"bf16", "fp8-current"}
    assert reference.layers_recipe == {} and reference.switch == "" and reference.recipe == "bf16"
    assert narrow.layers_recipe == {"lm_head": "mxfp8"} and narrow.switch == "bf16@80%"
    assert (
        reference.cache == narrow.cache == str(study.output / "cache")
        and narrow.seed == reference.seed == 4
    )
    assert study.settings_of(study.jobs()[0], threads=2, device="cuda:1").device == "cuda:1"


def stored_for(study, **changes):
    facts = {
        "recipes": list(study.recipes),
        "seeds": list(study.seeds),
        "metric": "loss",
        "margin": "0.25%",
        "threads": 1,
        "identity": {"content_hash": "a"},
    }
    return facts | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": (0, 5)}, coded("study.left-out", "seeds", "0, 1", "and 1", "1 would")),
        ({"recipes": ("bf16", "mxfp8")}, coded("study.left-out")),
        ({"recipes": ("fp8-current", "bf16")}, coded("study.reference", "bf16")),
        ({"metric": "perplexity"}, coded("study.best", "metric = 'perplexity'")),
        (
            {"config": TrainConfig(learning_rate=2e-3)},
            coded("study.other-study", "learning_rate", "002", "001"),
        ),
        ({"config": TrainConfig(steps=301)}, coded("study.other-study", "training.steps = 301")),
    ],
)
def test_a_folder_of_another_study_is_refused(make_study, changes, said):
    study = make_study()
    folder = StudyFolder(study.output)
    study.output.mkdir()
    folder.write(stored_for(study), study.config)
    with raises(ConfigError, said):
        folder.refuse(make_study(**changes), folder.stored())


def test_more_seeds_recipes_and_lines_on_the_console_go_on(make_study):
    study = make_study()
    folder = StudyFolder(study.output)
    study.output.mkdir()
    folder.write(stored_for(study), study.config)
    more = make_study(
        recipes=("bf16", "fp8-current", "mxfp8"), seeds=(0, 1, 2), config=TrainConfig(log_every=3)
    )
    folder.refuse(more, folder.stored())


def test_a_run_a_damaged_file_and_other_data_are_refused(make_study, tmp_path):
    study = make_study()
    folder = StudyFolder(study.output)
    study.output.mkdir()
    assert folder.stored() is None
    (study.output / "run.json").write_text("{}")
    with raises(ConfigError, "study.holds-run"):
        folder.refuse(study, None)
    (study.output / "run.json").unlink()
    (study.output / "config.json").write_text("{}")
    with raises(ConfigError, "run.holds-model", "config.json"), folder.claimed():
        pass
    with raises(DataError, "study.other-data", "data content"):
        folder.refuse_data(stored_for(study), {"content_hash": "b"})
    folder.refuse_data(stored_for(study), {"content_hash": "a"})
    for text in (
        "{",
        "[]",
        json.dumps({"recipes": [1]}),
        "",
        json.dumps(stored_for(study, seeds=[-1])),
    ):
        folder.facts.write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            folder.stored()


# Room


def test_cores_follow_the_quota_of_the_control_group(tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert room.cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert room.cores(tmp_path) == room.cores(tmp_path / "none") >= 1


def test_memory_is_the_least_of_machine_and_group(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert room.available_bytes(tmp_path, meminfo) == 1_024_000
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert room.available_bytes(tmp_path, meminfo) == 150_000
    assert room.available_bytes(tmp_path / "none", tmp_path / "neither") is None


def test_a_run_fits_when_those_that_run_have_grown():
    assert room.fits(100, [], 115) and not room.fits(100, [], 114)
    assert room.fits(100, [60, 120], 155) and not room.fits(100, [60, 120], 154)
    assert room.fits(10**15, [], None)


def test_devices_of_the_cpu_are_none():
    assert room.devices("cpu") == [] and room.devices("cuda:1") == ["cuda:1"]
    assert Path("/proc/self/status").exists() is False or room.resident_bytes(1) >= 0
