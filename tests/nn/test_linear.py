"""The Linear: gradients against float64 (bounded), caches, checkpointing and copies (exact), autocast and compile."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowgauge import recipes
from narrowgauge.conversion import advance, convert, suspended
from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.formats import E4M3, E5M2
from narrowgauge.nn import linear_function
from narrowgauge.nn.linear import QLinear, linear
from narrowgauge.recipe import Cast, Gemm, Recipe
from tests.compare import assert_same, sqnr_db
from tests.oracles import gaussian_sqnr_db
from tests.raising import raises


def has_random_signs(recipe: Recipe) -> bool:
    """Codes of x.T could not be used again."""
    rotate = recipe.grad_weight.rotate
    return rotate is not None and rotate.signs == "random"


SHAPES = [(48, 64, 32), (33, 130, 70), (1, 16, 16), (7, 5, 3)]  # tokens, in_features, out_features
STATELESS = [recipe for recipe in recipes.ALL if not recipe.has_state]
NARROW = [recipe for recipe in recipes.ALL if recipe.name != "bf16"]
# 4-bit integers: tests/nn/test_straight_through.py.
RECAST = [recipe for recipe in recipes.ALL if recipe.backward == "recast"]
FOUR_BITS = [recipe for recipe in NARROW if recipe.output.lhs.format.bits == 4]
KEEPS_CODES = [recipe for recipe in NARROW if not has_random_signs(recipe)]


def layer_of(recipe: Recipe | None, k: int = 64, n: int = 32, **options: object) -> QLinear:
    torch.manual_seed(1)
    return QLinear(k, n, recipe=recipe, **options)  # type: ignore[arg-type]


def run(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(11)  # of stochastic rounding
    y = layer(x)
    y.backward(gy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, "w": layer.weight.grad, "b": layer.bias.grad}  # type: ignore[union-attr,dict-item]


def exact(layer: QLinear, x: torch.Tensor, gy: torch.Tensor) -> dict[str, torch.Tensor]:
    twin = torch.nn.Linear(layer.in_features, layer.out_features).double()
    twin.load_state_dict({name: layer.state_dict()[name].double() for name in ("weight", "bias")})
    return run(twin, x.double(), gy.double())


def floor_db(gemm: Gemm) -> float:
    """What rounding alone leaves, less 1.5 dB for small samples.

    A product of two operands with independent relative noise of powers p1, p2 has p1 + p2. The noise of a cast is that of a
    normal tensor by the format's values (`gaussian_sqnr_db`); bfloat16 was measured at 50 dB.
    """
    noise = [
        10 ** (-(gaussian_sqnr_db(cast) if cast else 50.0) / 10) for cast in (gemm.lhs, gemm.rhs)
    ]
    return float(-10 * torch.log10(torch.tensor(sum(noise)))) - 1.5


@pytest.mark.parametrize(
    ("cast", "db"),
    [
        (recipes.FP8_CURRENT.output.lhs, 31.5),
        (recipes.FP8_CURRENT.grad_input.lhs, 25.5),
        (recipes.MXFP4.output.lhs, 18.7),
        (recipes.MXFP4.grad_input.lhs, 15.4),
    ],
    ids=str,
)
def test_the_floor_of_a_cast_is_the_measured_one(cast: Cast, db: float) -> None:
    """As measured through `quantize` before the floors had a formula."""
    assert gaussian_sqnr_db(cast) == pytest.approx(db, abs=0.2)


@pytest.mark.parametrize("recipe", RECAST, ids=lambda recipe: recipe.name)
def test_products_reach_the_quality_of_their_formats(recipe: Recipe) -> None:
    layer = layer_of(recipe, 256, 192)
    x, gy = torch.randn(160, 256), torch.randn(160, 192)
    found, truth = run(layer, x, gy), exact(layer, x, gy)
    for key, gemm in (("y", recipe.output), ("x", recipe.grad_input), ("w", recipe.grad_weight)):
        assert sqnr_db(truth[key], found[key]) > floor_db(gemm), key
    assert sqnr_db(truth["b"], found["b"]) > 120  # a float32 sum


def test_published_floors_of_peers_hold_with_their_inputs() -> None:
    """torchao's block-wise test asks 25 / 30 / 30 dB, its row-wise one 18 / - / 17, with the loss `y.sum()`: gy is all ones."""
    x, gy = torch.randn(256, 256), torch.ones(256, 256)
    for name, floors in {
        "fp8-block": (25, 30, 30),
        "fp8-row": (18, 17, 17),
        "mxfp8": (26, 25, 24),
    }.items():
        layer = layer_of(recipes.get(name), 256, 256)
        found, truth = run(layer, x, gy), exact(layer, x, gy)
        for key, floor in zip(("y", "x", "w"), floors, strict=True):
            assert sqnr_db(truth[key], found[key]) >= floor, (name, key)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
