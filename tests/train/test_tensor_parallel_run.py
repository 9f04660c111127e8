"""A run whose ranks share matrix products (`--parallel tp=2`) learns as one process does, and ends, resumes and refuses as all runs do.

Bounded: scales go by shards and sums have another order. The control is one process whose weights begin a millionth apart and which draws
other random numbers; after six steps the weights of the ranks are at most 1.5 times as far from those of the unchanged process. The
model is deep for one flipped code to reach most of it (see tests/distributed/test_tensor_parallel.py). Of the loss column, six numbers
that go together, the control's distances differ by 2.3 from seed to seed, so it is asked to be within 3. Exact: what is resumed, and
what ranks hold alike.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from narrowgauge.errors import DriftError
from narrowgauge.train import assembly, loop
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import replace
from narrowgauge.train.parallel import digest
from narrowgauge.train.trainer import Trainer
from tests.compare import assert_same
from tests.selection import quick
from tests.train import tiny
from tests.train.test_torchrun import trained

DEEP = {"hidden_size": 64, "intermediate_size": 128, "layers": 8, "steps": 6, "learning_rate": 3e-3}
# Rows and columns that no tile or block of a recipe is cut in.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "steps": 2}
MOST = 1.5  # of the control's drift: of weights
MOST_OF_LOSSES = 3.0


@pytest.fixture
def perturbed(monkeypatch):
    """perturbed(config, seed): a run of one process whose weights begin a millionth apart, with other random numbers."""
    real = Trainer._optimizer_step

    def run(config, seed):
        def step(run):
            if run.step == 0:
                generator = torch.Generator().manual_seed(seed)
                with torch.no_grad():
                    for each in run.model.parameters():
                        each.mul_(1 + 1e-6 * torch.randn(each.shape, generator=generator))
                run.parallel.agreements[0].seed += seed
            return real(run)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_optimizer_step", step)
            assert loop.run(config) == 0

    return run


def _apart(config, reference):
    """The distances of weights and of loss columns."""
    (ours, losses), (theirs, other) = (
        (_weights(each), tiny.losses(Path(each.output))) for each in (config, reference)
    )
    assert ours.keys() == theirs.keys() and losses.keys() == other.keys()
    squares = sum(
        float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours
    )
    return squares**0.5, sum((losses[step] - other[step]) ** 2 for step in losses) ** 0.5


def assert_near(ranks, make, perturbed, recipe, layout, world, pieces, **changes):
    common = {**DEEP, "recipe": recipe, "micro_batches": pieces}
    reference = make("reference", **common)
    assert loop.run(reference) == 0
    # Drifts of random recipes lie in two groups, 0.9 to 1.05 and 1.25 to 1.45 for int4-hq-bs, of which three seeds may see the lower alone.
    seeds = range(1, 9) if recipe.startswith("int4") else range(1, 4)
    controls = [make(f"control-{seed}", **common) for seed in seeds]
    for seed, each in enumerate(controls, 1):
        perturbed(each, seed)
    config = make("ranks", parallel=layout, **(common | {"micro_batches": 1} | changes))
    assert ranks(world)(trained, config) == [0] * world
    apart, drifts = (
        _apart(config, reference),
        zip(*(_apart(each, reference) for each in controls), strict=True),
    )
    weights, losses = (own / max(drift) for own, drift in zip(apart, drifts, strict=True))
    print(
        f"{layout} {recipe}: weights {weights:.2f}, losses {losses:.2f} of what controls drift"
    )  # pytest -rP shows it
    assert 0 < weights <= MOST and losses <= MOST_OF_LOSSES


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["bf16", "fp8-delayed", "fp8-row", "int8", "int4-hq-bs", "int4-hq-lss"]
)
def test_two_ranks_learn_as_one_process_does(ranks, make, perturbed, recipe):
    assert_near(ranks, make, perturbed, recipe, "tp=2", 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-bs"])
@pytest.mark.parametrize("layout", ["fsdp=2,tp=2", "dp=2,tp=2"])
def test_so_do_two_groups_of_them_with_two_micro_batches(ranks, make, perturbed, recipe, layout):
    assert_near(ranks, make, perturbed, recipe, layout, 4, 2)


OPTIONS = [
    {"recipe": "fp8-current", "compress_activations": True},
    {"recipe": "fp8-current", "checkpointing": "full", "sample_tokens": 4},
    {"recipe": "fp8-row", "optimizer": "lion", "states": "8bit", "tensor_every": 1},
    {"recipe": "fp8-row", "optimizer": "adamw", "states": "8bit", "precision": "bf16-o3"},
    {"recipe": "int4-hq-lss", "precision": "fp32"},
    {"recipe": "none", "precision": "fp32", "freeze": "*.0.self_attn.*"},
    {"recipe": "none", "precision": "fp32", "embedding_codes": "int4"},
]


def assert_as_one_process(ranks, make, parallel, settings):
    """Losses of two ranks and of one process; returns both configurations."""
    reference, config = (
        make("reference", **WIDE, **settings),
        make("ranks", parallel=parallel, **WIDE, **settings),
    )
    assert loop.run(reference) == 0 and ranks(2)(trained, config) == [0, 0]
    ours, theirs = tiny.losses(Path(config.output)), tiny.losses(Path(reference.output))
    assert ours == pytest.approx(theirs, rel=1e-5 if settings["recipe"] == "none" else 5e-3)
    return reference, config


@pytest.mark.slow
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_settings_that_work_on_one_process_work(ranks, make, settings):
    """Each of these changes what is kept or stored, and hardly what is computed."""
    assert_as_one_process(ranks, make, "tp=2", settings)


@pytest.mark.slow
@pytest.mark.parametrize("messages", [{"gradients": "fp8"}, {"weights": "codes"}], ids=str)
def test_messages_between_groups_may_be_narrow(ranks, make, messages):
    common = {**WIDE, "recipe": "fp8-current"}
    reference, config = (
        make("reference", micro_batches=2, **common),
        make("ranks", parallel="fsdp=2,tp=2", **common, **messages),
    )
    assert loop.run(reference) == 0 and ranks(4)(trained, config) == [0] * 4
    assert tiny.losses(Path(config.output)) == pytest.approx(
        tiny.losses(Path(reference.output)), rel=5e-3
    )


# --- checkpoints


def _weights(config):
    found, _ = store.newest_valid(Path(config.output) / "checkpoints")
    return found.tensors["weights"]


@pytest.mark.slow
def test_stopped_it_goes_on_to_the_bit_and_in_one_process(ranks, make):
    """Ctrl-C reaches rank 1 alone. The checkpoint and final/ are of whole tensors, with the names and shapes of one process."""
    common = {"recipe": "fp8-delayed", "steps": 4, "batch_size": 2}
    whole, config = (
        make("whole", parallel="tp=2", **common),
        make("stopped", parallel="tp=2", **common),
    )
    assert ranks(2)(trained, whole) == [0, 0]
    assert ranks(2)(trained, config, [("stop", 1, 2)]) == [130, 130]
    assert ranks(2)(trained, replace(config, resume=True), [("stop", 0, 3)]) == [130, 130]
    assert tiny.losses(Path(config.output)) == {
        step: tiny.losses(Path(whole.output))[step] for step in (1, 2, 3)
    }
    assert loop.run(replace(config, resume=True, parallel="")) == 0
    ours, theirs = tiny.losses(Path(config.output)), tiny.losses(Path(whole.output))
    assert ours[4] == pytest.approx(theirs[4], rel=1e-2) and ours[4] != ours[3]
    exported = safetensors.torch.load_file(Path(whole.output) / "final" / "model.safetensors")
    saved = _weights(whole)
    assert {name: each.shape for name, each in exported.items()} == {
        name: each.shape for name, each in _weights(config).items()
    }
    for name, each in exported.items():
        assert_same(each, saved[name])


@pytest.mark.slow
def test_from_one_process_to_four_ranks(ranks, make):
    config = make("run", recipe="fp8-delayed", steps=4, micro_batches=2, checkpoint_every=2)
    assert loop.run(replace(config, steps=2)) == 0
    four = replace(config, resume=True, parallel="fsdp=2,tp=2", micro_batches=1)
    assert ranks(4)(trained, four) == [0] * 4
    reference = make("reference", recipe="fp8-delayed", steps=4, micro_batches=2)
    assert loop.run(reference) == 0
    assert tiny.losses(Path(config.output)) == pytest.approx(
        tiny.losses(Path(reference.output)), rel=1e-2
    )


# --- what must be equal


@pytest.mark.slow
def test_a_norm_that_differs_between_ranks_that_share_products_ends_the_run(ranks, make):
    """That step's losses show it, or the digests after it."""
    said = sorted(
        ranks(2)(
            trained, make(recipe="fp8-delayed", parallel="tp=2", digest_every=2), [("norm", 1, 2)]
        )
    )
    assert re.search("^DriftError: (rank 1: )?step 2: ", said[0]) and re.search(
        "rank 0 and .*rank 1", said[0]
    )
    assert all(each.startswith(("DriftError", "EndedElsewhere")) for each in said)


