"""What a Linear saves for backward: every combination against one table (exact).

The expected forms were recorded before the decision had one owner. A CPU computes; where the table
depends on the device, `device_is` lets it decide as a GPU.
"""

from __future__ import annotations

import fnmatch
import itertools
from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.nn import keep_policy as keep_policy_module
from narrowgauge.nn.keep_policy import KeepPolicy, SavedInput, keep_policy, producer_policy
from narrowgauge.ops import mm
from narrowgauge.ops.quantize import cpp
from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Recipe
from tests.compare import assert_same

TOKENS, INPUTS, OUTPUTS = 32, 64, 48
NAMES = (
    "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4", "mxfp4",
    "int4-hq-bs", "int4-hq-lss",
)  # fmt: skip
W, X = ("w:float32",), ("x:float32",)
AMAX = ("state:float32",)
# Straight-through: the scale, packed codes, mask bits, then residual and rows of a learned step.
FORWARD_CODES = {
    "int4-hq-bs": ("state:float32", "scale:uint8", "scale:uint8", *W, *AMAX),
    "int4-hq-lss": (
        "state:float32", "scale:uint8", "scale:uint8", "scale:float16", "state:int64", *W, *AMAX,
    ),
}  # fmt: skip
# A CPU that emulates a GEMM decodes codes of one scale at once, and saves these values.
DECODED = {"fp8-current": ("x.T:float32", *AMAX), "fp8-delayed": ("x.T:float32", *AMAX)}
CODES = {
    "fp8-row": ("x.T:float8_e4m3fn", "x.T:float32"),
    "fp8-block": ("x.T:float8_e4m3fn", "x.T:float32"),
    "mxfp8": ("x.T:float8_e4m3fn", "x.T:uint8"),  # exponents of the scales
    "int8": ("x.T:int8", "x.T:float32"),
    "nvfp4": ("x.T:uint8", "x.T:float32", "state:float32"),
}


def expected(name: str, save: str, weight_codes: str, producer: str) -> tuple[str, ...]:
    """The saved tensors of x, then of w."""
    if name in FORWARD_CODES:
        return FORWARD_CODES[name]
    amax = AMAX if name == "fp8-delayed" else ()
    if save == "original" or (weight_codes == "recast" and producer == "relu"):
        return *amax, *X, *amax, *W
    if name in DECODED:
        return *amax, "x.T:float32", *AMAX, *amax, *W
    # x.T needs its own cast, unless one read gives both.
    is_native = mm.why_emulated(recipes.INT8_ROW.output, torch.device("cpu")) is None
    one_read = name == "int8" and is_native and not cpp.LIBRARY.missing
    codes = CODES[name] if weight_codes == "recast" or one_read else X
    return *codes, *W


def described(tensor: torch.Tensor) -> str:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if shape == (OUTPUTS, INPUTS):
        return f"w:{dtype}"
    if shape == (TOKENS, INPUTS):
        return f"x:{dtype}"
    if tensor.ndim > 1 and shape[0] == INPUTS:
        return f"x.T:{dtype}"
    return f"{'state' if tensor.numel() <= 2 else 'scale'}:{dtype}"


def layer_of(recipe: Recipe, weight_codes: str) -> ng.QLinear:
    """A layer after the first `advance`, from which on casts of the weight are cached."""
    layer = ng.QLinear(INPUTS, OUTPUTS, bias=False, recipe=recipe)
    layer.weight_codes = weight_codes
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    for _ in range(2):
        layer(x).sum().backward()
        ng.advance(layer)
    return layer


def saved(layer: ng.QLinear, producer: str) -> tuple[str, ...]:
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    y = layer(torch.relu(x) if producer == "relu" else x * 1)
    return tuple(described(each) for each in y.grad_fn.saved_tensors if each is not None)


def combinations() -> list[tuple[str, str, str, str]]:
    found = []
    for name, save in itertools.product(NAMES, ("original", "quantized")):
        try:
            replace(recipes.get(name), save=save)
        except ConfigError:  # a recipe that casts no input, or whose GEMMs read its codes anyway
            continue
        found += itertools.product((name,), (save,), ("auto", "recast", "step"), ("plain", "relu"))
    return found


@pytest.mark.parametrize("name, save", sorted({each[:2] for each in combinations()}))
def test_every_combination_saves_what_the_table_says(name, save):
    recipe = replace(recipes.get(name), save=save)
    for weight_codes in ("auto", "recast", "step"):
        layer = layer_of(recipe, weight_codes)
        for producer in ("plain", "relu"):
            case = name, save, weight_codes, producer
            assert saved(layer, producer) == expected(*case), case


def test_120_combinations_have_ten_answers():
    cases = combinations()
    assert len(cases) == 120
    assert len({expected(*case) for case in cases}) == 10


@pytest.mark.parametrize("weight_codes", ["auto", "recast", "step"])
@pytest.mark.parametrize("has_grad_weight", [True, False], ids=["w", "frozen"])
def test_x_is_saved_for_grad_weight_alone(weight_codes, has_grad_weight):
    layer = layer_of(recipes.get("fp8-row"), weight_codes)
    layer.weight.requires_grad_(has_grad_weight)
    assert any(each.startswith("x") for each in saved(layer, "plain")) is has_grad_weight


