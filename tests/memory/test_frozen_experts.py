"""Frozen experts that are kept as codes alone: the same bits, states, copies, writes and refusals as of a Linear. exact"""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from tests.compare import assert_same, sqnr_db
from tests.nn.test_grouped_linear import E, K, experts, inputs
from tests.raising import raises
from tests.selection import quick

# Without token for any expert, for the last one alone, and index E, an expert of another rank.
PAIRS = [[(0, 1)] * 7 + [(1, 2)] * 6 + [(4, 0)] * 5 + [(3, 1)], [(E - 1, 0)], [(E, E), (2, E)]]
# The cast of w.T is the cast of w, transposed: backward multiplies by the same codes.
TURNED = ("fp8-current", "fp8-delayed", "fp8-block")
# Equal operands, but BLAS may add an expert's single row in the order of memory. A last bit may move one code of the next product, of 64
# in a row and by 2**-4: 42 dB. Other weights would be below 20.
ONE_CODE = 30

pytestmark = pytest.mark.usefixtures("transformers_5")


@pytest.fixture
def transformers_5() -> None:
    pytest.importorskip("transformers", minversion="5")


class Block(nn.Module):
    """A Linear that trains, and experts that are frozen."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.experts = nn.Linear(K, K, dtype=dtype), experts(kind, dtype)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.experts(self.up(x), index, weights)


def built(
    recipe: str, codes: bool, kind: str = "mixtral", dtype: torch.dtype = torch.float32
) -> Block:
    model = ng.convert(Block(kind, dtype), recipe)
    ng.memory.freeze(model, "experts.*_proj", codes=codes)
    return model


def trip(model: Block, pairs: list[tuple[int, ...]] = PAIRS[0]) -> list[Tensor]:
    """The output, and the gradients of the Linear and of the experts' biases."""
    x, index, weights, gy = inputs(pairs, model.up.weight.dtype)
    y = model(x, index, weights)
    y.backward(gy)
    found = [y.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
    model.zero_grad()
    ng.advance(model)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "recipe",
    quick(["fp8-current", "mxfp8", "nvfp4"], [*TURNED, "fp8-row", "mxfp8", "int8", "nvfp4", "mxfp4", "quartet2"]),
)  # fmt: skip
def test_forward_has_the_same_bits_and_backward_where_codes_turn(recipe, kind, dtype):
    whole, coded = built(recipe, False, kind, dtype), built(recipe, True, kind, dtype)
    assert coded.experts.coded_stacks() == ["gate_up_proj", "down_proj"]
    for pairs in PAIRS:
        torch.manual_seed(2)
        expected = trip(whole, pairs)
        torch.manual_seed(2)
        found = trip(coded, pairs)
        if kind == "mixtral":
            assert_same(found[0], expected[0])
        else:  # codes lie as [N, K], the stack as [K, N]
            assert sqnr_db(expected[0], found[0]) > ONE_CODE
        assert len(found) == len(expected) == 3 + 2 * (kind == "gpt_oss")
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            if not theirs.any():
                assert_same(mine, theirs)
            elif recipe in TURNED:
                assert sqnr_db(theirs, mine) > ONE_CODE
            else:  # a cast along the other axis, of numbers that were rounded
                assert sqnr_db(theirs, mine) > (5 if recipe in ("nvfp4", "mxfp4") else 18)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8", "nvfp4"])
def test_states_copies_and_moves(recipe, kind):
    model = built(recipe, True, kind)
    for _ in range(2):
        expected = trip(model)
    state = model.state_dict()
    assert state["experts.3.down_proj.frozen.codes"].dtype == torch.uint8
    assert state["experts.down_proj"].isfinite().all()
    other = built(recipe, True, kind)
    for name in ("gate_up_proj", "down_proj"):
        for layer in other.experts.slices(name):
            layer.frozen.write(layer, torch.ones_like(layer.weight))
    other.load_state_dict(state)
    held = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other, model.to("cpu")
    for twin in held:
        assert twin.experts.coded_stacks() == ["gate_up_proj", "down_proj"]
        assert twin.experts.down_proj.untyped_storage().nbytes() == 4
        assert twin.experts.down_proj.shape == model.experts.down_proj.shape
    found = [trip(twin) for twin in held]
    for each in found[1:]:
        for mine, theirs in zip(each, found[0], strict=True):
            assert_same(mine, theirs)
    if recipe != "fp8-delayed":  # whose scales went on
        assert_same(found[0][0], expected[0])
    # Codes follow the dtype of the stack, and keep their own.
    twin = copy.deepcopy(model.experts).bfloat16()
    assert twin.down_proj.dtype == twin.down_proj.float().bfloat16().dtype == torch.bfloat16
    assert_same(twin.slices("down_proj")[1].frozen.codes, model.experts.slices("down_proj")[1].frozen.codes)  # fmt: skip


