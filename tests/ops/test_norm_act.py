"""Norms and activations with their casts: gradients beside autograd's (bounded), refusals (in words), casts handed back (exact)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import BackendError
from narrowgauge.formats import E4M3, E5M2, INT4
from narrowgauge.fuse import fuse
from narrowgauge.fuse.forward import FusedForward
from narrowgauge.ops.mm import plan
from narrowgauge.ops.norm_act import (
    BACKWARD,
    FORWARD,
    KINDS,
    CastRequest,
    Kind,
    NormActSpec,
    definition,
    value,
)
from narrowgauge.ops.quantize import quantize, tile_amax
from narrowgauge.ops.quantize.amax_state import update_amax
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import examine
from narrowgauge.recipe import WHOLE, Cast, ClippedRms
from narrowgauge.scaling import POW2
from tests.compare import assert_same
from tests.raising import coded, raises, refusal_of, require

HOPPER = Device("cuda", (9, 0))
TENSOR, ROW = Cast(format=E4M3), Cast(format=E4M3, tile=(1, WHOLE), scale=POW2)
VECTOR = Cast(format=E4M3, tile=(1, 128), scale=POW2)


def tensors_of(
    name: str, rows: int = 9, columns: int = 40, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    x = torch.randn(rows, columns, dtype=torch.float64) * 2 + (0.7 if name == "layer-norm" else 0.0)
    more = {"layer-norm": 2}.get(name, int(name.endswith("-norm")))
    parameters = [1 + 0.3 * torch.randn(columns, dtype=torch.float64) for _ in range(more)]
    return [
        each.to(dtype)
        for each in (x, *parameters, *([torch.randn_like(x)] if Kind(name).is_gated else []))
    ]


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_function(name):
    """Beside autograd of the definition; both compute in float32, so within some of its roundings of the largest."""
    kind = Kind(name, 1e-5)
    tensors = [each.float().requires_grad_() for each in tensors_of(name)]
    gy = torch.randn(9, 40)
    value(kind, tensors).backward(gy)
    detached = [each.detach() for each in tensors]
    orders = [None, None] if kind.is_gated else [None]
    statistics = definition.statistics(kind, detached)
    made, of_parameters = BACKWARD.kernels[-1].run(kind, detached, statistics, gy, orders)
    found = [each.value for each in made] + of_parameters
    assert len(found) == len(tensors)
    for got, tensor in zip(found, tensors, strict=True):
        size = tensor.grad.abs().max()
        assert ((got - tensor.grad).abs() <= 64 * 2.0**-23 * size).all()


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_narrow_tensors_are_rounded_once(name):
    """Those of the same values in float32, rounded: nothing on the way is bfloat16."""
    kind = Kind(name, 1e-5)
    narrow = tensors_of(name, dtype=torch.bfloat16)
    gy = torch.randn(9, 40).bfloat16()

    def gradients(dtype):
        tensors = [each.to(dtype) for each in narrow]
        statistics = definition.statistics(kind, tensors)
        orders = [None, None] if kind.is_gated else [None]
        made, of_parameters = BACKWARD.kernels[-1].run(
            kind, tensors, statistics, gy.to(dtype), orders
        )
        return [each.value for each in made] + of_parameters

    for got, wide in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert_same(got, wide.bfloat16())


def test_a_norm_is_that_of_its_module():
    x = torch.randn(5, 48)
    norm = nn.LayerNorm(48)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    y = value(Kind("layer-norm", norm.eps), (x, norm.weight, norm.bias))
    torch.testing.assert_close(y, norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "order",
    [
        CastRequest(TENSOR, torch.tensor([3.0, 0.0, 0.0]), True, True),
        CastRequest(ROW),
        CastRequest(VECTOR),
    ],
)
def test_the_casts_are_those_of_what_is_returned(order):
    made, _ = FORWARD.kernels[-1].run(
        Kind("swiglu"), tensors_of("swiglu", dtype=torch.bfloat16), order
    )
    amax = (
        None
        if order.amax_state is None
        else update_amax(torch.tensor([3.0, 0.0, 0.0]), tile_amax(made.value, (WHOLE, WHOLE)))
    )
    assert_same(made.plain.data, quantize(made.value, order.cast, amax=amax).data)
    if order.transposed:
        assert_same(made.transposed.data, quantize(made.value.T, order.cast, amax=amax).data)
    else:
        assert made.transposed is None


def spec(
    name: str,
    *casts: tuple[Cast, bool],
    device: Device = HOPPER,
    shape=(64, 64),
    dtypes=(torch.bfloat16,),
):
    return NormActSpec(Kind(name, 1e-5), device, dtypes, shape[1], casts, 0 in shape)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (spec("swiglu", (TENSOR, False), device=Device("cpu")), coded("device", "cpu")),
        (spec("swiglu", shape=(0, 4)), coded("shape")),
        (spec("gelu", dtypes=(torch.float64,)), coded("dtype", torch.float64)),
        (spec("rms-norm", shape=(4, 8193)), coded("shape", 8192, 8193)),
        (spec("gelu", (Cast(format=E5M2, rounding="stochastic"), False)), coded("rounding", "stochastic")),
        (spec("gelu", (Cast(format=E4M3, calibrate=ClippedRms()), False)), coded("calibration", "2.475 rms")),
        (spec("gelu", (Cast(format=INT4), False)), coded("format", "int4")),
        (spec("gelu", (Cast(format=E4M3, tile=(128, 128)), False)), coded("tile", (128, 128))),
        (spec("swiglu", (VECTOR, True)), coded("tile-transposed")),
        (spec("gelu", (ROW, True)), coded("tile-transposed")),
        (spec("rms-norm", (VECTOR, True)), coded("tile-transposed")),
    ],
)  # fmt: skip
def test_refusals_say_why(triton_installed, given, expected):
    for registry in (FORWARD, BACKWARD):
        require(refusal := refusal_of(registry, "triton", given), expected.code, *expected.values)
        with raises(BackendError, "kernel.refused", refusal.text):
            registry.choose(given, "triton")


@pytest.mark.parametrize("cast", [ROW, VECTOR], ids=str)
def test_gradients_have_one_scale_per_tensor(triton_installed, cast):
    with raises(BackendError, "kernel.refused", "triton"):
        BACKWARD.choose(spec("gelu", (cast, False)), "triton")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cast", [TENSOR, ROW, VECTOR], ids=str)
def test_a_gpu_takes_the_kernel(triton_installed, name, cast):
    assert FORWARD.choose(spec(name, (cast, cast.tile == (WHOLE, WHOLE)))).kernel.name == "triton"


def wrong(change):
    """The definition, with something changed in the first of what it makes."""

    def run(kind, tensors, *given):
        *_, requests = given
        one, rest = (
            (FORWARD if len(given) == 1 else BACKWARD).kernels[-1].run(kind, tensors, *given)
        )
        made = one if isinstance(one, list) else [one]
        made[0] = change(made[0])
        return (made if isinstance(requests, list) else made[0]), rest

    return run


def one_code_off(made):
    made.transposed.data.view(torch.uint8)[100, 7] ^= 1
    return made


def a_window_as_it_was(made):
    return replace(made, amax=made.amax + 1)


@pytest.mark.parametrize("registry", [FORWARD, BACKWARD], ids=lambda each: each.op)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made, None),
        (lambda made: replace(made, value=made.value.roll(1, 0)), "its result 0 is wrong on cpu"),
        (
            lambda made: replace(made, value=made.value * (1 + 2.0**-8)),
            "its result 0 is wrong on cpu",
        ),
        (one_code_off, "its codes of x.T is wrong on cpu in 1 of "),
        (a_window_as_it_was, "its amax is wrong on cpu"),
        (lambda made: 1 / 0, "it failed when it was tried on cpu: ZeroDivisionError"),
    ],
    ids=["right", "another row", "rounded too often", "a code", "amax", "raises"],
)
def test_wrong_kernels_are_found(registry, change, words):
    check = registry.kernels[0].check()
    examples = [each for each in check.examples() if each.kind.name == "gelu" and each.kept is None]
    [spec] = [each for each in examples if "delayed" in str(each.casts[0][0])]
    result = examine(registry.op, wrong(change), check, check.kind(spec), torch.device("cpu"))
    assert result.reason is None if words is None else result.reason.startswith(words)


def test_a_spec_of_x_alone_is_checked_as_that_of_all_tensors():
    kind = FORWARD.kernels[0].check().kind
    assert kind(spec("layer-norm")) == kind(spec("layer-norm", dtypes=(torch.bfloat16,) * 3))


# --- through the layers -------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """The names of Llama's, behind a norm that has the names of GPT-2's."""

    def __init__(self, width: int = 32, wide: int = 48) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def step(model: nn.Module, recipe: str, steps: int = 2, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(3, 20, 32).to(device).requires_grad_()
        model(x).square().sum().backward()
        found += [x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        ng.advance(model)
        model.zero_grad()
    return found


def forced(model: nn.Module, monkeypatch) -> nn.Module:
    """With the function of the kernels, computed by their definition, where a CPU would take the module's own code."""
    monkeypatch.setattr(
        "narrowgauge.nn.plan.plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )
    for layer in (model.gate_proj, model.up_proj, model.down_proj):
        layer.recipe = layer.recipe  # its plan anew
    fuse(model)
    monkeypatch.setattr(FusedForward, "kernel", lambda self, registry, spec: registry.kernels[-1])
    return model


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-block"])
def test_gate_and_up_take_the_casts_of_their_gradients(monkeypatch, recipe):
    """Every gradient as without, but for the roundings of the activation's own; casts made once each and all taken."""
    torch.manual_seed(0)
    plain = ng.convert(Mlp(), recipe)
    torch.manual_seed(0)
    fused = forced(ng.convert(Mlp(), recipe), monkeypatch)
    put, taken = [], []
    shared = fused.gate_proj.state.shared_inputs.gradients
    monkeypatch.setattr(
        shared, "put", lambda g, casts, real=shared.put: put.append(g.shape) or real(g, casts)
    )
    monkeypatch.setattr(
        shared, "lookup", lambda *call, real=shared.lookup: _noted(taken, real(*call))
    )
    for a, b in zip(step(fused, recipe), step(plain, recipe), strict=True):
        # An activation's last bit may move a code to its neighbour, one of 8 between powers of two.
        assert (a - b).abs().max() <= 2.0**-4 * b.abs().max()
        assert (a - b).norm() <= 2.0**-8 * b.norm()
    assert put == [(60, 48)] * 4, "gate and up, in two steps"
    assert len(taken) == 4


def _noted(taken: list, found):
    if found is not None:
        taken.append(found)
    return found


def test_windows_of_gradients_are_noted_once(monkeypatch):
    """By the fused activation, for the layer, to the last bit of what the layer would have noted of the same gradient."""
    torch.manual_seed(0)
    model = forced(ng.convert(Mlp(), "fp8-delayed"), monkeypatch)
    gradients = []
    model.gate_proj.register_full_backward_hook(
        lambda module, inputs, outputs: gradients.append(outputs[0])
    )
    x = torch.randn(7, 32, requires_grad=True)
    model(x).square().sum().backward()
    seen = model.gate_proj.amax_state("gy")[1]
    assert_same(seen, gradients[0].abs().max())


def test_a_gradient_that_was_changed_on_the_way_is_cast_by_its_layer(monkeypatch):
    """In place, or for another tensor: what was handed over with it is not its cast any more."""
    for change in (lambda g: g.mul_(2), lambda g: g * 2):
        torch.manual_seed(0)
        model = forced(ng.convert(Mlp(), "fp8-current"), monkeypatch)
        shared = model.gate_proj.state.shared_inputs.gradients
        taken = []
        monkeypatch.setattr(
            shared,
            "lookup",
            lambda *call, real=shared.lookup, taken=taken: _noted(taken, real(*call)),
        )
        gate = model.gate_proj.forward
        model.gate_proj.forward = lambda x, gate=gate, change=change: _hooked(gate(x), change)
        model(torch.randn(7, 32)).square().sum().backward()
        assert len(taken) == 1, "up's alone"


def _hooked(y: Tensor, change) -> Tensor:
    y.register_hook(change)
    return y


# --- on a GPU -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (37, 131), (300, 4096), (129, 8191)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compute_the_definition_and_cast_what_they_computed(gpu, name, shape, dtype):
    kind = Kind(name, 1e-5)
    tensors = [each.to(dtype) for each in tensors_of(name, *shape)]
    there = [each.to(gpu) for each in tensors]
    unit = torch.finfo(dtype).eps
    for cast, turned, in_use in (
        (TENSOR, True, 3.0),
        (TENSOR, True, 0.0),
        (TENSOR, True, None),
        (ROW, False, None),
        (VECTOR, False, None),
    ):
        live = None if in_use is None else torch.tensor([in_use, 0.5, 0.0])
        order = CastRequest(cast, None if live is None else live.to(gpu), True, turned)
        made, statistics = FORWARD.choose(_spec(kind, there, (order,)), "triton").kernel.run(
            kind, there, order
        )
        expected = value(kind, tensors)
        size = expected.double().abs().amax(-1, keepdim=True)
        bound = 2 * unit * expected.double().abs() + 2.0**-18 * size
        assert ((made.value.cpu().double() - expected.double()).abs() <= bound).all()
        amax = (
            None if live is None else update_amax(live, tile_amax(made.value.cpu(), (WHOLE, WHOLE)))
        )
        if live is not None:
            assert_same(order.amax_state, live)
        assert_same(
            made.plain.data, quantize(made.value.cpu(), cast, amax=amax, backend="reference").data
        )
        if turned:
            assert_same(
                made.transposed.data,
                quantize(made.value.cpu().T, cast, amax=amax, backend="reference").data,
            )
    gy = torch.randn(shape).to(dtype)
    orders = (
        [CastRequest(Cast(format=E5M2), None, True, True)] * (2 if Kind(name).is_gated else 1)
        if not kind.is_norm
        else [None]
    )
    got, sums = BACKWARD.choose(_spec(kind, there, orders), "triton").kernel.run(
        kind, there, statistics, gy.to(gpu), orders
    )
    wanted, wanted_sums = BACKWARD.kernels[-1].run(
        kind,
        tensors,
        tuple(each if each is None else each.cpu() for each in statistics),
        gy,
        [None] * len(orders),
    )
    for mine, theirs in [
        *((a.value, b.value) for a, b in zip(got, wanted, strict=True)),
        *zip(sums, wanted_sums, strict=True),
    ]:
        size = theirs.double().abs().max()
        assert (
            (mine.cpu().double() - theirs.double()).abs()
            <= 2 * unit * theirs.double().abs() + 2.0**-14 * size
        ).all()
    for each, order in zip(got, orders, strict=True):
        if order is not None:
            assert_same(
                each.plain.data, quantize(each.value.cpu(), order.cast, backend="reference").data
            )


def _spec(kind: Kind, tensors: list[Tensor], orders) -> NormActSpec:
    device = Device("cuda", torch.cuda.get_device_capability())
    casts = tuple((order.cast, order.transposed) for order in orders if order is not None)
    return NormActSpec(
        kind, device, tuple(each.dtype for each in tensors), tensors[0].shape[1], casts
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block"])
def test_a_fused_layer_trains_as_another(gpu, recipe):
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = ng.convert(Mlp().to(gpu), recipe, fuse=fused)
        results.append(step(model, recipe, device="cuda"))
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 2.0**-6 * b.norm()
