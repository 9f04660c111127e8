"""A run in stages of a pipeline is the run of one process with as many micro-batches (exact), and refuses what it cannot cut."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge import recipes
from narrowgauge.distributed.pipeline import ACTIVATION_GRADIENTS
from narrowgauge.errors import ConfigError
from narrowgauge.train import assembly, loop
from narrowgauge.train.config.settings import TrainConfig, replace
from narrowgauge.train.parallel.pipeline import SCHEDULES
from narrowgauge.train.parallel.stages import Absent, Cut, remove, view
from narrowgauge.train.trainer import Trainer
from tests.raising import coded, raises, require
from tests.selection import quick
from tests.train import faulty_run, tiny
from tests.train.test_torchrun import same_run, trained

# --- cutting


def model_of(kind, **changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": False, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if kind == "GPT2":
        sizes |= {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def tried(model, count):
    return Cut.of(model, count), Cut.of(model, count).refuse_other_numbers(
        model, contextlib.nullcontext()
    )


@pytest.mark.parametrize(
    "kind",
    quick(
        ["Llama", "GPT2"],
        ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "GPTNeoX", "GPT2", "Mixtral"],
    ),
)
def test_stages_compute_what_the_model_does(kind):
    """Exact; the sliding window of Mistral and the positions of GPT-2 included."""
    model = model_of(kind, **({"sliding_window": 4} if kind == "Mistral" else {}))
    cut, dtype = tried(model, 3)
    assert dtype == torch.float32
    names = {
        name
        for number in range(3)
        for name, _ in view(model, cut.absent([number])).named_parameters()
    }
    assert names == {name for name, _ in model.named_parameters()}


def test_a_view_shares_and_removing_frees():
    model = model_of("Llama")
    cut = Cut.of(model, 2)
    stage = view(model, cut.absent([1]))
    assert stage.model.layers[3] is model.model.layers[3] and isinstance(
        stage.model.layers[0], Absent
    )
    assert not isinstance(model.model.layers[0], Absent)
    assert (
        next(name for name, _ in stage.named_parameters())
        == "model.layers.2.self_attn.q_proj.weight"
    )
    remove(model, cut.absent([1]))
    assert isinstance(model.model.layers[0], Absent) and isinstance(
        model.model.embed_tokens, torch.nn.Module
    )
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in stage.named_parameters()
    }


def test_blocks_are_shared_out_so_that_the_last_stage_has_no_more():
    cut = Cut((), tuple(map(str, range(6))), (), 4)
    assert [sorted({*cut.blocks} - {*cut.absent([number])}) for number in range(4)] == [
        ["0", "1"],
        ["2"],
        ["3", "4"],
        ["5"],
    ]


REFUSED = [
    ("Llama", {"tie_word_embeddings": True},
     coded("pipeline.tied-weights", "'model.embed_tokens.weight' of stage 0", "'lm_head.weight' of stage 1")),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, coded("pipeline.uncuttable", "OPTForCausalLM")),
    ("Bloom", {}, coded("pipeline.uncuttable", "BloomForCausalLM")),
    ("Llama", {"num_hidden_layers": 1}, coded("blocks.none")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "expected"), REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(kind, changes, expected):
    with raises(ConfigError, expected):
        tried(model_of(kind, **changes), 2)


def test_fewer_blocks_than_stages():
    with raises(ConfigError, "pipeline.blocks", "4 blocks", "than 5", "5 stages"):
        Cut.of(model_of("Llama"), 5)


# --- the same numbers

COMMON = {
    "micro_batches": 2,
    "steps": 3,
    "eval_every": 2,
    "sample_tokens": 4,
    "checkpoint_every": 2,
}


def both(ranks, make, world=2, **changes):
    """The folders of a run on ranks, and of one process."""
    changes = {**COMMON, **changes}
    reference = make(
        "reference",
        **{key: value for key, value in changes.items() if key not in ("schedule", "activations")},
    )
    assert loop.run(reference) == 0
    config = make("ranks", parallel=f"pp={world}", **changes)
    assert ranks(world)(trained, config) == [0] * world
    return Path(config.output), Path(reference.output)


def known(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.names())
def test_two_stages_are_one_process(ranks, make, recipe):
    ours, theirs = both(ranks, make, recipe=recipe, tensor_every=2)
    same_run(ours, theirs)
    for key in ("parameters", "auto", "loss", "describe", "model"):
        assert known(ours)[key] == known(theirs)[key], key
    samples = [
        [event["text"] for event in tiny.events(folder, "sample")] for folder in (ours, theirs)
    ]
    assert samples[0] == samples[1] and len(samples[0]) == 2
    own, other = (
        {(event["module"], event["role"]): event for event in tiny.events(folder, "tensor")}
        for folder in (ours, theirs)
    )
    same = own.keys() & other.keys()
    assert all(own[key] == other[key] for key in same) and bool(same) == bool(other)


SETTINGS = [
    {
        "precision": "bf16-o2",
        "optimizer": "lion",
        "states": "4bit",
        "master": "bf16-remainder",
        "hidden_size": 64,
    },
    {
        "precision": "bf16-o3",
        "optimizer": "sgd",
        "states": "fp8",
        "embedding_states": "same",
        "hidden_size": 64,
    },
    {"precision": "fp32", "states": "8bit", "hidden_size": 64, "recipe": "fp8-delayed"},
    {"layers_recipe": {"lm_head": "fp8-current"}},
    {"freeze": "embed*", "checkpointing": "full", "recipe": "int4-hq-bs"},
    {"fuse": True, "switch": "bf16@1"},
    {"batch_size": 12, "micro_batches": 6, "best": "loss"},
    {"layers_recipe": {"model.layers.1.*": "bf16"}, "compress_activations": True},
    {"recipe": "int4-hq-bs", "embedding_codes": "int4"},
    {"recipe": "fp8-delayed", "layers_recipe": {"model.layers.1.*": "bf16"}},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_so_are_other_settings(ranks, make, settings):
    ours, theirs = both(ranks, make, **settings)
    same_run(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_so_are_other_schedules(ranks, make, schedule):
    ours, theirs = both(
        ranks, make, schedule=schedule, layers=4, micro_batches=4, recipe="fp8-delayed"
    )
    same_run(ours, theirs)


@pytest.mark.slow
def test_so_are_four_stages(ranks, make):
    ours, theirs = both(ranks, make, world=4, layers=5, micro_batches=4, recipe="fp8-delayed")
    same_run(ours, theirs)


@pytest.mark.slow
def test_stopped_on_two_stages_it_goes_on_in_one_process_and_in_stages_again(
    ranks, make, before_step
):
    """Ctrl-C reaches the last stage alone. All have the log of one process, and one checkpoint that any number of ranks reads."""
    common = {"recipe": "fp8-delayed", "steps": 4, "micro_batches": 2}
    reference = make("reference", **common)
    assert loop.run(reference) == 0
    config = make("stopped", parallel="pp=2", **common)
    assert ranks(2)(trained, config, [("stop", 1, 1)]) == [130, 130]
    before_step(3, lambda trainer: faulty_run.apply("stop", trainer))
    assert loop.run(replace(config, resume=True, parallel="")) == 130
    assert ranks(2)(trained, replace(config, resume=True)) == [0, 0]
    ours, theirs = Path(config.output), Path(reference.output)
    same_run(ours, theirs)
    assert [event["step"] for event in tiny.events(ours, "resume")][-1] == 3
    final, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
        for folder in (ours, theirs)
    )
    assert all(
        torch.equal(x, expected.state_dict()[name]) for name, x in final.state_dict().items()
    )


# --- messages


def observed(config):
    """The exit code of this rank, what it counted, and which parameters of the whole model were alive while it trained."""
    found, alive, refs = {}, [], {}
    built, train = assembly.built, Trainer.train

    def noted(*given):
        model = built(*given)
        refs.update({name: weakref.ref(parameter) for name, parameter in model.named_parameters()})
        return model

    def observing(trainer, *given):
        gc.collect()
        alive.extend(name for name, ref in refs.items() if ref() is not None)
        assert alive == [name for name, _ in trainer.model.named_parameters()]
        try:
            return train(trainer, *given)
        finally:
            found.update(trainer.parallel.agreements[0].bytes_sent)

    assembly.built, Trainer.train = noted, observing
    try:
        return trained(config), found, alive
    finally:
        assembly.built, Trainer.train = built, train


@pytest.mark.slow
def test_messages_of_8_bits_are_a_setting_and_a_rank_holds_its_stages_alone(ranks, make):
    changes = {**COMMON, "eval_every": 0, "sample_tokens": 0, "hidden_size": 64}
    whole = make("whole", parallel="pp=2", **changes)
    narrow = make("narrow", parallel="pp=2", activations="fp8", **changes)
    assert [code for code, *_ in ranks(2)(observed, whole)] == [0, 0]
    (code, first, upper), (other, last, lower) = ranks(2)(observed, narrow)
    assert code == other == 0
    assert (
        "lm_head.weight" in lower and len(upper) == 10 and len(lower) == 11
    )  # the memory of the others is free
    tokens = 4 * 16
    evaluated = sum(event["tokens"] for event in tiny.events(Path(narrow.output), "eval"))
    of_token = 4 * -(-64 // 32 * 33 // 4)  # bytes of a row of the message, in whole float32
    assert last[ACTIVATION_GRADIENTS] == 3 * tokens * of_token
    assert first["activations"] - 3 * tokens * of_token in range(
        evaluated * of_token, 2 * evaluated * of_token
    )
    ours, theirs = tiny.losses(Path(narrow.output)), tiny.losses(Path(whole.output))
    assert ours != theirs and ours == pytest.approx(theirs, rel=1e-3)


# --- bad input

WRONG = [
    ({"micro_batches": 1}, coded("pipeline.micro-batches", "batch.micro_batches = 1", "2 stages", "'1F1B' on 2 ranks")),
    ({"schedule": "ZBVZeroBubble", "layers": 2, "micro_batches": 4}, coded("pipeline.blocks", "2 blocks", "4 stages")),
    ({"schedule": "Interleaved1F1B", "layers": 4, "micro_batches": 5, "batch_size": 5},
     coded("pipeline.schedule", "parallel.schedule = 'Interleaved1F1B'")),
    ({"compile": True}, coded("parallel.compiled", "compile")),
    ({"gradients": "fp8"}, coded("parallel.no-gradients", "parallel.gradients = 'fp8'")),
    ({"weights": "codes"}, coded("parallel.weights", "parallel.weights = 'codes'", "'pp=2'")),
    ({"freeze": "embed*,layers.0"}, coded("pipeline.all-frozen", "stage 0 of 2")),
    ({"parallel": "fsdp=2", "activations": "fp8"}, coded("parallel.activations", "parallel.activations = 'fp8'", "'fsdp=2'")),
]  # fmt: skip


def each(configs):
    return [trained(config) for config in configs]


@pytest.mark.slow
def test_bad_settings_are_refused_on_all_ranks(ranks, make):
    configs = [
        make(f"run-{place}", **{"parallel": "pp=2", **COMMON, **changes})
        for place, (changes, _) in enumerate(WRONG)
    ]
    for (_, expected), told in zip(WRONG, zip(*ranks(2)(each, configs), strict=True), strict=True):
        error, other = sorted(told)
        require(error, expected.code, "ConfigError", *expected.values)
        assert other.startswith("EndedElsewhere")


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "layers"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
def test_a_weight_that_is_nan_ends_all_with_its_name(ranks, make, schedule, layers):
    """Block 1 is on rank 1 in both."""
    config = make(
        parallel="pp=2",
        layers=layers,
        schedule=schedule,
        recipe="fp8-row",
        **{**COMMON, "micro_batches": 4},
    )
    said = sorted(ranks(2)(trained, config, [("nan", 1, 2)]))
    assert said[0].startswith("EndedElsewhere") and re.match(
        r"NumericsError: (rank 1: )?step 2", said[1]
    )  # who is first tells
    assert (
        "the parameter 'model.layers.1.mlp.down_proj.weight' itself" in said[1]
        and "on rank 1" in said[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "layers"), [("1F1B", 2), ("ZBVZeroBubble", 4)])
@pytest.mark.parametrize(
    ("place", "words"), [("forward", "the output"), ("backward", "the gradient of the input")]
)
def test_what_overflows_is_named_by_the_stage_where_it_began(
    ranks, make, place, words, schedule, layers
):
    config = make(
        parallel="pp=2",
        layers=layers,
        schedule=schedule,
        recipe="fp8-row",
        **{**COMMON, "micro_batches": 4},
    )
    said = sorted(ranks(2)(trained, config, [(place, 1, 2)]))
    assert said[0].startswith("EndedElsewhere") and re.match(
        r"NumericsError: (rank 1: )?step 2", said[1]
    )  # who is first tells
    assert "on rank 1" in said[1] and "layers.1." in said[1] and words in said[1]


def test_the_setting_names_the_schedules_that_there_are():
    """They stand in the settings too, which import no torch."""
    assert set(TrainConfig.__dataclass_fields__["schedule"].metadata["rule"].names) == set(
        SCHEDULES
    )
