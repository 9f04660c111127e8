"""What holds for every task of the catalog; a new task is tested here as soon as it has an entry (exact)."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge import data
from narrowgauge.diagnose.metrics_table import METRICS
from narrowgauge.train import loop
from narrowgauge.train.config.data_settings import EXAMPLES
from narrowgauge.train.config.settings import replace
from narrowgauge.train.config.task_entries import TASKS
from narrowgauge.train.planning.steps import task_of
from narrowgauge.train.tasks import task_class
from narrowgauge.train.tasks.losses import count_targets, step_loss
from narrowgauge.train.tasks.table import TableTask
from tests.compare import assert_same
from tests.processes import ROOT
from tests.train import tiny

ALWAYS = {"event", "step", "elapsed_s", "tokens", "loss", "perplexity"}
SOMETIMES = {"bleu", "chrf", "f1_binary"}  # on request; of two classes


@pytest.fixture
def make_task(make, jobs):
    """make_task("tagging", steps=3): the settings of the first job of a task."""

    def settings(name, folder="run", **changes):
        job = next(job for job, settings in jobs.items() if settings["task"] == name)
        return make(job, folder, **changes)

    return settings


@pytest.mark.parametrize("name", TASKS)
def test_pages_and_records_know_every_metric_of_a_task(name):
    """A new metric needs its range, its title and its better side in diagnose/metrics_table.py."""
    assert set(TASKS[name].metrics) <= set(METRICS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_measures_what_the_catalog_says(make_task, name):
    """And leaves a folder that transformers loads, with facts of which reports are made."""
    config, entry = make_task(name, steps=2), TASKS[name]
    assert loop.run(config) == 0
    folder = Path(config.output)
    [evaluation] = tiny.events(folder, "eval")
    measured = set(evaluation) - ALWAYS
    assert measured <= set(entry.metrics) and set(entry.metrics) - measured <= SOMETIMES
    assert all(math.isfinite(evaluation[metric]) for metric in ("loss", *measured))
    run = json.loads((folder / "run.json").read_text("utf-8"))
    assert run["best"] == entry.default_metric and run["loss_unit"] == entry.loss_unit
    assert run["trivial"].keys() >= {"predictor", "loss", *measured}
    kind = json.loads((folder / "final" / "config.json").read_text("utf-8"))["architectures"][0]
    _, found = getattr(transformers, kind).from_pretrained(
        folder / "final", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_loss_of_a_run_is_that_of_a_loop_of_ones_own(make_task, name):
    # Chunks of tokens sum in another order.
    whole = {"loss": "whole"} if TASKS[name].generates else {}
    task = task_class(name).prepare(make_task(name, **whole))
    torch.manual_seed(0)
    model = task.model().eval()
    if not isinstance(task, TableTask):
        pytest.skip("images come without a collator")
    batch = task.collator()([task.train[place] for place in range(3)])
    total = count_targets([batch], name)
    aligned = task.align(batch, model)
    assert total == data.valid_targets(aligned)
    objective = task.objective(model, torch.float32)
    assert_same(
        step_loss(model, batch, name, total), objective(aligned, torch.device("cpu")) / total
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_has_batches_of_the_same_form(make_task, name):
    """Without data: the tensors of a training batch, with the same types and numbers of axes."""
    config = make_task(name)
    real = task_class(name).prepare(config)
    model = real.model()
    planned, model_class = task_of(config)
    shape = planned.largest_micro_batch(config.micro_batches)
    batch = planned.align(planned.dummy_batch(shape), model)
    drawn = real.feed(model).probe()
    assert model_class.auto is real.model_class.auto
    assert {key: (each.dtype, each.ndim) for key, each in drawn.items() if key in batch} == {
        key: (each.dtype, each.ndim) for key, each in batch.items()
    }
    assert batch.keys() >= {key for key in drawn if key != "token_type_ids"}


@pytest.mark.parametrize(("batch_size", "parts", "rows"), [(5, 2, 3), (4, 2, 2), (3, 3, 1)])
def test_the_largest_micro_batch_has_the_rows_that_do_not_divide(
    make_task, batch_size, parts, rows
):
    """The first micro-batch of a step has one row more where the rows do not divide."""
    planned, _ = task_of(make_task("classification", batch_size=batch_size))
    assert planned.largest_micro_batch(parts).rows == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_stopped_run_goes_on_to_the_bit(make_task, before_step, name):
    common = {"steps": 4, "eval_every": 2, "recipe": "fp8-delayed"}
    reference, config = (make_task(name, folder, **common) for folder in ("whole", "stopped"))
    assert loop.run(reference) == 0
    before_step(3, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(reference.output))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_on_training_has_its_row(name):
    rows = (ROOT / "docs" / "training.md").read_text("utf-8").splitlines()
    assert sum(row.startswith(f"| `{name}` |") for row in rows) == 1
