"""Fused norms and activations: found by what they are, no number changed where no kernel runs (exact), and described (in words)."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.fuse import fuse, fusions, precast, rotary
from narrowgauge.fuse.forward import FusedForward
from narrowgauge.fuse.precast import FusedModule
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm import plan
from tests.compare import assert_same

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_kernel")  # test_values.py has the kernels of CPUs

FUSED = {
    "llama": {"rms-norm": 4, "swiglu": 2, "rotary": 2},
    "gpt2": {"layer-norm": 4, "gelu-tanh": 2},
    "bert": {"layer-norm": 3, "gelu": 2},
}


def llama() -> nn.Module:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """With Linears in the place of its Conv1D, as convert asks for."""
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    for block in model.transformer.h:
        for owner, names in ((block.attn, ("c_attn", "c_proj")), (block.mlp, ("c_fc", "c_proj"))):
            for name in names:
                conv = getattr(owner, name)
                linear = nn.Linear(*conv.weight.shape)
                linear.weight.data, linear.bias.data = (
                    conv.weight.data.T.contiguous(),
                    conv.bias.data,
                )
                setattr(owner, name, linear)
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}
IDS = torch.arange(24).reshape(2, 12) % 64


def built(name: str, recipe: str = "fp8-current", fused: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in (
        model.parameters()
    ):  # norms that begin as ones and zeros would hide a weight that is left out
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return ng.convert(model, recipe, fuse=fused)


def trained(model: nn.Module, steps: int = 2, precision: torch.dtype | None = None) -> list[Tensor]:
    """Losses, then gradients of the last step, then all buffers and parameters."""
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast(
            "cpu", dtype=precision or torch.bfloat16, enabled=precision is not None
        ):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        ng.advance(model)
    return [
        *losses,
        *(parameter.grad for parameter in model.parameters()),
        *model.state_dict().values(),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_usual_blocks_are_found(name):
    found = fusions(built(name))
    count: dict[str, int] = {}
    for each in found:
        count[each.function] = count.get(each.function, 0) + (not each.reason)
    count.pop("attention")  # test_attention.py
    assert {kind: number for kind, number in count.items() if number} == FUSED[name], "\n".join(
        map(str, found)
    )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, "fp8-current") for name in MODELS]
    + [("llama", recipe) for recipe in ("fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4", "int4-hq-bs")],
)  # fmt: skip
def test_without_a_kernel_the_numbers_are_those_without_fusing(name, recipe):
    """Loss, every gradient, weights and windows, to the bit."""
    plain, fused = (trained(built(name, recipe, fused)) for fused in (False, True))
    for a, b in zip(plain, fused, strict=True):
        assert_same(a, b)


def test_so_they_are_in_mixed_precision_and_in_evaluation():
    plain, fused = (
        trained(built("llama", "fp8-delayed", each), 3, torch.bfloat16) for each in (False, True)
    )
    for a, b in zip(plain, fused, strict=True):
        assert_same(a, b)
    outputs = []
    for each in (False, True):
        model = built("llama", "fp8-delayed", each)
        trained(model, 1)
        with torch.no_grad():
            outputs.append(model.eval()(input_ids=IDS).logits)
    assert_same(*outputs)


def test_every_reader_takes_the_cast_and_nobody_casts_again(monkeypatch):
    """Of a block: q, k, v share one cast, gate and up one, down has one, o has its own, at the layer."""
    casts: list[tuple[int, int]] = []
    real = precast.Operand
    monkeypatch.setattr(precast, "Operand", Counting := type("Counting", (real,), {}))
    monkeypatch.setattr(
        Counting,
        "read",
        lambda self: casts.append(tuple(self.tensor.shape)) or real.read(self),
        raising=False,
    )
    model = built("llama", "fp8-delayed")
    trained(model, 1)
    assert casts == [(24, 64), (24, 64), (24, 96)] * 2
    assert all(each.unused_cast_share == 0 for each in fusions(model) if each.readers)


def test_windows_of_readers_agree_with_those_of_an_unfused_model():
    plain, fused = (built("llama", "fp8-delayed", each) for each in (False, True))
    for model in (plain, fused):
        trained(model, 3)
    for name, buffer in plain.state_dict().items():
        assert_same(fused.state_dict()[name], buffer, at=name)


def test_micro_batches_and_checkpointing_change_nothing():
    from torch.utils.checkpoint import checkpoint

    results = []
    for fused in (False, True):
        model = built("llama", "fp8-delayed", fused)
        for rows in (IDS[:1], IDS[1:]):
            embedded = model.model.embed_tokens(rows).requires_grad_()
            y = checkpoint(
                lambda h, model=model: model.model(inputs_embeds=h)[0],
                embedded,
                use_reentrant=False,
            )
            y.square().sum().backward()
        ng.advance(model)
        results.append(
            [p.grad for p in model.parameters() if p.grad is not None]
            + list(model.state_dict().values())
        )
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


def test_a_mixed_recipe_hands_over_to_those_who_ask_for_it():
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = ng.convert(
            llama(), {"*": "fp8-delayed", "*.k_proj": "bf16", "*.v_proj": "fp8-row"}, fuse=fused
        )
        results.append(trained(model))
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_a_default_device_elsewhere_changes_nothing(name):
    """As torch.set_default_device has it; the model itself is on the CPU."""
    expected = [str(each) for each in fuse(ng.convert(MODELS[name](), "fp8-current"))]
    model = ng.convert(MODELS[name](), "fp8-current")
    with torch.device("meta"):
        assert [str(each) for each in fuse(model)] == expected


def test_what_is_not_fused_says_why():
    """No Linear, no recipe, another function, another precision."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    ng.convert(model, {"mlp.c_fc": "fp8-current"})
    reasons = {each.name: each.reason for each in fuse(model)}
    assert (
        reasons["transformer.h.0.ln_1"]
        == "transformer.h.0.attn.c_attn is a Conv1D, which has no recipe"
    )

    torch.manual_seed(0)
    model = llama()
    for block in model.model.layers:
        block.mlp.act_fn = nn.Tanh()
        block.input_layernorm.weight.data.fill_(0.5)
        forward = block.input_layernorm.forward
        block.input_layernorm.forward = lambda x, forward=forward: forward(x)
    ng.convert(model, {"*": "bf16", "*.up_proj": "fp8-current"}, fuse=True)
    reasons = {each.name: each.reason for each in fusions(model)}
    assert reasons["model.layers.0.mlp"] == (
        "a LlamaMLP does not multiply one of silu, gelu, gelu-tanh, relu of gate_proj by up_proj"
    )
    assert reasons["model.layers.0.input_layernorm"].code == "replaced-forward"
    assert reasons["model.layers.0.post_attention_layernorm"] == "", (
        "up_proj reads it, whatever gate_proj does"
    )