def test_any_size_works(recipe: Recipe, shape: tuple[int, int, int]) -> None:
    t, k, n = shape
    layer = layer_of(recipe, k, n)
    x, gy = torch.randn(t, k), torch.randn(t, n)
    found, truth = run(layer, x, gy), exact(layer, x, gy)
    for key in ("y", "x", "w", "b"):
        assert found[key].shape == truth[key].shape
        # Far below any recipe's quality, far above a wrong product (0 dB). Gradients in 4 bits have 9 to 14 dB.
        assert sqnr_db(truth[key], found[key]) > (4 if recipe in FOUR_BITS else 15), key


@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
def test_no_tokens_give_an_empty_output_and_zero_gradients(recipe: Recipe) -> None:
    found = run(layer_of(recipe), torch.randn(0, 64), torch.randn(0, 32))
    assert found["y"].shape == (0, 32)
    assert found["x"].shape == (0, 64)
    assert not found["w"].any()
    assert not found["b"].any()


def test_leading_axes_are_kept() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    x = torch.randn(2, 3, 5, 64)
    assert_same(layer(x).reshape(-1, 32), layer(x.reshape(-1, 64)))
    assert_same(layer(x[0, 0, 0]), layer(x[0, 0, :1])[0])


@pytest.mark.parametrize("recipe", KEEPS_CODES, ids=lambda recipe: recipe.name)
def test_keeping_codes_changes_no_gradient(recipe: Recipe) -> None:
    """For casts per tensor by construction; for tiles, because codes of x.T are made from x, never from codes of x."""
    x, gy = torch.randn(40, 64), torch.randn(40, 32)
    kept = [run(layer_of(replace(recipe, save=save)), x, gy) for save in ("original", "quantized")]  # type: ignore[arg-type]
    assert_same(kept[1], kept[0])


