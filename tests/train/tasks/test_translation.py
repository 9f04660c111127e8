"""Translations during a run: BLEU and chrF are sacrebleu's of the table's own targets, whatever the batches (exact where not said)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge.errors import ConfigError
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig, replace
from narrowgauge.train.tasks.translation import Translation, generated
from tests.train import tiny
from tests.train.tasks import folders

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = dict(
    zip(
        [*folders.COLOURS, *folders.THINGS, "the", "and"],
        ["rot", "grün", "blau", "grau", "Kachel", "Maß", "Code", "Spitze", "Zeile", "die", "und"],
        strict=True,
    )
)


def stop(trainer):
    signal.raise_signal(signal.SIGTERM)


def without_clocks(folder):
    return [{**event, "elapsed_s": 0} for event in tiny.events(folder, "eval")]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_scores_are_those_of_the_exported_model_a_row_at_a_time(make, place, beams):
    """In float32 and without padding; chrF of what a model of four steps writes is not 0."""
    config = make(
        "translated",
        recipe="none",
        precision="fp32",
        validation_data=place / "pairs.jsonl",
        beams=beams,
    )
    assert loop.run(config) == 0
    [event] = tiny.events(Path(config.output), "eval")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(Path(config.output, "final")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(config.output, "final"))
    rows = [json.loads(line) for line in Path(config.data).read_text("utf-8").splitlines()][:9]
    facts = json.loads(Path(config.output, "run.json").read_text("utf-8"))["data"]["translation"]
    texts = []
    for row in rows:
        ids = tokenizer(row["source"], return_tensors="pt")["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        [written] = generated(model, inputs, beams, facts["most_tokens"]).tolist()
        texts.append(tokenizer.decode(written, skip_special_tokens=True))
    references = [row["target"] for row in rows]
    bleu = sacrebleu.corpus_bleu(texts, [references], tokenize="none", force=True)
    assert (
        event["bleu"] == bleu.score
        and event["chrf"] == sacrebleu.corpus_chrf(texts, [references]).score > 0
    )
    assert (
        facts["translated"] == 9
        and "tok:none" in facts["signatures"]["bleu"]
        and "nrefs:1" in facts["signatures"]["chrf"]
    )


def test_what_stands_in_the_table_has_a_score_of_100(make):
    """Letters beyond ASCII come back from the cache as they were."""
    from narrowgauge.train.tasks.seq2seq import Seq2SeqTask

    task = Seq2SeqTask.prepare(make("translated", eval_wide=True))
    assert isinstance(task.translation, Translation)
    found = task.translation.score(task.translation.references)
    assert found == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert (
        "Each evaluation translates 9 rows greedily, and again with the products in 16 bits"
        in task.notes[-1]
    )


@pytest.mark.slow
def test_stopped_and_resumed_to_the_bit_with_the_best_translations(make, before_step):
    common = {"steps": 4, "eval_every": 1, "best": "chrf", "recipe": "fp8-delayed"}
    reference, config = (
        make("translated", "reference", **common),
        make("translated", "stopped", **common),
    )
    assert loop.run(reference) == 0
    before_step(3, stop)
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    left, right = Path(config.output), Path(reference.output)
    assert tiny.losses(left) == tiny.losses(right) and tiny.digests(left) == tiny.digests(right)
    assert without_clocks(left) == without_clocks(right)
    assert [path.name for path in (left / "best").iterdir()] == [
        path.name for path in (right / "best").iterdir()
    ]


@pytest.mark.slow
def test_a_run_that_translates_has_the_weights_of_one_that_does_not(make):
    """Generators and the state of recipes stay as they are."""
    runs = [
        make(
            "translated",
            f"translate-{rows}",
            translate=rows,
            eval_every=1,
            recipe="fp8-delayed",
            **other,
        )
        for rows, other in ((5, {}), (0, {"bleu_words": "13a"}))
    ]
    assert [loop.run(config) for config in runs] == [0, 0]
    assert (
        len(
            {
                json.dumps(tiny.digests(Path(config.output)), sort_keys=True, default=str)
                for config in runs
            }
        )
        == 1
    )


def test_settings_that_need_translations():
    table = {"task": "seq2seq", "model": "m", "data": "d.csv"}
    with pytest.raises(ConfigError, match=r"task.best = 'bleu': needs translations. Set translate"):
        TrainConfig(**table, best="bleu")
    with pytest.raises(
        ConfigError,
        match=r"task.beams = 4, task.bleu_words = '13a': have no effect with task.translate = 0",
    ):
        TrainConfig(**table, beams=4)
