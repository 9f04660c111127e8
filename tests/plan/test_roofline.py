"""Work and time of counted steps: FLOPs against torch's own counter and bytes against sums made by hand (exact), times by their formula."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.ops.registry import cpu_facts
from narrowgauge.ops.timing.cards import card, of_memory
from narrowgauge.ops.timing.rates import ERROR, RATES
from narrowgauge.ops.timing.work import Work
from narrowgauge.plan import Count, Step, count
from narrowgauge.plan.roofline import as_dict, time
from narrowgauge.plan.tally import as_rows, deeper, from_rows, repeated, tally
from tests.raising import raises

H100 = card("h100")
ROWS, WIDTH, OUT = 4096, 2048, 8192


def linear(recipe: str | None = None, states: str | None = None):
    """One bias-free Linear in bfloat16, whose input needs a gradient."""

    def build() -> Step:
        model = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False, dtype=torch.bfloat16))
        if recipe:
            ng.convert(model, recipe)
        x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        gy = torch.empty(ROWS, OUT, dtype=torch.bfloat16)
        named = {"states": states, "master": "stochastic"}
        optimizer = (
            ng.optim.AdamW(model, **named)
            if states
            else torch.optim.AdamW(model.parameters(), fused=True)
        )

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)

        def loss() -> torch.Tensor:
            return (model(x) * gy).sum()

        return Step(model, loss, update, lambda: [], [x, gy])

    return build


def second(found: Count) -> list[Work]:
    phases = found.trace.phases
    return [
        each for each in found.trace.work if each.phase and phases[each.phase][0] >= found.second
    ]


def of_kind(found: Count, kind: str) -> list[Work]:
    return [each for each in second(found) if each.kind == kind]


def test_products_are_those_that_torch_counts():
    """A real step of the same model under torch's FlopCounterMode."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }

    def build() -> Step:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
        ids = torch.zeros(2, 32, dtype=torch.int64)
        return Step(
            model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, lambda: model.zero_grad(), lambda: [], ids
        )  # fmt: skip

    found = count(build, cpu_facts())
    step = build()
    with FlopCounterMode(display=False) as counted:
        step.loss().backward()
    torchs = {
        str(name): flops
        for name, flops in counted.get_flop_counts()["Global"].items()
        if "mm" in str(name)
    }
    assert sum(each.flops for each in of_kind(found, "products")) == sum(torchs.values()) > 0


def test_bytes_of_a_product_and_of_the_step():
    found = count(linear(), H100.device)
    x, w, y = ROWS * WIDTH, OUT * WIDTH, ROWS * OUT
    assert [each.nbytes for each in of_kind(found, "products")] == [2 * (x + w + y)] * 3
    assert {each.flops for each in of_kind(found, "products")} == {2 * ROWS * WIDTH * OUT}
    (adamw,) = [each for each in second(found) if "adamw" in each.operation]
    assert (
        adamw.nbytes - 14 * w < 1000
    )  # reads weight, gradient and two moments, writes all but the gradient


def test_bytes_of_casts():
    """fp8-current: x and gy are read for the amax and for both orientations, written in both, 6 bytes an element."""
    casts = of_kind(count(linear("fp8-current"), H100.device), "casts")
    for size, launch in ((ROWS * WIDTH, casts[0]), (ROWS * OUT, casts[2])):
        assert launch.operation == "amax_and_cast"
        assert launch.nbytes / size == pytest.approx(6, rel=1e-3)
    assert all(each.own for each in casts)


@pytest.mark.parametrize(
    ("states", "moments"), [("8bit", 2 * (1 + 2 / 256)), ("4bit", 2 * (1 / 2 + 2 / 128))]
)
def test_bytes_that_an_optimizer_reaches_by_address(states, moments):
    step = [each for each in second(count(linear(states=states), H100.device)) if each.own]
    expected = (
        (2 + 2 * 2 + 2 * moments) * OUT * WIDTH
    )  # the gradient once, weight and moments there and back
    assert sum(each.nbytes for each in step) == pytest.approx(expected, rel=1e-3)


