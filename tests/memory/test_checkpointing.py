"""Checkpointing (exact): the same gradients to the last bit, fewer bytes, nothing but `forward` touched."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.memory import cheapest, checkpoint, find_blocks, freeze, saved_bytes
from tests.compare import assert_same
from tests.memory.models import batch, llama, step
from tests.raising import raises
from tests.selection import quick

POLICIES = ["full", "every-2", "sqrt", "selective", "budget:400KiB", "budget:0.2MiB"]
INPUTS = {**batch(), "use_cache": False}


def stochastic(x_only: bool) -> ng.Recipe:
    """fp8-row with operands of `output` rounded stochastically: x alone, or weights as well."""
    from dataclasses import replace

    recipe = ng.recipes.get("fp8-row")
    lhs = replace(recipe.output.lhs, rounding="stochastic")
    rhs = recipe.output.rhs if x_only else replace(recipe.output.rhs, rounding="stochastic")
    return replace(recipe, name="random", output=replace(recipe.output, lhs=lhs, rhs=rhs))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_do_not_change_and_bytes_fall(policy):
    model = llama(attention_dropout=0.2)
    whole = saved_bytes(model, INPUTS).total
    loss, gradients = step(model)
    report = checkpoint(model, policy, batch=INPUTS)
    again_loss, again = step(model)
    assert_same(again_loss, loss)
    assert_same(again, gradients)
    kept = saved_bytes(model, INPUTS).total
    assert kept < whole
    assert report.recomputed and set(report.recomputed) | set(report.not_recomputed) == set(
        find_blocks(model)
    )
    if report.measured_bytes is not None:
        assert report.measured_bytes == kept <= (400 if policy.endswith("KiB") else 204.8) * 1024


@pytest.mark.parametrize("policy", ["full", "sqrt", "selective"])
@pytest.mark.parametrize("x_only", quick([False], [True, False]), ids=["x", "x and w"])
@pytest.mark.parametrize("advanced", quick([True], [False, True]), ids=["", "weights kept"])
def test_stochastic_rounding_replays(policy, x_only, advanced):
    """With kept weights the first forward draws their noise and the recomputation finds them cast: it must draw alike."""
    found = []
    for wanted in (None, policy):
        model = llama()
        ng.convert(model, stochastic(x_only))
        checkpoint(model, wanted)
        if advanced:
            ng.advance(model)
        found.append([step(model), step(model)])
    assert_same(found[1], found[0])


def test_delayed_scaling_sees_each_amax_once():
    states = []
    for policy in (None, "full", "sqrt"):
        model = llama()
        ng.convert(model, "fp8-delayed")
        checkpoint(model, policy)
        for _ in range(3):
            step(model)
            ng.advance(model)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert_same(states[1:], states[:1] * 2)


def test_frozen_layers_below_are_neither_kept_nor_computed_again():
    model = llama()
    freeze(model, "embed*,layers.0-1")
    loss, gradients = step(model)
    report = checkpoint(model, "full", keep_last=False)
    assert "2 of them, model.layers.0 to model.layers.1, lie below all that trains" in str(report)
    calls = []
    for name, block in find_blocks(model).items():
        block.mlp.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    again_loss, again = step(model)
    assert_same((again_loss, again), (loss, gradients))
    numbers = [name.rpartition(".")[2] for name in calls]
    assert sorted(numbers) == ["0", "1", "2", "2", "3", "3"]
    saved = saved_bytes(model, INPUTS)
    assert saved.below("model.layers.0") == saved.below("model.layers.1") == 0


def test_the_last_block_is_left_out_by_default():
    model = llama()
    assert "lie below" not in str(checkpoint(model, "full"))
    assert checkpoint(model, "full").not_recomputed == ("model.layers.3",)
    assert checkpoint(model, "full", keep_last=False).not_recomputed == ()
    assert checkpoint(model, "every-3").segments == (3,) and checkpoint(
        model, "every-3"
    ).not_recomputed == ("model.layers.3",)
    assert checkpoint(model, "every-3", keep_last=False).segments == (3, 1)


def test_full_keeps_the_inputs_alone():
    model = llama()
    checkpoint(model, "full", keep_last=False)
    saved = saved_bytes(model, INPUTS)
    residual = 4 * 32 * 32 * 4
    assert [saved.below(name) for name in find_blocks(model)][1:] == [
        residual + torch.get_rng_state().nbytes
    ] * 3


@pytest.mark.parametrize("policy", ["full", "sqrt"])
def test_only_forward_is_replaced_and_comes_back(policy):
    model = llama()
    names = list(model.state_dict())
    checkpoint(model, policy)
    assert (
        list(model.state_dict()) == names
        and type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    )
    expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved_and_loaded(model)):
        assert other.model.layers[0].forward.block is other.model.layers[0]
        assert_same(step(other), expected)
        assert saved_bytes(other, INPUTS).total == saved_bytes(model, INPUTS).total
    assert checkpoint(model, None).recomputed == ()
    assert not any(
        "forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules()
    )


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_another_replacement_of_forward_is_kept():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
    calls = []

    def observed(x, inner=model[0].forward):
        calls.append(1)
        return inner(x)

    model[0].forward = observed
    checkpoint(model, "full", keep_last=False)
    model(torch.randn(2, 8)).sum().backward()
    assert len(calls) == 2
    checkpoint(model, None)
    assert model[0].forward is observed


def test_the_cache_is_off_in_training_and_on_in_generation():
    model = llama()
    report = checkpoint(model, "full")
    assert [note.code for note in report.notes if note.startswith("KV")] == [
        "checkpointing.cache-off"
    ]
    assert model(**batch()).past_key_values is None
    with raises(ConfigError, "checkpointing.use-cache", "use_cache=True"):
        model(**batch(), use_cache=True)
    with raises(ConfigError, "checkpointing.cache-argument", "past_key_values"):
        model.model(**batch(), use_cache=True)
    with torch.no_grad():
        assert model(**batch()).past_key_values is not None
    assert model.config.use_cache is True


def test_an_encoder_and_pytorchs_own():
    sizes = BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=64,
    )
    bert = BertForSequenceClassification(sizes).train()
    assert list(find_blocks(bert)) == [f"bert.encoder.layer.{n}" for n in range(3)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 48, batch_first=True), 3, enable_nested_tensor=False
    )
    assert list(find_blocks(encoder)) == ["layers.0", "layers.1", "layers.2"]
    x, found = torch.randn(2, 6, 32), []
    for policy in (None, "full", "sqrt", "selective"):
        checkpoint(encoder, policy)
        torch.manual_seed(1)
        encoder.zero_grad()
        encoder(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in encoder.parameters()])
    assert_same(found[1:], found[:1] * 3)


def test_a_budget_takes_segments_where_full_is_too_much():
    """What of a segment comes back in backward counts: two inputs of blocks here, of which one is there at the end of forward."""
    model = llama(num_hidden_layers=10)
    checkpoint(model, "full", keep_last=False)
    full = saved_bytes(model, INPUTS).total
    checkpoint(model, "sqrt", keep_last=False)
    at_the_end, residual = saved_bytes(model, INPUTS).total, 4 * 32 * 32 * 4
    report = checkpoint(model, f"budget:{full - 1}B", batch=INPUTS)
    assert (
        report.segments == (4, 3, 2, 1)
        and report.not_recomputed == ()
        and report.measured_bytes == at_the_end < full
    )
    report = checkpoint(model, f"budget:{full}B", batch=INPUTS)
    assert report.segments == () and report.measured_bytes == full
    few = llama(
        num_hidden_layers=3
    )  # segments of 2 and 1: what comes back is as much as full keeps
    checkpoint(few, "full", keep_last=False)
    least = saved_bytes(few, INPUTS).total
    with raises(ConfigError, "checkpointing.budget", f"{least // 2:,}"):
        checkpoint(few, f"budget:{least // 2}B", batch=INPUTS)
    assert residual < least


def test_auto_is_the_cheapest_that_fits():
    counted = {"none": 900, "selective": 700, "full": 300, "every-2": 250, "sqrt": 100}
    asked = []

    def peak(policy):
        asked.append(policy)
        return counted[policy]

    assert [cheapest(peak, limit).policy for limit in (900, 899, 300, 299, 100)] == [
        "none", "selective", "full", "every-2", "sqrt",
    ]  # fmt: skip
    asked.clear()
    model = llama()
    report = checkpoint(model, "auto", peak_bytes=peak, limit_bytes=400)
    assert (
        asked == ["none", "selective", "full"]
        and report.policy == "full"
        and len(report.recomputed) == 3
    )
    assert "auto: full is the cheapest whose step fits into 0.00 GiB" in str(report)
    with raises(ConfigError, "checkpointing.nothing-fits", "(99", "100", "'sqrt'"):
        checkpoint(model, "auto", peak_bytes=peak, limit_bytes=99)
    with raises(ConfigError, "checkpointing.auto-arguments", "'auto'", "peak_bytes"):
        checkpoint(model, "auto")


def test_bad_requests_are_refused_in_words():
    model = llama()
    with raises(ConfigError, "checkpointing.policy", "'half'"):
        checkpoint(model, "half")
    with raises(ConfigError, "checkpointing.no-batch"):
        checkpoint(model, "budget:1MiB")
    with raises(ConfigError, "checkpointing.budget", "1,024", "to 1"):
        checkpoint(model, "budget:1KiB", batch=INPUTS)
    assert not any("forward" in module.__dict__ for module in model.modules())
    with raises(ConfigError, "pattern.no-match"):
        checkpoint(model, "full", blocks="layer.*")
    with raises(ConfigError, "blocks.nested"):
        checkpoint(model, "full", blocks=["layers.0", "layers.0.mlp"])
    with raises(ConfigError, "blocks.none", "Linear"):
        checkpoint(nn.Linear(4, 4), "full")
    model.model.layers[2].gradient_checkpointing = True  # what gradient_checkpointing_enable sets
    with raises(ConfigError, "checkpointing.twice"):
        checkpoint(model, "full")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_it_compiles(policy):
    """Traced in one graph with its recomputation. What Inductor makes of such graphs is for tests/nn/test_linear.py to say."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)]
    )
    x = torch.randn(8, 16)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    checkpoint(model, policy, keep_last=False)
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, reference, rtol=1e-5, atol=1e-6)
