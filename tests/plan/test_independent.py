"""Peaks of a counted step against sums made by hand (exact to 0.1 %): which tensors of a Llama are alive when backward begins.

Nothing of narrowgauge/plan is used for the expected figures. They follow from what torch's operators and our Linear keep, in bytes a token:

    RMSNorm (Hugging Face's)   x in float32, 1/rms, the normalised x in 16 bits       attention   q, k, v, out, log-sum-exp per head
    MLP                        g, u, silu(g), silu(g) u                               Linear      its input: 16 bits, or the codes of x.T
    loss                       log-softmax in float32; then two gradients of its size

The peak is where the gradient of the logits has been made, which the sizes below make larger than the optimizer's step.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from narrowgauge.ops.registry import Device
from narrowgauge.plan import count
from tests.selection import quick

pytest.importorskip("transformers")

from benchmarks.steps_of_llamas import Run, llama_step

HOPPER = Device("cuda", (9, 0), cuda=(12, 9))
LAYERS, WIDTH, MIDDLE, WORDS, HEADS, GROUPS, TOKENS = 4, 1024, 3072, 32768, 8, 2, 2048
HEAD = WIDTH // HEADS
MODEL = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": TOKENS,
}  # fmt: skip
LINEARS = [(WIDTH, WIDTH), (WIDTH, WIDTH), *[(GROUPS * HEAD, WIDTH)] * 2, *[(MIDDLE, WIDTH)] * 3]
NORMS = (2 * LAYERS + 1) * WIDTH
IN_LINEARS = LAYERS * sum(map(prod, LINEARS))
PARAMETERS = NORMS + IN_LINEARS + 2 * WORDS * WIDTH

ATTENTION = (
    2 * WIDTH + 2 * 2 * GROUPS * HEAD + 2 * WIDTH + 4 * HEADS
)  # q; k and v; out; log-sum-exp
NORM = 4 * WIDTH + 4 + 2 * WIDTH  # without its output
LOGITS = 4 * WORDS
ROTARY = 2 * 2 * HEAD


def layer(inputs: int, gates: int, norm: int = NORM) -> int:
    """Bytes a token. inputs: what its Linears keep of theirs, out apart, which attention has; gates: g, u and what is made of them."""
    return 2 * norm + inputs + ATTENTION + gates


BF16 = layer(inputs=2 * 2 * WIDTH, gates=4 * 2 * MIDDLE)
CODES = layer(
    inputs=2 * WIDTH + MIDDLE, gates=3 * 2 * MIDDLE
)  # of both norms' outputs and of the MLP's product
# Codes are made again from x, out, g and u.
FUSED = layer(inputs=0, gates=2 * 2 * MIDDLE, norm=2 * WIDTH + 4)
SAVED = layer(
    inputs=0, gates=2 * (MIDDLE + MIDDLE // 128), norm=WIDTH + 4
)  # codes, a byte each, and scales
INPUT = 2 * WIDTH


def behind_blocks(norm: int = NORM) -> int:
    """Bytes a token: the last norm, the head's input, the loss with its two gradients, targets, ids, cos and sin."""
    return norm + 2 * WIDTH + 3 * LOGITS + 8 + 8 + ROTARY


def in_8_bits(elements: int) -> float:
    """Two moments: a byte and its share of a 16-bit scale for each 256 elements."""
    return elements * 2 * (1 + 2 / 256)


ADAMW = 2 * 2 * PARAMETERS
# The head's too; the embedding's in float32.
NARROW = in_8_bits(IN_LINEARS + WORDS * WIDTH) + 2 * 4 * (WORDS * WIDTH + NORMS)
EIGHT = {"states": "8bit", "master": "stochastic", "checkpointing": "full"}


CASES = [
    ("bf16", {}, ADAMW, LAYERS * BF16 + behind_blocks()),
    ("fp8-current", {"recipe": "fp8-current"}, ADAMW, LAYERS * CODES + behind_blocks()),
    (
        "fp8-current, fused",
        {"recipe": "fp8-current", "convert": {"fuse": True}},
        ADAMW,
        LAYERS * FUSED + behind_blocks(),
    ),
    ("8-bit states, checkpointing", EIGHT, NARROW, (LAYERS - 1) * INPUT + BF16 + behind_blocks()),
    ("int8", {"recipe": "int8"}, ADAMW, LAYERS * CODES + behind_blocks()),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run", "states", "kept"), quick(["8-bit states, checkpointing"], CASES)
)
def test_a_peak_is_what_shapes_say(name: str, run: dict[str, Any], states: float, kept: int):
    found = count(llama_step(Run(**run, model=MODEL, tokens=TOKENS)), HOPPER)
    most, _ = found.peak(found.second)
    assert most == pytest.approx(2 * PARAMETERS + states + TOKENS * kept, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "kept"), quick(["fp8"], [("exact", FUSED), ("fp8", SAVED), ("int8", SAVED)])
)
def test_what_fused_blocks_keep_is_what_shapes_say(save: str, kept: int):
    run = Run(
        recipe="fp8-current", convert={"fuse": True, "save": save}, model=MODEL, tokens=TOKENS
    )
    found = count(llama_step(run), HOPPER)
    made = {event for event in found.trace.events[found.second :] if event >= 0}
    saved = [
        each.nbytes
        for each in found.trace.allocations
        if each.number in made and each.part == "saved"
    ]
    assert sum(saved) == pytest.approx(TOKENS * (LAYERS * kept + ROTARY), rel=2e-3)