def test_time_is_that_of_what_bounds_it():
    found = count(linear("fp8-current"), H100.device)
    flops = 2 * ROWS * WIDTH * OUT
    whole = time(tally(found), H100)
    (adamw,) = [each for each in second(found) if "adamw" in each.operation]
    assert whole.by_kind["optimizer"] >= RATES.eager * adamw.nbytes / (
        RATES.copied * H100.bandwidth
    )
    assert (
        whole.launches * RATES.launch
        <= whole.device
        <= whole.seconds
        == max(whole.device, whole.host)
    )
    assert (
        sum(whole.by_phase.values()) == pytest.approx(whole.device)
        and whole.flops == 3 * flops == whole.model_flops
    )
    twice = replace(
        H100,
        bandwidth=H100.bandwidth / 2,
        peak={kind: rate / 2 for kind, rate in H100.peak.items()},
    )
    assert time(tally(found), twice).device <= 2 * whole.device


def test_a_small_step_is_bound_by_its_launches():
    found = count(linear("fp8-current"), H100.device)
    fast = replace(H100, bandwidth=1e18, clock=1e18, peak=dict.fromkeys(H100.peak, 1e24))
    whole = time(tally(found), fast)
    assert whole.is_launch_bound and whole.device == pytest.approx(
        RATES.eager * whole.launches * RATES.launch, rel=1e-3
    )


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-row", "fp8-delayed"])
def test_no_product_is_lost(recipe):
    """Those of cuBLAS' blocks, too, which no operator of torch stands for under fake tensors."""
    products = of_kind(count(linear(recipe), H100.device), "products")
    assert [each.flops for each in products] == [2 * ROWS * WIDTH * OUT] * 3
    assert {each.operands for each in products} == {"fp8"} and (recipe == "fp8-block") == (
        products[0].sums == "blocks"
    )


@pytest.mark.slow
def test_products_in_four_bits_count_both_codes_of_a_byte():
    b200 = card("b200")
    products = [
        each
        for each in of_kind(count(linear("mxfp4"), b200.device), "products")
        if each.operands == "fp4"
    ]
    assert [each.flops for each in products] == [2 * ROWS * WIDTH * OUT] * 3
    assert {each.sums for each in products} == {"mx"}


def test_an_answer_of_it():
    found = time(tally(count(linear("fp8-current"), H100.device)), H100)
    answer = as_dict(found, H100, tokens=ROWS)
    low, high = answer["likely_seconds"]
    assert low < found.seconds < high == found.seconds * (1 + ERROR["eager"])
    assert answer["tokens_per_s"] == [ROWS / high, ROWS / low] and len(answer["lines"]) == 2
    assert f"{found.seconds:.3g} s " in answer["lines"][0] and "products" in answer["lines"][1]
    assert json.loads(json.dumps(answer)) == answer
    spread = as_dict(found, H100, tokens=ROWS, messages=1.0)
    assert (
        spread["likely_seconds"] == [1.0, high + 1.0]
        and "Messages between ranks take 1 s" in spread["lines"][2]
    )


def test_what_cannot_be_timed():
    found = count(linear("fp8-current"), H100.device)
    with raises(ConfigError, "plan.unknown-card"):
        time(tally(found), of_memory("24GiB"))
    with raises(ConfigError, "card.no-unit", "_scaled_mm", "fp8"):
        time(tally(found), card("a100"))


@pytest.mark.slow
def test_a_deep_model_lies_on_a_line():
    pytest.importorskip("transformers")
    from benchmarks.steps_of_llamas import Run, llama_step

    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }

    def at(layers: int):
        run = Run(recipe="fp8-current", tokens=512, model=sizes | {"num_hidden_layers": layers})
        return tally(count(llama_step(run), H100.device))

    few, more, deep = (at(layers) for layers in (3, 4, 6))
    found = deeper(few, more, 3)
    assert from_rows(as_rows(found)) == found
    found, deep = time(found, H100), time(deep, H100)
    assert (
        found.launches == deep.launches
        and found.flops == deep.flops
        and found.device == pytest.approx(deep.device)
    )
    assert found.by_kind == pytest.approx(deep.by_kind) and found.host == pytest.approx(deep.host)


def test_more_micro_batches_repeat_all_but_the_update():
    done = tally(count(linear("fp8-current"), H100.device))
    once, four = time(done, H100), time(repeated(done, 4), H100)
    assert four.by_phase["step"] == once.by_phase["step"]
    assert four.by_phase["backward"] == pytest.approx(4 * once.by_phase["backward"])
