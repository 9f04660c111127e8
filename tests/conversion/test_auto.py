"""Which recipe `auto` gives a layer, from what measurement, and what it says (exact); clocks and devices are simulated."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.conversion import auto
from narrowgauge.conversion.auto import CANDIDATES, Decision, decide, measure, preferred
from narrowgauge.conversion.predict import counted, predicted
from narrowgauge.errors import ConfigError
from narrowgauge.ops.mm.spec import OTHER_GPUS, ROCM
from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.ops.timing import rates
from narrowgauge.ops.timing.cards import card
from tests.raising import coded, raises, warns
from tests.selection import needs_compiler

CPU = torch.device("cpu")
WORKLOAD = measure.LinearWorkload(tokens=8192, inputs=4096, outputs=14336, dtype=torch.bfloat16)


@pytest.fixture
def on_hopper(monkeypatch, device_is):
    """The registry takes the CPU for an H200; keys need no device."""
    device_is(Device("cuda", (9, 0), cuda=(12, 9)), of="cpu")
    monkeypatch.setattr(measure, "key", lambda workload, names, device: f"{workload} {names}")


def timed(**seconds):
    """A stand-in for the measurement, which counts its calls."""

    def measured(workload, names, device):
        measured.calls.append((workload, tuple(names)))
        return {name: seconds[name.replace("-", "_")] for name in names}, {}

    measured.calls = []
    return measured


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({"bf16": 1.0, "fp8-block": 0.9, "fp8-row": 0.8, "fp8-current": 0.5}, "fp8-current"),
        (
            {"bf16": 1.0, "fp8-block": 0.9, "fp8-row": 0.509, "fp8-current": 0.5},
            "fp8-row",
        ),  # within 2 %
        ({"bf16": 1.0, "fp8-block": 0.509, "fp8-row": 0.5, "fp8-current": 0.505}, "fp8-block"),
        ({"bf16": 1.0, "fp8-block": 0.511, "fp8-row": 0.52, "fp8-current": 0.5}, "fp8-current"),
        ({"bf16": 1.01, "fp8-current": 1.0}, "bf16"),
        ({"bf16": 1.0}, "bf16"),
    ],
)
def test_the_more_accurate_of_equally_fast_ones(seconds, wanted):
    assert preferred(seconds) == wanted


def test_accuracy_is_in_the_order_of_the_candidates():
    """What of x becomes zero, where magnitudes differ between rows and between blocks: less, the smaller the tile (exact order)."""
    x = torch.randn(64, 1024)
    x *= torch.exp2(-torch.arange(64.0) % 16)[:, None] * torch.exp2(
        -2 * torch.arange(8.0)
    ).repeat_interleave(128)
    casts = [recipes.get(name).output.lhs for name in CANDIDATES[1:]]
    lost = [int((ng.dequantize(ng.quantize(x, cast)) == 0).sum()) for cast in casts]
    assert lost[0] < lost[1] < lost[2], lost


@pytest.fixture
def plain_cpu(device_is, monkeypatch):
    """A CPU that multiplies neither bfloat16 nor INT8."""
    refusal = Refusal("capability", "no units")
    monkeypatch.setattr("narrowgauge.ops.mm.int8_cpp.refuse", lambda spec: refusal)
    device_is(Device("cpu", bf16_gemm=False, int8_gemm=False))


def test_on_a_cpu_without_units_nothing_is_faster_and_nothing_is_measured(tmp_path, plain_cpu):
    measured = timed()
    decision = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert decision.recipe == "bf16" and decision.how == "no choice" and not measured.calls
    assert str(decision).startswith(
        "auto, no choice at 8,192 tokens; not fp8-block, fp8-row, fp8-current: cpu has no FP8 units; not int8: "
    )
    assert "no units" in str(decision)


@needs_compiler
@pytest.mark.parametrize(("int8", "recipe"), [(1e-3, "int8"), (1.99e-3, "bf16"), (3e-3, "bf16")])
def test_on_a_cpu_int8_is_chosen_where_it_was_measured_faster(tmp_path, device_is, int8, recipe):
    device_is(Device("cpu"))
    measured = timed(bf16=2e-3, int8=int8)
    decision = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert (decision.recipe, decision.how) == (recipe, "measured")
    assert decision.seconds == {"bf16": 2e-3, "int8": int8}
    assert decision.excluded.keys() == {"fp8-block", "fp8-row", "fp8-current"}
    again = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert (again.recipe, again.how) == (recipe, "measured before")


def test_a_gpu_without_fp8_says_so(device_is):
    device_is(Device("cuda", (8, 0), cuda=(12, 9)), of="cpu")
    assert "fp8-current: compute capability 8.0, FP8 needs 8.9" in str(decide(WORKLOAD, CPU))


def test_a_measurement_is_made_once_and_kept(on_hopper, tmp_path):
    cache = tmp_path / "auto.json"
    measured = timed(bf16=2e-3, fp8_block=1.5e-3, fp8_row=1.4e-3, fp8_current=1e-3)
    first = decide(WORKLOAD, CPU, cache, measured)
    assert (first.recipe, first.how) == ("fp8-current", "measured")
    assert str(first) == (
        "auto, measured at 8,192 tokens: fp8-current 1 ms, fp8-row 1.4 ms, fp8-block 1.5 ms, bf16 2 ms; "
        "not int8: predicted 0.77 to 0.93 of bf16's speed over a layer, its INT32 sums are scaled apart"
    )
    again = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert (again.recipe, again.how, again.seconds) == (
        "fp8-current",
        "measured before",
        first.seconds,
    )
    decide(replace(WORKLOAD, tokens=512), CPU, cache, measured)
    assert [workload.tokens for workload, _ in measured.calls] == [8192, 512]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"format": 2, "measured": {}}', '{"format": 1}', '{"format": 1, "measured": []}',
        '{"format": 1, "measured": {"a": {"bf16": -1.0}}}', '{"format": 1, "measured": {"a": {"bf16": NaN}}}',
        '{"format": 1, "measured": {"a": 3}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_cache_is_ignored_with_a_warning_and_replaced(on_hopper, tmp_path, content):
    path = tmp_path / "auto.json"
    path.write_text(content, encoding="utf-8")
    measured = timed(bf16=2.0, fp8_block=1.0, fp8_row=1.5, fp8_current=1.5)
    with pytest.warns(
        UserWarning, match=r"auto\.json: is damaged .* measures anew and replaces it"
    ):
        assert decide(WORKLOAD, CPU, path, measured).recipe == "fp8-block"
    assert decide(WORKLOAD, CPU, path, measured).how == "measured before"


def test_a_cache_that_cannot_be_written_is_said(on_hopper, tmp_path):
    measured = timed(bf16=1.0, fp8_block=1.0, fp8_row=1.0, fp8_current=1.0)
    with pytest.warns(
        UserWarning, match="measurements of recipe 'auto' are not kept: No such file"
    ):
        assert decide(WORKLOAD, CPU, tmp_path / "missing" / "auto.json", measured).recipe == "bf16"


def test_a_write_that_fails_leaves_no_draft(tmp_path, monkeypatch):
    def full(draft, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(measure, "publish", full)
    with pytest.warns(UserWarning, match="are not kept: No space left on device"):
        measure.keep(tmp_path / "auto.json", "a", {"bf16": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measure.user_cache() == tmp_path / "narrowgauge" / "auto.json"


def test_a_candidate_that_fails_is_named_and_not_kept(on_hopper, tmp_path):
    def measured(workload, names, device):
        return {"bf16": 1.0, "fp8-row": 0.5}, {
            "fp8-block": "failed when it was measured: RuntimeError: ptxas"
        }

    decision = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert decision.recipe == "fp8-row" and "not fp8-block: failed when it was measured" in str(
        decision
    )
    assert not (tmp_path / "auto.json").exists(), "another time it may work"


@pytest.mark.parametrize(
    ("name", "how"),
    [("NVIDIA H200", "predicted"), ("Fantasy GPU", "no memory")],
)
def test_without_memory_to_measure_it_predicts(on_hopper, tmp_path, monkeypatch, name, how):
    def measured(*_):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    decision = decide(WORKLOAD, CPU, tmp_path / "auto.json", measured)
    assert decision.how.startswith(how)
    assert (decision.recipe == "bf16") == ("Fantasy" in name)
    if decision.seconds:
        assert decision.seconds == predicted(WORKLOAD, CANDIDATES, card("h200"))
        assert decision.how.startswith("predicted within 4%")


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_int8_loses_where_it_is_refused(name):
    """The words of the refusal, by the counts and rates of now, over the Linears of benchmarks/planned_time.py."""
    total = dict.fromkeys(("bf16", "int8"), 0.0)
    for inputs, outputs in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)):
        workload = replace(WORKLOAD, tokens=15872, inputs=inputs, outputs=outputs)
        seconds = predicted(workload, tuple(total), card(name))
        assert seconds["bf16"] < seconds["int8"]
        total = {each: total[each] + seconds[each] for each in total}
    assert 0.76 < total["bf16"] / total["int8"] < 0.94


def test_a_gain_below_the_error_of_predictions_is_none():
    assert preferred({"bf16": 1.03, "fp8-current": 1.0}) == "fp8-current"
    assert preferred({"bf16": 1.03, "fp8-current": 1.0}, tie=0.04) == "bf16"


# --- the prediction -----------------------------------------------------------------------------------------------------------


def test_small_products_stay_wide_and_large_ones_pay():
    """Published of rows: at 2,048 tokens they always lose, at 16,384 and 8,192 by 8,192 they gain 1.33 (torchao, fp8-rowwise-perf.png)."""
    for m, n, k, wins in ((512, 1024, 1024, False), (16384, 8192, 8192, True)):
        workload = measure.LinearWorkload(tokens=m, inputs=k, outputs=n, dtype=torch.bfloat16)
        seconds = predicted(workload, CANDIDATES, card("h100"))
        assert (preferred(seconds) != "bf16") == wins, (m, n, k, seconds)


def test_a_prediction_is_the_sum_of_what_is_counted():
    """Three products of bf16, nothing else; and of fp8-current its casts too, by the same rates as a plan (exact)."""
    m, n, k = 4096, 4096, 2048
    workload = measure.LinearWorkload(tokens=m, inputs=k, outputs=n, dtype=torch.bfloat16)
    h200 = card("h200")
    works = counted(workload, "bf16", h200)
    assert [each.flops for each in works if each.kind == "products"] == [2 * m * n * k] * 3
    assert predicted(workload, ["bf16"], h200)["bf16"] == sum(
        rates.seconds(each, h200) for each in works
    )
    narrow = counted(workload, "fp8-current", h200)
    assert sum(each.nbytes for each in narrow if each.kind == "casts") >= 4 * (
        m * k + m * n + n * k
    )
    state = torch.get_rng_state()
    predicted(workload, ["fp8-current"], h200)
    assert torch.equal(torch.get_rng_state(), state)


# --- the measurement ---------------------------------------------------------------------------------------------------------


def test_candidates_take_turns_and_give_the_median():
    order = []

    def clock(run, count):
        order.append(run)
        return (
            count * {"a": 1.0, "b": 2.0}[run] * (100.0 if len(order) == 3 else 1.0)
        )  # one reading is disturbed

    found = measure.interleaved({"a": "a", "b": "b"}, clock, rounds=5, slice_s=0.0)
    assert found == {"a": 1.0, "b": 2.0}
    assert "".join(order) == "ab" + "ab" + "ba" + "ab" + "ba" + "ab"


def test_the_clock_of_a_cpu_tells_the_seconds_of_its_calls(monkeypatch):
    readings, turns = iter([100.0, 100.75]), []
    monkeypatch.setattr(measure, "perf_counter", lambda: next(readings))
    assert measure.wall_clock(turns.append, 3) == 0.75 and turns == [0, 1, 2]


def test_every_candidate_runs_forward_and_backward(monkeypatch):
    """On the CPU, emulated: gradients arrive and are dropped, random state stays."""
    monkeypatch.setattr(measure, "SLICE_S", 0.0)
    workload = measure.LinearWorkload(
        tokens=33, inputs=48, outputs=64, dtype=torch.float32, biased=True
    )
    state = torch.get_rng_state()
    found, failed = measure.measured(workload, CANDIDATES, CPU)
    assert (
        found.keys() == set(CANDIDATES)
        and all(seconds > 0 for seconds in found.values())
        and not failed
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weight_is_quantized_in_every_step(monkeypatch):
    """As after an optimizer step: a cast kept from the step before would flatter."""
    from narrowgauge.nn import plan

    calls = []
    real = plan.OperandPlan.quantize
    monkeypatch.setattr(
        plan.OperandPlan,
        "quantize",
        lambda self, x, *a: calls.append(tuple(x.shape)) or real(self, x, *a),
    )
    workload = measure.LinearWorkload(tokens=32, inputs=48, outputs=64, dtype=torch.bfloat16)
    sets = [measure.inputs(workload, CPU)]
    run = measure.step(workload, "fp8-current", sets, CPU)
    run(0)
    first = calls.count((64, 48))
    run(1)
    assert first >= 1 and calls.count((64, 48)) == 2 * first


def test_a_candidate_that_raises_is_left_out_and_bf16_is_not(monkeypatch):
    real = measure.step

    def step(workload, name, sets, device):
        if name == broken:
            raise RuntimeError("no kernel image is available\nfor this device")
        return real(workload, name, sets, device)

    monkeypatch.setattr(measure, "step", step)
    workload = measure.LinearWorkload(tokens=16, inputs=32, outputs=32, dtype=torch.bfloat16)
    broken = "fp8-row"
    found, failed = measure.measured(workload, ["bf16", "fp8-row"], CPU)
    assert list(found) == ["bf16"]
    assert failed == {
        "fp8-row": "failed when it was measured: RuntimeError: no kernel image is available"
    }
    broken = "bf16"
    with pytest.raises(RuntimeError, match="no kernel image"):
        measure.measured(workload, ["bf16"], CPU)


# --- convert and describe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16_gemm", [True, False])
def test_bf16_is_measured_as_it_would_run(device_is, monkeypatch, bf16_gemm):
    """Without bfloat16 instructions convert multiplies in float32, and autocast would be emulated."""
    device_is(Device("cpu", bf16_gemm=bf16_gemm))
    timed = {}
    real = measure.step_of

    def step_of(layer, workload, sets, device, autocasts=True):
        timed[len(timed)] = (type(layer).__name__, sets[0][0].dtype, autocasts)
        return real(layer, workload, sets, device, autocasts)

    monkeypatch.setattr(measure, "step_of", step_of)
    workload = measure.LinearWorkload(tokens=16, inputs=32, outputs=32, dtype=torch.float32)
    sets = [measure.inputs(workload, CPU)]
    for name in ("bf16", measure.AUTOCAST, measure.FLOAT32):
        measure.step(workload, name, sets, CPU)(0)
    assert [*timed.values()] == [
        ("Linear" if bf16_gemm else "QLinear", torch.bfloat16, True),
        ("Linear", torch.bfloat16, True),
        ("Linear", torch.float32, False),
    ]


def small_model():
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64))


def test_convert_decides_once_per_shape_and_describe_tells(monkeypatch):
    asked = []

    def fake(workload, device):
        asked.append(workload)
        name = "fp8-row" if workload.outputs == 64 else "fp8-block"
        return Decision(
            recipe=name, tokens=workload.tokens, how="measured", seconds={"bf16": 2.0, name: 1.0}
        )

    monkeypatch.setattr(auto, "decide", fake)
    model = ng.convert(small_model(), {"*": "auto", "1": "fp8-current"}, tokens=4096)
    assert [layer.recipe.name for layer in model] == ["fp8-row", "fp8-current", "fp8-row"] and len(
        asked
    ) == 1
    assert asked[0].tokens == 4096 and (asked[0].inputs, asked[0].outputs) == (32, 64)
    assert auto.chosen(model) == {"0": "fp8-row", "2": "fp8-row"}
    way, times = "auto, measured at 4,096 tokens", "fp8-row 1 s, bf16 2 s"
    assert ng.describe(model)[0].note == f"{way}, {times}"
    assert auto.summary(model) == [f"32 -> 64 (2 layers): fp8-row ({way}: {times})"]
    model[0].recipe = "int8"
    assert auto.chosen(model) == {"2": "fp8-row"}, (
        "a recipe that was set by hand is no choice of auto"
    )
    model(torch.randn(4, 32)).sum().backward()


def test_convert_on_a_cpu_gives_bf16_and_says_why(plain_cpu):
    model = ng.convert(small_model(), "auto", tokens=64)
    assert {layer.recipe.name for layer in model} == {"bf16"}
    assert "not fp8-block, fp8-row, fp8-current: cpu has no FP8 units" in ng.describe(model)[0].note
    assert type(ng.convert(model, None)[0]) is nn.Linear


def test_choices_are_followed_without_measuring(monkeypatch):
    monkeypatch.setattr(auto, "decide", lambda *_: pytest.fail("measured"))
    model = ng.convert(
        small_model(), "auto", tokens=64, choices={"0": "fp8-row", "1": "bf16", "2": "fp8-block"}
    )
    assert [layer.recipe.name for layer in model] == ["fp8-row", "bf16", "fp8-block"]
    assert auto.chosen(model) == {"0": "fp8-row", "1": "bf16", "2": "fp8-block"}
    assert {layer.decision.how for layer in model} == {"given"}
    assert ng.describe(model)[0].note == str(model[0].decision)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, coded("auto.tokens", "None", "'auto'")),
        ({"tokens": 0}, coded("auto.tokens", "is 0")),
        ({"tokens": True}, coded("auto.tokens", "True")),
        (
            {"tokens": 8, "choices": 3},
            coded("auto.choices", "= 3", "auto.chosen"),
        ),
        (
            {"tokens": 8, "choices": {"0": "fp8-row"}},
            coded("auto.choice", "'1'", "None"),
        ),
        (
            {"tokens": 8, "choices": {"0": "mxfp8", "1": "bf16", "2": "bf16"}},
            coded("auto.choice", "'0'", "'mxfp8'"),
        ),
    ],
)
def test_bad_input(options, words):
    with raises(ConfigError, words):
        ng.convert(small_model(), "auto", **options)


def test_auto_is_no_recipe():
    with raises(ConfigError, "recipes.auto", "'auto'"):
        recipes.get("auto")


def test_the_cache_file_is_plain_json(tmp_path):
    cache = tmp_path / "auto.json"
    measure.keep(cache, "a", {"bf16": 1.0})
    measure.keep(cache, "b", {"bf16": 2.0})
    content = json.loads(cache.read_text(encoding="utf-8"))
    assert content == {"format": 1, "measured": {"a": {"bf16": 1.0}, "b": {"bf16": 2.0}}}
    assert [path.name for path in tmp_path.iterdir()] == ["auto.json"], "no temporary file is left"


@pytest.mark.gpu
def test_on_this_gpu(tmp_path):
    workload = measure.LinearWorkload(tokens=2048, inputs=1024, outputs=1024, dtype=torch.bfloat16)
    device = torch.device("cuda", 0)
    decision = decide(workload, device, tmp_path / "auto.json")
    assert (
        decision.seconds == {}
        or decision.seconds[decision.recipe] <= decision.seconds["bf16"] * 1.02
    )


# --- GPUs without kernels

GPUS = {**OTHER_GPUS, "cuda": ROCM}


@pytest.fixture
def has_gpu(monkeypatch):
    """has_gpu("mps"): torch sees such a GPU, of AMD if it is "cuda", and no other."""

    def install(kind):
        monkeypatch.setattr(torch.version, "hip", "6.4" if kind == "cuda" else None)
        for name, module in (("cuda", torch.cuda), ("mps", torch.backends.mps), ("xpu", torch.xpu)):
            monkeypatch.setattr(module, "is_available", lambda name=name: name == kind)

    return install


@pytest.mark.parametrize("kind", GPUS)
def test_on_a_gpu_without_kernels_bf16_is_chosen_and_the_reason_told(has_gpu, device_is, kind):
    has_gpu(kind)
    device_is(Device("cuda"))
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False, device="meta") for _ in range(2)))
        for layer in model:
            layer.weight = nn.Parameter(torch.empty(32, 32, device=kind))
        with warns("auto.no-kernels", "bf16", f"on {kind}", GPUS[kind]) as told:
            ng.convert(model, "auto", tokens=64)
        assert len(told) == 1 and set(auto.chosen(model).values()) == {"bf16"}
        assert all(layer.recipe is None for layer in model), "computed by nn.Linear"
        assert any(GPUS[kind] in line for line in auto.summary(model))


@pytest.mark.parametrize("kind", GPUS)
def test_a_choice_for_the_cpu_beside_a_gpu_without_kernels(has_gpu, monkeypatch, kind):
    """The choice is the CPU's own, and the GPU is named once; an explicit or a given recipe is not told."""
    has_gpu(kind)
    decision = Decision(recipe="int8", tokens=64, how="measured")
    monkeypatch.setattr(auto, "decide", lambda workload, device: decision)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with warns("auto.no-kernels", "int8 on the CPU", kind, GPUS[kind]) as told:
        ng.convert(model, "auto", tokens=64)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.convert(nn.Sequential(nn.Linear(32, 32)), "int8")
        ng.convert(nn.Sequential(nn.Linear(32, 32)), "auto", choices={"0": "int8"})


@pytest.mark.parametrize("kind", ["", "nvidia"])
def test_no_gpu_and_one_with_kernels_are_not_told(has_gpu, monkeypatch, kind):
    has_gpu("")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "nvidia")
    monkeypatch.setattr(
        auto, "decide", lambda *_: Decision(recipe="int8", tokens=64, how="measured")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.convert(nn.Sequential(nn.Linear(32, 32)), "auto", tokens=64)
