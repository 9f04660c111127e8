"""Timings of layers and whole steps: a Llama of 8B shape in plain torch, so that nothing has to be installed.

    layer   one block, forward and backward, eager and compiled
    step    LAYERS blocks, head and loss of a 32,000-token vocabulary, torch's fused AdamW: seconds of
            forward, backward and update, and of the whole step

Hidden 4096, MLP 14336, 32 heads, 8 of keys and values, 2 sequences of 4,096 tokens, bfloat16
weights; attention is causal without a mask. Each contender is a process of its own: nothing but the
process beside it tells how far the clocks have moved, so BF16 is timed first and last.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from narrowgauge.conversion.measure import compiled_alone
from narrowgauge.lab.card import contenders
from narrowgauge.lab.card.process import WRONG, CardJob, Tell
from narrowgauge.lab.card.timings import backends, kernels, measured
from narrowgauge.nn.converted_model import advance

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

EAGER_S, COMPILED_S = 90.0, 180.0
LAYERS, ROUNDS, WARM_UPS = 4, 5, 3
NAMES = ("fp8-current", "fp8-delayed", "fp8-block", "fp8-row", "mxfp8", "nvfp4")
COMPILED = ("bf16", "torchao-tensorwise", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8")
AGAIN = " again"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a Llama. The defaults are 8B's, with fewer layers and a small vocabulary."""

    hidden: int = 4096
    mlp: int = 14_336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 32_000
    layers: int = LAYERS
    rows: int = 2
    length: int = 4096


class LlamaBlock(nn.Module):
    """One pre-norm block of a Llama, with transformers' names.

    A Linear called `gate` would keep 16 bits, as a router does.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, narrow = sizes.hidden, sizes.hidden // sizes.heads * sizes.key_heads

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, bias=False)

        self.q_proj, self.o_proj = (linear(hidden, hidden) for _ in range(2))
        self.k_proj, self.v_proj = (linear(hidden, narrow) for _ in range(2))
        self.gate_proj, self.up_proj = (linear(hidden, sizes.mlp) for _ in range(2))
        self.down_proj = linear(sizes.mlp, hidden)
        self.before_attention, self.before_mlp = (nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (
            layer(h).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.q_proj, self.sizes.heads),
                (self.k_proj, self.sizes.key_heads),
                (self.v_proj, self.sizes.key_heads),
            )
        )
        attended = functional.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        h = self.before_mlp(x)
        return x + self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Embedding, blocks, norm and head; forward returns the mean loss of the next tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        # transformers' name: recipes keep it in 16 bits, and so does torchao's filter.
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.angles = Angles(sizes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, *self.angles())
        # float32 logits, as transformers computes its loss.
        logits = self.lm_head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class AloneBlock(nn.Module):
    """A block with its angles: x [rows, length, hidden] -> the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.block, self.angles = LlamaBlock(sizes), Angles(sizes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, *self.angles())
        return y


class Angles(nn.Module):
    """cos and sin of rotary embeddings, [length, head]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        head = sizes.hidden // sizes.heads
        rates = 500_000.0 ** -(torch.arange(0, head, 2) / head)
        angles = (torch.arange(sizes.length)[:, None] * rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin  # type: ignore[return-value]


def jobs(card: Device, device: str = "cuda:0") -> list[CardJob]:
    """Layers and steps; compiled ones last, since they are dear."""
    native = contenders.recipes_of(card)
    eager = (contenders.BF16, *(name for name in NAMES if name in native), *contenders.TORCHAO)
    graphs = tuple(name for name in COMPILED if name in native or name not in NAMES)
    found = []
    for part, compiled, names in (
        ("layer", False, eager),
        ("step", False, eager),
        ("layer", True, graphs),
        ("step", True, graphs),
    ):
        for name in (*names, contenders.BF16 + AGAIN):
            mode = "compiled" if compiled else "eager"
            found.append(
                CardJob(
                    name=f"8B-shaped {part}, {mode}, {name}", part=part, run=f"narrowgauge.lab.card.steps:{part}",
                    limit_s=COMPILED_S if compiled else EAGER_S, alone=True,
                    arguments={"contender": name.removesuffix(AGAIN), "compiled": compiled, "device": device},
                )
            )  # fmt: skip
    return found


def layer(
    tell: Tell, contender: str, compiled: bool, device: str, sizes: dict[str, int] | None = None
) -> dict[str, Any]:
    """Seconds of one block's forward and backward."""
    there, of = torch.device(device), Sizes(**(sizes or {}))
    torch.manual_seed(0)
    with there:
        block = AloneBlock(of).to(torch.bfloat16)
        x = torch.randn(of.rows, of.length, of.hidden, dtype=torch.bfloat16, requires_grad=True)
        gy = torch.randn_like(x)
    model = contenders.model(contender, block, of.rows * of.length)
    forward: Any = compiled_alone(model) if compiled else model

    def run(turn: int) -> None:
        forward(x).backward(gy)
        model.zero_grad()
        x.grad = None
        advance(model)

    tell("compilation" if compiled else "first step")
    for turn in range(WARM_UPS):
        run(turn)
    tell("timing")
    found = measured(run, there)
    tell("kernels")
    return found | {"kernels": kernels(lambda: run(0), there), "backend": backends(model)}


def step(
    tell: Tell, contender: str, compiled: bool, device: str, sizes: dict[str, int] | None = None
) -> dict[str, Any]:
    """Seconds of a training step and of its parts, with the loss after them."""
    there, of = torch.device(device), Sizes(**(sizes or {}))
    torch.manual_seed(0)
    with there:
        model: nn.Module = Llama(of).to(torch.bfloat16)
        ids = torch.randint(of.vocabulary, (of.rows, of.length))
    model = contenders.model(contender, model, ids.numel())
    on_card = there.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_card)
    forward: Any = compiled_alone(model) if compiled else model
    # A list, because each part needs the loss of the one before it.
    losses: list[Tensor] = []

    def update() -> None:
        optimizer.step()
        advance(model)
        # Gradients are dropped, so that backward allocates them as in a training loop.
        optimizer.zero_grad()

    parts: dict[str, Callable[[], object]] = {
        "forward": lambda: losses.append(forward(ids)),
        "backward": lambda: losses[-1].backward(),
        "update": update,
    }

    def run(turn: int) -> None:
        losses.clear()
        for part in parts.values():
            part()

    tell("compilation" if compiled else "first step")
    for turn in range(WARM_UPS):
        run(turn)
    tell("timing")
    found = measured(run, there) | {"parts_s": _by_parts(parts, losses, on_card)}
    found |= {"loss": float(losses[-1].detach()), "backend": backends(model)}
    tell("kernels")
    found["kernels"] = kernels(lambda: run(0), there)
    if not found["loss"] < 2 * torch.log(torch.tensor(float(of.vocabulary))):
        found |= {
            "status": WRONG,
            "why": f"the loss is {found['loss']:.3g}: a random model has less",
        }
    return found


def _by_parts(
    parts: dict[str, Callable[[], object]], losses: list[Tensor], on_card: bool
) -> dict[str, float]:
    """Median seconds of each part, by events of the device; {} without one."""
    if not on_card:
        return {}
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(ROUNDS):
        losses.clear()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(parts.values(), marks[1:], strict=True):
            part()
            mark.record()
        # Events are read after the device has passed all of them.
        torch.cuda.synchronize()
        for place, name in enumerate(parts):
            samples[name].append(marks[place].elapsed_time(marks[place + 1]) / 1e3)
    return {name: statistics.median(found) for name, found in samples.items()}
