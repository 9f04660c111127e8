"""Kernels that read memory never get a tensor whose memory is elsewhere: they refuse in words, and torch computes (exact)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

import narrowgauge as ng
from narrowgauge import addresses, recipes
from narrowgauge.errors import BackendError
from narrowgauge.formats import INT4
from narrowgauge.ops import hadamard as rotation
from narrowgauge.ops import random
from narrowgauge.ops.cpp import int4 as cpp
from narrowgauge.ops.hadamard import cpp as rotations
from narrowgauge.ops.hadamard import definition
from narrowgauge.ops.mm import cpp as products
from narrowgauge.ops.quantize import cpp as casts
from narrowgauge.ops.registry import Device, device_of
from narrowgauge.ops.triton.launch import launch
from narrowgauge.optim.cpp import binding
from narrowgauge.recipe import Cast, Hadamard
from tests.compare import assert_same
from tests.ops.registries import registries
from tests.raising import raises, require
from tests.selection import quick

PACKAGE = Path(ng.__file__).parent
# (op, kernel) beside the definitions that computes by torch's operators alone. One that takes an address does not belong here.
BY_TORCH = {("mm", name) for name in ("native", "native-block", "native-mx", "native-int8")}
DEFINITIONS = {"reference", "torch"}


class Wrapper(torch.Tensor):
    """As DTensor: a tensor without memory, in front of one that has it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {})
        )
        return tree_map(
            lambda x: cls(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs)
        )


class Plain(torch.Tensor):
    """A subclass that computes as any tensor does."""


def fake(x: torch.Tensor) -> FakeTensor:
    return FakeTensorMode().from_tensor(x)


OPS = {
    "mm", "quantize", "quantize_pair", "quantize_precast", "quantize_rotated", "hadamard", "rotate_and_encode", "rotary", "optim",
    "norm_act", "norm_act_backward", "cross_entropy", "cross_entropy_backward", "attention", "attention16", "grouped",
}  # fmt: skip


def test_every_registered_kernel_that_reads_memory_refuses_wrappers():
    assert {each.op for each in registries()} == OPS
    for registry in registries():
        for name in ("DTensor", "FakeTensor", "FunctionalTensor"):
            device = Device("cpu", wrapper=name)
            for kernel in registry.kernels:
                if kernel.by_torch:
                    is_known = kernel.name in DEFINITIONS or (registry.op, kernel.name) in BY_TORCH
                    assert is_known, (
                        f"{registry.op}: {kernel.name} is registered by_torch. If it takes no address, add it to BY_TORCH."
                    )
                    continue
                for spec in (device, SimpleNamespace(device=device)):
                    require(kernel.refuse(spec), "wrapper", name)


def test_no_other_file_takes_an_address_or_starts_a_kernel():
    """So that the next kernel cannot forget to ask.

    A checkpoint, a snapshot and a traced allocation compare addresses of tensors.

    `ops/fingerprint.py` refuses wrappers itself before it sums the bytes of a weight.

    A replay compares them too, once wrappers were refused.

    A launch of a C++ kernel reads the addresses of plain tensors at once, and asks `address` for others.
    """
    holding: dict[str, set[str]] = {"data_ptr()": set(), "enable_fp_fusion": set()}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for words, found in holding.items():
            if words in text:
                found.add(str(path.relative_to(PACKAGE)))
    assert holding["data_ptr()"] == {
        "addresses.py", "ops/cpp/__init__.py", "ops/fingerprint.py", "ops/triton/replay.py", "plan/allocations.py", "snapshot/copies.py",
        "train/checkpoint/store.py",
    }  # fmt: skip
    spoken_of = {"ops/triton/__init__.py"}
    assert holding["enable_fp_fusion"] - spoken_of == {
        "ops/triton/launch.py",
        "ops/mm/triton.py",
        "ops/grouped/launches.py",  # an option of `launch`
    }


@pytest.mark.parametrize("hide", [Wrapper, fake])
def test_compiled_code_raises_for_what_was_not_refused(hide):
    x, row = hide(torch.randn(4, 16)), torch.ones(1, 1)
    as_codes = hide(torch.ones(4, 16, dtype=torch.int8))
    calls = [
        lambda: rotations.rotate(x, 16, None),
        lambda: rotations.rotate(torch.randn(4, 16), 16, hide(torch.ones(16))),
        lambda: rotations.encode(x, row, INT4, True, True),
        lambda: rotations.decode(hide(torch.ones(4, 8, dtype=torch.uint8)), INT4, 16),
        lambda: casts.run(x, Cast(format=INT4), None, None, None),
        lambda: products.gemm(as_codes, torch.ones(4, 16, dtype=torch.int8), row, row, True, 7),
        lambda: binding._moment(SimpleNamespace(format=INT4, codes=x, scale=None, expansion=None)),
        lambda: launch(None, 1, x, warps=4),
    ]
    if cpp.LIBRARY.missing:
        calls = calls[-1:]
    elif not products.has_gemm():
        calls.pop(5)
    for call in calls:
        with raises(BackendError, "kernel.no-memory"):
            call()