def test_a_16_bit_state_is_cast_as_it_is_loaded():
    """To the bits of a model that was loaded first; a state that was changed beside its codes warns."""
    model, other = built("mxfp8", True), built("mxfp8", True)
    for name in ("gate_up_proj", "down_proj"):
        for layer in other.experts.slices(name):
            layer.frozen.write(layer, torch.ones_like(layer.weight))
    other.load_state_dict(Block("mixtral", torch.float32).state_dict())
    assert_same(trip(other)[0], trip(model)[0])
    state = {name: each.clone() for name, each in model.state_dict().items()}
    state["experts.down_proj"][3] *= 2
    with pytest.warns(UserWarning, match=r"experts\.down_proj is not what experts\.3\.down_proj\.frozen\.codes"):  # fmt: skip
        other.load_state_dict(state)
    assert_same(other.experts.down_proj[3] + 0, state["experts.down_proj"][3])
    assert_same(other.experts.down_proj[2] + 0, model.experts.down_proj[2] + 0)


def test_what_cannot_be_loaded_says_why():
    state = built("fp8-current", True).state_dict()
    lone = {name: each for name, each in state.items() if name != "experts.down_proj"}
    with pytest.raises(RuntimeError, match=r"experts.down_proj was saved as the codes of a frozen"):
        built("fp8-current", False).load_state_dict(lone)
    built("fp8-current", True).load_state_dict(lone)  # the codes are all of it
    with pytest.raises(RuntimeError, match=r"made by the cast 'e4m3 tensor fp32', recipe 'mxfp8'"):
        built("mxfp8", True).load_state_dict(state)
    state["experts.down_proj"] = torch.zeros(2, 3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for experts.down_proj: \[2, 3, 3\]"):
        built("fp8-current", True).load_state_dict(state)


def test_reads_decode_and_writes_become_the_weight():
    model = built("fp8-block", True)
    stack, layer = model.experts.down_proj, model.experts.slices("down_proj")[2]
    whole = stack.detach() + 0
    assert_same(layer.weight + 0, whole[2])
    assert layer.weight.shape == (K, 64) and layer.weight.untyped_storage().nbytes() == 4
    y = trip(model)[0]
    layer.weight.mul_(2)  # one matrix: the stack has 16 bits again, and lost nothing
    assert model.experts.coded_stacks() == ["gate_up_proj"]
    whole[2] *= 2
    assert_same(stack + 0, whole)
    assert not torch.equal(trip(model)[0], y)
    model.experts.gate_up_proj.data += 1.0
    assert model.experts.coded_stacks() == []
    assert all(each.frozen is None for each in model.modules() if isinstance(each, ng.QLinear))
    trip(model)
    # Another Parameter in its place: the codes are dropped at the next pass.
    model = built("fp8-block", True)
    model.experts.down_proj = nn.Parameter(whole.clone(), requires_grad=False)
    trip(model)
    assert model.experts.coded_stacks() == ["gate_up_proj"]
    assert_same(model.state_dict()["experts.down_proj"], whole)


@pytest.mark.parametrize("kind", ["stack", "linear"])
def test_a_parameter_in_the_place_of_codes_outlives_moves_copies_and_loads(kind):
    """The codes of the weight before came back: after `to`, `thaw`, a pickle, or in place of a loaded state."""

    def replaced() -> tuple[nn.Module, nn.Module, str]:
        model = built("fp8-block", True)
        model.up.requires_grad_(False)
        model.other = ng.convert(nn.Sequential(nn.Linear(K, K)), "fp8-block")
        model.last = nn.Linear(1, 1)
        ng.memory.freeze(model, "other", codes=True)
        owner, name = (
            (model.experts, "down_proj") if kind == "stack" else (model.other[0], "weight")
        )
        own = getattr(owner, name)
        setattr(owner, name, nn.Parameter(torch.ones(own.shape), requires_grad=False))
        return model, owner, name

    def values(model: nn.Module) -> Tensor:
        return (model.experts.down_proj if kind == "stack" else model.other[0].weight).detach() + 0

    for change in (
        lambda model: model.bfloat16(),
        lambda model: model.to("cpu"),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: ng.memory.thaw(model, "*") and model,
    ):
        model, *_ = replaced()
        found = values(change(model))
        assert_same(found, torch.ones_like(found))
    model, owner, name = replaced()
    copied = copy.copy(owner)
    assert_same(getattr(copied, name) + 0, torch.ones(getattr(owner, name).shape))
    state = {key: each + 0 for key, each in built("fp8-block", True).state_dict().items()}
    model, *_ = replaced()
    if kind == "stack":
        model.load_state_dict(state, strict=False)
        assert_same(values(model), state["experts.down_proj"])
        assert_same(trip(model)[0], trip(built("fp8-block", True))[0])


@pytest.mark.parametrize("change", [lambda model: model.bfloat16(), lambda model: model.to("cpu")])
def test_a_refused_move_leaves_codes_as_they_are(change):
    """The weight was NaN after it."""
    model = built("fp8-block", True)
    y = trip(model)[0]
    model.experts.down_proj.requires_grad_()
    with raises(ConfigError, "freeze.trains", "e4m3"):
        change(model.experts)
    model.experts.down_proj.requires_grad_(False)
    assert model.experts.coded_stacks() == ["gate_up_proj", "down_proj"]
    assert_same(trip(model)[0], y)


def test_thawed_and_suspended_experts_compute_what_their_codes_decode_to():
    for kind in ("mixtral", "gpt_oss"):
        model, plain = built("fp8-row", True, kind), Block(kind, torch.float32)
        decoded = {name: each + 0 for name, each in model.state_dict().items() if ".frozen." not in name}  # fmt: skip
        plain.load_state_dict(decoded)
        given = inputs(PAIRS[0])[:3]
        with ng.suspended(model):
            assert_same(model(*given).detach(), plain(*given).detach())
        y = trip(model)[0]
        assert ng.memory.thaw(model, "experts") == 2 * E
        assert model.experts.coded_stacks() == [] and not model.experts.down_proj.requires_grad
        assert_same(model.experts.down_proj.detach(), plain.experts.down_proj.detach())
        assert sqnr_db(y, trip(model)[0]) > 60
        ng.convert(model, None)


def test_what_would_need_the_weight_is_refused():
    model = built("fp8-current", True)
    with raises(ConfigError, "freeze.other-recipe", "'fp8-current'"):
        ng.convert(model, "fp8-row")
    with raises(ConfigError, "freeze.other-recipe", "'fp8-current'"):
        ng.convert(model, None)
    with raises(ConfigError, "train-only.codes", "'experts.down_proj'"):
        ng.memory.train_only(model, "experts.down_proj")
    model.experts.down_proj.requires_grad_()
    with raises(ConfigError, "freeze.trains", "e4m3"):
        trip(model)


def test_stacks_that_cannot_be_codes_say_why():
    model = ng.convert(Block("mixtral", torch.float32), {"*": "fp8-current", "experts.2.*": None})
    with raises(ConfigError, "freeze.no-codes", "expert 2: no recipe casts it"):
        ng.memory.freeze(model, "experts", codes=True)
    assert model.experts.down_proj.requires_grad
    model = ng.convert(Block("mixtral", torch.float32), "fp8-current")
    model.tied = nn.Module()
    model.tied.weight = model.experts.down_proj
    report = ng.memory.freeze(model, "experts", codes=True)
    assert report.coded == E and dict(report.kept_16bit) == {"experts.down_proj": "tied to tied"}
    with raises(ConfigError, "freeze.no-codes", "straight-through"):
        built("int4-hq-bs", True)


def test_the_report_and_describe_count_each_matrix():
    model = ng.convert(Block("mixtral", torch.bfloat16), "mxfp8")
    report = ng.memory.freeze(model, "experts", codes=True)
    elements = model.experts.down_proj.numel() + model.experts.gate_up_proj.numel()
    held = sum(each.nbytes for each in model.buffers())
    assert report.coded == 2 * E and report.weight_bytes_saved == 2 * elements - held
    assert ng.memory.freeze(built("mxfp8", False), "experts", codes=True).kept_16bit == ()
    notes = {row.name: row.note for row in ng.describe(model)}
    assert "frozen, kept as e4m3" in notes["experts.3.down_proj"]
    with raises(ConfigError, "freeze.no-codes"):  # all are codes already
        ng.memory.freeze(model, "experts", codes=True)


@pytest.mark.parametrize("codes", [False, True])
def test_peft_adapts_the_parameter_and_codes_last_beyond_its_passes(codes):
    """peft computes the stack by a parametrization while it runs: the codes serve again after it."""
    peft = pytest.importorskip("peft")
    model = built("fp8-block", codes)
    config = peft.LoraConfig(
        r=2, target_modules=["up"], target_parameters=["experts.down_proj"], exclude_modules=r".*\.\d+\..*"
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model)
    given = inputs(PAIRS[0])
    held = model.experts.base_layer
    y = model(*given[:3])
    y.backward(given[3])
    assert held.coded_stacks() == (["gate_up_proj", "down_proj"] if codes else [])
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
    # Twice the adapter is another result: its change enters the products.
    for name, each in model.named_parameters():
        if "experts.lora" in name:
            each.data.add_(1.0)
    assert not torch.equal(model(*given[:3]), y)
    assert "experts.base_layer.2.down_proj.frozen.codes" in model.state_dict() or not codes


def test_peft_around_an_experts_matrix_is_refused():
    """It ended in an AttributeError: a matrix of experts is a Linear by its class, and peft wrapped it."""
    peft = pytest.importorskip("peft")
    model = built("fp8-block", False)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up", "down_proj"]), model)
    with raises(ConfigError, "experts.wrapped", "down_proj of expert 0"):
        model(*inputs(PAIRS[0])[:3])


def matrix(model: Block, index: int = 2) -> Tensor:
    return model.experts.slices("down_proj")[index].weight


WRITES = {
    "a matrix twice": lambda m: matrix(m).mul_(3).add_(1),
    "two held matrices": lambda m: [each.mul_(3) for each in (matrix(m, 1), matrix(m, 2))],
    "a matrix held over a thaw": lambda m: (w := matrix(m), ng.memory.thaw(m, "*"), w.mul_(2)),
    "a matrix held over a write": lambda m: (w := matrix(m), m.experts.down_proj.mul_(2), w.add_(1)),
    "a matrix held over a move": lambda m: (w := matrix(m), m.to("cpu"), w.mul_(2), w.mul_(2)),
    "a row of a matrix twice": lambda m: matrix(m)[0].mul_(3).add_(1),
    "an expert of the stack twice": lambda m: m.experts.down_proj[1].mul_(3).add_(1),
    "each expert of the stack": lambda m: [each.mul_(3) for each in m.experts.down_proj],
    "data held over a thaw": lambda m: (v := m.experts.down_proj.data, ng.memory.thaw(m, "*"), v.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_codes_is_that_to_the_weight_in_16_bits(write, kind):
    """The second write through a held matrix or view was lost, or an AttributeError."""
    coded, wide = built("fp8-block", True, kind), built("fp8-block", False, kind)
    with torch.no_grad():
        wide.experts.down_proj.copy_(coded.experts.down_proj)
        if "thaw" in write.__code__.co_names:  # which refuses a model without codes
            ng.memory.freeze(wide, "experts.gate_up_proj", codes=True)
        write(coded)
        write(wide)
        assert_same(coded.experts.down_proj.detach().clone(), wide.experts.down_proj.detach())
    trip(coded)  # and the layer goes on with it
    assert_same(coded.state_dict()["experts.down_proj"].clone(), wide.experts.down_proj.detach())


@pytest.mark.parametrize("is_stack", [True, False])
def test_a_weight_that_its_module_lost_keeps_what_is_written_to_it(is_stack):
    """Pruning moves the Parameter to another name, and a module may be gone."""
    for passes in (False, True):
        model = built("fp8-block", True) if is_stack else coded_linears()
        owner, name = (model.experts, "down_proj") if is_stack else (model[0], "weight")
        prune.l1_unstructured(owner, name, amount=0.5)
        if passes:
            trip(model) if is_stack else model(torch.randn(3, 64))
        prune.remove(owner, name)
        assert (getattr(owner, name) == 0).float().mean() == 0.5
    model = built("fp8-block", True) if is_stack else coded_linears()
    weight = model.experts.down_proj if is_stack else model[0].weight
    before = weight.detach().clone()
    del model, owner
    gc.collect()
    with torch.no_grad():
        weight.mul_(2)
    assert_same(weight.detach(), before * 2)


def coded_linears() -> nn.Sequential:
    model = ng.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "fp8-block")
    ng.memory.freeze(model, "0", codes=True)
    return model
