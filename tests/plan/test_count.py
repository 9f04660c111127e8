"""What is counted under fake tensors is what a CPU allocates (within 0.1 %, most to the byte), and published figures (within 1 %)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import narrowgauge as ng
from narrowgauge.ops.mm import int8_cpp
from narrowgauge.ops.registry import Device, cpu_facts
from narrowgauge.plan import Step, count, replay
from narrowgauge.train.attention import use_attention_of_whole_rows
from tests.selection import quick, slow_on_a_plain_cpu

transformers = pytest.importorskip("transformers")

# Where the peak is a product, oneDNN may copy its weight [256, 128] into memory of its own, which no operator of torch shows.
ONEDNN_COPIES = {"nvfp4": 66_560}
HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
GIB = 2**30


def llama(
    recipe: str, states: str, checkpointing: str | None = None, **sizes: Any
) -> Callable[[], Step]:
    given = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
    }
    given |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    dtype, tokens, fused = (
        sizes.pop("dtype", torch.float32),
        sizes.pop("tokens", 256),
        sizes.pop("fuse", {}),
    )
    rows = sizes.pop("rows", 2)

    def build() -> Step:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**(given | sizes), dtype=dtype)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        if recipe != "none":
            ng.convert(model, recipe, **fused)
        if checkpointing:
            ng.memory.checkpoint(model, checkpointing)
        use_attention_of_whole_rows(model, {"input_ids": torch.empty(0)})
        if states == "torch":
            optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            optimizer = ng.optim.AdamW(model, states=states)
        ids = torch.zeros(rows, tokens, dtype=torch.int64)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            if recipe != "none":
                ng.advance(model)

        def kept() -> list[torch.Tensor]:
            return [
                each
                for state in optimizer.state.values()
                for each in state.values()
                if torch.is_tensor(each)
            ]

        return Step(
            model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss, update, kept, ids
        )

    return build


def allocated(build: Callable[[], Step]) -> int:
    """The most bytes that are alive in a real second step, by the events of torch's allocator.

    Without the memory into which INT8 products pack, which each thread keeps: 4 MiB a side at most.
    """
    for side in ("left", "right"):
        setattr(int8_cpp._MEMORY, side, torch.empty(5 << 20, dtype=torch.uint8))
    step = build()

    def once() -> None:
        loss = step.loss()
        loss.backward()
        del loss
        step.update()

    held = [*step.model.parameters(), *step.model.buffers(), step.batch]
    total = sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values()
    )
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            once()
            with record_function("second"):
                once()
    finally:
        gc.enable()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins, most = next(event.start_ns() for event in events if event.name() == "second"), 0
    for event in events:
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total if event.start_ns() >= begins else 0)
    return most


@pytest.mark.slow
@slow_on_a_plain_cpu
@pytest.mark.parametrize(
    ("recipe", "states", "checkpointing"),
    quick(
        [("fp8-delayed", "8bit", None)],
        [
            ("none", "torch", None),
            ("fp8-delayed", "8bit", None),
            ("fp8-row", "fp8", None),
            ("fp8-block", "torch", "full"),
            ("mxfp8", "4bit", None),
            ("fp8-current", "fp8-lm", "every-2"),
            ("int8", "torch", "selective"),
            ("int4-hq-bs", "torch", None),
            ("int4-hq-lss", "8bit", "every-2"),
            ("mxfp4", "torch", None),
            ("nvfp4", "8bit", "every-2"),
            ("int4-lsq-luq", "torch", None),
            ("int4-row-sr", "torch", None),
        ],
    ),
)
def test_counted_is_what_a_cpu_allocates(recipe, states, checkpointing, cpu):
    build = llama(recipe, states, checkpointing)
    found = count(build, cpu)
    counted, real = found.peak(found.second)[0], allocated(build)
    assert (real - ONEDNN_COPIES.get(recipe, 0)) * (1 - 1e-3) <= counted <= real * (1 + 1e-3)


@pytest.mark.parametrize("slices", [False, True])
def test_the_loss_in_parts_is_counted(slices):
    """Where its logits are the peak; within a thousandth."""

    def build() -> Step:
        torch.manual_seed(0)
        table, head = nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)
        model = nn.ModuleList([table, head])
        ids = torch.zeros(4, 256, dtype=torch.int64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def loss() -> torch.Tensor:
            total, found = ng.memory.chunked_cross_entropy(
                table(ids), head.weight, ids, slices=slices, checked=True
            )
            return total / found

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, loss, update, list, ids)

    found = count(build, cpu_facts())
    assert found.peak(found.second)[0] == pytest.approx(allocated(build), rel=1e-3)


def test_parts_add_up_and_the_allocator_rounds_them():
    found = count(llama("fp8-current", "8bit"), HOPPER)
    most, parts = found.peak(found.second)
    assert sum(parts.values()) == most and all(
        parts[name] for name in ("weights", "states", "saved", "head", "batch")
    )
    allocator = replay(found.trace)
    assert most <= allocator.peak_allocated <= allocator.peak_reserved
    names = [name for name, _, _ in found.peaks_by_phase()]
    assert names.count("backward 0") == 2 and names.count("step") == 2 and found.blocks == 3


def test_nothing_real_is_touched():
    """Neither torch's generators nor a library of the CPU; and what is made afterwards is real."""
    before = torch.get_rng_state()
    count(llama("fp8-row", "8bit"), cpu_facts())
    assert torch.equal(torch.get_rng_state(), before)
    assert float(ng.convert(nn.Linear(16, 16), "fp8-row")(torch.ones(1, 16)).detach().sum()) != 0.0
