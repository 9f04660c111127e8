"""A Llama in a hundred lines whose attention takes as many heads as it is given, and the plans that parallelise it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from narrowgauge.distributed import tensor_parallel
from narrowgauge.distributed.tensor_parallel import GatherInput

VOCABULARY, WIDTH, HEADS, MLP, LAYERS, TOKENS = 128, 128, 4, 256, 8, 32


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.head = width // heads
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, width, bias=bias) for _ in range(3)
        )
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, bias), Mlp(width, inner, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(
        self,
        *,
        width: int = WIDTH,
        heads: int = HEADS,
        inner: int = MLP,
        layers: int = LAYERS,
        bias: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, inner, bias) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def batch(step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens that follow from each other, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    ids = (start + torch.arange(TOKENS + 1) * 3) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, step: int, piece: int = 0, of: int = 1) -> Tensor:
    """Of the batch of a step, or of one of its pieces."""
    ids, targets = (each.chunk(of)[piece] for each in batch(step))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())


def parallelize(
    model: Llama, mesh: DeviceMesh, sequence: bool = False, gather: str = "", scatter: str = ""
) -> Llama:
    """As users do, with torch's own styles; sequence: activations between the Linears are cut along the tokens.

    gather, scatter: "fp8" or "16bit" for our styles in place of PrepareModuleInput and RowwiseParallel.
    """
    block: dict[str, ParallelStyle] = {
        f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")
    } | {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    whole: dict[str, ParallelStyle] = {}
    if sequence:
        gathers = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        block |= {
            "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gathers), "mlp": PrepareModuleInput(**gathers),
        }  # fmt: skip
        whole = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }  # fmt: skip
    if gather:
        block |= {name: GatherInput(activations=gather) for name in ("attention", "mlp")}
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    if scatter:
        rows = tensor_parallel.RowwiseParallel(activations=scatter)
    block |= {"attention.o_proj": rows, "mlp.down_proj": rows}
    parallelize_module(model, mesh, whole)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return model
