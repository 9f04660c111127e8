"""Fine-tuning from data to exported folder, for every kind of task (exact, but for the sums of split batches)."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge.cli import main
from narrowgauge.conversion import auto
from narrowgauge.conversion.auto import Decision
from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.train import loop
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import replace
from narrowgauge.train.config.task_entries import TASKS
from tests.compare import assert_same
from tests.raising import raises, with_code
from tests.selection import quick
from tests.train import tiny
from tests.train.tasks import folders

JOBS = [
    "classification",
    "pairs of a decoder",
    "completion",
    "packed",
    "chat",
    "t5",
    "marian",
    "questions",
    "tags",
    "packed tags",
    "choices",
    *folders.WITH_OWN_JOB,
]
AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "causal-lm": transformers.AutoModelForCausalLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "tagging": transformers.AutoModelForTokenClassification,
    "multiple-choice": transformers.AutoModelForMultipleChoice,
}
SAME = 2e-6  # relative, float32: the same sums of a few hundred terms in another order


def stop(trainer):
    signal.raise_signal(signal.SIGTERM)


def architecture(folder):
    """The class of transformers that a saved model names: tasks with a job of their own have no Auto class here."""
    [name] = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    return getattr(transformers, name)


def run_json(config):
    return json.loads(Path(config.output, "run.json").read_text("utf-8"))


@pytest.mark.parametrize("job", quick(["classification", "packed", "t5"], JOBS))
def test_a_run_leaves_a_folder_that_transformers_loads(make, reports, job):
    config = make(
        job, eval_every=2, **({"sample_tokens": 3} if job in ("completion", "t5") else {})
    )
    assert loop.run(config) == 0
    folder = Path(config.output)
    model_class = AUTO.get(config.task) or architecture(folder / "final")
    model, found = model_class.from_pretrained(folder / "final", output_loading_info=True)
    assert (
        not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "final")
    assert len(tokenizer) == len(transformers.AutoTokenizer.from_pretrained(config.model))
    evaluations = tiny.events(folder, "eval")
    assert [event["step"] for event in evaluations] == [2, 4] and all(
        event["tokens"] > 0 for event in evaluations
    )
    entry = TASKS[config.task]
    metric = "perplexity" if entry.generates else entry.metrics[0]
    assert all(math.isfinite(event[metric]) for event in evaluations)
    facts = run_json(config)
    padding = facts["data"]["padding"]
    # 67 windows of questions are nearly all of one length, and shuffled steps as wide as any: buckets round both up
    worst = 1.1 if job == "questions" or entry.generates else 1.0
    assert (
        facts["task"] == config.task
        and padding["planned"]["positions"] <= worst * padding["shuffled"]["positions"]
    )
    steps = tiny.events(folder, "step")
    assert all(event["positions"] >= event["examples"] for event in steps)
    best = store.load(folder / "best" / f"step-{min_step(evaluations, facts['best']):08}").tensors[
        "weights"
    ]
    for name, tensor in model.state_dict().items():
        if name in best:
            assert_same(tensor, best[name].to(tensor.dtype))
    assert reports == [folder]


@pytest.mark.slow
def test_shuffled_batches_are_the_same_however_they_are_cut_and_pad_less_in_parts(make, capsys):
    """And what a run says of its padding is what its micro-batches have. A task that writes is shuffled where nothing else is asked."""
    seen = {}
    for parts in (1, 4):
        config = make(
            "completion", f"parts-{parts}", micro_batches=parts, recipe="none", epochs=1, steps=0
        )
        assert loop.run(config) == 0
        planned = run_json(config)["data"]["padding"]["planned"]["positions"]
        events = tiny.events(Path(config.output), "step")
        assert planned == sum(event["positions"] for event in events)
        seen[parts] = (
            planned,
            [event["loss"] for event in events],
            [event["examples"] for event in events],
        )
    assert seen[4][0] < seen[1][0] and seen[4][2] == seen[1][2]
    [told] = re.findall(
        r"4 times as many micro_batches would cut each .*?, (\d+) % padding",
        " ".join(capsys.readouterr().err.split()),
    )
    assert int(told) == round(
        100 * (1 - run_json(config)["data"]["padding"]["planned"]["tokens"] / seen[4][0])
    )
    assert seen[4][1] == pytest.approx(seen[1][1], rel=1e-3)


@pytest.mark.slow
def test_it_learns_and_the_report_tells(make, tmp_path, with_report):
    """Whether 'red' is in a sentence, of 400 of them, in 60 steps of fp8-row from random weights."""
    data = folders.classes_csv(tmp_path / "many.csv", 400)
    config = make(
        "classification",
        data=data,
        steps=60,
        batch_size=16,
        learning_rate=5e-3,
        recipe="fp8-row",
        warmup_steps=6,
        eval_every=30,
        eval_wide=True,
    )
    assert loop.run(config) == 0
    folder = Path(config.output)
    _, evaluation = tiny.events(folder, "eval")
    labels = [line.rpartition(",")[2] for line in data.read_text("utf-8").splitlines()[1:]]
    assert (
        max(map(labels.count, labels)) / len(labels) < 0.8
    )  # what always the same answer would reach
    assert evaluation["accuracy"] > 0.9 and evaluation["mcc"] > 0.8
    report = (folder / "report.html").read_text("utf-8")
    assert all(re.search(rf'class="label">{label}<', report) for label in ("MCC", "Padding"))
    # Two evaluations are drawn over the steps; of one there are only the numbers above.
    assert re.search(r"<h2[^>]*>\s*Metrics", report)


def test_recipe_none_is_an_ordinary_float32_run(make):
    """Plain Linears everywhere; a switch to it is refused, since nothing is wider than what it is."""
    config = make("classification", steps=1, batch_size=64, recipe="none", precision="fp32", seed=3)
    assert loop.run(config) == 0
    facts = run_json(config)
    assert facts["recipe"] == "none" and {row["recipe"] for row in facts["describe"]} == {"none"}
    assert (
        main(
            [
                "train",
                f"--output={config.output}",
                "--resume",
                "--recipe=none",
                "--recipe.switch=none@50%",
            ]
        )
        == 2
    )


def min_step(evaluations, metric):
    sign = -1 if metric == "loss" else 1
    return max(
        evaluations, key=lambda event: (sign * event[metric], -event["loss"], -event["step"])
    )["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    quick(
        ["packed"],
        [
            "classification",
            "chat",
            "packed",
            "marian",
            "questions",
            "packed tags",
            "choices",
            "regression",
        ],
    ),
)
def test_stopped_and_resumed_to_the_bit_across_an_epoch(make, before_step, job):
    """Six or so steps are an epoch here, so that step 7 is of the second."""
    common = {"steps": 8, "eval_every": 4, "recipe": "fp8-delayed"}
    reference, config = make(job, "reference", **common), make(job, "stopped", **common)
    assert loop.run(reference) == 0
    before_step(4, stop)
    assert loop.run(config) == 75
    before_step(7, stop)
    assert loop.run(replace(config, resume=True)) == 75
    assert loop.run(replace(config, resume=True)) == 0
    left, right = Path(config.output), Path(reference.output)
    assert tiny.losses(left) == tiny.losses(right) and tiny.digests(left) == tiny.digests(right)
    assert max(event["epoch"] for event in tiny.events(left, "step")) > 1
    scores = [
        [{**event, "elapsed_s": 0} for event in tiny.events(folder, "eval")]
        for folder in (left, right)
    ]
    assert scores[0] == scores[1]
    assert [path.name for path in (left / "best").iterdir()] == [
        path.name for path in (right / "best").iterdir()
    ]
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (left, right)]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        "classification",
        "completion",
        "packed",
        "t5",
        "questions",
        "tags",
        "choices",
        "regression",
    ],
)
def test_cutting_a_step_changes_nothing(make, copy_of, jobs, job):
    """(8 x 1), (4 x 2), (1 x 8): loss and gradient norm of masked, padded and packed steps in float32, without dropout."""
    folder, readings = copy_of(jobs[job]["model"].name), []
    sizes = json.loads((folder / "config.json").read_text("utf-8"))
    still = {key: 0.0 for key in sizes if key.endswith(("dropout", "dropout_prob", "dropout_rate"))}
    (folder / "config.json").write_text(json.dumps(sizes | still), encoding="utf-8")
    for parts in (1, 2, 8):
        config = make(
            job,
            f"parts-{parts}",
            model=folder,
            steps=2,
            micro_batches=parts,
            batch_size=8,
            recipe="bf16",
            precision="fp32",
        )
        assert loop.run(config) == 0
        steps = tiny.events(Path(config.output), "step")
        readings.append([event[key] for event in steps for key in ("loss", "grad_norm")])
    # The gradients of a question's choices cancel to a thousandth at random weights: roundings of the terms, near one, are left.
    same = {"rel": SAME, "abs": SAME if job == "choices" else None}
    assert readings[1] == pytest.approx(readings[0], **same) and readings[2] == pytest.approx(
        readings[0], **same
    )


def test_packed_rows_have_the_gradient_of_padded_ones(make):
    """All examples in one step, once padded and once packed."""
    padded = make("completion", "padded", steps=1, batch_size=64, recipe="bf16", precision="fp32")
    packed = make("packed", "in-rows", steps=1, batch_size=64, recipe="bf16", precision="fp32")
    assert loop.run(padded) == loop.run(packed) == 0
    [left], [right] = (tiny.events(Path(config.output), "step") for config in (padded, packed))
    assert left["tokens"] == right["tokens"] and left["examples"] == right["examples"]
    assert right["positions"] < left["positions"]
    for key in ("loss", "grad_norm"):
        assert right[key] == pytest.approx(left[key], rel=SAME)


TECHNIQUES = [
    {"freeze": "*layer*0*", "states": "8bit"},
    {"checkpointing": "full", "compress_activations": True, "optimizer": "lion"},
    {
        "checkpointing": "budget:64MiB",
        "precision": "bf16-o2",
        "states": "fp8-lm",
        "master": "fp16-scaled",
    },
    {"switch": "bf16@50%", "recipe": "fp8-row", "precision": "amp-fp16"},
]


@pytest.mark.parametrize(
    "technique", quick(TECHNIQUES[2:], TECHNIQUES), ids=lambda each: next(iter(each.values()))
)
@pytest.mark.parametrize(
    "job", quick(["classification"], ["classification", "marian", "questions", "tags", "choices"])
)
def test_memory_and_precision_are_options_of_every_task(make, job, technique):
    config = make(job, steps=2, **technique)
    if job == "marian" and "freeze" in technique:
        config = replace(config, freeze="*encoder.layers.0*")
    assert loop.run(config) == 0
    assert all(math.isfinite(loss) for loss in tiny.losses(Path(config.output)).values())


@pytest.mark.slow
def test_epochs_are_as_many_steps_as_their_plans_have(make):
    config = make("chat", epochs=2, token_budget=192)
    assert loop.run(config) == 0
    last = tiny.events(Path(config.output), "step")[-1]
    assert last["epoch"] == 2.0 and run_json(config)["steps"] == last["step"]
    assert tiny.losses(Path(config.output)) and loop.run(replace(config, resume=True)) == 0


def test_every_example_is_seen_once_in_an_epoch(make):
    config = make("completion", epochs=1)
    assert loop.run(config) == 0
    steps = tiny.events(Path(config.output), "step")
    assert sum(event["examples"] for event in steps) == run_json(config)["data"]["train_examples"]


@pytest.mark.slow
def test_compared_with_a_reference_on_the_same_batches(make, capfd, with_report):
    config = make("classification", steps=1, compare="bf16")
    assert loop.run(config) == 0
    mine, theirs = (
        tiny.events(Path(path), "step") for path in (config.output, f"{config.output}/compare-bf16")
    )
    assert [event["positions"] for event in mine] == [event["positions"] for event in theirs]
    assert "Report:" in capfd.readouterr().err


def test_the_best_is_kept_and_exported_though_the_rotation_has_passed_it(make, monkeypatch):
    """Evaluations made to say that step 2 was the best."""
    from narrowgauge.train.tasks.classification import ClassificationTask

    scores = iter([0.1, 0.9, 0.8, 0.3])
    real = ClassificationTask.evaluate
    monkeypatch.setattr(
        ClassificationTask, "evaluate", lambda *given: {**real(*given), "mcc": next(scores)}
    )
    config = make("classification", eval_every=1, checkpoint_every=1, keep=1)
    assert loop.run(config) == 0
    folder = Path(config.output)
    assert [path.name for path in (folder / "best").iterdir()] == ["step-00000002"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
    assert same_weights(folder, store.load(folder / "best" / "step-00000002").tensors["weights"])


def test_best_none_exports_the_last(make):
    config = make("classification", best="none", eval_every=1)
    assert loop.run(config) == 0
    folder = Path(config.output)
    assert not (folder / "best").exists()
    assert same_weights(folder, store.newest_valid(folder / "checkpoints")[0].tensors["weights"])


def same_weights(folder, weights):
    from safetensors.torch import load_file

    exported = load_file(folder / "final" / "model.safetensors")
    return all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())


@pytest.mark.slow
def test_lost_best_weights_are_told_and_chosen_anew(make, before_step, told):
    config = make("classification", eval_every=1)
    before_step(3, stop)
    assert loop.run(config) == 75
    shutil.rmtree(Path(config.output, "best"))
    assert loop.run(replace(config, resume=True)) == 0
    assert len(with_code(told, "checkpoint.best-lost")) == 1
    assert list(Path(config.output, "best").iterdir())


def test_a_metric_that_the_evaluation_does_not_have(make, place, tmp_path):
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(folders.texts())]
    config = make(
        "classification",
        data=folders.jsonl(tmp_path / "three.jsonl", rows),
        best="f1_binary",
        steps=1,
    )
    with raises(ConfigError, "train.best", "task.best = 'f1_binary'", "'loss'", "'mcc'", "'f1'"):
        loop.run(config)


@pytest.mark.parametrize(
    "job", quick(["marian"], ["classification", "marian", "chat", "questions"])
)
def test_a_number_that_is_not_finite_stops_with_its_place(make, before_step, job):
    def spoil(trainer):
        with torch.no_grad():
            list(trainer.model.parameters())[-1].fill_(math.nan)

    before_step(2, spoil)
    config = make(job)
    with raises(NumericsError, "loss.not-finite"):
        loop.run(config)
    assert [event["reason"] for event in tiny.events(Path(config.output), "done")] == ["nonfinite"]


def test_the_console_shows_what_is_learnt_and_what_padding_costs(make, capfd):
    assert loop.run(make("chat", steps=1)) == 0
    printed = capfd.readouterr().err
    assert (
        "<|assistant|>⟦" in printed and "</s>⟧" in printed and "First epoch, padding: " in printed
    )
    assert "eval_tokens" not in printed


def test_an_evaluation_of_a_part_says_so_and_is_always_the_same(make, capfd):
    config = make("chat", eval_tokens=60, eval_every=1, steps=2)
    assert loop.run(config) == 0
    assert "(eval_tokens)" in capfd.readouterr().err
    first, second = tiny.events(Path(config.output), "eval")
    assert first["tokens"] == second["tokens"] < 60


def test_from_the_command_line(place, tmp_path, capfd):
    words = [
        "train", "--task", "classification", "--model", str(place / "bert"), "--data", str(place / "classes.csv"),
        "--output", str(tmp_path / "run"), "--training.steps", "1", "--device.threads", "1", "--log.tensor-every", "0", "--device", "cpu",
    ]  # fmt: skip
    assert main(words) == 0
    assert "accuracy" in capfd.readouterr().err
    assert main([*words[:3], "--data", "x.csv"]) == 2
    assert "--task 'classification': needs model" in capfd.readouterr().err


def test_a_comparison_shows_the_example_once(make, capsys):
    config = make("completion", steps=1, recipe="fp8-row", compare="bf16")
    assert loop.run(config) == 0
    said = capsys.readouterr().err.splitlines()
    assert (
        sum("⟦" in line for line in said)
        == sum(line.startswith("First epoch, padding") for line in said)
        == 1
    )
    assert sum(line.startswith("bf16: finished at step 1 of 1") for line in said) == 1


def test_auto_knows_the_tokens_of_a_table(make, monkeypatch):
    """Exact: the mean micro-batch of the first epoch, to the next multiple of 16; no limit on lengths is needed."""
    asked = set()

    def decide(problem, device):
        asked.add(problem.tokens)
        return Decision(recipe="bf16", tokens=problem.tokens, how="measured", seconds={"bf16": 2.0})

    monkeypatch.setattr(auto, "decide", decide)
    config = make("classification", recipe="auto", steps=1, micro_batches=2)
    assert loop.run(config) == 0
    facts = run_json(config)["data"]
    steps = math.ceil(facts["train_examples"] / config.batch_size)
    assert asked == {round(facts["padding"]["planned"]["positions"] / (2 * steps) / 16) * 16}