def test_a_norm_that_adds_one_to_its_weight_is_not_taken_for_one_that_does_not():
    """Gemma's, which has the names and attributes of Llama's: it is one of its own kind."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = llama()
    torch.manual_seed(0)
    for block in model.model.layers:
        block.input_layernorm = GemmaRMSNorm(64)
    ng.convert(model, "fp8-current", fuse=True)
    functions = {each.name: each.function for each in fusions(model)}
    assert functions["model.layers.0.input_layernorm"] == "gemma-norm"
    assert functions["model.layers.0.post_attention_layernorm"] == "rms-norm"


def test_a_function_that_several_blocks_share_keeps_its_own_code():
    """Their readers are different layers, with windows of their own."""
    model = built("gpt2", fused=False)
    act = model.transformer.h[0].mlp.act
    model.transformer.h[1].mlp.act = act
    reasons = {each.name: each.reason for each in fuse(model)}
    assert reasons["transformer.h.0.mlp.act"] == "several modules share transformer.h.0.mlp.act"
    assert "forward" not in act.__dict__


def test_layers_that_share_a_linear_have_the_numbers_of_those_that_are_not_fused():
    """Its window sees what all of them read."""
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = llama()
        first, second = (block.self_attn for block in model.model.layers)
        second.k_proj = first.k_proj
        results.append(trained(ng.convert(model, "fp8-delayed", fuse=fused)))
    assert {each.reason for each in fusions(model) if each.name.endswith("input_layernorm")} == {
        f"several modules share model.layers.{number}.self_attn.k_proj" for number in (0, 1)
    }
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


def test_a_dropout_inside_an_mlp_is_seen_in_evaluation_too():
    """Fused as it computes then, it would train without its dropout; and the modes of its modules stay as they were."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (
                nn.Linear(16, 24),
                nn.Linear(16, 24),
                nn.Linear(24, 16),
            )
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(
                self.drop(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
            )

    model = nn.Sequential(Dropping()).eval()
    ng.convert(model, "fp8-current", fuse=True)
    [found] = fusions(model)
    assert (
        found.reason
        == "a Dropping does not multiply one of silu, gelu, gelu-tanh, relu of gate_proj by up_proj"
    )
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_queries_and_keys_are_turned_as_the_attention_would(precision, monkeypatch):
    """By the autograd function that a kernel runs in; in mixed precision they are bfloat16 and the angles float32."""
    found = []
    for fused in (True, False):
        model = built("llama", fused=fused)
        taken = []
        for block in model.model.layers if fused else ():
            forward = block.self_attn.forward
            monkeypatch.setattr(forward, "kernel", lambda registry, spec: registry.kernels[-1])
            forward.function = lambda *call, taken=taken: taken.append(call)
        found.append(trained(model, precision=precision))
        assert not taken
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", ["full", "sqrt", "selective"])
def test_fused_blocks_are_computed_again_to_the_bit(policy, monkeypatch):
    """By the autograd function that a kernel runs in; torch hands what was saved out once while it computes a block again."""
    monkeypatch.setattr(
        "narrowgauge.nn.plan.plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )
    monkeypatch.setattr(FusedForward, "kernel", lambda self, registry, spec: registry.kernels[-1])
    found = []
    for chosen in (None, policy):
        model = built("llama", "fp8-row")
        ng.memory.checkpoint(model, chosen, keep_last=False)
        found.append(trained(model))
        replaced = [each.__dict__.get("forward") for each in model.modules()]
        assert sum(each.stats.made for each in replaced if isinstance(each, FusedModule)) > 0
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    "angles", [(1, 6, 8), (1, 1, 16), (3, 6, 16)], ids=["half a head", "one token", "batch"]
)
def test_angles_that_no_kernel_reads_reach_the_own_code(angles, monkeypatch):
    """Part of a head is turned by models with partial_rotary_factor; torch broadcasts the others."""

    def own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x[..., : cos.shape[-1]] * cos[:, None] * sin[:, None] for x in (q, k))  # type: ignore[return-value]

    attention = rotary.FusedAttention(nn.Linear(2, 2), own)
    monkeypatch.setattr(
        attention, "kernel", lambda registry, spec: pytest.fail("a kernel would read it")
    )
    q, k = (torch.randn(3 if angles[0] == 1 else 1, heads, 6, 16) for heads in (4, 2))
    cos, sin = torch.randn(angles), torch.randn(angles)
    for got, expected in zip(attention.embed(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        assert torch.equal(got, expected)


def test_an_attention_that_turns_otherwise_keeps_its_own_code(monkeypatch):
    """Pairs of neighbours, as in some models, under the same name."""
    from transformers.models.llama import modeling_llama

    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = (torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k))
        return tuple(
            x * cos[:, None] + y * sin[:, None] for x, y in zip((q, k), turned, strict=True)
        )  # type: ignore[return-value]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", neighbours)
    found = fusions(built("llama"))
    reasons = {each.name: each.reason for each in found if each.function != "attention"}
    assert reasons["model.layers.0.self_attn"] == "its apply_rotary_pos_emb computes something else"


def test_describe_prints_it_and_none_takes_it_back():
    model = built("llama")
    assert "mlp (swiglu)" in str(ng.describe(model))
    ng.convert(model, None)
    assert fusions(model) == [] and all(
        "forward" not in module.__dict__ for module in model.modules()
    )
    assert "swiglu" not in str(ng.describe(model))


def test_recipes_may_change_afterwards():
    """To one that casts otherwise, to none, suspended: the fused cast follows."""
    results = []
    for fused in (False, True):
        model = built("llama", "fp8-delayed", fused)
        trained(model, 1)
        for layer in model.modules():
            if isinstance(layer, QLinear) and layer.recipe is not None:
                layer.recipe = "fp8-block"
        found = trained(model, 1)
        with ng.suspended(model):
            found += trained(model, 1)
        results.append(found)
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


def test_copies_and_pickles_work_on_their_own():
    model = built("llama", "fp8-delayed")
    trained(model, 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mlp = other.model.layers[0].mlp
        assert mlp.__dict__["forward"].module is mlp
        assert all(each in list(other.modules()) for each in mlp.__dict__["forward"].readers)
        for a, b in zip(trained(copy.deepcopy(model), 1), trained(other, 1), strict=True):
            assert_same(a, b)


def test_a_reader_that_never_comes_shows():
    model = built("llama")
    norm = model.model.layers[0].input_layernorm
    for _ in range(2):
        norm(torch.randn(3, 64))
    found = {each.name: each for each in fusions(model)}["model.layers.0.input_layernorm"]
    assert found.unused_cast_share == 1 and "100% of its casts were read by nobody" in str(found)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated"
)  # Dynamo's own use of autograd.Function
def test_compiled_code_passes_it_by_without_a_break():
    layer = built("llama", "fp8-current").model.layers[0]
    part, x = nn.Sequential(layer.post_attention_layernorm, layer.mlp), torch.randn(2, 12, 64)
    assert_same(torch.compile(part, backend="eager", fullgraph=True)(x), part(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_code_of_a_whole_model_passes_it_by_without_a_break():
    model = built("llama", "fp8-current")
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    assert_same(compiled(input_ids=IDS)[0], model.model(input_ids=IDS)[0])