def test_what_a_wrapper_is():
    x = torch.randn(3)
    plain = (x, nn.Parameter(x), nn.Buffer(x), x.as_subclass(Plain), None, torch.empty(0))
    assert addresses.wrapper(*plain) == ""
    assert all(
        addresses.address(each) == (0 if each is None else each.data_ptr()) for each in plain
    )
    assert (
        addresses.wrapper(x, Wrapper(x)) == "Wrapper"
        and addresses.wrapper(nn.Parameter(fake(x))) == "FakeTensor"
    )
    with FakeTensorMode():
        assert addresses.wrapper(x) == "FakeTensorMode"
    assert (
        torch.func.vmap(lambda x: x * len(addresses.wrapper(x)))(x)
        .eq(x * len(addresses.TRANSFORM))
        .all()
    )
    with pytest.raises(BackendError):
        addresses.address(torch._to_functional_tensor(x))


@pytest.mark.parametrize("hide", [Wrapper, fake], ids=["wrapper", "fake"])
def test_ops_compute_wrappers_by_torch_and_refuse_a_kernel_by_name(hide):
    x, hadamard, cast = torch.randn(16, 32), Hadamard(block=16), Cast(format=INT4, tile=(1, -1))
    inside = definition.pack_bits(torch.rand(16, 32) > 0.5)
    calls = {
        "quantize": lambda wrap, **how: ng.quantize(wrap(x), cast, **how).data,
        "rotate": lambda wrap, **how: rotation.rotate(wrap(x), hadamard, **how),
        "codes": lambda wrap, **how: rotation.encode(wrap(x), torch.ones(1, 1), INT4, **how).codes,
        "decode": lambda wrap: rotation.decode(
            wrap(torch.ones(16, 16, dtype=torch.uint8)), INT4, 32
        ),
        "unclipped": lambda wrap: rotation.unrotate(
            wrap(x), None, 32, bits=inside if wrap is Wrapper else wrap(inside)
        ),
    }
    for op, call in calls.items():
        if hide is fake:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                found, expected = call(mode.from_tensor), call(lambda x: x)
                assert (
                    isinstance(found, FakeTensor)
                    and found.shape == expected.shape
                    and found.dtype == expected.dtype
                )
        else:
            found = call(hide)
            assert_same(
                found.inner, call(lambda x: x).to(found.dtype)
            ) if op != "rotate" else torch.testing.assert_close(found.inner, call(lambda x: x))
        if op in ("quantize", "rotate", "codes"):
            with raises(BackendError, "kernel.refused", "native-cpp"):
                call(hide, backend="native-cpp")


def test_noise_under_a_mode_that_makes_tensors_fake():
    with FakeTensorMode():
        assert isinstance(random.draw((4, 4), torch.device("cpu")), FakeTensor)
        assert isinstance(random.Key((1, 2)).uniform((4, 4)), FakeTensor)


def test_a_device_that_is_not_here_may_hold_fake_tensors():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with FakeTensorMode():
        assert device_of(torch.empty(2, device="cuda")) == Device("cuda", wrapper="FakeTensor")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


@pytest.mark.filterwarnings("ignore:narrowgauge.optim steps in plain torch")
@pytest.mark.parametrize(
    "recipe",
    quick(
        [recipes.get(name) for name in ("fp8-delayed",)],
        recipes.ALL,
    ),
    ids=lambda recipe: recipe.name,
)
def test_a_model_trains_on_fake_tensors(recipe):
    with FakeTensorMode():
        layers = ng.convert(model(), {"*": recipe})
        optimizers = [
            ng.optim.AdamW(layers.parameters(), states=states) for states in ("8bit", "fp8", "4bit")
        ]
        for optimizer in optimizers:
            layers(torch.randn(32, 64)).sum().backward()
            optimizer.step()
            ng.advance(layers)
    assert all(isinstance(each.grad, FakeTensor) for each in layers.parameters())
    assert "layers" in str(ng.describe(layers)) or recipe.name in str(ng.describe(layers))
    assert optimizers[0].computed_by(layers[0].weight).startswith("torch")