@pytest.mark.parametrize("weight_codes", ["auto", "recast", "step"])
def test_an_observer_that_needs_x_gets_x_itself(weight_codes):
    """Not the values that codes of x.T decode to, also where backward recasts the weight."""
    layer, originals = layer_of(recipes.get("fp8-row"), weight_codes), {}

    class Watch:
        def __call__(self, gemm, role, original, operand):
            originals[gemm, role] = original

        def multiplied(self, gemm, bias, result):
            pass

    layer.observer = Watch()
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    layer(x * 1).sum().backward()
    assert_same(originals["grad_weight", "x"], x.detach())


@pytest.mark.parametrize(
    "producer, form", [("plain", SavedInput.CODES), ("relu", SavedInput.INPUT)]
)
def test_a_gpu_recasts_and_saves_codes_unless_the_producer_saves_x(device_is, producer, form):
    layer = layer_of(recipes.get("fp8-row"), "auto")
    device_is(Device("cuda", (9, 0)), of="cpu")
    ng.advance(layer)
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    x = torch.relu(x) if producer == "relu" else x * 1
    keep = layer.context(x, layer.state.cache).keep
    assert keep.weight == "recast" and keep.of_input(True, False) is form


def forms_of_the_docstring() -> dict[str, tuple[str, str]]:
    """Recipe -> (form on a CPU, form on a GPU), from the second table of keep_policy."""
    assert keep_policy_module.__doc__ is not None
    table = keep_policy_module.__doc__.partition("    recipe  ")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[1:]:
        *names, cpu, gpu = line.replace(",", " ").split()
        for pattern in names:
            matching = fnmatch.filter(recipes.names(), pattern)
            assert matching, f"no recipe is named {pattern}"
            found.update(dict.fromkeys(matching, (cpu, gpu)))
    return found


@pytest.mark.parametrize("name", recipes.names())
def test_the_docstring_names_the_saved_form_of_each_recipe(name, device_is):
    """Codes that a CPU decoded are "values" there."""
    layer = layer_of(recipes.get(name), "auto")
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    forms = []
    cpu = Device("cpu", bf16_gemm=True, int8_gemm=True)
    for device in (cpu, Device("cuda", (9, 0))):
        device_is(device, of="cpu")
        ng.advance(layer)
        context = layer.context(x * 1, layer.state.cache)
        if layer.recipe.backward != "recast":
            forms.append("packed")
        elif context.keep.of_input(True, False) is SavedInput.INPUT:
            forms.append("x")
        else:
            decodes = device.type == "cpu" and context.plan.x.transposes
            forms.append("values" if decodes else "codes")
    assert forms_of_the_docstring()[name] == tuple(forms)


def table_line(**facts: object) -> KeepPolicy:
    given: dict[str, object] = {
        "save": "quantized", "casts_once": False, "device_type": "cpu", "weight_codes": "auto", "weight": "step",
    }  # fmt: skip
    return keep_policy(**given | facts)


def test_the_first_line_that_applies_decides():
    leaf, x = torch.randn(4), torch.randn(4, requires_grad=True)
    assert not table_line(save="original").codes_of_x
    assert not table_line(observer_needs_x=True, weight="recast", x=leaf).codes_of_x
    assert not table_line(weight="recast", x=torch.relu(x)).codes_of_x
    assert table_line(weight="recast", x=x * 1).codes_of_x
    assert not table_line().codes_of_x and table_line(device_type="cuda").codes_of_x
    assert table_line(casts_once=True).codes_of_x and table_line(weight_codes="recast").codes_of_x


def test_forms_of_x_and_casts_made_together():
    codes, x = KeepPolicy(codes_of_x=True, weight="step"), KeepPolicy(weight="recast")
    assert codes.of_input(False, True) is SavedInput.NOTHING
    assert codes.of_input(True, True) is SavedInput.PRODUCER_INPUTS
    assert codes.of_input(True, False) is SavedInput.CODES
    assert x.of_input(True, False) is SavedInput.INPUT
    both, input_alone = (True, True), (True, False)
    assert codes.casts_both("x", both, False, False) and not codes.casts_both(
        "x", both, False, True
    )
    assert codes.casts_both("w", input_alone, False, False) and not x.casts_both(
        "w", both, False, False
    )
    assert not codes.casts_both("w", both, True, False)  # drawn anew at every forward pass
    assert x.casts_both("gy", both, True, False) and not x.casts_both(
        "gy", input_alone, True, False
    )
    no_graph = replace(codes, grads=False)
    assert not no_graph.casts_both("x", both, False, False)
    assert no_graph.casts_both("x", both, True, False)  # noise is drawn as the repetition draws it


@pytest.mark.parametrize(
    "grads, shares_codes, is_recomputable, policy",
    [
        (False, True, True, "both"),
        (True, True, True, "outputs"),
        (True, False, True, "inputs"),
        (True, False, False, "both"),
    ],
)
def test_a_fused_producer_saves_codes_inputs_or_both(grads, shares_codes, is_recomputable, policy):
    assert producer_policy(grads, shares_codes, is_recomputable) == policy
