"""Casts from one read of a tensor in the products: the numbers of casting in turn (exact), and that one read is all there is.

On a GPU a kernel gives both orientations and the window's amax at once; here the reference does, through the same seams, as if it
were such a kernel: operands are codes, and `reads_once` says yes. The kernels themselves are compared under Triton's interpreter
(tests/ops/triton) and on a GPU (tests/ops/test_quantize_triton.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.nn import plan as settings
from narrowgauge.ops.mm import plan
from narrowgauge.ops.quantize import pair, quantize
from narrowgauge.qtensor import QTensor
from tests.compare import assert_same

IN, OUT, TOKENS = 80, 48, 40
PAIRED = (
    "fp8-delayed",
    "fp8-current",
    "fp8-block",
    "mxfp8",
    "mxfp4",
)  # of which gradients are cast alike for both products


@pytest.fixture
def codes(monkeypatch):
    """As on a device whose kernels read codes."""
    monkeypatch.setattr(
        settings, "plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )


def trained(
    recipe: str, steps: int = 2, caches: bool = True, evaluates: bool = False
) -> dict[str, object]:
    """Two layers, steps of two micro-batches each; everything that can differ. evaluates: ahead of each step."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.GELU(), torch.nn.Linear(OUT, IN))
    ng.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(steps):
        if evaluates:
            model.eval()(torch.ones(TOKENS, IN))
            model.train()
        for _ in range(2):
            x = torch.randn(TOKENS, IN, requires_grad=True)
            y = model(x)
            y.backward(torch.randn_like(y))
            outputs += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
        if caches:
            ng.advance(model)
    return {"outputs": outputs, "state": dict(model.state_dict())}


@pytest.mark.parametrize("caches", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("recipe", PAIRED)
def test_both_orientations_at_once_are_what_casting_in_turn_gives(
    codes, monkeypatch, recipe, caches
):
    """Outputs, gradients, weights and windows after steps of two micro-batches each, to the bit."""
    found = []
    for one_read in (True, False):
        monkeypatch.setattr(pair, "reads_once", lambda *call, one_read=one_read: one_read)
        found.append(trained(recipe, caches=caches))
    assert_same(*found)


@pytest.mark.parametrize("one_read", [True, False])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_evaluation_between_steps_changes_nothing(codes, monkeypatch, recipe, one_read):
    """Its casts of the weights are not noted in their windows, so training may not go by them."""
    monkeypatch.setattr(pair, "reads_once", lambda *call: one_read)
    assert_same(trained(recipe, steps=3, evaluates=True), trained(recipe, steps=3))


@pytest.mark.parametrize("recipe", sorted({*recipes.names(), *PAIRED} - {"auto"}))
def test_every_recipe_trains_where_kernels_read_once(codes, monkeypatch, recipe):
    monkeypatch.setattr(pair, "reads_once", lambda *call: True)
    assert all(each.isfinite().all() for each in trained(recipe, steps=1)["outputs"])


def counted(monkeypatch) -> Counter[str]:
    """How often each cast happens from now on."""
    calls: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        whole = getattr(owner, name)

        def counting(*call, **options):
            calls[name if options.get("both", options.get("cols", True)) else f"{name}, rows"] += 1
            return whole(*call, **options)

        monkeypatch.setattr(owner, name, counting)

    count(pair, "quantize_pair")
    count(settings.OperandPlan, "amax")
    count(settings.OperandPlan, "quantize")
    return calls


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_weights_are_cast_once_per_step_and_the_rest_once_per_pass(codes, monkeypatch, recipe):
    """2 layers x (1 weight + 2 micro-batches x (x and gy)): no cast and no amax besides, where caches are on."""
    trained_before = ng.convert(
        torch.nn.Sequential(torch.nn.Linear(IN, OUT), torch.nn.Linear(OUT, IN)), recipe
    )
    ng.advance(trained_before)
    monkeypatch.setattr(pair, "reads_once", lambda *call: True)
    calls = counted(monkeypatch)
    for _ in range(2):
        x = torch.randn(TOKENS, IN, requires_grad=True)
        trained_before(x).square().sum().backward()
    assert calls == {"quantize_pair": 2 * (1 + 2 * 2)}
    ng.advance(trained_before)
    trained_before(x)
    assert calls["quantize_pair"] == 2 * (1 + 2 * 2) + 2 * 2


def test_in_evaluation_the_amax_comes_with_the_codes(codes, monkeypatch):
    """One orientation is enough there, and the window is not touched."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(IN, OUT)), "fp8-delayed").eval()
    monkeypatch.setattr(pair, "reads_once", lambda *call: True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    calls = counted(monkeypatch)
    with torch.no_grad():
        model(torch.randn(TOKENS, IN))
    # x; and the weight, of which no cast is kept without gradients, by an amax of its own
    assert calls == {"quantize_pair, rows": 1, "amax": 1, "quantize": 1}
    assert_same(dict(model.state_dict()), before)


def test_a_weight_that_an_optimizer_wrote_is_cast_anew(monkeypatch):
    """Kernels write through addresses; the version of the parameter says so, without `advance`."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(IN, OUT)), "fp8-current")
    ng.advance(model)
    x = torch.randn(TOKENS, IN)
    optimizer = ng.optim.AdamW(model, lr=0.1, states="8bit")
    before = model(x)
    before.sum().backward()
    optimizer.step()
    cached = model(x)
    model[0].empty_cache()
    assert_same(cached, model(x))
    assert not torch.equal(cached, before)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8"])
def test_on_a_gpu_operands_are_the_references_bits_and_nothing_waits(recipe):
    """Every operand of the first step (a window gives the tensor's own amax then), and a second step without synchronisation."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(256, 384)), recipe).to(
        "cuda", torch.bfloat16
    )
    ng.advance(model)
    seen = []
    model[0].observer = lambda gemm, role, original, operand: seen.append(
        (gemm, role, original.clone(), operand)
    )

    def step() -> None:
        x = torch.randn(160, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
        y.backward(torch.randn_like(y))

    step()
    assert len(seen) == 6
    for gemm, role, original, operand in seen:
        if (gemm, role) == ("grad_weight", "x") and model[0].recipe.save == "quantized":
            original = seen[0][2]  # what its codes were made of
        if not isinstance(operand, QTensor) or operand.is_expanded:
            continue  # a product that this GPU emulates
        if (gemm, role) in (("grad_input", "w"), ("grad_weight", "gy"), ("grad_weight", "x")):
            original = original if tuple(original.shape) == operand.shape else original.T
        expected = quantize(original.cpu(), operand.cast, backend="reference")
        assert_same(operand.scale.contiguous(), expected.scale, at=f"{gemm} {role} scale")
        assert_same(operand.data.contiguous(), expected.data, at=f"{gemm} {role}")
    model[0].observer = None
    ng.advance(model)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        ng.advance(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ["int4-hq-bs", "int4-hq-lss"])
def test_rotating_and_encoding_in_one_pass(codes, monkeypatch, recipe):
    """A learned step is the same scale; one from the spread is that of x instead of x H (bounded).

    Off by rounding, 2^-20 or less, which turns a code in a million: here none, so outputs agree within that.
    """
    found = []
    for one_pass in (True, False):
        monkeypatch.setattr(
            "narrowgauge.ops.hadamard.encoding.rotation_is_fused",
            lambda *call, one_pass=one_pass: one_pass,
        )
        found.append(trained(recipe, steps=1, caches=False)["outputs"])
    for fused, apart in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-4, atol=1e-4 * float(apart.abs().max()))
