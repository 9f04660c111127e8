"""Conversion of experts in one parameter: what gets a recipe, what keeps its precision and why, and what `None` gives back. exact"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.conversion.switching import switch
from narrowgauge.errors import ConfigError
from narrowgauge.nn.experts import GroupedExperts, refuse
from narrowgauge.nn.grouped_linear import ExpertLinear
from narrowgauge.structure import blocks
from tests.compare import assert_same
from tests.raising import raises, warns

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.arange(40).reshape(2, 20) % 64
STACKS = ("gate_up_proj", "down_proj")
FIRST = "model.layers.0.mlp.experts"


def mixtral(**sizes: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4,
    }  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**given | sizes))


def recipes_of_experts(model: nn.Module) -> dict[str, str]:
    return {
        row.name.removeprefix(f"{FIRST}."): row.recipe
        for row in ng.describe(model)
        if row.name.startswith(FIRST)
    }


def why(model: nn.Module) -> set[str]:
    """Codes of the notes on experts without a recipe."""
    rows = [row for row in ng.describe(model) if "experts" in row.name and row.recipe == "none"]
    assert rows
    return {note.code for row in rows for note in row.notes}


def passed(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())]


def test_experts_have_the_recipe_and_the_model_keeps_its_names() -> None:
    model = mixtral()
    names, keys, classes = dict(model.named_parameters()), list(model.state_dict()), [type(each) for each in model.modules()]  # fmt: skip
    before = passed(model)
    ng.convert(model, "fp8-current")
    assert isinstance(model.get_submodule(FIRST), GroupedExperts)
    assert recipes_of_experts(model) == {
        f"{index}.{name}": "fp8-current" for index in range(4) for name in STACKS
    }
    assert list(model.state_dict()) == keys
    assert all(dict(model.named_parameters())[name] is each for name, each in names.items())
    assert not torch.equal(passed(model)[0], before[0])
    with ng.suspended(model):
        assert torch.equal(passed(model)[0], before[0])
    ng.convert(model, None)
    assert [type(each) for each in model.modules()] == classes
    assert_same(passed(model), before)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "int4-hq-lss"])
def test_copies_and_pickles_train_alike(recipe: str) -> None:
    model = ng.convert(mixtral(), recipe)
    passed(model)
    ng.advance(model)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies[1:]:
        own = {id(parameter) for parameter in each.parameters()}
        slices = [layer for layer in each.modules() if isinstance(layer, ExpertLinear)]
        assert len(slices) == 16 and all(id(layer.parameter) in own for layer in slices)
    torch.manual_seed(0)
    first = passed(model)
    for each in copies[1:]:
        torch.manual_seed(0)
        assert_same(passed(each), first)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"*.experts": "fp8-row"}, ["fp8-row", "fp8-row", "fp8-row"]),
        ({"*.experts.gate_up_proj": "fp8-row"}, ["fp8-row", "none", "fp8-row"]),
        ({"*": "fp8-row", "*.experts.1-3.*": "mxfp8"}, ["fp8-row", "fp8-row", "mxfp8"]),
        ({"*.experts": "fp8-row", "*.experts.0.down_proj": None}, ["fp8-row", "none", "fp8-row"]),
        (
            {"*": "fp8-row", "*.experts.down_proj": "bf16:grad_weight"},
            ["fp8-row", "fp8-row+bf16:grad_weight", "fp8-row"],
        ),
    ],
)
def test_patterns_name_stacks_and_experts(patterns: dict[str, str], expected: list[str]) -> None:
    found = recipes_of_experts(ng.convert(mixtral(), patterns))
    assert [found[name] for name in ("0.gate_up_proj", "0.down_proj", "3.gate_up_proj")] == expected


def test_a_switch_names_experts_too() -> None:
    model = ng.convert(mixtral(), "fp8-current")
    assert len(switch(model, "bf16", "*.experts.down_proj")) == 8
    assert recipes_of_experts(model)["2.down_proj"] == "bf16"
    assert recipes_of_experts(model)["2.gate_up_proj"] == "fp8-current"


def test_a_reference_follows_the_experts_of_its_policy() -> None:
    policy = ng.convert(mixtral(), {"*": "fp8-current", "*.experts.0.*": "mxfp8"})
    reference = ng.convert_like(policy, mixtral())
    assert recipes_of_experts(reference) == recipes_of_experts(policy)
    assert_same(passed(reference), passed(policy))
    ng.convert(policy, None)
    reference = ng.convert_like(ng.convert(policy, {"*.q_proj": "fp8-row"}), mixtral())
    assert not isinstance(reference.get_submodule(FIRST), GroupedExperts)


def test_experts_that_a_pattern_leaves_are_the_modules_of_the_model() -> None:
    model = ng.convert(mixtral(), {"*": "fp8-current", "*.experts": None})
    assert not isinstance(model.get_submodule(FIRST), GroupedExperts)
    assert why(model) == {""}
    assert why(ng.convert(mixtral(), {"*": "auto"}, tokens=40)) == {"experts-auto"}
    assert why(ng.convert(mixtral(intermediate_size=8), "fp8-current")) == {"too-small"}


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = mixtral()
    classes = [type(each) for each in model.modules()]
    with raises(ConfigError, "pattern.no-match"):
        ng.convert(model, {"*": "fp8-current", "*.exparts": "mxfp8"})
    assert [type(each) for each in model.modules()] == classes


def other_kernel(experts: Any) -> None:
    experts.config._experts_implementation = "sonicmoe"


def other_forward(experts: Any) -> None:
    experts.forward = experts.forward


def other_layout(experts: Any) -> None:
    experts.down_proj = nn.Parameter(torch.zeros(4, 48, 32))


def other_name(experts: Any) -> None:
    experts.projection = experts.gate_up_proj
    del experts.gate_up_proj


def other_type(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), False)


def one_matrix(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[:1].expand(4, -1, -1))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (other_kernel, "experts-kernel"),
        (other_forward, "experts-forward"),
        (other_layout, "experts-layout"),
        (other_name, "experts-layout"),
        (other_type, "experts-dtype"),
        (one_matrix, "experts-shared"),
    ],
)
def test_experts_that_cannot_be_converted_say_why(change: Any, code: str) -> None:
    """In 16 bits with the reason where "*" reaches them, an error where the user names them."""
    model = mixtral(num_hidden_layers=1)
    change(model.get_submodule(FIRST))
    with warns("convert.small-share", "_proj"):
        ng.convert(model, "fp8-current")
    assert not isinstance(model.get_submodule(FIRST), GroupedExperts)
    assert why(model) == {code}
    with raises(ConfigError, f"convert.{code}", FIRST):
        ng.convert(model, {"*.experts": "fp8-current"})


def test_experts_of_an_unknown_class_say_so() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 32, 32))

    model = nn.ModuleDict({"experts": Experts(), "up": nn.Linear(32, 32)})
    with warns("convert.small-share", "'weight'"):
        ng.convert(model, "fp8-current")
    assert why(model) == {"experts"}
    assert refuse(model["experts"]).code == "experts"


def test_an_implementation_chosen_later_is_an_error_unless_it_computes_the_same() -> None:
    model = ng.convert(mixtral(), "fp8-current")
    expected = passed(model)
    model.set_experts_implementation("batched_mm")  # as transformers does while it generates
    assert_same(passed(model), expected)
    model.config._experts_implementation = "sonicmoe"
    with raises(ConfigError, "experts.implementation", "sonicmoe"):
        model(IDS)


def test_a_block_of_experts_alone_is_a_block() -> None:
    class Block(nn.Module):
        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.experts = experts

    own = [layer.mlp.experts for layer in mixtral(num_hidden_layers=3).model.layers]
    model = nn.ModuleDict({"layers": nn.ModuleList(Block(each) for each in own)})
    ng.convert(model, "nvfp4")
    found = blocks(model)["layers.2.experts.0.down_proj"]
    assert (found.index, found.count) == (2, 3)


def test_experts_without_tokens_are_not_taken_for_bypassed() -> None:
    model = ng.convert(mixtral(num_local_experts=8), "fp8-current")
    ids = IDS[:1, :1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(8):  # a warning is an error in tests
        model(ids, labels=ids).logits.sum().backward()
        optimizer.step()
    slices = [each for each in model.modules() if isinstance(each, ExpertLinear)]
    assert not any(each.state.steps_without_call for each in slices)


def test_an_optimizer_ends_the_step_of_experts_and_their_casts() -> None:
    model = ng.convert(mixtral(), "fp8-delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passed(model)
    optimizer.step()
    layer = next(each for each in model.modules() if isinstance(each, ExpertLinear) and each.amax_history("w").history[0])  # fmt: skip
    assert layer.state.step_ended and layer.state.cache is not None
    passed(model)
    (casts,) = layer.cached_casts()
    assert casts.rows is not None
    optimizer.step()
    assert layer.cached_casts()[0].rows is None


def test_the_share_in_low_precision_counts_experts() -> None:
    model = ng.convert(mixtral(num_hidden_layers=1), "fp8-current")
    with_experts = ng.describe(model, batch={"input_ids": IDS}).coverage
    without = ng.describe(ng.convert(model, {"*.experts": None}), batch={"input_ids": IDS}).coverage
    assert with_experts is not None and without is not None
    assert with_experts.operations == without.operations
    # One pair of experts has 2 x (32 x 96 + 48 x 32) multiplications, forward and twice backward.
    narrow = 2 * 3 * 2 * IDS.numel() * (32 * 96 + 48 * 32)
    assert with_experts.narrow[8] - without.narrow[8] == pytest.approx(narrow / without.operations)


def test_llama_4_has_recipes_too() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    sizes = {"num_local_experts": 3, "hidden_size": 32, "intermediate_size": 48}
    model = nn.ModuleDict({"experts": Llama4TextExperts(transformers.Llama4TextConfig(**sizes))})
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    x = torch.randn(3 * 7, 32)
    expected = model["experts"](x)
    ng.convert(model, "fp8-current")
    with ng.suspended(model):
        torch.testing.assert_close(model["experts"](x), expected)
    own = ng.QLinear(32, 96, bias=False, recipe="fp8-current")
    own.weight.data = model["experts"].gate_up_proj.detach()[1].t().contiguous()
    first = model["experts"].slices("gate_up_proj")[1]
    assert_same(first(x[7:14]).detach(), own(x[7:14]).detach())
    assert (model["experts"](x) - expected).norm() < 0.1 * expected.norm()


def test_experts_without_a_gate_and_with_a_norm_behind_them() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(
        hidden_size=32, moe_intermediate_size=48, n_routed_experts=4
    )
    config._experts_implementation = "eager"
    own = NemotronHExperts(config)
    for each in own.parameters():
        nn.init.normal_(each, std=0.1)
    x, index, weights = torch.randn(9, 32), torch.randint(0, 4, (9, 1)), torch.rand(9, 1)
    expected = own(x, index, weights)
    ng.convert(nn.ModuleDict({"experts": own}), "fp8-current")
    assert (own(x, index, weights) - expected).norm() < 0.1 * expected.norm()
    with ng.suspended(own):
        assert_same(own(x, index, weights).detach(), expected.detach())
        before = own(x, index, weights)
        own.post_expert_norm, own.has_post_expert_norm = nn.RMSNorm(32), True
        assert not torch.equal(own(x, index, weights), before)


def test_weights_of_experts_decay_and_their_biases_do_not() -> None:
    sizes = {"num_local_experts": 4, "hidden_size": 32, "intermediate_size": 48}
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    model = nn.ModuleDict({"experts": GptOssExperts(transformers.GptOssConfig(**sizes))})
    decays = {
        name: group["weight_decay"]
        for group in ng.optim.groups(model, weight_decay=0.1)
        for name, _ in group["params"]
    }
    assert {name for name, decay in decays.items() if decay} == {
        f"experts.{name}" for name in STACKS
    }
    assert decays.keys() == dict(model.named_parameters()).keys()


def test_frozen_experts_are_codes_and_pass_gradients_on() -> None:
    model = ng.convert(mixtral(), "fp8-current")
    report = ng.memory.freeze(model, "model.layers.0.*", codes=True)
    assert not {f"{FIRST}.{name}" for name in STACKS} & dict(report.kept_16bit).keys()
    assert model.get_submodule(FIRST).coded_stacks() == list(STACKS)
    model(IDS, labels=IDS).loss.backward()  # frozen experts pass gradients on
    assert model.get_submodule(FIRST).down_proj.grad is None
    assert model.model.layers[1].mlp.experts.down_proj.grad.any()
    assert model.model.embed_tokens.weight.grad.any()


def test_the_step_of_our_optimizer_leaves_the_casts_of_experts_to_the_layer() -> None:
    model = ng.convert(mixtral(), "fp8-current")
    optimizer = ng.optim.AdamW(model, states="8bit")
    casts = optimizer.cast_weights(model)
    assert casts[f"{FIRST}.0.down_proj"].code == "experts"
    passed(model)
    optimizer.step()
    assert optimizer.state[model.get_submodule(FIRST).down_proj]


def test_a_graph_is_refused_since_the_host_reads_the_router() -> None:
    from narrowgauge.cuda_graphs import refuse_run

    model = ng.convert(mixtral(), "fp8-current")
    optimizer = ng.optim.AdamW(model)
    assert "experts" in {reason.code for reason in refuse_run(model, optimizer)}
    ng.convert(model, {"*.experts": None})
    assert "experts" not in {reason.code for reason in refuse_run(model, optimizer)}


def test_blame_names_the_expert_and_the_product() -> None:
    from narrowgauge.lab.blame import observed

    model = mixtral(num_hidden_layers=1)
    ng.convert(model, {"*": "fp8-current", "*.experts.2.down_proj": "int4-minmax-sr"})
    found = observed(model, lambda: model(IDS, labels=IDS).loss.backward())
    assert {each.layer for each in found.suspects} == {f"{FIRST}.2.down_proj"}
    assert {each.product for each in found.suspects} == {"output", "grad_input", "grad_weight"}
