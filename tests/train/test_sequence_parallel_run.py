"""A run whose ranks share products, and have other tokens each between them (`--parallel tp=2,sp`), with messages of 16 bits and of FP8.

Bounded, by the control of `test_tensor_parallel_run`; with messages in FP8 of recipes that are finer than E4M3 it is `fp8-current`'s
(see tests/distributed/test_tensor_parallel.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from narrowgauge.distributed.tensor_parallel import messages_of
from narrowgauge.errors import ConfigError
from narrowgauge.train import loop
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.config.settings import replace, resolved
from narrowgauge.train.trainer import Trainer
from tests.raising import coded, raises, require
from tests.train import tiny
from tests.train.test_tensor_parallel_run import WIDE, assert_as_one_process, assert_near, perturbed  # noqa: F401
from tests.train.test_torchrun import trained


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-row", "int4-hq-bs"])
def test_two_ranks_with_other_tokens_learn_as_one_process_does(
    ranks,
    make,
    perturbed,  # noqa: F811
    recipe,
    activations,
):
    assert_near(ranks, make, perturbed, recipe, "tp=2,sp", 2, 1, activations=activations)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["16bit", "fp8"])
def test_so_do_two_groups_of_shards(ranks, make, perturbed, activations):  # noqa: F811
    assert_near(
        ranks, make, perturbed, "fp8-delayed", "fsdp=2,tp=2,sp", 4, 2, activations=activations
    )


OPTIONS = [
    {"recipe": "none", "precision": "fp32", "sample_tokens": 3},
    {"recipe": "none", "precision": "fp32", "checkpointing": "full", "sequence_length": 15},
    {"recipe": "fp8-current", "precision": "bf16-o3", "states": "8bit"},
    {"recipe": "none", "precision": "fp32", "embedding_codes": "int8"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_settings_that_work_on_one_process_work(ranks, make, settings):
    """Widths that the ranks do not divide, as of samples, included."""
    reference, config = assert_as_one_process(ranks, make, "tp=2,sp", settings)
    texts = [
        [event["text"] for event in tiny.events(Path(each.output), "sample")]
        for each in (config, reference)
    ]
    assert texts[0] == texts[1]


def _counted(config):
    """The exit code; of the first step the bytes that this rank gave to collectives of activations, and what a norm read."""
    counted, read = Counter(), []
    real = Trainer._optimizer_step

    def step(run):
        norm = run.model.model.layers[1].post_attention_layernorm
        hook = norm.register_forward_pre_hook(lambda _, given: read.append(list(given[0].shape)))
        found = [via for each in run.model.modules() if (via := messages_of(each)) is not None]
        before = sum((each.bytes_sent for each in found), Counter())
        taken = real(run)
        hook.remove()
        if not run.step > 1:
            counted.update(sum((each.bytes_sent for each in found), Counter()) - before)
        return taken

    Trainer._optimizer_step = step
    try:
        return trained(config), dict(counted), read[0]
    finally:
        Trainer._optimizer_step = real


@pytest.mark.slow
def test_messages_take_a_byte_per_number_and_norms_read_a_part(ranks, make):
    """Of two blocks: x of attention and MLP and the gradients of their outputs are gathered; the outputs and gradients of x are sums."""
    common = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "steps": 2,
        "recipe": "fp8-current",
        "parallel": "tp=2,sp",
    }
    narrow, wide = make("narrow", activations="fp8", **common), make("wide", **common)
    numbers = 2 * 2 * 2 * (4 * 16 * 128)  # of all tokens
    for code, sent, read in ranks(2)(_counted, narrow):
        assert code == 0 and read == [4, 8, 128]
        assert sent == {
            "all-gather": numbers,
            "all-to-all": numbers + numbers // 128,
            "maximum": 8 * 8,
        }
    assert ranks(2)(_counted, wide)[0] == (0, {}, [4, 8, 128])


@pytest.mark.slow
def test_stopped_it_goes_on_to_the_bit_and_in_one_process(ranks, make):
    common = {
        "recipe": "fp8-delayed",
        "steps": 4,
        "batch_size": 2,
        "parallel": "tp=2,sp",
        "activations": "fp8",
    }
    whole, config = make("whole", **common), make("stopped", **common)
    assert ranks(2)(trained, whole) == [0, 0]
    assert ranks(2)(trained, config, [("stop", 1, 2)]) == [130, 130]
    assert ranks(2)(trained, replace(config, resume=True), [("stop", 0, 3)]) == [130, 130]
    assert tiny.losses(Path(config.output)) == {
        step: tiny.losses(Path(whole.output))[step] for step in (1, 2, 3)
    }
    assert loop.run(replace(config, resume=True, parallel="")) == 0
    ours, theirs = tiny.losses(Path(config.output)), tiny.losses(Path(whole.output))
    assert ours[4] == pytest.approx(theirs[4], rel=1e-2)


REFUSED = [
    (
        {"parallel": "tp=2", "activations": "fp8"},
        coded("parallel.activations", "parallel = 'tp=2'"),
    ),
    ({"parallel": "tp=2,sp", "fuse": True}, coded("parallel.fuse", "recipe.fuse")),
    ({"parallel": "sp"}, coded("parallel.sp-without-tp", "'tp=2,sp'")),
    ({"parallel": "tp=2,sp=2"}, coded("parallel.sp-number", "'sp=2'")),
]


def each(configs):
    return [trained(config) for config in configs]


@pytest.mark.slow
def test_what_does_not_go_together_is_refused_by_all(ranks, make):
    configs = [make(f"run-{place}", **changes) for place, (changes, _) in enumerate(REFUSED[:2])]
    for (_, expected), told in zip(
        REFUSED, zip(*ranks(2)(each, configs), strict=True), strict=False
    ):
        error, other = sorted(told)
        require(error, expected.code, *expected.values)
        assert other.startswith("EndedElsewhere")


@pytest.mark.parametrize(("changes", "expected"), REFUSED[2:])
def test_a_layout_that_says_nothing_is_refused(make, changes, expected):
    with raises(ConfigError, "config.parallel", *expected.values):
        resolved(make(**changes))
    [problem] = parallel_syntax.problems(changes["parallel"])
    assert problem.code == expected.code
