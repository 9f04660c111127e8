"""Cosines of two embeddings: strict tables, the loss as transformers and torch have it, and a run that learns (exact where not said)."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.data import Collator, valid_targets, without_targets
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train import loop
from narrowgauge.train.tasks import task_class
from narrowgauge.train.tasks.losses import step_loss, trainer_loss
from narrowgauge.train.tasks.sentence_similarity import cosines
from tests.raising import coded, raises
from tests.train import tiny
from tests.train.tasks import folders

NAME = "sentence-similarity"


def table(path: Path, count: int = 60) -> Path:
    """Pairs of sentences, and the share of the colours of either that both have."""
    draw, known, rows = random.Random(4), folders.texts(1000), []
    for _ in range(count):
        both = draw.sample(known, 2)
        first, second = (
            {word for word in text.split() if word in folders.COLOURS} for text in both
        )
        score = len(first & second) / len(first | second)
        rows.append({"text": both[0], "pair": both[1], "score": score})
    return folders.jsonl(path, rows)


def job(place: Path) -> dict[str, object]:
    """Settings of a tiny run, with which the tests of all tasks run this one."""
    rows = place / "alike.jsonl"
    if not rows.exists():
        table(rows)
    return {"task": NAME, "model": place / "bert", "data": rows}


def rows_of(path: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_it_learns(make, tmp_path, capfd, with_report):
    """The share of common colours, from 400 pairs in 120 steps of fp8-row from random weights."""
    config = make(
        NAME, data=table(tmp_path / "many.jsonl", 400), steps=120, batch_size=16, learning_rate=5e-3, recipe="fp8-row", warmup_steps=6,
    )  # fmt: skip
    assert loop.run(config) == 0
    folder = Path(config.output)
    [evaluation] = tiny.events(folder, "eval")
    [note] = [line for line in capfd.readouterr().err.splitlines() if "Scores 'score'" in line]
    mean = float(re.search(r" loss of ([\d.e+-]+)\.", note)[1])
    assert evaluation["pearson"] > 0.6 and evaluation["spearman"] > 0.6
    assert evaluation["loss"] < mean / 2
    assert "squared error" in (folder / "report.html").read_text("utf-8")


def test_the_loss_of_an_evaluation_is_that_of_plain_transformers(make):
    """Bounded by rounding in float32: each text alone, without padding, through the exported model."""
    import transformers
    from scipy import stats

    config = make(
        NAME, steps=1, batch_size=8, recipe="none", precision="fp32", eval_every=1, best="none"
    )
    assert loop.run(config) == 0
    final, evaluation = (
        Path(config.output, "final"),
        tiny.events(Path(config.output), "eval")[-1],
    )
    model = transformers.AutoModel.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    held_out = task_class(NAME).prepare(config).evaluation_set

    def embedding(text):
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    known = {
        tuple(tuple(tokenizer(row[name])["input_ids"]) for name in ("text", "pair")): row
        for row in rows_of(config.data)
    }
    rows = [known[tuple(tuple(ids.tolist()) for ids in each["input_ids"])] for each in held_out]
    found = [
        float(torch.cosine_similarity(embedding(row["text"]), embedding(row["pair"]), dim=0))
        for row in rows
    ]
    scores = [row["score"] for row in rows]
    assert evaluation["tokens"] == len(rows)
    assert evaluation["loss"] == pytest.approx(np.mean(np.subtract(found, scores) ** 2), rel=1e-5)
    assert evaluation["pearson"] == pytest.approx(stats.pearsonr(found, scores).statistic, abs=1e-4)


def test_padding_and_the_order_of_pairs_do_not_change_a_cosine():
    """Bounded by a rounding of float32. The mean is over the tokens of each text alone."""
    hidden = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([6, 2, 3, 5])
    mask = (torch.arange(6) < sizes[:, None]).long()
    means = torch.stack([row[:size].mean(0) for row, size in zip(hidden, sizes, strict=True)])
    expected = torch.cosine_similarity(means[[0, 2]], means[[1, 3]])
    spoilt = hidden.masked_fill(mask[..., None] == 0, 1e4)
    for states in (hidden, spoilt):
        found = cosines(states, mask)
        assert found.shape == (2, 1) and torch.allclose(found[:, 0], expected, atol=1e-6)
    turned = cosines(hidden[[1, 0, 3, 2]], mask[[1, 0, 3, 2]])
    assert torch.equal(turned, cosines(hidden, mask))


def test_a_batch_has_a_row_for_each_text_and_a_score_for_each_pair():
    def example(first, second, score):
        ids = [np.arange(1, size + 1) for size in (first, second)]
        return {"input_ids": ids, "labels": np.array([score])}

    examples = [example(3, 5, 0.25), example(2, 4, 1.0)]
    batch = Collator(pad_id=0, multiple=8, tokens_multiple=8)(examples)
    assert batch["input_ids"].shape == (4, 8) == batch["attention_mask"].shape
    assert batch["attention_mask"].sum(-1).tolist() == [3, 5, 2, 4]
    assert batch["labels"].tolist() == [[0.25], [1.0]] and valid_targets(batch) == 2
    spare = without_targets(batch)
    hidden = torch.randn(4, 8, 3, requires_grad=True)
    loss = step_loss(lambda **inputs: {"last_hidden_state": hidden}, spare, NAME, 1)
    loss.backward()
    assert valid_targets(spare) == 0 and loss.item() == 0 and not hidden.grad.any()


def test_a_loss_without_a_mask_is_refused():
    outputs = {"last_hidden_state": torch.randn(2, 4, 3)}
    with raises(ConfigError, "similarity.no-mask"):
        trainer_loss(NAME)(outputs, torch.ones(1, 1))


def test_padding_is_counted_over_both_texts(make):
    """As the batches of the first epoch have it."""
    config = make(NAME, micro_batches=2)
    task = task_class(NAME).prepare(config)
    feed = task.feed(task.model())
    drawn = [feed.draw(step) for step in range(task.steps(1))]
    planned = task.epoch(0).padding.planned
    assert planned.positions == sum(step.facts["positions"] for step in drawn)
    assert planned.tokens == sum(step.inputs for step in drawn) == task.data_facts["train_tokens"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, coded("regression.not-finite", "nan", "'score'", "jsonl:60")),
        ("1,5", coded("regression.not-a-number", "'1,5'", "data.columns.score", "jsonl:60")),
        (None, coded("regression.not-a-number", "None", "data.columns.score", "jsonl:60")),
        (1.25, coded("similarity.range", "1.25", "'score'", "jsonl:60")),
        (-0.5, coded("similarity.range", "-0.5", "'score'", "jsonl:60")),
    ],
)
def test_what_is_no_score_is_refused_with_its_row(make, tmp_path, value, words):
    rows = rows_of(table(tmp_path / "rows.jsonl"))
    rows[-1]["score"] = value
    with raises(DataError, words):
        loop.run(make(NAME, data=folders.jsonl(tmp_path / "rows.jsonl", rows)))


@pytest.mark.parametrize("column", ["text", "pair"])
def test_a_row_with_one_text_is_refused_or_left_out(make, tmp_path, column):
    rows = rows_of(table(tmp_path / "rows.jsonl"))
    rows[6][column] = " "
    path = folders.jsonl(tmp_path / "rows.jsonl", rows)
    with raises(DataError, coded("examples.no-target", "1 of 60", "jsonl:7")):
        loop.run(make(NAME, data=path))
    task = task_class(NAME).prepare(make(NAME, data=path, no_target="skip"))
    assert len(task.train) + len(task.validation) == 59


def test_the_longer_text_decides_what_is_too_long(make):
    """And truncating cuts each text by itself, before its last separator."""
    with raises(DataError, coded("examples.too-long", "max_length 8")):
        loop.run(make(NAME, max_length=8))
    task = task_class(NAME).prepare(make(NAME, max_length=8, too_long="truncate"))
    end = task.tokenizer.sep_token_id
    texts = [ids for each in task.train for ids in each["input_ids"]]
    assert max(map(len, texts)) == 8 and all(ids[-1] == end for ids in texts)


def test_scores_that_are_all_equal_are_refused(make, tmp_path):
    rows = [row | {"score": 0.5} for row in rows_of(table(tmp_path / "rows.jsonl"))]
    path = folders.jsonl(tmp_path / "rows.jsonl", rows)
    with raises(DataError, coded("regression.constant", "'score'", "0.5", "data.columns.score")):
        loop.run(make(NAME, data=path))


def test_settings_that_cannot_work_are_refused(make, place):
    with raises(ConfigError, coded("similarity.encoder-decoder", "t5")):
        loop.run(make(NAME, model=place / "t5"))
    with raises(ConfigError, "similarity.columns"):
        loop.run(make(NAME, columns={"pair": "text"}))
    with raises(DataError, coded("similarity.token-budget", 30)):
        loop.run(make(NAME, token_budget=30))


def test_weights_of_an_encoder_that_are_missing_are_refused(make, copy_of):
    """A pooler may be missing, and nothing else: names of a model without a head have no prefix."""
    from safetensors.torch import load_file, save_file

    folder = copy_of("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with raises(ConfigError, "model.missing-weights"):
        loop.run(make(NAME, model=folder))


def test_a_decoder_is_an_encoder_too(make, place):
    config = make(NAME, model=place / "llama", steps=2)
    assert loop.run(config) == 0
    assert math.isfinite(tiny.events(Path(config.output), "eval")[-1]["pearson"])
