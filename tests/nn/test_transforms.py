"""What PyTorch does to a model besides calling it: each transform computes the layer's numbers, or ends in a sentence (exact).

WORKS lists the transforms that give what the model itself gives, REFUSED those that raise a NarrowgaugeError, with the words that
say what to do. Inside `suspended` every refused transform gives what it gives for nn.Linear, unless it needs a copy without recipes.
Left out: torch.compile (tests/nn/test_compile.py), and `torch.ao.quantization.quantize_dynamic(model, {nn.Linear})` and `fuse_modules`.
These look classes up in tables of torch, and call nothing of a layer whose class they do not know.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from functorch.compile import aot_module, nop
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.gradcheck import GradcheckError
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError, ShapeError, TransformError
from narrowgauge.nn.dropout import CountedDropout
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same
from tests.raising import Coded, coded, raises
from tests.selection import quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:`?torch.jit.*deprecated:DeprecationWarning"),  # torch 2.13
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated"
    ),  # Dynamo's own use of autograd.Function
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:must run observer before calling calculate_qparams:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other:UserWarning"
    ),
    # Of torch.func.linearize, about the graph that it makes itself.
    pytest.mark.filterwarnings(
        "ignore:Attempted to insert a get_attr Node with no underlying reference:UserWarning"
    ),
]

K, N = 32, 16
RECIPES = ("fp8-current", "fp8-delayed", "int8", "int4-hq-lss", "nvfp4", "bf16", "fused")
QUICK = ("fp8-delayed", "int4-hq-lss")

Model = nn.Sequential
Run = Callable[[Model, Tensor], Any]


def plain() -> Model:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(K), nn.Linear(K, N))


def converted(recipe: str) -> Model:
    """fused: the norm runs as one autograd function with the cast of its output, on any device."""
    if recipe == "fused":
        return ng.convert(plain(), "fp8-current", fuse=True, save="int8")  # type: ignore[return-value]
    return ng.convert(plain(), recipe)  # type: ignore[return-value]


def given() -> Tensor:
    return torch.randn(48, K, generator=torch.Generator().manual_seed(2))


def gradients(model: Model, y: Tensor) -> list[Tensor]:
    """y, and the gradients of all parameters for a fixed gradient of y."""
    gy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(y, list(model.parameters()), gy, materialize_grads=True)
    return [y.detach(), *found]


# --- those that give the layer's numbers


def saved_tensors_hooks(model: Model, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = model(x)
    return gradients(model, y)


def save_on_cpu(model: Model, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = model(x)
    return gradients(model, y)


def functional_call(model: Model, x: Tensor) -> Tensor:
    copies = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)  # what the call must not read
    return torch.func.functional_call(model, copies, (x,))


def deepcopied_in_inference_mode(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = copy.deepcopy(model)(x)
    model(x).sum().backward()  # the original still trains
    return y.clone()


def pickled(model: Model, x: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(model))(x)


def saved_whole(model: Model, x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(x)


def parametrized(model: Model, x: Tensor) -> Tensor:
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    y = model(x)
    assert_same(y, copy.deepcopy(model)(x))
    parametrize.remove_parametrizations(model[1], "weight")
    return y


def pruned(model: Model, x: Tensor) -> Tensor:
    prune.custom_from_mask(model[1], "weight", torch.ones(N, K))
    y = model(x)
    prune.remove(model[1], "weight")
    assert isinstance(model[1], nn.Linear)
    return y


def weight_normed(model: Model, x: Tensor) -> Tensor:
    """The norm of each row stays as it is: the weight is the same but for its last bit, which the next line takes away."""
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(N, K))
    want = model(x)
    parametrizations.weight_norm(model[1])
    y = model(x)
    torch.testing.assert_close(y, want)
    parametrize.remove_parametrizations(model[1], "weight")
    return _with_weight(model, x)


def weight_normed_by_hooks(model: Model, x: Tensor) -> Tensor:
    nn.utils.weight_norm(model[1])
    model(x).sum().backward()
    assert model[1].weight_v.grad is not None
    nn.utils.remove_weight_norm(model[1])
    return _with_weight(model, x)


def _with_weight(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model[1].weight.copy_(plain()[1].weight)
    return model(x)


def skip_init(model: Model, x: Tensor) -> Tensor:
    layer = nn.utils.skip_init(type(model[1]), K, N)
    if isinstance(layer, QLinear):
        layer.recipe = model[1].recipe
    layer.load_state_dict(model[1].state_dict())
    model[1] = layer
    return model(x)


def exported(model: Model, x: Tensor) -> Tensor:
    return torch.export.export(model, (x,), strict=False).module()(x)


def checkpointed(model: Model, x: Tensor) -> Any:
    y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
    return gradients(model, y)


def counted_flops(model: Model, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return model(x)


def averaged(model: Model, x: Tensor) -> Tensor:
    mean = torch.optim.swa_utils.AveragedModel(model)
    mean.update_parameters(model)
    return mean(x)


def with_hooks(model: Model, x: Tensor) -> Tensor:
    seen: list[Any] = []
    model[1].register_forward_pre_hook(
        lambda module, args, named: seen.append(args or named), with_kwargs=True
    )
    model[1].register_full_backward_hook(lambda *_: seen.append(1))
    y = model(x)
    y.sum().backward()
    assert len(seen) == 2
    return y


WORKS: dict[str, Run] = {
    "the keyword input": lambda model, x: model[1](input=model[0](input=x)),
    "torch.fx.symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "torch.export": exported,
    "torch.func.functional_call": functional_call,
    "saved_tensors_hooks": saved_tensors_hooks,
    "save_on_cpu": save_on_cpu,
    "checkpoint": checkpointed,
    "deepcopy": lambda model, x: copy.deepcopy(model)(x),
    "deepcopy in inference mode": deepcopied_in_inference_mode,
    "pickle": pickled,
    "torch.save": saved_whole,
    "share_memory": lambda model, x: model.share_memory()(x),
    "DataParallel": lambda model, x: nn.DataParallel(model)(x),
    "parametrize": parametrized,
    "parametrizations.weight_norm": weight_normed,
    "weight_norm": weight_normed_by_hooks,
    "prune": pruned,
    "skip_init": skip_init,
    "AveragedModel": averaged,
    "FlopCounterMode": counted_flops,
    "hooks": with_hooks,
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    quick(
        [(name, recipe) for name in WORKS if name != "torch.export" for recipe in QUICK],
        [(name, recipe) for name in WORKS for recipe in RECIPES],
    ),
)
def test_a_transform_gives_the_numbers_of_the_layer(name: str, recipe: str) -> None:
    """With the same seed, of a copy that has seen as much."""
    run, model, x = WORKS[name], converted(recipe), given()
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    y = twin(x.requires_grad_(name == "checkpoint"))
    want = gradients(twin, y)
    torch.manual_seed(5)
    found = run(model, x.detach())
    if name == "torch.export":  # its graph sums in another order
        torch.testing.assert_close(found, y)
        return
    assert_same(
        found if isinstance(found, list) else found.detach(),
        want if isinstance(found, list) else want[0],
    )


@pytest.mark.parametrize("recipe", quick(list(QUICK), list(RECIPES)))
def test_shapes_are_known_without_numbers(recipe: str) -> None:
    """On the meta device, and for fake tensors: forward and backward."""
    on_meta = converted(recipe).to("meta")
    for model, device, mode in ((on_meta, "meta", nullcontext()), (None, "cpu", FakeTensorMode())):
        with mode:
            model = converted(recipe) if model is None else model
            y = model(torch.empty(48, K, device=device))
            y.sum().backward()
            assert y.shape == (48, N) and model[1].weight.grad.shape == (N, K)


# --- those that are refused


def doubly(model: Model, x: Tensor) -> Any:
    x = x.requires_grad_()
    [once] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(once.square().sum(), x)[0]


def with_tangent(model: Model, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x + 1))))


def with_tangents_of_weights(model: Model, x: Tensor) -> Any:
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(each, each + 1) for name, each in model.named_parameters()
        }
        return tuple(forward_ad.unpack_dual(torch.func.functional_call(model, duals, (x,))))


def func_grad(model: Model, x: Tensor) -> Any:
    weights = {name: each for name, each in model.named_parameters() if "steps" not in name}
    return torch.func.grad(
        lambda each: torch.func.functional_call(model, each, (x,)).square().sum()
    )(weights)


def many_gradients(model: Model, x: Tensor) -> Any:
    y = model(x)
    gy = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad(y, model[1].weight, gy, is_grads_batched=True)


def many_gradients_by_func(model: Model, x: Tensor) -> Any:
    y = model(x)
    gy = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(3))
    return torch.func.vmap(lambda each: torch.autograd.grad(y, model[1].weight, each))(gy)


def graph_of_gradients(model: Model, x: Tensor) -> Any:
    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    return make_fx(gradient)(x)(x)


def gradgradcheck(model: Model, x: Tensor) -> Any:
    return torch.autograd.gradgradcheck(
        model.double(), x[:3].double().requires_grad_(), fast_mode=True
    )


_SUSPENDED = "narrowgauge.suspended(model)"
_FUNC = coded("transform.functorch", _SUSPENDED)
_TWICE = coded("transform.second-derivative", _SUSPENDED)
_MANY = coded("transform.batched-gradient", _SUSPENDED)
_GRAPH = coded("transform.make-fx", _SUSPENDED, "torch.export")


def _tangent(of: str) -> Coded:
    return coded("transform.forward-mode", _SUSPENDED, of)


REFUSED: dict[str, tuple[Run, Coded]] = {
    "torch.func.vmap": (lambda model, x: torch.func.vmap(model)(x), _FUNC),
    "torch.func.grad": (func_grad, _FUNC),
    "torch.func.jvp": (lambda model, x: torch.func.jvp(model, (x,), (x,)), _FUNC),
    "torch.func.vjp": (lambda model, x: torch.func.vjp(model, x)[1](model[1].weight.new_ones(48, N)), _FUNC),
    "torch.func.jacfwd": (lambda model, x: torch.func.jacfwd(model)(x[:2]), _FUNC),
    "torch.func.jacrev": (lambda model, x: torch.func.jacrev(model)(x[:2]), _FUNC),
    "torch.func.hessian": (lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x[:2]), _FUNC),
    "torch.func.functionalize": (lambda model, x: torch.func.functionalize(model)(x), _FUNC),
    "torch.func.linearize": (lambda model, x: torch.func.linearize(model, x)[1](x), _tangent("x has a tangent")),
    "forward-mode AD": (with_tangent, _tangent("x has a tangent")),
    "forward-mode AD of weights": (with_tangents_of_weights, _tangent("tangent")),
    "functional.jacobian, forward-mode": (
        lambda model, x: torch.autograd.functional.jacobian(model, x[:2], vectorize=True, strategy="forward-mode"),
        _tangent("x has a tangent"),
    ),
    "functional.jacobian, vectorize": (
        lambda model, x: torch.autograd.functional.jacobian(model, x[:2], vectorize=True), _MANY,
    ),
    "functional.jvp": (lambda model, x: torch.autograd.functional.jvp(model, x, x), _TWICE),
    "functional.hessian": (
        lambda model, x: torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x[:2]), _TWICE,
    ),
    "functional.hvp": (
        lambda model, x: torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x[:2], x[:2]), _TWICE,
    ),
    "create_graph=True": (doubly, _TWICE),
    "gradgradcheck": (gradgradcheck, _TWICE),
    "is_grads_batched=True": (many_gradients, _MANY),
    "torch.func.vmap over backward": (many_gradients_by_func, _MANY),
    "make_fx": (lambda model, x: make_fx(model)(x)(x), _GRAPH),
    "make_fx, fake": (
        lambda model, x: make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x), _GRAPH,
    ),
    "make_fx, symbolic": (
        lambda model, x: make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)(x), _GRAPH,
    ),
    "make_fx of gradients": (graph_of_gradients, _GRAPH),
    "torch.fx.symbolic_trace of the layer": (
        lambda model, x: torch.fx.symbolic_trace(model[1])(x), coded("transform.fx", _SUSPENDED),
    ),
    "torch.jit.trace": (
        lambda model, x: torch.jit.trace(model, x)(x), coded("transform.jit-trace", _SUSPENDED, "torch.export"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recipe"),
    quick(
        [(name, QUICK[0]) for name in REFUSED],
        [(name, recipe) for name in REFUSED for recipe in RECIPES],
    ),
)
def test_a_transform_without_a_rule_ends_in_a_sentence(name: str, recipe: str) -> None:
    """And inside `suspended` it computes what it computes for nn.Linear."""
    run, expected = REFUSED[name]
    with raises(TransformError, expected):
        run(converted(recipe), given())
    model, twin = converted(recipe), plain()
    want = run(twin, given())
    with ng.suspended(model):
        found = run(model, given())
    torch.testing.assert_close(found, want)


RECORDED = {
    "fp8-current": True,
    "int8": True,
    "bf16": True,
}  # the others draw noise, or remember something


@pytest.mark.parametrize("recipe", quick(["fp8-current", "nvfp4"], RECIPES[:-1]))
def test_graphs_of_aot_autograd_hold_no_noise(recipe: str) -> None:
    model, x = converted(recipe), given()
    if RECORDED.get(recipe):
        assert_same(aot_module(model, nop)(x).detach(), model(x).detach())
        return
    with raises(TransformError, _GRAPH):
        aot_module(model, nop)(x)


def script(model: Model, x: Tensor) -> Any:
    return torch.jit.script(model)(x)


def quantized_aware(model: Model, x: Tensor) -> Any:
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return type(torch.ao.quantization.prepare_qat(model.train())[1]).__module__


def quantized_by_class(model: Model, x: Tensor) -> Any:
    kind = type(model[1])
    return type(
        torch.ao.quantization.quantize_dynamic(model, {kind}, dtype=torch.qint8)[1]
    ).__module__


def quantized_by_fx(model: Model, x: Tensor) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    prepared = quantize_fx.prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return quantize_fx.convert_fx(prepared)(x)


@pytest.mark.parametrize("recipe", quick(list(QUICK), list(RECIPES)))
@pytest.mark.parametrize(
    "run", [script, quantized_aware, quantized_by_class, quantized_by_fx], ids=lambda f: f.__name__
)
def test_what_looks_into_a_layer_asks_for_a_copy_without_recipes(run: Run, recipe: str) -> None:
    model, x = converted(recipe), given()
    with pytest.raises(
        TransformError, match=r"narrowgauge.convert\(copy.deepcopy\(model\), None\)"
    ):
        run(copy.deepcopy(model), x)
    found = run(ng.convert(copy.deepcopy(model), None), x)  # type: ignore[arg-type]
    want = run(plain(), x)
    assert found == want if isinstance(found, str) else torch.equal(found, want)
    assert isinstance(model[1], QLinear)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradcheck_passes_where_there_is_something_to_check(recipe: str) -> None:
    """A rounding has no derivative that differences could find: gradcheck says so, and in `suspended` there is none."""
    model, x = converted(recipe).double(), given()[:3].double().requires_grad_()
    with ng.suspended(model):
        assert torch.autograd.gradcheck(model, x, fast_mode=True)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(model, x, fast_mode=True)


@pytest.mark.parametrize("recipe", RECIPES[:-1])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_copy_made_in_inference_mode_computes_there_and_does_not_train(
    recipe: str, is_training: bool
) -> None:
    """nn.Linear raises torch's RuntimeError in the same place."""
    model, x = converted(recipe).train(is_training), given()
    want = copy.deepcopy(model)(x).detach()
    with torch.inference_mode():
        twin = copy.deepcopy(model)
        assert_same(twin(x).clone(), want)
    with raises(TransformError, "transform.inference-tensor", "inference_mode"):
        twin[1](x).sum().backward()