def _other_model(config):
    """Rank 1 builds a model of which one weight is another."""
    real = assembly.build

    def build(*given):
        model = real(*given)
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[40, 5] += 1
        return model

    assembly.build = build
    try:
        return trained(config)
    finally:
        assembly.build = real


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "fsdp=2"])
def test_a_model_that_is_another_on_one_rank_is_refused_before_it_is_cut(ranks, make, layout):
    said = sorted(ranks(2)(_other_model, make(parallel=layout)))
    assert "model.layers.0.mlp.up_proj.weight differs between rank 0 and rank 1" in said[0]


def _drift():
    """Shards over one axis that the other axis holds alike, and what is cut on both."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("fsdp", "tp"))
    own = torch.arange(4.0) + 2.0**-20 * (dist.get_rank() == 1)
    tensors = {
        "cut": DTensor.from_local(own, mesh, [Replicate(), Shard(0)]),
        "norm": DTensor.from_local(own, mesh["fsdp"], [Shard(0)], run_check=False),
        "bias": DTensor.from_local(own, mesh["tp"], [Replicate()], run_check=False),
    }
    digest.refuse_drift({"cut": tensors["cut"]}, "step 1", torch.device("cpu"), mesh)
    with pytest.raises(DriftError) as raised:
        digest.refuse_drift(tensors, "step 1", torch.device("cpu"), mesh)
    return str(raised.value)


def test_digests_compare_what_only_some_axes_cut(ranks):
    for said in ranks(2)(_drift):
        assert (
            "step 1: norm differs between rank 0 and rank 1" in said
            and "so do 1 tensors after it" in said
        )


@pytest.mark.slow
def test_a_nan_in_one_ranks_part_of_a_weight_is_named(ranks, make):
    said = sorted(ranks(2)(trained, make(recipe="fp8-row", parallel="tp=2"), [("nan", 1, 2)]))
    assert said[0].startswith("EndedElsewhere") and "NumericsError: " in said[1]
    assert (
        "the parameter 'model.layers.1.mlp.down_proj.weight' itself" in said[1]
        and "on rank 1" in said[1]
    )


@pytest.mark.slow
def test_an_overflow_in_one_ranks_features_is_named_by_its_layer(ranks, make):
    said = sorted(ranks(2)(trained, make(recipe="fp8-row", parallel="tp=2"), [("features", 1, 2)]))
    assert said[0].startswith("EndedElsewhere") and "NumericsError: " in said[1]
    assert "'model.layers.1.mlp.up_proj'" in said[1] and "on rank 1" in said[1]


# --- what is refused

REFUSED = {
    "tensor-parallel.head-count": {"kv_heads": 1},
    "tensor-parallel.tiles": {"recipe": "mxfp8"},
    "parallel.compiled": {"compile": True},
    "parallel.fuse": {"fuse": True},
    "parallel.no-gradients": {"gradients": "fp8"},
    "parallel.float16": {"precision": "amp-fp16"},
    "parallel.ranks": {"parallel": "tp=3"},
}


@pytest.mark.parametrize("code", quick(["tensor-parallel.head-count"], REFUSED))
def test_what_ranks_cannot_share_is_refused_by_all(ranks, make, code):
    said = sorted(ranks(2)(trained, make(**({"parallel": "tp=2"} | REFUSED[code]))))
    assert (
        said[0].startswith("ConfigError")
        and said[0].code == code
        and said[1].startswith("EndedElsewhere")
    )
