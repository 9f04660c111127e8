"""Fused norms and activations on a CPU: near the module's own code (bounded), autocast's dtype, and what gives the same bits (exact)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.fuse import fusions
from narrowgauge.fuse.patterns import candidates
from narrowgauge.fuse.precast import FusedModule
from tests.compare import assert_same
from tests.fuse import test_architectures as architectures
from tests.fuse.test_fusing import IDS, MODELS, built, llama, trained
from tests.selection import needs_compiler, quick

transformers = pytest.importorskip("transformers")
pytestmark = needs_compiler
OTHERS = ("", "rotary", "attention", "cross-entropy")
KERNEL = "native-cpp, values alone"
RECIPES = ("bf16", "int8", "fp8-delayed", "int4-hq-bs", "fp8-current")


def fused_modules(model: nn.Module) -> dict[str, FusedModule]:
    found = {name: each.__dict__.get("forward") for name, each in model.named_modules()}
    return {name: each for name, each in found.items() if isinstance(each, FusedModule)}


def assert_near(found: list[Tensor], expected: list[Tensor], unit: float) -> None:
    """The first, a loss, to `unit`; the others in norm, since a code or two may differ.

    Gradients of q and k are differences of numbers that cancel: their error is that of the others.
    """
    assert float((found[0] - expected[0]).abs()) <= unit * float(expected[0].abs())
    largest = max(float(each.double().norm()) for each in expected[1:])
    for a, b in zip(found[1:], expected[1:], strict=True):
        size = float(b.double().norm()) + 1e-2 * largest
        assert float((a.double() - b.double()).norm()) <= 32 * unit * size


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_kernels_are_reported(name, recipe):
    found = [each for each in fusions(built(name, recipe)) if each.function not in OTHERS]
    assert len(found) >= 5 and {each.backend for each in found} == {KERNEL}
    assert all(each.saved and not each.reason for each in found)


@pytest.mark.parametrize(
    ("name", "recipe"),
    quick(
        [("llama", "bf16"), ("llama", "int8"), ("gpt2", "bf16"), ("bert", "bf16")],
        [(name, recipe) for name in MODELS for recipe in RECIPES],
    ),
)  # fmt: skip
def test_a_step_is_near_that_of_the_own_code(name, recipe):
    """Operands of a product may round to the neighbour in bfloat16, or in codes."""
    plain, fused = (trained(built(name, recipe, each), 1) for each in (False, True))
    assert_near(fused[:-1], plain[:-1], 1e-5 if recipe == "bf16" else 2e-3)


@pytest.mark.parametrize("name", quick(["gemma2", "neox"], architectures.MODELS))
def test_other_architectures_are_near_too(name):
    expected, found = (
        architectures.gradients(architectures.built(name, fuse=each)) for each in (False, True)
    )
    assert_near(found, expected, 2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_a_norm_writes_what_its_linears_read(name):
    """Only where nobody else reads it: BERT's norms are the residual stream."""
    model, dtypes = built(name, "bf16"), {}
    for at, module in model.named_modules():
        if "forward" in module.__dict__ and "norm" in type(module).__name__.lower():
            module.register_forward_hook(
                lambda module, given, y, at=at: dtypes.update({at: (given[0].dtype, y.dtype)})
            )
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    written = {each for _, each in dtypes.values()}
    assert written == ({torch.float32} if name == "bert" else {torch.bfloat16})
    assert {each for each, _ in dtypes.values()} == {torch.float32}


def test_the_readers_of_a_narrow_norm_read_the_same_bits():
    """bfloat16 of its float32 is what autocast's Linear makes: within the order of the norm's sums."""
    model = built("llama", "bf16")
    norm, x = model.model.layers[0].input_layernorm, torch.randn(5, 7, 64)
    own = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(norm(x), own.bfloat16())


def test_mixed_precision_trains_as_the_own_code():
    plain, fused = (
        trained(built("llama", "bf16", each), 2, torch.bfloat16) for each in (False, True)
    )
    assert_near(fused, plain, 2.0**-9)


