"""The setting embedding_codes: what a run learns, resumes, branches, evaluates and writes with it; the plan counts it in test_plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from narrowgauge.errors import ConfigError
from narrowgauge.lab import training
from narrowgauge.lab.study.plan import Study
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.checkpoint import store
from narrowgauge.train.evaluation.saved import SavedRun, versions
from narrowgauge.train.model import build
from tests.raising import raises
from tests.train import faulty_run, tiny
from tests.train.test_torchrun import same_run, trained


def step_of(folder) -> dict:
    found, _ = store.newest_valid(folder / "checkpoints")
    return {
        name: tensor
        for part in found.tensors.values()
        for name, tensor in part.items()
        if ".steps." in name
    }


def test_a_run_learns_the_step_of_its_table(make, capsys):
    config = make(recipe="bf16", embedding_codes="int4")
    assert training.run(config) == 0
    said = capsys.readouterr().err
    assert "bf16 with int4 in embeddings" in said
    assert "Embeddings looked up as int4, with a learned step each: model.embed_tokens." in said
    steps = step_of(Path(config.output))
    assert int(steps["model.embed_tokens.steps.cold_left"]) == 0
    assert float(steps["model.embed_tokens.steps.w"]) != 0
    run = json.loads((Path(config.output) / "run.json").read_bytes())
    assert run["embedding_codes"] == "int4"
    [row] = [row for row in run["describe"] if row["name"] == "model.embed_tokens"]
    assert row["recipe"] == "int4 rows"


def test_it_changes_the_numbers_and_none_means_as_before(make):
    losses = {}
    for codes in ("", "int4", "int8"):
        config = make(codes or "plain", recipe="none", embedding_codes=codes)
        assert training.run(config) == 0
        losses[codes] = tiny.losses(Path(config.output))
    assert losses[""] != losses["int8"] != losses["int4"]
    assert abs(losses["int8"][6] - losses[""][6]) < 0.02 * losses[""][6]


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(make, before_step):
    assert training.run(make("whole", embedding_codes="int4", checkpoint_every=3)) == 0

    before_step(5, lambda trainer: faulty_run.apply("stop", trainer))
    cut = make("cut", embedding_codes="int4", checkpoint_every=3)
    assert training.run(cut) == 130
    assert training.run(replace(cut, resume=True)) == 0
    assert tiny.digests(Path(cut.output)) == tiny.digests(Path(make("whole").output))


def test_other_codes_are_no_resumption(make):
    config = make(embedding_codes="int4", checkpoint_every=3, steps=3)
    training.run(config)
    with raises(ConfigError, "resume.changed", "recipe.embedding_codes = 'int8'"):
        training.run(replace(config, resume=True, embedding_codes="int8", steps=6))


def test_a_model_without_a_table_is_refused_by_name(make, tmp_path):
    class Own(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 2

    class Model(torch.nn.Module):
        def __init__(self, table) -> None:
            super().__init__()
            self.table, self.up = table, torch.nn.Linear(32, 32)

    config, cpu = make(embedding_codes="int4"), torch.device("cpu")
    for table, words in (
        (torch.nn.Identity(), "Model holds no nn.Embedding"),
        (Own(8, 32), "'table' is a Own"),
    ):
        with raises(ConfigError, "convert.embedding-codes", words):
            build(config, lambda table=table: Model(table), cpu, 8, None)


@pytest.mark.slow
def test_the_reference_of_a_comparison_has_none(make):
    config = make(recipe="bf16", embedding_codes="int4", compare="bf16")
    assert training.run(config) == 0
    facts = [
        json.loads((Path(config.output) / part / "run.json").read_bytes())
        for part in ("", "compare-bf16")
    ]
    assert [each["embedding_codes"] for each in facts] == ["int4", ""]
    assert not [row for row in facts[1]["describe"] if row["recipe"] == "int4 rows"]


def test_a_study_gives_codes_to_all_but_its_reference(make, tmp_path):
    study = Study(
        config=make(embedding_codes="int8"),
        recipes=("bf16", "fp8-row"),
        seeds=(0, 1),
        output=tmp_path / "study",
    )
    # Of each seed: the reference, fp8-row, and the positive control, which has the settings of the reference.
    assert [study.settings_of(job).embedding_codes for job in study.jobs()] == ["", "int8", ""] * 2


def test_evaluations_are_narrow_and_wide(make):
    """An evaluation in 16 bits reads the rows as they are, also where no product is narrow."""
    config = make(recipe="none", embedding_codes="int4", eval_wide=True, eval_every=3)
    assert training.run(config) == 0
    for event in tiny.events(Path(config.output), "eval"):
        assert event["loss"] != event["wide"]["loss"]
    saved = SavedRun.open(Path(config.output), torch.device("cpu"))
    model, _, why = saved.model(saved.paths("newest")[0])
    assert not why and [name for name, _ in versions(model, why)] == ["narrow", "16 bits"]


def test_the_trained_model_is_written_as_an_ordinary_one(make):
    config = make(recipe="bf16", embedding_codes="int4")
    assert training.run(config) == 0
    written = load_file(Path(config.output) / "final" / "model.safetensors")
    assert not [name for name in written if ".steps." in name]
    assert written["model.embed_tokens.weight"].unique().numel() > 1000  # not rounded


@pytest.mark.slow
def test_a_branch_carries_the_step_over_and_may_leave_it(make, tmp_path):
    config = make("parent", recipe="bf16", embedding_codes="int4", steps=6, checkpoint_every=3)
    assert training.run(config) == 0
    same = checkpoint_ref.branched(f"{config.output}@3", str(tmp_path / "same"))
    assert same.embedding_codes == "int4" and training.run(same) == 0
    assert tiny.losses(tmp_path / "same") == {
        step: loss for step, loss in tiny.losses(Path(config.output)).items() if step > 3
    }
    wide = checkpoint_ref.branched(f"{config.output}@3", str(tmp_path / "wide"), recipe="none")
    assert wide.embedding_codes == "" and training.run(wide) == 0
    assert not step_of(tmp_path / "wide")
    narrower = checkpoint_ref.branched(
        f"{config.output}@3", str(tmp_path / "int8"), embedding_codes="int8"
    )
    assert training.run(narrower) == 0
    assert float(step_of(tmp_path / "int8")["model.embed_tokens.steps.w"]) != 0


def test_frozen_tables_keep_their_step(make):
    config = make(recipe="bf16", embedding_codes="int8", freeze="*embed_tokens")
    assert training.run(config) == 0
    assert len(tiny.losses(Path(config.output))) == 6


@pytest.mark.slow
def test_a_guard_has_something_to_judge_though_no_product_is_narrow(make):
    config = make(
        recipe="none",
        embedding_codes="int4",
        steps=30,
        warmup_steps=2,
        guard="every=10,steps=6,margin=0.25%,then=warn",
    )
    assert training.run(config) == 0
    found = tiny.events(Path(config.output), "guard")
    assert len(found) == 2 and all(event["wide"] != event["narrow"] for event in found)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["dp=2", "fsdp=2"])
def test_two_ranks_are_one_process_with_two_micro_batches(ranks, make, parallel):
    """Exact: two parts are summed in one order alone."""
    changes = {"recipe": "fp8-row", "embedding_codes": "int4", "steps": 4}
    reference, config = (
        make("reference", micro_batches=2, **changes),
        make("ranks", parallel=parallel, **changes),
    )
    assert training.run(reference) == 0
    assert ranks(2)(trained, config) == [0, 0]
    same_run(Path(config.output), Path(reference.output))
