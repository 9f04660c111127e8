"""The audit observes steps of the run itself, so a step that is observed must give the bits of one that is not.

The class is searched: recipes x fused norms and activations x gradient checkpointing x micro-batches x kept weight codes x autocast.
"""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.lab.guard.audit import Audit
from narrowgauge.recipes import POSITIVE_CONTROL
from tests.compare import assert_same
from tests.selection import quick

RECIPES = [name for name in ng.recipes.names() if name not in ("bf16", POSITIVE_CONTROL)]
FUSED = {
    "off": {},
    "exact": {"fuse": True},
    "fp8": {"fuse": True, "save": "fp8"},
    "int8": {"fuse": True, "save": "int8"},
}
CASES = [
    {"fused": fused, "checkpointing": checkpointing, "micro_batches": micro, "weight_codes": codes, "autocast": autocast}
    for fused, checkpointing, micro, codes, autocast in itertools.product(
        FUSED, (False, True), (1, 2), ("recast", "step"), (False, True)
    )
]  # fmt: skip
VOCABULARY, STEPS = 32, 3


def trained(
    recipe,
    observed,
    *,
    fused,
    checkpointing,
    micro_batches,
    weight_codes,
    autocast,
    dtype=torch.float32,
):
    """Losses, parameters and amax windows of a small Llama after STEPS steps, and what the audit found."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaForCausalLM(sizes).to(dtype).train()
    if checkpointing:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    ng.convert(model, recipe, weight_codes=weight_codes, **FUSED[fused])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(
        VOCABULARY, (STEPS, micro_batches, 2, 16), generator=torch.Generator().manual_seed(1)
    )
    audit, losses = Audit(model, 0), []
    if observed == "a function":
        for layer in (each for each in model.modules() if isinstance(each, ng.QLinear)):
            layer.observer = lambda *given: None
    for batch in ids:
        if observed == "audit":
            audit.begin()
        for part in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=part, labels=part).loss
            loss.backward()
            losses.append(loss.detach())
        audit.end()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return {**model.state_dict(), "losses": torch.stack(losses)}, audit.found()


def check(recipe, **case):
    alone, _ = trained(recipe, "", **case)
    observed, found = trained(recipe, "audit", **case)
    assert_same(observed, alone)
    assert not found.unlike and found.compared, (recipe, case, found)


@pytest.mark.parametrize(
    "recipe",
    quick(
        ["fp8-delayed", "nvfp4", "quartet2"],
        ["fp8-current", "fp8-delayed", "fp8-block", "int8", "nvfp4", "quartet2", "int4-hq-bs"],
    ),
)
def test_an_observed_step_has_the_bits_of_one_that_is_not(recipe):
    """With save="fp8" norms have kernels on every device; an observed reader once sent them back to torch's."""
    check(
        recipe,
        fused="fp8",
        checkpointing=False,
        micro_batches=2,
        weight_codes="auto",
        autocast=True,
    )


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int8", "nvfp4"])
def test_a_function_that_observes_changes_no_bit(recipe):
    case = {
        "fused": "fp8",
        "checkpointing": False,
        "micro_batches": 1,
        "weight_codes": "auto",
        "autocast": False,
    }
    assert_same(trained(recipe, "a function", **case)[0], trained(recipe, "", **case)[0])


@pytest.mark.parametrize("seed", quick([0], range(4)))
def test_a_random_member_of_the_class_keeps_its_bits(seed):
    draw = random.Random(seed)
    check(draw.choice(RECIPES), **draw.choice(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_keeps_its_bits(recipe):
    for case in random.Random(recipe).sample(CASES, 6):
        check(recipe, **case)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-current", "int8", "int4-hq-lss"])
def test_weights_in_bfloat16_keep_their_bits_too(recipe):
    for case in random.Random(0).sample([each for each in CASES if not each["autocast"]], 4):
        check(recipe, **case, dtype=torch.bfloat16)
