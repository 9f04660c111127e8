"""A mixture of experts is counted as it is allocated, in every recipe: within 1 %, by the events of a CPU's allocator.

The plan gives all experts equally many tokens; the router of the real step does not. Blocks of 128
tokens, to which EDEN fills up an expert's, are no part of the peak with the C++ kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.plan import Step, count
from narrowgauge.train.attention import use_attention_of_whole_rows
from tests.plan.test_count import allocated

transformers = pytest.importorskip("transformers", minversion="5")

IDS = (torch.arange(256) * 37 % 251).reshape(2, 128)


def mixture(recipe: str, dtype: torch.dtype, codes: bool = False) -> Any:
    def build() -> Step:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, dtype=dtype,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        if recipe != "none":
            ng.convert(model, recipe)
        if codes:
            ng.memory.freeze(model, "*.experts", codes=True)
        use_attention_of_whole_rows(model, {"input_ids": torch.empty(0)})
        master = None if dtype == torch.float32 else "fp32"
        optimizer = ng.optim.AdamW(model, states="8bit", master=master)
        ids = IDS.clone()  # a real tensor in the real step, a fake one in the counted one

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            ng.advance(model)

        def kept() -> list[torch.Tensor]:
            states = optimizer.state.values()
            return [each for state in states for each in state.values() if torch.is_tensor(each)]

        def loss() -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        return Step(model, loss, update, kept, ids)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "dtype", "cpu"),
    # One kind of CPU for each recipe in turn; `test_count` has both for a dense model.
    [(name, torch.float32, place % 2 == 1) for place, name in enumerate(("none", *recipes.names()))]
    + [("fp8-current", torch.bfloat16, True)],
    indirect=["cpu"],
)
def test_what_is_counted_is_what_a_cpu_allocates(recipe: str, dtype: torch.dtype, cpu: Any) -> None:
    build = mixture(recipe, dtype)
    found = count(build, cpu)
    counted, real = found.peak(found.second)[0], allocated(build)
    assert counted == pytest.approx(real, rel=0.01)
    assert len(found.notes) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cpu"),
    [(name, place % 2 == 1) for place, name in enumerate(("fp8-current", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4", "mxfp4"))],
    indirect=["cpu"],
)  # fmt: skip
def test_frozen_experts_are_counted_as_codes(recipe: str, cpu: Any) -> None:
    build = mixture(recipe, torch.float32, codes=True)
    found = count(build, cpu)
    counted, real = found.peak(found.second)[0], allocated(build)
    assert counted == pytest.approx(real, rel=0.01)