def kept_bytes(recipe: Recipe, device: str = "cpu") -> int:
    """What autograd keeps for backward of a [40, 64] input, the weight not counted."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    layer = layer_of(recipe).to(device)
    layer.weight_codes = "recast"  # else a CPU keeps x of what is cast by tiles
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(40, 64, device=device))
    return sum(sizes) - layer.weight.nbytes


def test_tiled_codes_are_a_quarter_of_float32() -> None:
    assert kept_bytes(replace(recipes.FP8_ROW, save="original")) == 40 * 64 * 4
    assert kept_bytes(recipes.FP8_ROW) == 40 * 64 + 64 * 4
    assert kept_bytes(recipes.MXFP8) == 40 * 64 + 64 * 2  # one byte for each scale


@pytest.mark.gpu
def test_codes_of_a_tensor_are_a_quarter_of_float32_on_a_gpu() -> None:
    assert kept_bytes(recipes.FP8_CURRENT, "cuda") == 40 * 64 + 4


def test_frozen_weight_keeps_no_input() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    layer.weight.requires_grad_(False)
    shapes: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(t.shape) or t, lambda t: t
    ):
        x = torch.randn(40, 64, requires_grad=True)
        layer(x).sum().backward()
    assert torch.Size([40, 64]) not in shapes
    assert torch.Size([64, 40]) not in shapes
    assert x.grad is not None
    assert layer.weight.grad is None


def test_gradient_of_the_input_is_not_computed_when_nobody_asks() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    products: set[str] = set()
    layer.observer = lambda gemm, role, original, operand: products.add(gemm)
    layer(torch.randn(8, 64)).sum().backward()
    assert products == {"output", "grad_weight"}


@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("tokens", [40, 33])
def test_the_order_of_the_backward_products_changes_no_bits(recipe: Recipe, tokens: int) -> None:
    """A layer without an observer may make the gradient of its input last; one with an observer never does."""
    x, gy = torch.randn(tokens, 64), torch.randn(tokens, 32)
    layer, products = layer_of(recipe), []
    found = run(layer, x, gy)
    drawn = torch.get_rng_state()
    layer = layer_of(recipe)
    layer.observer = lambda gemm, role, original, operand: products.append(gemm)
    watched = run(layer, x, gy)
    assert products.index("grad_input") < products.index("grad_weight")
    assert_same(found, watched)
    assert_same(drawn, torch.get_rng_state())


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_the_input_is_gone_when_its_gradient_is_made(monkeypatch, keeps_graph: bool) -> None:
    """Unless the graph is kept for another backward pass, which then finds it."""
    layer, x = layer_of(recipes.MXFP4), torch.randn(40, 64, requires_grad=True)
    gone, seen = [], []
    original = linear_function._gradient

    def watch(product: str, *given: Any) -> torch.Tensor:
        seen.append((product, bool(gone)))
        return original(product, *given)

    monkeypatch.setattr(linear_function, "_gradient", watch)
    inner = x * 2
    weakref.finalize(inner.untyped_storage(), gone.append, True)
    y = layer(inner)
    del inner
    y.backward(torch.ones_like(y), retain_graph=keeps_graph)
    assert seen == [("grad_weight", False), ("grad_input", not keeps_graph)]
    if keeps_graph:
        y.backward(torch.ones_like(y))
        assert seen[2:] == [("grad_weight", False), ("grad_input", True)]


@pytest.mark.parametrize("recipe", RECAST, ids=lambda recipe: recipe.name)
def test_activation_checkpointing_is_bitwise_neutral(recipe: Recipe) -> None:
    def results(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            QLinear(32, 48, recipe=recipe), torch.nn.Tanh(), QLinear(48, 16, recipe=recipe)
        )
        x = torch.randn(24, 32, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        y.square().sum().backward()
        return [
            y.detach(),
            x.grad,
            *[p.grad for p in model.parameters()],
            *[b.clone() for b in model.buffers()],
        ]

    assert_same(results(checkpointed=True), results(checkpointed=False))


def test_stochastic_rounding_replays_in_recomputation() -> None:
    gradient = Cast(format=E5M2, rounding="stochastic")
    forward = Cast(format=E4M3)
    recipe = Recipe(
        name="stochastic", output=Gemm(lhs=gradient, rhs=forward),
        grad_input=Gemm(lhs=gradient, rhs=forward), grad_weight=Gemm(lhs=gradient, rhs=forward),
    )  # fmt: skip

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        layer = layer_of(recipe)
        torch.manual_seed(5)
        x = torch.randn(24, 64, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return [y.detach()]

    assert_same(gradients(checkpointed=True), gradients(checkpointed=False))


def test_autocast_decides_the_output() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    x = torch.randn(8, 64)
    assert layer(x).dtype == torch.float32
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert layer(x).dtype == dtype
    found = run(layer.bfloat16(), x.bfloat16(), torch.randn(8, 32))
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        "yxwb", torch.bfloat16
    )


def test_bias_is_added_before_the_only_rounding() -> None:
    """A bias of 2**-9 disappears when it is added to a bfloat16 number near 1 whose own low bits were already lost."""
    layer = layer_of(recipes.BF16, 16, 16)
    with torch.no_grad():
        layer.weight.zero_()[:, 0] = 1
        layer.bias.fill_(2.0**-9)
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1 + 2.0**-7
    wide = (x[0, 0].double() + 2.0**-9).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(layer(x)[0], wide.expand(16).contiguous())


def test_weight_is_quantized_once_per_step_after_advance() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    casts: list[int] = []
    layer.observer = lambda gemm, role, original, operand: (
        casts.append(id(operand)) if role == "w" else None
    )
    layer.empty_cache(keep=True)
    x = torch.randn(8, 64, requires_grad=True)
    first = run(layer, x, torch.randn(8, 32))
    again = layer(x)
    assert casts[0] == casts[2], "the same cast serves both micro-batches"
    assert_same(again.detach(), first["y"])
    with torch.no_grad():
        layer.weight.mul_(2)
    assert_same(layer(x).detach(), layer_with_weight(layer)(x).detach())
    layer.weight.data.mul_(2)  # leaves the version counter as it was: advance has to be told
    layer.empty_cache(keep=True)
    assert_same(layer(x).detach(), layer_with_weight(layer)(x).detach())


def layer_with_weight(layer: QLinear) -> QLinear:
    fresh = layer_of(layer.recipe)
    fresh.load_state_dict(layer.state_dict())
    return fresh


@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
def test_cached_weights_change_nothing(recipe: Recipe) -> None:
    x, gy = torch.randn(24, 64), torch.randn(24, 32)
    plain, cached = layer_of(recipe), layer_of(recipe)
    cached.empty_cache(keep=True)
    assert_same(run(cached, x, gy), run(plain, x, gy))
    assert_same(run(cached, x, gy), run(plain, x, gy))


def test_recipe_can_be_changed_at_run_time() -> None:
    layer = layer_of(recipes.FP8_DELAYED)
    x = torch.randn(8, 64)
    layer(x)
    assert any("scaling" in name for name in layer.state_dict())
    layer.recipe = recipes.FP8_BLOCK
    assert_same(layer(x), layer_of(recipes.FP8_BLOCK)(x))
    assert not any("scaling" in name for name in layer.state_dict())
    layer.recipe = None
    assert_same(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with raises(ConfigError, "linear.recipe", "recipes.names"):
        layer.recipe = 8  # type: ignore[assignment]


def test_recipe_can_be_given_by_name() -> None:
    layer = layer_of(None)
    for name, expected in (("fp8-current", recipes.FP8_CURRENT), ("int4", recipes.INT4_HQ_BS)):
        layer.recipe = name
        assert layer.recipe == expected
    assert QLinear(64, 32, recipe="fp8-row").recipe == recipes.FP8_ROW
    with raises(ConfigError, "recipes.unknown", "'fp8-curent'", "'fp8-current'"):
        layer.recipe = "fp8-curent"
    assert layer.recipe == recipes.INT4_HQ_BS, "a wrong name changes nothing"


@pytest.mark.parametrize("recipe", recipes.ALL, ids=lambda recipe: recipe.name)
def test_copies_pickles_and_state_dicts_are_the_same_layer(recipe: Recipe) -> None:
    layer = layer_of(recipe)
    layer.empty_cache(keep=True)
    x, gy = torch.randn(8, 64), torch.randn(8, 32)
    run(layer, x, gy)
    loaded = layer_of(recipe)
    loaded.load_state_dict(layer.state_dict())
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded]
    truth = run(layer, x, gy)
    for twin in twins:
        assert twin.recipe == recipe
        assert_same(dict(twin.state_dict()), dict(layer.state_dict()))
        assert_same(run(twin, x, gy), truth)


def test_function_and_layer_agree() -> None:
    for recipe in STATELESS:
        layer = layer_of(recipe)
        x = torch.randn(8, 64)
        assert_same(linear(x, layer.weight, layer.bias, recipe), layer(x))
    with raises(ConfigError, "linear.has-memory"):
        linear(x, layer.weight, None, recipes.FP8_DELAYED)


def test_wrong_last_axis_is_told() -> None:
    with raises(ShapeError, "linear.x-shape", "[8, 63]", "[32, 64]", "be 64"):
        layer_of(recipes.FP8_CURRENT)(torch.randn(8, 63))


@pytest.mark.parametrize(
    "recipe",
    [recipes.FP8_CURRENT, recipes.INT4_HQ_BS, recipes.BF16],
    ids=lambda recipe: recipe.name,
)
def test_second_derivatives_raise(recipe: Recipe) -> None:
    layer = layer_of(recipe)
    x = torch.randn(4, 64, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().sum()

    for ask in (
        lambda: torch.autograd.grad(loss(x), x, create_graph=True),
        lambda: loss(x).backward(create_graph=True),
        lambda: torch.autograd.functional.hessian(loss, x),
        lambda: torch.autograd.functional.hvp(loss, x, torch.ones_like(x)),
    ):
        with pytest.raises(
            RuntimeError, match=r"a Linear with a recipe has no second derivatives.*suspended"
        ):
            ask()
    with suspended(layer):
        [twice] = torch.autograd.grad(
            torch.autograd.grad(loss(x), x, create_graph=True)[0].sum(), x
        )
    torch.testing.assert_close(
        twice, (torch.ones(4, 64) @ layer.weight.T @ layer.weight * 2).detach()
    )


@pytest.mark.parametrize(
    "recipe", [recipes.FP8_CURRENT, recipes.INT4_HQ_BS], ids=lambda recipe: recipe.name
)
@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda f: f.__name__
)
def test_transforms_of_torch_func_are_refused_in_words(recipe: Recipe, transform: Any) -> None:
    layer, x = layer_of(recipe), torch.randn(4, 64)
    with raises(ConfigError, "transform.functorch"):
        transform(lambda x: layer(x).sum())(x)
    with suspended(layer):
        transform(lambda x: layer(x).sum())(x)
    parameters = {name: value.clone() for name, value in layer.named_parameters()}
    assert_same(
        torch.func.functional_call(layer, parameters, (x,)), layer(x)
    )  # no transform: calls the layer as it is


@pytest.mark.parametrize(
    "recipe", [recipes.FP8_DELAYED, recipes.INT4_HQ_LSS], ids=lambda recipe: recipe.name
)
def test_what_a_transform_left_behind_is_read(recipe: Recipe) -> None:
    """A tensor of torch.func.grad that outlives it has no memory of its own; torch's own functions look inside, and so does the Linear."""
    layer, x, left = layer_of(recipe), torch.randn(4, 64), []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(x)
    assert torch._C._functorch.is_functorch_wrapped_tensor(left[0])
    layer.eval()
    assert_same(layer(left[0]), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
def test_torch_jit_trace_is_refused_in_words(recipe: Recipe) -> None:
    """By then kernels had run, and one of four bits ended Python: torch looks for who called on a thread that has no interpreter."""
    layer, x = layer_of(recipe), torch.randn(4, 64)
    with raises(ConfigError, "transform.jit-trace", "a recipe"):
        torch.jit.trace(layer, x)
    with suspended(layer):
        traced = torch.jit.trace(layer, x)
        assert_same(traced(x), layer(x))


@pytest.mark.parametrize("recipe", NARROW, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_nonfinite_input_shows_itself(recipe: Recipe, poison: float) -> None:
    layer = layer_of(recipe)
    for _ in range(2):  # the second time delayed scaling has a window
        x = torch.randn(8, 64)
        layer(x)
        if recipe.delayed_scaling():
            advance(layer)
    x[3, 5] = poison
    assert not layer(x)[3].isfinite().all()


# Dynamo (torch 2.13) makes a Function object while it traces one, and warns of it itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_agrees_with_eager() -> None:
    """Whole graph, forward and backward, the buffers of delayed scaling included; GEMM inputs are equal bit for bit.

    One compilation for both: scales of a tensor with a window, and of tiles without. tests/ops/test_mm.py compiles the rest.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = torch.nn.Sequential(
        QLinear(64, 48, recipe="fp8-delayed"), torch.nn.ReLU(), QLinear(48, 32, recipe="mxfp8")
    )
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(2):
        x = torch.randn(40, 64)
        outputs = []
        for model in (eager, compiled):
            y = model(x)
            y.square().sum().backward()
            outputs.append(y.detach())
        assert_same(outputs[1], outputs[0])
    for (key, left), (_, right) in zip(eager.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(
            right, left, rtol=2e-6, atol=0, msg=key
        )  # gy's sums may differ in their order
    for left, right in zip(eager.parameters(), twin.parameters(), strict=True):
        assert (
            sqnr_db(left.grad, right.grad) > 90
        )  # float32 sums in another order; a flipped code would leave 60


def test_averaged_weights_are_seen_after_a_change_of_mode() -> None:
    """Moving averages are swapped in through .data, which leaves the version counter as it was."""
    layer = layer_of(recipes.FP8_CURRENT)
    layer.empty_cache(keep=True)
    x = torch.randn(8, 64)
    own = layer.weight.detach().clone()
    trained = layer(x).detach()
    layer.eval()
    layer.weight.data.copy_(own * 0.5)
    assert_same(layer(x).detach(), layer_with_weight(layer)(x).detach())
    layer.weight.data.copy_(own)
    layer.train()
    assert_same(layer(x).detach(), trained)


def test_cached_casts_keep_the_memory_of_their_weight() -> None:
    """A weight computed anew at each forward may else come back at the same address, at version 0 (exact)."""
    layer = layer_of(recipes.FP8_CURRENT, bias=False)
    layer.empty_cache(keep=True)
    x = torch.randn(8, 64)
    for _ in range(4):
        weight = torch.randn(32, 64)
        y = torch.func.functional_call(layer, {"weight": weight}, (x,))
        assert_same(y, linear(x, weight, None, recipes.FP8_CURRENT))
        assert layer.state.cache is not None and layer.state.cache.held is not None
        assert layer.state.cache.held.data_ptr() == weight.data_ptr()
        del weight, y


def test_moving_a_layer_drops_its_casts() -> None:
    layer = layer_of(recipes.FP8_CURRENT)
    layer.empty_cache(keep=True)
    layer(torch.randn(8, 64))
    assert layer.state.cache is not None and not layer.state.cache.casts.is_empty
    layer.to(torch.bfloat16)
    assert layer.state.cache.casts.is_empty and layer.state.cache.held is None


def test_a_view_of_the_weight_at_the_same_address_is_another_weight() -> None:
    """Transposed, a square weight has the same address, version and shape; only its strides differ."""
    layer = layer_of(recipes.FP8_CURRENT, k=32, bias=False)
    layer.empty_cache(keep=True)
    x, weight = torch.randn(8, 32), torch.randn(32, 32)
    for view in (weight, weight.T):
        y = torch.func.functional_call(layer, {"weight": view}, (x,))
        assert_same(y, linear(x, view, None, recipes.FP8_CURRENT))


X, W = torch.zeros(8, 32), torch.zeros(16, 32)


@pytest.mark.parametrize(
    "recipe", [recipes.BF16, recipes.FP8_CURRENT], ids=lambda recipe: recipe.name
)
@pytest.mark.parametrize(
    ("x", "weight", "bias", "words"),
    [
        (X.int(), W, None, "x is a torch.int32"),
        (X.bool(), W, None, "x is a torch.bool"),
        (X.to(torch.complex64), W, None, "x is a torch.complex64"),
        (X.to(torch.float8_e4m3fn), W, None, "x is a torch.float8_e4m3fn"),
        (X.to_sparse(), W, None, "x is a torch.float32 torch.sparse_coo"),
        ([1.0], W, None, "x is a list"),
        (X.numpy(), W, None, "x is a ndarray"),
        (
            torch.tensor(1.0),
            W,
            None,
            r"x is \[\], weight \[16, 32\]; the last axis of x must be 32",
        ),
        (X, W.int(), None, "weight is a torch.int32"),
        (X, None, None, "weight is a NoneType"),
        (X, W[0], None, r"weight is \[32\]; it must be \[out_features, in_features\]"),
        (X, W.to("meta"), None, "x is on cpu, weight on meta"),
        (X, W, torch.zeros(1), r"bias is \[1\].*bias must be \[16\]"),
        (X, W, torch.zeros(8, 16), r"bias must be \[16\]"),
        (X, W, torch.zeros(16).int(), "bias is a torch.int32"),
    ],
)
def test_what_is_no_float_matrix_is_refused_in_words(x, weight, bias, words, recipe) -> None:  # type: ignore[no-untyped-def]
    """Integers and complex numbers once gave integers and real parts; a bias of another shape was spread in silence."""
    with pytest.raises(ShapeError, match=words):
        linear(x, weight, bias, recipe)
    if weight is W and bias is None:
        with pytest.raises(ShapeError, match=words):
            QLinear(32, 16, recipe=recipe)(x)


@pytest.mark.parametrize("recipe", [None, "fp8-current"])
def test_function_wants_a_recipe(recipe: object) -> None:
    with raises(ConfigError, "linear.recipe"):
        linear(X, W, None, recipe)  # type: ignore[arg-type]


def test_meta_tensors_pass_through() -> None:
    y = QLinear(32, 16, device="meta", recipe=recipes.FP8_DELAYED)(X.to("meta"))
    assert y.is_meta and y.shape == (8, 16)


def test_autocast_leaves_float64_alone_as_it_does_for_a_linear() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(X.double(), W.double(), None, recipes.FP8_CURRENT).dtype == torch.float64


@pytest.mark.parametrize(
    "recipe",
    ["int4-hq-bs", "int4-hq-lss", "int4-lsq-luq", "fp8-current", "fp8-delayed", "nvfp4", "int8"],
)
@pytest.mark.parametrize("caches", [False, True])
def test_what_inference_mode_computed_does_not_enter_training(recipe, caches):
    """Neither the casts of an input that is read again nor those of the weight; with and without a change of mode."""
    torch.manual_seed(0)
    model, x = (
        convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), recipe),
        torch.randn(32, 64),
    )
    if caches:
        model(x).sum().backward()
        advance(model)
    for changes in (True, False):
        model.train(not changes)
        with torch.inference_mode():
            model(x)
        model.train()
        model(x).sum().backward()
        model(torch.randn(32, 64)).sum().backward()
    assert all(
        parameter.grad.isfinite().all()
        for parameter in model.parameters()
        if parameter.grad is not None
    )


@pytest.mark.parametrize("recipe", recipes.ALL, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_an_axis_of_zero(recipe: Recipe, shape: tuple[int, int]) -> None:
    """As nn.Linear has it: the bias, and gradients of zero."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element")
        layer, ordinary = QLinear(*shape, recipe=recipe), torch.nn.Linear(*shape)
    ordinary.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    x = torch.randn(3, 2, shape[0], requires_grad=True)
    y = layer(x)
    assert_same(y.detach(), ordinary(x.detach()).detach())
    y.sum().backward()
    assert_same(x.grad, torch.zeros_like(x.detach()))
    assert_same(layer.weight.grad, torch.zeros_like(layer.weight.detach()))
