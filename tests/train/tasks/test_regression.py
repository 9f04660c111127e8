"""Numbers for texts: strict tables, loss and correlations as torch and scipy have them, and a run that learns (exact where not said)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.data import squared_loss, valid_targets, without_targets
from narrowgauge.errors import DataError, NumericsError
from narrowgauge.train import loop
from narrowgauge.train.tasks.regression import correlations
from tests.raising import coded, raises
from tests.train import tiny
from tests.train.tasks import folders


def job(place: Path) -> dict[str, object]:
    """Settings of a tiny run, with which the tests of all tasks run this one."""
    table = place / "scores.jsonl"
    if not table.exists():
        folders.scores(table)
    return {
        "task": "regression",
        "model": place / "bert",
        "data": table,
        "columns": {"label": "score,green"},
    }


@pytest.mark.slow
def test_it_learns(make, tmp_path, capfd, with_report):
    """Whether 400 sentences are red, green or both, in 80 steps of fp8-row from random weights."""
    config = make(
        "regression", data=folders.scores(tmp_path / "many.jsonl", 400), steps=80, batch_size=16, learning_rate=5e-3,
        recipe="fp8-row", warmup_steps=6, columns={"label": "score"},
    )  # fmt: skip
    assert loop.run(config) == 0
    folder = Path(config.output)
    [evaluation] = tiny.events(folder, "eval")
    notes = capfd.readouterr().err.splitlines()
    [mean] = [
        float(re.search(r" loss of ([\d.e+-]+)\.", note)[1])
        for note in notes
        if "Targets 'score'" in note
    ]
    assert (
        evaluation["pearson"] > 0.7
        and evaluation["spearman"] > 0.7
        and evaluation["loss"] < mean / 2
    )
    sizes = json.loads((folder / "final" / "config.json").read_text("utf-8"))
    assert sizes["problem_type"] == "regression" and sizes["id2label"] == {"0": "score"}
    assert "squared error" in (folder / "report.html").read_text("utf-8")


def test_the_loss_is_the_mean_squared_error_of_transformers(make, place, tmp_path):
    """Bounded: one step of all examples in float32, against the loss that a model computes itself."""
    import transformers

    config = make(
        "regression", steps=1, batch_size=64, recipe="none", precision="fp32", eval_every=1
    )
    assert loop.run(config) == 0
    [step] = tiny.events(Path(config.output), "step")
    rows = [json.loads(line) for line in Path(config.data).read_text("utf-8").splitlines()]
    assert step["tokens"] == 2 * step["examples"] < 2 * len(rows)
    final = transformers.AutoModelForSequenceClassification.from_pretrained(
        Path(config.output, "final")
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(config.output, "final"))
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    targets = torch.tensor([[row["score"], float(row["green"])] for row in rows])
    with torch.no_grad():
        found = final(**batch, labels=targets)
    ours = squared_loss(found.logits, targets) / targets.numel()
    assert float(ours) == pytest.approx(float(found.loss), rel=1e-6)


def test_targets_that_do_not_count_have_no_loss_and_no_gradient():
    """-100 is a number like others; NaN does not count."""
    labels = torch.tensor([[-100.0, 2.0], [math.nan, 0.0]])
    values = torch.tensor([[1.0, 2.0], [5.0, 3.0]], requires_grad=True)
    loss = squared_loss(values, labels)
    loss.backward()
    assert loss.item() == 101.0**2 + 9 and values.grad.tolist() == [[202.0, 0.0], [0.0, 6.0]]
    assert (
        valid_targets({"labels": labels}) == 3
        and valid_targets(without_targets({"labels": labels})) == 0
    )


def test_correlations_are_those_of_numpy_and_constants_have_none():
    """Bounded by a rounding of float64. Spearman's is Pearson's of the ranks."""
    draw = np.random.default_rng(0)
    targets = draw.normal(size=(50, 2))
    answers = targets + draw.normal(size=(50, 2))
    found = correlations(answers, targets)
    assert found["pearson"] == pytest.approx(
        np.mean([np.corrcoef(a, t)[0, 1] for a, t in zip(answers.T, targets.T, strict=True)]),
        rel=1e-12,
    )
    ranks = [np.argsort(np.argsort(each, axis=0), axis=0) for each in (answers, targets)]
    expected = np.mean(
        [np.corrcoef(a, t)[0, 1] for a, t in zip(ranks[0].T, ranks[1].T, strict=True)]
    )
    assert found["spearman"] == pytest.approx(expected, rel=1e-12)
    same = np.ones((50, 1))
    assert correlations(same, targets[:, :1]) == {"pearson": 0.0, "spearman": 0.0}
    assert math.isnan(correlations(np.full((50, 1), np.nan), targets[:, :1])["pearson"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, coded("regression.not-finite", "nan", "'score'", "jsonl:60")),
        ("inf", coded("regression.not-a-number", "'inf'", "'score'", "jsonl:60")),
        ("1,5", coded("regression.not-a-number", "'1,5'", "'score'", "jsonl:60")),
        ("", coded("regression.not-a-number", "''", "'score'", "jsonl:60", "' in column '")),
        (None, coded("regression.not-a-number", "None", "'score'", "jsonl:60")),
        (True, coded("regression.not-a-number", "True", "'score'", "jsonl:60")),
        (1e39, coded("regression.not-finite", "1e+39", "'score'", "jsonl:60")),
    ],
)
def test_what_is_no_number_is_refused_with_its_row(make, tmp_path, value, words):
    rows = [
        json.loads(line)
        for line in folders.scores(tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    ]
    rows[-1]["score"] = value
    with raises(DataError, words):
        loop.run(make("regression", data=folders.jsonl(tmp_path / "rows.jsonl", rows)))


def test_numbers_that_are_all_the_same_are_refused(make, tmp_path):
    rows = [
        {"text": text, "score": 2.5, "green": place} for place, text in enumerate(folders.texts())
    ]
    with raises(DataError, "regression.constant", "'score'"):
        loop.run(make("regression", data=folders.jsonl(tmp_path / "rows.jsonl", rows)))
    held_out = folders.jsonl(tmp_path / "held-out.jsonl", rows[:20])
    good = folders.scores(tmp_path / "good.jsonl")
    with raises(DataError, "regression.constant", "'score'", "(20"):
        loop.run(make("regression", data=good, validation_data=held_out))


def test_a_scale_far_from_one_is_told(make, tmp_path, capfd):
    rows = [
        {"text": text, "score": 4000 + 70 * place} for place, text in enumerate(folders.texts())
    ]
    config = make(
        "regression",
        data=folders.jsonl(tmp_path / "rows.jsonl", rows),
        columns={"label": "score"},
        steps=1,
    )
    assert loop.run(config) == 0
    assert " scaled to " in capfd.readouterr().err


def test_a_loss_that_is_not_finite_is_found_in_its_layer(make, before_step):
    def spoil(trainer):
        with torch.no_grad():
            list(trainer.model.parameters())[-1].fill_(math.nan)

    before_step(2, spoil)
    with raises(NumericsError, "loss.not-finite"):
        loop.run(make("regression"))
