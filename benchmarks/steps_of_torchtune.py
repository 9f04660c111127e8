"""torchtune's training steps of Llama 3.2 3B as of November 2024, for counting them: 2 rows of 4,096 tokens, bfloat16.

Written down from its sources, operation by operation as far as autograd keeps something of it: RMSNorm in float32, keys and values
repeated for all heads, whole logits in float32 or 8 chunks of them in bfloat16, the head is the embedding.

Compiled blocks keep what AOTAutograd's partitioner chooses. `compiled_units` asks it, on a narrow block of the same proportions, and the
counted block keeps as many bytes per token and width. Of the compiled loss nothing is in memory but the logits and their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import narrowgauge as ng
from benchmarks.steps_of_llamas import Run, bfloat16_weights, optimizer_of, step_of
from narrowgauge.plan import Step


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.scale


class Block(nn.Module):
    def __init__(
        self, width: int = 3072, middle: int = 8192, heads: int = 24, groups: int = 8
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.before, self.behind = _RmsNorm(width), _RmsNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, middle, bias=False) for _ in range(2))
        self.down = nn.Linear(middle, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        y = self.before(x)
        q = _turned(self.q(y).view(rows, tokens, self.heads, self.head)).transpose(1, 2)
        k = _turned(self.k(y).view(rows, tokens, self.groups, self.head)).transpose(1, 2)
        v = self.v(y).view(rows, tokens, self.groups, self.head).transpose(1, 2)
        shape = (rows, self.groups, self.heads // self.groups, tokens, self.head)
        k, v = (each.unsqueeze(2).expand(shape).flatten(1, 2) for each in (k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).contiguous().view(rows, tokens, width))
        y = self.behind(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    """Rotary embedding in float32, of a table without gradient."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cos = sin = torch.ones(1, x.shape[1], 1, pairs.shape[-2], dtype=torch.float32)
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 1] * cos + pairs[..., 0] * sin
    return torch.stack([first, second], -1).flatten(3).type_as(x)


@cache
def compiled_units() -> float:
    """What the partitioner keeps of a compiled block, in sizes of its input; of an eager one it is 22.9."""
    width, tokens = 192, 64
    with bfloat16_weights():
        block = Block(width, width // 3 * 8, 6, 2)
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weights = {each.untyped_storage().data_ptr() for each in block.parameters()}
    kept: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        torch.compile(block, backend="aot_eager_decomp_partition")(x)
    torch._dynamo.reset()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    return sum(nbytes for place, nbytes in storages.items() if place not in weights) / (
        x.numel() * x.element_size()
    )


class _CompiledBlock(Block):
    """Keeps so many bytes; computes nothing."""

    def __init__(self, units: float) -> None:
        super().__init__()
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        return _Keeps.apply(x, self.units, *self.parameters())


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, units: float, *weights: Tensor) -> Tensor:
        # The input is the first of the units, and what checkpointing keeps of a block.
        ctx.save_for_backward(x, *weights, x.new_empty(round((units - 1) * x.numel())))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights, _ = ctx.saved_tensors
        return torch.empty_like(x), None, *(torch.empty_like(each) for each in weights)


class _CompiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


class _Decoder(nn.Module):
    def __init__(
        self,
        block: Callable[[], nn.Module],
        vocabulary: int = 128256,
        width: int = 3072,
        blocks: int = 28,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = _RmsNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@dataclass(frozen=True, kw_only=True)
class Torchtune:
    """Its flags, as its table adds them. chunks: of the logits; embeddings: whether their 8-bit states are of 8 bits too."""

    compiled: bool = False
    chunks: int = 1
    checkpointing: bool = False
    in_backward: bool = False
    offload: bool = False
    states: str = "torch"
    embeddings: str = "same"
    layers: int = 28


def torchtune_step(flags: Torchtune) -> Callable[[], Step]:
    units = compiled_units() if flags.compiled else 0.0

    def build() -> Step:
        with bfloat16_weights():
            model = _Decoder(
                (lambda: _CompiledBlock(units)) if flags.compiled else Block, blocks=flags.layers
            ).train()
        if flags.checkpointing:
            ng.memory.checkpoint(model, "full", keep_last=False)
        ids = torch.zeros(2, 4096, dtype=torch.int64)

        def hidden() -> Tensor:
            if not flags.offload:
                return model(ids)
            with torch.autograd.graph.saved_tensors_hooks(_gone, _back):
                return model(ids)

        def loss() -> Tensor:
            logits = [
                part @ model.embedding.weight.T for part in hidden().chunk(flags.chunks, dim=1)
            ]
            if flags.chunks == 1:  # whole ones are widened by the model
                logits = [logits.pop().float()]
            parts = zip(logits, ids.chunk(flags.chunks, dim=1), strict=True)
            return torch.stack([_loss(z, targets, flags.compiled) for z, targets in parts]).sum()

        return step_of(model, loss, ids, _optimizer(model, flags))

    return build


def _loss(logits: Tensor, targets: Tensor, compiled: bool) -> Tensor:
    if compiled:
        return _CompiledLoss.apply(logits)
    return cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum"
    )


def _gone(x: Tensor) -> Any:
    """What is in host memory takes none of the device's."""
    return x if isinstance(x, nn.Parameter) else (x.shape, x.dtype)


def _back(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else torch.empty(kept[0], dtype=kept[1])


def _optimizer(model: nn.Module, flags: Torchtune) -> Any:
    if flags.states != "torch":
        kind = {"states": flags.states, "embeddings": flags.embeddings}
        return optimizer_of(model, Run(**kind, master="stochastic", in_backward=flags.in_backward))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _InBackward(model) if flags.in_backward else optimizer


class _InBackward:
    """An AdamW of its own for each weight, which steps when its gradient is whole."""

    def __init__(self, model: nn.Module) -> None:
        self.each = {
            weight: torch.optim.AdamW([weight], fused=True) for weight in model.parameters()
        }
        for weight in self.each:
            weight.register_post_accumulate_grad_hook(self._stepped)

    def _stepped(self, weight: Tensor) -> None:
        self.each[weight].step()
        self.each[weight].zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        return {
            weight: state for each in self.each.values() for weight, state in each.state.items()
        }

    def step(self) -> None:
        """Nothing is left to do."""

    zero_grad = step
