"""Stages of a pipeline beside copies, shards and shared products (`--parallel fsdp=2,pp=2`).

Exact: with as many micro-batches, two groups of ranks in stages compute what the same two groups compute without stages, and the first
loss of one process. Of the other steps, whose gradients one process adds up in another order, losses are within 1e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge import recipes
from narrowgauge.train import loop
from narrowgauge.train.config.settings import replace
from tests.processes import PYTHON, run
from tests.train import tiny
from tests.train.test_torchrun import PROGRAM, same_run, trained

COMMON = {
    "micro_batches": 2,
    "steps": 3,
    "eval_every": 2,
    "sample_tokens": 4,
    "checkpoint_every": 2,
}


def both(ranks, make, layout, **changes):
    """The folders of a run in two stages, and of one without stages."""
    changes = COMMON | changes
    staged, whole = (
        make("staged", parallel=f"{layout},pp=2", **changes),
        make("whole", parallel=layout, **changes),
    )
    assert ranks(4)(trained, staged) == [0] * 4
    assert ranks(2)(trained, replace(whole, schedule="1F1B")) == [0] * 2
    return Path(staged.output), Path(whole.output)


# --- the same numbers


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.names())
def test_stages_of_shards_are_the_shards(ranks, make, recipe):
    ours, theirs = both(ranks, make, "fsdp=2", recipe=recipe)
    same_run(ours, theirs)
    samples = [
        [event["text"] for event in tiny.events(folder, "sample")] for folder in (ours, theirs)
    ]
    assert samples[0] == samples[1] and len(samples[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
@pytest.mark.parametrize("layout", ["dp=2", "tp=2"])
def test_so_are_stages_of_copies_and_of_shared_products(ranks, make, recipe, layout):
    ours, theirs = both(ranks, make, layout, recipe=recipe, hidden_size=64, intermediate_size=128)
    same_run(ours, theirs)


SPLIT = {"layers": 4, "micro_batches": 4, "batch_size": 8}
SETTINGS = [
    {"schedule": "ZBVZeroBubble", **SPLIT},
    {"schedule": "InterleavedZeroBubble", **SPLIT},
    {"schedule": "Interleaved1F1B", "weights": "codes", "recipe": "fp8-delayed", **SPLIT},
    {"weights": "codes", "recipe": "fp8-row"},
    {"gradients": "fp8"},
    {
        "optimizer": "lion",
        "states": "4bit",
        "precision": "bf16-o2",
        "hidden_size": 64,
        "checkpointing": "full",
    },
    {
        "precision": "bf16-o3",
        "optimizer": "sgd",
        "states": "fp8",
        "hidden_size": 64,
        "freeze": "embed*",
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_so_with_other_settings(ranks, make, settings):
    """Schedules that gather before the first forward pass, or split the backward pass, included."""
    ours, theirs = both(ranks, make, "fsdp=2", **settings)
    same_run(ours, theirs)


@pytest.mark.slow
def test_the_first_loss_is_that_of_one_process(ranks, make):
    staged = make("staged", parallel="fsdp=2,pp=2", **COMMON)
    alone = make("alone", **COMMON | {"micro_batches": 4})
    assert ranks(4)(trained, staged) == [0] * 4 and loop.run(alone) == 0
    ours, theirs = tiny.losses(Path(staged.output)), tiny.losses(Path(alone.output))
    assert ours[1] == theirs[1] and ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "dp=2"])
def test_messages_between_stages_may_be_narrow(ranks, make, layout):
    changes = COMMON | {"hidden_size": 64, "sample_tokens": 0}
    wide, narrow = (
        make(form, parallel=f"{layout},pp=2", activations=form, **changes)
        for form in ("16bit", "fp8")
    )
    assert ranks(4)(trained, wide) == ranks(4)(trained, narrow) == [0] * 4
    ours, theirs = tiny.losses(Path(narrow.output)), tiny.losses(Path(wide.output))
    assert ours != theirs and ours == pytest.approx(theirs, rel=1e-3)


# --- checkpoints


@pytest.mark.slow
def test_it_goes_on_in_one_process_and_in_stages_of_copies(ranks, make):
    """To the bit as the same chain without stages; final/ is one folder of Hugging Face."""
    common = {**COMMON, "recipe": "fp8-delayed", "steps": 6}
    folders = []
    for name, stages in (("staged", ",pp=2"), ("whole", "")):
        world = 4 if stages else 2
        config = make(name, **common)
        shards, copies = (replace(config, parallel=f"{each}=2{stages}") for each in ("fsdp", "dp"))
        assert ranks(world)(trained, shards, [("stop", world - 1, 2)]) == [130] * world
        assert loop.run(replace(config, steps=4, micro_batches=4, resume=True)) == 0
        assert ranks(world)(trained, replace(copies, resume=True)) == [0] * world
        folders.append(Path(config.output))
    same_run(*folders)
    assert [event["step"] for event in tiny.events(folders[0], "resume")] == [2, 4]
    final, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "final") for folder in folders
    )
    assert all(
        torch.equal(x, expected.state_dict()[name]) for name, x in final.state_dict().items()
    )


@pytest.mark.slow
def test_under_torchrun(make, text):
    """The command itself, four ranks, which Ctrl-C at one of them ends; then one process."""
    config, alone = (
        make("staged", steps=4, micro_batches=2),
        make("alone", steps=4, micro_batches=4),
    )
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    more = ["--parallel=fsdp=2,pp=2", "--batch.micro-batches=2"]
    run([*torchrun, PROGRAM, "stop", "3", "2", "train", *tiny.flags(config, text), *more])
    assert list(tiny.losses(Path(config.output))) == [1, 2]
    assert loop.run(replace(config, resume=True, micro_batches=4)) == 0 and loop.run(alone) == 0
    assert tiny.losses(Path(config.output)) == pytest.approx(
        tiny.losses(Path(alone.output)), rel=1e-3
    )


# --- what goes wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fault", "words"),
    [
        ("fsdp=2", "nan", "the parameter 'model.layers.1.mlp.down_proj.weight' itself"),
        ("dp=2", "forward", "the output"),
        ("fsdp=2", "backward", "the gradient of the input"),
    ],
)
def test_what_is_not_finite_is_named_with_its_rank(ranks, make, layout, fault, words):
    """Block 1 is on ranks 2 and 3."""
    said = sorted(
        ranks(4)(
            trained, make(parallel=f"{layout},pp=2", recipe="fp8-row", **COMMON), [(fault, 3, 2)]
        )
    )
    assert [each.startswith("EndedElsewhere") for each in said] == [True] * 3 + [False]
    assert (
        "NumericsError: " in said[3]
        and words in said[3]
        and "layers.1." in said[3]
        and "on rank 3" in said[3]
    )


@pytest.mark.slow
def test_copies_of_a_stage_that_drift_apart_are_named(ranks, make):
    config = make(parallel="dp=2,pp=2", digest_every=2, **COMMON)
    said = sorted(ranks(4)(trained, config, [("weight", 3, 2)]))
    assert said[0].startswith("DriftError")
    assert (
        "step 2: model.layers.1.mlp.down_proj.weight differs between rank 2 and rank 3" in said[0]
    )


@pytest.mark.slow
def test_too_few_micro_batches_of_a_rank_are_refused(ranks, make):
    said = sorted(ranks(4)(trained, make(parallel="fsdp=2,pp=2", batch_size=4, micro_batches=1)))
    assert "batch.micro_batches = 1: fewer than the 2 stages of the pipeline" in said[0]