def test_norms_between_sublayers_and_experts_are_not_private():
    """OLMo 2 adds a norm's result to the residual stream; experts are read by more than Linears."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    olmo = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes, pad_token_id=0))
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_local_experts=2)
    )
    private = {
        f"{type(model).__name__}: {each.name}": each.is_private
        for model in (olmo, mixtral, llama())
        for each in candidates(model)
        if each.form == "module" and each.readers
    }
    assert {name.partition(": ")[0] for name, each in private.items() if not each} >= {
        "Olmo2ForCausalLM",
        "MixtralForCausalLM",
    }
    assert private["MixtralForCausalLM: model.layers.0.input_layernorm"]
    assert not private["MixtralForCausalLM: model.layers.0.post_attention_layernorm"]
    assert not private["Olmo2ForCausalLM: model.layers.0.post_attention_layernorm"]
    assert all(each for name, each in private.items() if name.startswith("Llama"))


def test_suspended_and_without_a_recipe_the_own_code_runs():
    plain, fused = (built("llama", "bf16", each) for each in (False, True))
    with ng.suspended(plain), ng.suspended(fused):
        assert_same(trained(fused), trained(plain))
    for model in (plain, fused):
        for name, layer in ng.conversion.quantized_linears(model, "a test"):
            if name.startswith("model.layers.0"):
                layer.recipe = None
    names = [each.name for each in fusions(fused) if each.backend == KERNEL]
    assert names and all(name.startswith("model.layers.1") for name in names)


@pytest.mark.parametrize("policy", ["full", "sqrt", "selective"])
def test_recomputed_blocks_have_the_same_bits(policy):
    results = []
    for chosen in (None, policy):
        model = built("llama", "int8")
        ng.memory.checkpoint(model, chosen, keep_last=False)
        results.append(trained(model))
    assert_same(*results)


def test_evaluation_frozen_norms_and_a_second_use():
    model = built("llama", "bf16")
    norm = model.model.layers[0].input_layernorm
    x = torch.randn(3, 64)
    with torch.no_grad():
        expected = norm(x)
    assert_same(norm(x).detach(), expected)
    with torch.inference_mode():
        assert_same(norm(x), expected)
    norm.weight.requires_grad_(False)
    x.requires_grad_()
    (norm(x) + norm(2 * x)).sum().backward()
    grad, x.grad = x.grad, None
    with ng.suspended(model):
        (norm(x) + norm(2 * x)).sum().backward()
    torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-4)
    assert norm.weight.grad is None


def test_a_copy_has_kernels_of_its_own():
    model = built("llama", "bf16")
    trained(model, 1)
    other = copy.deepcopy(model)
    for name, forward in fused_modules(other).items():
        assert forward.module is other.get_submodule(name)
        assert forward.values.fused is forward
    assert_same(trained(model, 1), trained(other, 1))


def test_functional_transforms_run_the_own_code():
    model = built("llama", "bf16")
    norm, x = model.model.layers[0].input_layernorm, torch.randn(3, 64)
    found = torch.func.vmap(norm)(x)
    torch.testing.assert_close(found, norm(x), rtol=1e-5, atol=1e-5)


def test_under_autocast_queries_and_keys_are_what_attention_reads():
    """Rotated by float32 angles, and rounded to bfloat16: the own code leaves the rounding to attention."""
    forward = built("llama", "bf16").model.layers[0].self_attn.__dict__["forward"]
    q, k = (torch.randn(2, 6, heads, 16).bfloat16().transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 6, 16)
    for each in (q, k):
        each.requires_grad_()
    wide = forward.function(q, k, cos, sin)
    given = [torch.randn(each.shape).bfloat16() for each in wide]
    expected = torch.autograd.grad(wide, (q, k), [each.float() for each in given])
    with torch.autocast("cpu", torch.bfloat16):
        found = forward.embed(q, k, cos, sin)
    assert_same([x.detach() for x in found], [x.detach().bfloat16() for x in wide])
    gradients = torch.autograd.grad(found, (q, k), given)
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)  # 0 and -0 are equal
