"""Run folders of loops that are not ours: what they hold (exact), and the pages that are drawn from them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge import cli
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import EXIT_CANNOT_TELL, BusyError, ConfigError
from narrowgauge.integrations import RunFolder
from narrowgauge.integrations.recorder import UNSEEN
from narrowgauge.nn.linear import QLinear
from narrowgauge.report import groups, page, run_data, several
from narrowgauge.train import run_folder
from tests.raising import raises

accelerate = pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

DRAW = np.random.default_rng(0)
IDS = torch.from_numpy(DRAW.integers(1, 50, (32, 16)))
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:torch", "ignore::UserWarning:accelerate"
)


def model(recipe):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return ng.convert(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), recipe)


def trainer(folder, recipe="fp8-delayed", run=None, **options):
    settings = {"per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 3e-3}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    settings |= {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps"}
    arguments = TrainingArguments(str(folder), **settings | {"eval_steps": 3, "seed": 5} | options)
    run = run or RunFolder(folder / "run", tensor_every=2)
    return Trainer(
        model=model(recipe), args=arguments, train_dataset=DATA, eval_dataset=DATA[:8], callbacks=[run]
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs of transformers' Trainer, and what it logged itself."""
    folder = tmp_path_factory.mktemp("trainer")
    trainers = [trainer(folder / recipe, recipe) for recipe in ("fp8-delayed", "bf16")]
    for each in trainers:
        each.train()
    return [folder / recipe / "run" for recipe in ("fp8-delayed", "bf16")], trainers


def events(folder, kind):
    return [each for each in read_metrics(folder / "metrics.jsonl") if each["event"] == kind]


def test_steps_and_evaluations_are_those_that_the_trainer_logs(two):
    [first, _], [ran, _] = two
    logged = [each for each in ran.state.log_history if "loss" in each]
    steps = events(first, "step")
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(steps, logged, strict=True):
        assert (ours["loss"], ours["lr"]) == (theirs["loss"], theirs["learning_rate"])
        assert ours["grad_norm"] == float(theirs["grad_norm"]) and ours["peak_bytes"] > 0
    scored = [each["eval_loss"] for each in ran.state.log_history if "eval_loss" in each]
    assert [each["loss"] for each in events(first, "eval")] == scored and len(scored) == 2
    assert [each["path"] for each in events(first, "checkpoint")] == [
        "checkpoint-3",
        "checkpoint-6",
    ]
    assert [each["reason"] for each in events(first, "done")] == ["finished"]


def test_the_model_is_described_and_its_operands_are_watched(two):
    [first, second], [ran, _] = two
    known = read_run(first / "run.json")
    assert (known["recipe"], known["steps"], known["seed"]) == ("fp8-delayed", 6, 5)
    assert known["parameters"] == sum(each.numel() for each in ran.model.parameters())
    assert read_run(second / "run.json")["recipe"] == "bf16"
    watched = events(first, "tensor")
    assert {each["step"] for each in watched} == {2, 4, 6}
    assert {each["role"] for each in watched} == {"x", "w", "gy"} and events(first, "spread")
    assert all(each.observer is None for each in ran.model.modules() if isinstance(each, QLinear))


def test_what_a_callback_cannot_see_is_listed(two):
    [first, _], _ = two
    listed = read_run(first / "run.json")["unseen"]
    assert [each.partition(":")[0] for each in listed] == list(UNSEEN)
    # Exact: nothing that is listed as unseen is there.
    assert not {"data", "trivial", "tokens_per_step"} & read_run(first / "run.json").keys()
    assert not (first / "config.toml").exists() and not events(first, "sample")
    assert all("wide" not in each for each in events(first, "eval"))


@pytest.mark.slow
def test_a_report_is_drawn_of_one_run_and_of_two(two):
    """The same parts as of our own loop: losses, cards, layers, tensors; compared with the other run."""
    [first, second], _ = two
    shown = page.page(run_data.read(first))
    assert shown["status"]["word"] == "finished" and shown["loss"] and shown["layers"]
    assert shown["tensors"] and shown["spreads"] and shown["names"][0] == "fp8-delayed"
    assert {"Validation loss", "Peak memory"} <= {each["label"] for each in shown["cards"]}
    assert page.write(first).stat().st_size > 10_000
    written = several.write_folders((first, second), first.parent / "both.html", "bf16", "", "")
    text = Path(written).read_text(encoding="utf-8")
    assert "fp8-delayed" in text and "bf16" in text


@pytest.mark.slow
def test_pages_list_what_a_callback_could_not_see(two, tmp_path):
    """Pages of our own loop have no such list: nothing is missing there."""
    [first, second], _ = two
    text = page.write(first).read_text(encoding="utf-8")
    assert all(f"<li>{what}: " in text for what in UNSEEN) and "--guard every" not in text
    both = several.write_folders((first, second), tmp_path / "both.html", "bf16", "", "")
    assert all(f"<li>{what}: " in both.read_text(encoding="utf-8") for what in UNSEEN)