@pytest.mark.parametrize(
    "recipe",
    quick(
        [
            recipes.get(name)
            for name in ("fp8-delayed", "fp8-block", "int8", "int4-hq-bs", "int4-lsq-luq", "nvfp4")
        ],
        recipes.ALL,
    ),
    ids=lambda recipe: recipe.name,
)
def test_a_layer_goes_from_fake_tensors_back_to_its_kernels(recipe):
    """Nothing of the fake pass is kept: the same bits as a layer that has seen none."""
    torch.manual_seed(0)
    layers = ng.convert(model(), {"*": recipe})
    x, results = torch.randn(32, 64), []
    for fakes in (0, 1):
        if fakes:
            with FakeTensorMode(allow_non_fake_inputs=True):
                layers.eval()(torch.randn(32, 64))
            layers.train()
        torch.manual_seed(1)
        if recipe.has_state:
            layers.eval()  # which remembers nothing
        results.append(layers(x))
    assert type(results[1]) is torch.Tensor
    assert_same(results[1].detach(), results[0].detach())


@pytest.mark.slow
def test_a_model_that_fuses_runs_on_fake_tensors(llama):
    for recipe in ("fp8-current", "fp8-delayed", "int4-hq-lss"):
        with FakeTensorMode():
            made = llama()
            ng.convert(made, recipe, fuse=True)
            made(
                input_ids=torch.zeros(2, 8, dtype=torch.int64),
                labels=torch.zeros(2, 8, dtype=torch.int64),
            ).loss.backward()
        assert all(isinstance(each.grad, FakeTensor) for each in made.parameters())


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return lambda: transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "int8", "int4-hq-bs", "nvfp4"])
def test_numbers_that_a_view_negates_are_read_negated(recipe):
    """Their memory holds the others: z.conj().imag, and what autograd makes of it."""
    x, gy = torch.randn(32, 64), torch.randn(32, 16)

    def results(sign):
        torch.manual_seed(0)
        layer = ng.convert(nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 16)), recipe)[0]
        given = sign(x).requires_grad_()
        torch.manual_seed(0)
        y = layer(given)
        y.backward(sign(gy))
        return y, given.grad, layer.weight.grad

    assert_same(results(torch._neg_view), results(torch.neg))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "int8", "int4-hq-lss", "mxfp4"])
def test_a_gradient_that_is_zero_without_memory(recipe):
    """Autograd's own, of `sgn`: to the bit what zeros give."""
    x = torch.randn(32, 64)

    def results(loss):
        torch.manual_seed(0)
        layer = ng.QLinear(64, 16, recipe=recipe)
        given = x.clone().requires_grad_()
        loss(layer(given)).sum().backward()
        return given.grad, layer.weight.grad, layer.bias.grad

    assert_same(results(torch.sgn), results(lambda y: y * 0.0))


def test_zeros_without_memory_pass_fused_modules_and_optimizers():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    ng.convert(model, "fp8-current", fuse=True)
    model(torch.randn(16, 32)).sgn().sum().backward()
    assert all(float(each.grad.abs().max()) == 0 for each in model.parameters())
    parameter = nn.Parameter(torch.ones(64, 64))
    parameter.sgn().sum().backward()
    assert parameter.grad._is_zerotensor()
    ng.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0).step()
    assert_same(parameter.detach(), torch.ones(64, 64))


def test_a_gradient_that_a_view_negates_steps_the_right_way():
    found = []
    for sign in (torch._neg_view, torch.neg):
        parameter = nn.Parameter(torch.ones(64, 64))
        parameter.grad = sign(torch.ones(64, 64))
        ng.optim.AdamW([parameter], lr=1e-3).step()
        found.append(parameter.detach())
    assert_same(*found)


def test_quantize_reads_a_negated_view():
    x = torch.randn(6, 1, dtype=torch.complex64).conj().imag
    cast = Cast(format=INT4, tile=(1, -1))
    assert_same(
        ng.dequantize(ng.quantize(x, cast)), ng.dequantize(ng.quantize(x.resolve_neg(), cast))
    )
    with raises(BackendError, "kernel.refused"):
        ng.quantize(x, cast, backend="native-cpp")


def test_kernels_refuse_a_negated_view():
    views = {
        "kernel.negated-view": torch._neg_view(torch.randn(4, 16)),
        "kernel.no-memory": torch._efficientzerotensor((4, 16)),
    }
    for code, x in views.items():
        for call in (lambda x=x: addresses.address(x), lambda x=x: launch(None, 1, (x,), warps=4)):
            with raises(BackendError, code):
                call()
