"""Every task on two ranks is that of one process with two micro-batches (exact): batches by length, metrics, the best weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.diagnose.metrics_table import METRICS
from narrowgauge.train import loop
from narrowgauge.train.parallel import spread
from tests.selection import quick
from tests.train import tiny
from tests.train.tasks import folders
from tests.train.test_torchrun import trained

JOBS = [
    "classification",
    "chat",
    "t5",
    "pairs of a decoder",
    "completion",
    "packed",
    "marian",
    "questions",
    "tags",
    "choices",
    "pictures",
    "translated",
    *folders.WITH_OWN_JOB,
]


LAYOUTS = [
    *((job, layout) for job in JOBS for layout in ("dp", "fsdp")),
    ("chat", "pp"),
    ("completion", "pp"),
    ("packed", "pp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "layout"), quick([("chat", "dp")], LAYOUTS))
def test_a_task_on_two_ranks_is_that_of_one_process(ranks, make, job, layout):
    same_on_two_ranks(ranks, make, job, layout)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["t5", "marian"])
def test_what_all_blocks_of_a_decoder_read_gets_its_gradient_in_one_order(ranks, make, job):
    """In float32, where the order of every sum shows."""
    same_on_two_ranks(ranks, make, job, "fsdp", precision="fp32")


def same_on_two_ranks(ranks, make, job, layout, **changes):
    reference = make(job, "reference", micro_batches=2, **changes)
    assert loop.run(reference) == 0
    config = make(
        job, "ranks", parallel=layout, **{"micro_batches": 2 if layout == "pp" else 1, **changes}
    )
    assert ranks(2)(trained, config) == [0, 0]
    first, second = Path(config.output), Path(reference.output)
    for kind in ("step", "eval"):
        keys = {"grad_norm", "tokens", "positions", "inputs", "examples", *METRICS}
        ours, theirs = (
            [
                {key: event[key] for key in keys & event.keys()}
                for event in tiny.events(folder, kind)
            ]
            for folder in (first, second)
        )
        assert ours == theirs
    assert tiny.digests(first) == tiny.digests(second)
    assert (first / "final" / "model.safetensors").read_bytes() == (
        second / "final" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_classes_have_no_stages(ranks, make):
    said = sorted(ranks(2)(trained, make("classification", parallel="pp=2", micro_batches=2)))
    assert (
        "pp cuts causal language models (tasks text and causal-lm), and this run's task is 'classification'"
        in said[0]
    )
    assert said[1].startswith("EndedElsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_task_on_two_ranks_that_share_products_learns_as_one_process_does(ranks, make, job):
    """Bounded: the loss of evaluations, which drop nothing; in training each rank drops its own heads."""
    reference, config = make(job, "reference"), make(job, "ranks", parallel="tp=2")
    assert loop.run(reference) == 0 and ranks(2)(trained, config) == [0, 0]
    ours, theirs = (
        [event["loss"] for event in tiny.events(Path(each.output), "eval")]
        for each in (config, reference)
    )
    assert ours == pytest.approx(theirs, rel=2e-2)
    assert (Path(config.output) / "final" / "model.safetensors").exists()


def test_an_encoder_decoder_of_one_block_each_trains():
    """It has no stack of blocks in which gradients could be summed in another order."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 64}
    for layers in (1, 2):
        config = transformers.T5Config(num_layers=layers, num_decoder_layers=layers, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
        spread._sum_within_blocks(model)
        assert sum(bool(module._forward_pre_hooks) for module in model.modules()) == (
            0 if layers == 1 else 4
        )