def test_losses_of_policy_gradients_are_below_zero(tmp_path):
    recorder = RunFolder(tmp_path, loss_unit="mean advantage")
    with recorder.recording(torch.nn.Linear(4, 4), steps=3) as run:
        for loss in (0.0, -0.25, -0.5):
            run.step(loss)
        run.evaluation(loss=-0.75)
    assert [each["loss"] for each in events(tmp_path, "step")] == [0.0, -0.25, -0.5]
    shown = page.page(run_data.read(tmp_path))
    [card] = [each for each in shown["cards"] if each["label"] == "Validation loss"]
    assert card["unit"] == "mean advantage" and "perplexity" not in card["note"]


@pytest.mark.slow
def test_runs_of_a_trainer_are_judged_over_seeds_as_a_study_judges(tmp_path):
    folders = []
    for recipe in ("bf16", "fp8-delayed"):
        for seed in (0, 1):
            folders.append(tmp_path / f"{recipe}-{seed}")
            run = RunFolder(folders[-1], tensor_every=0)
            trainer(tmp_path, recipe, run, save_strategy="no", seed=seed).train()
    [verdict] = groups.gather(folders, "bf16").verdicts()
    assert (verdict.runs.name, len(verdict.seeds)) == ("fp8-delayed", 2)
    assert verdict.half_width is not None
    words = [*map(str, folders), "--recipes=bf16", f"--output={tmp_path / 'judged'}"]
    assert cli.main(["study", *words]) in (0, EXIT_CANNOT_TELL)
    assert "the data" in (tmp_path / "judged" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    straight = trainer(tmp_path / "a", save_steps=4)
    straight.train()
    stopped = trainer(tmp_path / "b", run=RunFolder(tmp_path / "b" / "run"), save_steps=4)
    stopped.args.max_steps = 6
    stopped.train()
    with raises(ConfigError, "run.exists"):
        trainer(tmp_path / "b").train()
    again = trainer(tmp_path / "b", save_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4"))
    first, second = (events(tmp_path / name / "run", "step") for name in "ab")
    assert [each["loss"] for each in second] == [each["loss"] for each in first]
    assert [each["step"] for each in events(tmp_path / "b" / "run", "resume")] == [4]


@pytest.mark.slow
def test_a_point_of_several_steps_says_so(tmp_path):
    run = trainer(tmp_path, logging_steps=3, eval_strategy="no")
    run.train()
    assert [each["step"] for each in events(tmp_path / "run", "step")] == [3, 6]
    assert "3 steps" in read_run(tmp_path / "run" / "run.json")["memory"][0]


def by_hand(folder, steps, accelerator=None, fails=False):
    net = model("fp8-row")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    recorder = RunFolder(folder, tensor_every=2)
    losses = []
    with recorder.recording(net, steps=3, accelerator=accelerator, seed=0) as run:
        for place in range(steps):
            with run.watching():
                loss = net(IDS[place : place + 2], labels=IDS[place : place + 2]).loss
                loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss.detach(), lr=0.1)
            losses.append(float(loss.detach()))
            if fails:
                raise ValueError("as planned")
        run.evaluation(loss=losses[-1])
    return losses


@pytest.mark.parametrize("with_accelerate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_by_hand_and_accelerate_write_the_same(tmp_path, with_accelerate):
    accelerator = accelerate.Accelerator(cpu=True) if with_accelerate else None
    losses = by_hand(tmp_path, 3, accelerator)
    assert [each["loss"] for each in events(tmp_path, "step")] == losses
    assert {each["step"] for each in events(tmp_path, "tensor")} == {2}
    assert events(tmp_path, "eval")[0]["loss"] == losses[-1]
    assert [each["reason"] for each in events(tmp_path, "done")] == ["finished"]
    shown = page.page(run_data.read(tmp_path))
    assert shown["status"]["word"] == "finished" and shown["tensors"]


def test_a_watch_that_was_not_ended_does_not_disturb_the_next(tmp_path):
    """A framework may begin a step twice, as after a batch that was skipped."""
    net = model("fp8-row")
    with RunFolder(tmp_path, tensor_every=1).recording(net, steps=1) as run:
        for _ in range(2):
            run.begin_watch()
        loss = net(IDS[:2], labels=IDS[:2]).loss
        loss.backward()
        run.end_watch()
        run.step(loss.detach())
    assert {each["step"] for each in events(tmp_path, "tensor")} == {1}
    assert all(each.observer is None for each in net.modules() if isinstance(each, QLinear))


def test_a_loop_that_ends_early_or_fails_is_not_finished(tmp_path):
    by_hand(tmp_path / "early", 2)
    assert [each["reason"] for each in events(tmp_path / "early", "done")] == ["interrupted"]
    with contextlib.suppress(ValueError):
        by_hand(tmp_path / "failed", 2, fails=True)
    assert len(events(tmp_path / "failed", "step")) == 1
    assert not events(tmp_path / "failed", "done")


def test_a_folder_in_use_is_refused(tmp_path):
    with run_folder.RunFolder.claim(tmp_path, False), raises(BusyError, "run.busy"):
        by_hand(tmp_path, 1)
    with raises(ConfigError, "run-folder.tensor-every"):
        RunFolder(tmp_path, tensor_every=-1)
