"""Casts shared by layers that read one tensor: the same bits as without (exact), bytes kept (exact), and what never is served."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.nn.cast_sources import SharedInputs
from narrowgauge.nn.keep_policy import KeepPolicy
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.linear_context import LinearContext
from narrowgauge.nn.linear_function import plan_of
from narrowgauge.nn.operands import Operand
from tests.compare import assert_same

TOKENS, WIDTH = 24, 64


class Attention(nn.Module):
    """Three layers that read one x."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


def built(recipe: str, shared: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = ng.convert(Attention(), recipe)
    if not shared:
        for layer in layers(model):
            layer.state.shared_inputs = None
    return model


def layers(model: nn.Module) -> list[QLinear]:
    return [module for module in model.modules() if isinstance(module, QLinear)]


def step(model: nn.Module, through: str = "plain") -> tuple[list[Tensor], int]:
    """Output and gradients of a step, and bytes kept for backward, each storage once, without weights and x."""
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h = x * 1.5
        known.add(h.untyped_storage().data_ptr())
        y = (
            model(h)
            if through == "plain"
            else checkpoint(model, h, use_reentrant=through == "reentrant")
        )
    kept = sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in held.items()
        if address not in known
    )
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)], kept


RECIPES = [
    "int4-hq-bs",
    "int4-hq-lss",
    "int4-minmax-sr",
    "fp8-current",
    "fp8-delayed",
    "fp8-block",
    "mxfp8",
    "int8",
    "nvfp4",
    "mxfp4",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_sharing_changes_no_bit(recipe):
    together, alone = built(recipe), built(recipe, shared=False)
    for _ in range(2):
        for mine, theirs in zip(step(together)[0], step(alone)[0], strict=True):
            assert_same(mine, theirs)
        ng.advance(together), ng.advance(alone)
        assert_same(together.state_dict(), alone.state_dict())


def test_one_copy_of_the_codes_is_kept():
    """Per layer: 5/8 byte per element, a scale of x, and one of w; the three share all of x's."""
    of_x, of_w = TOKENS * WIDTH * 5 // 8 + 4, 4
    assert step(built("int4-hq-bs"))[1] == of_x + 3 * of_w
    assert step(built("int4-hq-bs", shared=False))[1] == 3 * (of_x + of_w)


def test_windows_that_hold_the_same_share_casts_and_others_do_not():
    """One copy of x's codes (float32 on a CPU) beside three amax; from a state that was loaded as well."""
    alone, together = 3 * TOKENS * WIDTH * 4, TOKENS * WIDTH * 4
    model = built("fp8-delayed")
    for _ in range(3):
        assert together <= step(model)[1] < together + 300
        ng.advance(model)
    loaded = built("fp8-delayed")
    loaded.load_state_dict(model.state_dict())
    assert step(loaded)[1] < together + 300
    ng.advance(loaded)
    loaded.q.scaling["x"].history[0] *= 2
    assert 2 * together <= step(loaded)[1] < 2 * together + 300, "of k and v alone"
    other = built("fp8-delayed")
    other.k(torch.randn(TOKENS, WIDTH))
    step(other)  # who reads last is known from the pass before
    assert 2 * together <= step(other)[1] < 2 * together + 300, "k saw what q and v did not"
    assert step(built("fp8-delayed", shared=False))[1] >= alone


def test_windows_that_share_end_as_those_that_do_not():
    """With other tensors in between, several micro-batches and evaluation (exact)."""
    together, alone = built("fp8-delayed"), built("fp8-delayed", shared=False)
    for number in range(4):
        for model in (together, alone):
            torch.manual_seed(number)
            for _ in range(number % 2 + 1):
                model(torch.randn(TOKENS, WIDTH, requires_grad=True)).sum().backward()
            if number == 1:
                model.v(torch.randn(TOKENS, WIDTH) * 3)
            with torch.no_grad():
                model.eval()(torch.randn(TOKENS, WIDTH) * 9)
            ng.advance(model.train())
        assert_same(together.state_dict(), alone.state_dict())


def test_casts_go_with_the_last_reader_of_the_pass_before():
    """x itself may live on, where it is kept for backward."""
    model = built("fp8-row")
    shared, x = model.q.state.shared_inputs, torch.randn(TOKENS, WIDTH)
    model(x)
    assert shared._entry.made
    ng.advance(model)
    model(x)
    assert not shared._entry.made and [
        each.state.is_last_reader for each in (model.q, model.k, model.v)
    ] == [
        False,
        False,
        True,
    ]
    model.q(x)
    model.v(x * 2)
    assert [each.state.is_last_reader for each in (model.q, model.k, model.v)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("through", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("recipe", ["int4-hq-bs", "fp8-current"])
def test_checkpointing_is_bitwise_neutral(recipe, through):
    for mine, theirs in zip(step(built(recipe), through)[0], step(built(recipe))[0], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("weight_codes", ["step", "recast"])
def test_both_passes_of_reentrant_checkpointing_read_one_random_cast_of_the_weight(weight_codes):
    """In later micro-batches too, where the repetition finds a cast that the step made before."""
    fp8 = recipes.get("fp8-current")
    drawn = replace(fp8.output.rhs, rounding="stochastic")
    recipe = fp8.with_gemm(
        output=replace(fp8.output, rhs=drawn), grad_input=replace(fp8.grad_input, rhs=drawn)
    )
    layer = ng.QLinear(WIDTH, 48, bias=False, recipe=recipe)
    layer.weight_codes = weight_codes
    x, outputs = torch.randn(TOKENS, WIDTH, requires_grad=True), []

    def block(t):
        outputs.append(layer(t))
        return outputs[-1]

    for _ in range(2):
        for _ in range(3):
            outputs.clear()
            checkpoint(block, x, use_reentrant=True).sum().backward()
            assert_same(outputs[1].detach(), outputs[0])
        ng.advance(layer)


def test_codes_are_made_once_and_never_for_another_tensor_or_version(monkeypatch):
    from narrowgauge.nn import straight_through

    made = []
    encode = straight_through.CodedOperand._code

    def counting(self, *given, **options):
        made.append(len(self.tensor))
        return encode(self, *given, **options)

    monkeypatch.setattr(straight_through.CodedOperand, "_code", counting)
    model = built("int4-hq-bs").eval()
    x = torch.randn(TOKENS, WIDTH)

    def casts() -> int:
        made.clear()
        model(x)
        return made.count(TOKENS)

    with torch.no_grad():
        assert casts() == 1 and casts() == 1, "once for three layers, and anew in each forward pass"
        first = model(x)
        x.mul_(2)
        assert casts() == 1
        x.div_(2)
        assert casts() == 1
        assert_same(model(x), first)
        ng.advance(model)
        assert casts() == 1
    with torch.inference_mode():
        x = torch.randn(TOKENS, WIDTH)  # has no version
        assert casts() == 3


@pytest.mark.parametrize("recipe", ["fp8-current", "int4-hq-bs"])
def test_a_buffer_that_is_refilled_behind_its_version_is_cast_again(recipe):
    """As numpy, shared memory and `.data` do; the head reads the hidden state, so no other entry comes in between."""
    model = ng.convert(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8)), recipe
    ).eval()
    x, other = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        model(x)
        x.data.copy_(other)
        assert_same(model(x), model(other))
    attention = built(recipe)
    attention(x)
    x.data.copy_(torch.randn(TOKENS, WIDTH))
    assert_same(attention(x), attention(x.clone()))


def test_the_entry_goes_with_its_tensor():
    shared, x = SharedInputs(), torch.randn(3)
    share = shared.of(x)
    plan = plan_of(recipes.FP8_CURRENT, x.device)
    context = LinearContext(plan=plan, out_dtype=torch.float32, keep=KeepPolicy())
    operand = Operand(x, plan.x, context, (True, True), None)
    assert share is not None and share.lookup(operand) is share.lookup(operand) is not None
    del x, operand
    gc.collect()
    assert shared._entry is None


def test_an_input_may_outlive_the_recipes_of_its_readers():
    """A graph that waits while the model is turned back is freed without an error."""
    model = built("fp8-current")
    x = torch.randn(TOKENS, WIDTH)
    model(x)
    entry = layers(model)[0].state.shared_inputs
    ng.convert(model, None)
    del x
    assert entry._entry is None


def test_backward_does_not_hold_the_casts_of_inputs():
    model = built("fp8-current")
    layer = layers(model)[0]
    y = layer(torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert "x" not in y.grad_fn.context.sources.by_role


def test_copies_share_among_themselves_and_begin_empty():
    model = built("int4-hq-bs")
    model(torch.randn(TOKENS, WIDTH))
    original = layers(model)[0].state.shared_inputs
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (one,) = {id(layer.state.shared_inputs) for layer in layers(twin)}
        assert one != id(original) and layers(twin)[0].state.shared_inputs._entry is None
