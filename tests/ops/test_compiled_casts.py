"""Casts in compiled code are operators around the kernels of eager mode: who takes them, how many there are, and their bits (exact).

No GPU is asked: a graph is traced for a device that is named. On a CPU the operators compute by the definition, and in C++ INT8 by row.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import narrowgauge as ng
from narrowgauge.formats import E4M3
from narrowgauge.ops.flat_cast import flatten_cast
from narrowgauge.ops.quantize import compiled, cpp, pair, quantize
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast, DelayedScaling
from tests.compare import assert_same
from tests.selection import needs_compiler, quick

HOPPER = Device("cuda", (9, 0), cuda=(13, 0))
CASTS = {str(cast): cast for name in ("fp8-current", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4")
         for gemm in ng.recipes.get(name).gemms().values() for cast in (gemm.lhs, gemm.rhs)
         if cast is not None and cast.rounding == "nearest"}  # fmt: skip


class Attention(nn.Module):
    """Three layers that read one tensor, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x).sigmoid() * self.k(x) + self.v(x))


def casts_of(recipe: str, device_is, **options) -> list[Counter[str]]:
    """Of the graphs of forward and backward, how often each operator of narrowgauge stands there."""
    device_is(HOPPER, of="cpu")
    torch._dynamo.reset()
    found: list[Counter[str]] = []

    def count(graph, given):
        names = [
            str(node.args[0] if "functionalized" in str(node.target) else node.target)
            for node in graph.graph.nodes
        ]
        found.append(
            Counter(name.split(".")[1] for name in names if name.startswith("narrowgauge.cast"))
        )
        results = [
            node and node.meta["val"] for node in graph.graph.find_nodes(op="output")[0].args[0]
        ]
        forms = [None if each is None else (tuple(each.shape), each.dtype) for each in results]
        # A CPU has not all of these products: nothing is computed.
        return make_boxed_func(
            lambda *_: [form and torch.zeros(form[0], dtype=form[1]) for form in forms]
        )

    model = ng.convert(Attention(), recipe, **options)
    cut = min_cut_rematerialization_partition  # Inductor's; before it cuts, it makes one of what is computed alike
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=cut)
    torch.compile(model, backend=backend, fullgraph=True)(
        torch.randn(64, 32, dtype=torch.bfloat16)
    ).sum().backward()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_tensor_is_read_once_for_both_orientations_and_once_for_all_that_read_it(
    device_is, triton_installed
) -> None:
    """Two inputs and four weights in forward, four gradients in backward; backward casts no weight."""
    assert casts_of("fp8-current", device_is) == [{"cast": 6}, {"cast": 4}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_weight_is_cast_again_in_backward_where_no_codes_are_kept(
    device_is, triton_installed
) -> None:
    """Of the last layer alone: the input of the others needs no gradient."""
    assert casts_of("fp8-current", device_is, weight_codes="recast") == [{"cast": 6}, {"cast": 5}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(("recipe", "op"), [("fp8-delayed", "cast_delayed"), ("fp8-block", "cast")])
def test_windows_and_blocks_take_one_read_too(
    recipe: str, op: str, device_is, triton_installed
) -> None:
    """A window is its layer's own: there q, k and v cast their input each by itself."""
    assert casts_of(recipe, device_is) == [{op: 8 if recipe == "fp8-delayed" else 6}, {op: 4}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_cpu_fuses_the_definition() -> None:
    """Nothing of the operators is in its graphs."""
    assert casts_of("fp8-current", lambda *_, **__: None) == [{}, {}]


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("shape", [(48, 32), (5, 7), (130, 257)])
def test_an_operator_gives_what_quantize_gives(cast: Cast, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    rows, cols = compiled.quantize(x, cast, None, cols=True)
    assert cols is not None
    for made, of in ((rows, x), (cols, x.T)):
        expected = quantize(of, cast, backend="reference")
        assert_same(made.data.view(torch.uint8), expected.data.contiguous().view(torch.uint8))
        assert_same(made.scale, expected.scale)
        if expected.global_scale is not None:
            assert_same(made.global_scale, expected.global_scale)


@pytest.mark.parametrize("cols", [False, True])
def test_the_operator_of_a_window_notes_what_it_saw(cols: bool) -> None:
    cast, x = Cast(format=E4M3, calibrate=DelayedScaling(length=4)), torch.randn(24, 40)
    states = [torch.tensor([3.0, 0.5, 0.0]) for _ in range(2)]
    made = compiled.delayed(x, cast, states[0], True, cols)
    expected = pair.reference_pair(x, cast, states[1], True, cols, (None, None), "reference")
    assert_same(states[0], states[1])
    for mine, theirs in zip(made[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert_same(mine.data.view(torch.uint8), theirs.data.contiguous().view(torch.uint8))
            assert_same(mine.scale, theirs.scale)
    assert_same(made[2], expected[2])


@pytest.mark.parametrize("cast", quick(list(CASTS.values())[::3], CASTS.values()), ids=CASTS.keys())
@pytest.mark.parametrize("cols", quick([True], [False, True]))
def test_torch_checks_the_operators(cast: Cast, cols: bool) -> None:
    format, tile, rule, headroom = flatten_cast(cast)
    words = (format, list(tile), rule, headroom)
    amax = torch.tensor([[2.0]]) if cast.is_per_tensor else None
    torch.library.opcheck(
        torch.ops.narrowgauge.cast.default, (torch.randn(48, 34), amax, *words, cols)
    )
    if cast.is_per_tensor:
        given = (torch.randn(48, 34), torch.tensor([3.0, 0.5, 0.0]), *words, True, cols)
        torch.library.opcheck(torch.ops.narrowgauge.cast_delayed.default, given)


# --- INT8 by row on a CPU ---


def trained(layer: nn.Module, call, shapes: list[int], autocasts: bool) -> list[torch.Tensor]:
    """Outputs and gradients of batches of so many rows."""
    found = []
    for seed, rows in enumerate(shapes):
        torch.manual_seed(seed)
        x = torch.randn(rows, 32, requires_grad=True)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            y = call(x)
        y.float().square().sum().backward()
        gradients = [each.grad for each in layer.parameters() if each.requires_grad]
        found += [y.detach(), x.grad, *gradients]
    return found


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(
    ("bias", "autocasts", "trains"),
    [(True, True, True), (False, False, True), (True, False, False)],
)
def test_compiled_int8_is_eager_int8(bias: bool, autocasts: bool, trains: bool, device_is) -> None:
    """Outputs and gradients, of several numbers of rows and of a weight that is not trained (exact)."""
    device_is(Device("cpu", int8_gemm=True))
    torch._dynamo.reset()
    layer = ng.convert(nn.Sequential(nn.Linear(32, 24, bias=bias), nn.Linear(24, 40)), "int8")
    layer[0].weight.requires_grad_(trains)
    compiled_layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    shapes = [48, 7, 130]
    found = [trained(layer, call, shapes, autocasts) for call in (layer, compiled_layer)]
    for eager, other in zip(*found, strict=True):
        assert_same(other, eager)


@needs_compiler
@pytest.mark.parametrize("cols", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["rows", "columns", "row repeated", "column repeated", "part"])
def test_the_operator_of_int8_by_row_tells_the_strides_of_its_results(
    order: str, dtype: torch.dtype, cols: bool
) -> None:
    """Values by the definition, and strides as the fake has them (exact)."""
    x = torch.randn(33, 20).to(dtype)
    if order == "columns":
        x = x.T.contiguous().T
    elif order == "part":
        x = torch.cat([x, x], 1)[:, :20]
    elif order != "rows":
        x = x[:1].expand(33, 20) if order == "row repeated" else x[:, :1].expand(33, 20)
    cast = CASTS[next(name for name in CASTS if name.startswith("int8"))]
    format, tile, rule, headroom = flatten_cast(cast)
    given = (x, None, format, list(tile), rule, headroom, cols)
    parts = torch.ops.narrowgauge.cast(*given)
    for made, of in zip(parts[::2], (x, x.T), strict=False):
        assert_same(made, quantize(of, cast, backend="reference").data)
    assert len({each.untyped_storage().data_ptr() for each in parts}) == len(parts)
    torch.library.opcheck(
        torch.ops.narrowgauge.cast.default, given, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_code_casts_int8_by_operators(device_is) -> None:
    """Four weights and two inputs in forward, four gradients in backward, each read once."""
    if cpp.LIBRARY.missing:
        pytest.skip(cpp.LIBRARY.missing)
    assert casts_of("int8", lambda *_, **__: None) == [{"cast": 6}, {"cast": 4}]


@needs_compiler
def test_without_a_library_the_operator_computes_by_the_definition(monkeypatch) -> None:
    cast = CASTS[next(name for name in CASTS if name.startswith("int8"))]
    x = torch.randn(33, 20).T
    by_kernel = compiled.quantize(x, cast, None, cols=True)
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "no compiler")
    for made, expected in zip(compiled.quantize(x, cast, None, cols=True), by_kernel, strict=True):
        assert_same(made.data, expected.data)
        assert_same(made.scale, expected.scale)
        assert made.data.stride() == expected.data.stride()