# --- embeddings with a learned step, and dropout by counted noise


def embedding() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    model = ng.convert(
        nn.Sequential(nn.Embedding(20, K), nn.Linear(K, N)), "bf16", embeddings="int8"
    )
    assert type(model[0]) is QEmbedding
    return nn.Sequential(model[0]), torch.arange(20).reshape(4, 5)


def test_embeddings_are_called_and_traced_as_those_of_torch() -> None:
    model, ids = embedding()
    want = copy.deepcopy(model)(ids).detach()
    assert_same(model[0](input=ids).detach(), want)
    for run in ("torch.fx.symbolic_trace", "pickle", "deepcopy", "torch.export", "share_memory"):
        assert_same(WORKS[run](copy.deepcopy(model), ids).detach(), want)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (func_grad, _FUNC),
        (lambda model, ids: torch.func.vmap(model)(ids), _FUNC),
        (lambda model, ids: with_tangents_of_weights(model, ids), _tangent("weight has a tangent")),
        (lambda model, ids: make_fx(model)(ids)(ids), _GRAPH),
        (lambda model, ids: torch.jit.trace(model, ids), coded("transform.jit-trace")),
        (lambda model, ids: torch.fx.symbolic_trace(model[0]), coded("transform.fx")),
        (script, coded("transform.script", "narrowgauge.convert(copy.deepcopy(model), None)")),
        (lambda model, ids: model(ids).square().sum().backward(create_graph=True), _TWICE),
        (
            lambda model, ids: torch.autograd.grad(
                model(ids), model[0].weight, torch.ones(3, 4, 5, K), is_grads_batched=True
            ),
            _MANY,
        ),
    ],
)
def test_embeddings_refuse_with_the_same_codes(run: Run, expected: Coded) -> None:
    """The second derivative was zero, without a word: the gradient of its gradient has no graph."""
    model, ids = embedding()
    with raises(NarrowgaugeError, expected):
        run(model, ids)


def test_counted_dropout_is_that_of_torch_under_a_transform() -> None:
    layer, x = CountedDropout(0.5), torch.ones(64, 64)
    assert (layer(input=x) == 0).any()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        assert tangent is not None and set(tangent.unique().tolist()) == {0.0, 2.0}
    assert torch.func.vmap(layer, randomness="different")(x).shape == x.shape


@pytest.mark.filterwarnings("ignore::UserWarning")  # by torch, of a prototype
@pytest.mark.parametrize("recipe", ["bf16", "fp8-current", "fp8-delayed", "int4-hq-lss"])
def test_a_masked_tensor_is_refused_with_the_next_step(recipe):
    layer = ng.QLinear(16, 8, recipe=recipe)
    x = torch.masked.masked_tensor(torch.randn(4, 16), torch.rand(4, 16) > 0.5)
    with pytest.raises(ShapeError, match=r"x is a MaskedTensor.*Pass x\.to_tensor\(0\)"):
        layer(x)
    assert layer(x.to_tensor(0)).shape == (4, 8)
