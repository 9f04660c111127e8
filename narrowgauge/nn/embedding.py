"""Embeddings whose rows are looked up as integers of 4 or 8 bits, with a learned step: LSQ (arXiv 1902.08153).

    W [V, K] the weight, x [..., K] the rows that are looked up, s the step of the table, max 7 or 127

    forward      q = round(clip(x / s)),  clip to -max ... max
                 y = s q                                                              [..., K]
    backward     grad_x    = gy where x was not clipped, and so of W's rows
                 grad_step = sum gy * (q - x / s where not clipped, else q) / sqrt(V K max)

"Training Transformers with 4-bit Integers" (arXiv 2306.11987, section 5) has its embeddings so. s is a parameter of the layer and begins
with 2 mean|W| / sqrt(max), as those of Linears do (`learned_step`, with one step of a cold start). Computed in float32; y has W's type.

The weight keeps its numbers, which the optimizer moves, and nothing is smaller for it: a model learns to live with a narrow table. A head
that is tied to W reads W itself, or codes of its own recipe. Left out: what the paper's code does beside, a rotation of the rows and a
rounding of their gradient.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowgauge.addresses import is_compiling
from narrowgauge.formats import INT4, INT8, IntFormat
from narrowgauge.nn import step_end, transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.recipe import LearnedStep

Codes = Literal["int4", "int8"]
FORMATS: dict[str, IntFormat] = {"int4": INT4, "int8": INT8}
WEIGHT = "w"


class QEmbedding(nn.Embedding):
    """nn.Embedding that gives its rows as integers times a learned step. `convert(embeddings=...)` makes them.

    steps         the learned step, parameter `steps.w`, log(step) / RATE
    is_suspended  gives the rows as they are
    """

    format: IntFormat
    steps: LearnedSteps
    is_suspended: bool
    __prepare_scriptable__ = transforms.refuse_script  # looked for by torch.jit.script
    qconfig = property(None, transforms.refuse_qconfig)  # set by torch.ao.quantization

    @classmethod
    def adopt(cls, module: nn.Embedding, codes: Codes) -> QEmbedding:
        """Turns an nn.Embedding into a QEmbedding in place: its identity, parameters, hooks and users stay the same."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.format, module.is_suspended = FORMATS[codes], False
        module._for_step_end()
        steps = LearnedSteps({WEIGHT: LearnedStep(cold_steps=1)}, module.weight.device)
        module.steps = steps.requires_grad_(module.weight.requires_grad)
        return module

    def restore(self) -> None:
        """An nn.Embedding again."""
        step_end.forget(self)
        del self.steps
        for name in ("format", "is_suspended", "step_ended"):
            del self.__dict__[name]
        self.__class__ = nn.Embedding  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        if self.is_suspended:
            return super().forward(input)
        if not isinstance(input, Tensor):
            found: Tensor = transforms.leaf(self, input)
            return found
        if not is_compiling():
            transforms.refuse_active(None, "embedding", "a learned step", weight=self.weight)
        rows = super().forward(input)
        most = float(self.format.max)
        scale = 1 / math.sqrt(self.num_embeddings * self.embedding_dim * most)
        y: Tensor = _Rounded.apply(rows, self._step(), most, scale)
        return y

    def _step(self) -> Tensor:
        """[1] float32. In the cold start that of the weights, of which the parameter has a gradient of zero: all ranks have one."""
        step = self.steps.get(WEIGHT)
        assert step is not None
        if not self.steps.is_cold:
            return step
        writes = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            found = 2 * self.weight.detach().float().abs().mean().reshape(1) / math.sqrt(self.format.max)
            there = found.isfinite() & (found > 0)
            found = self.steps.put(WEIGHT, torch.where(there, found, step.detach()), there, writes)
        return found + 0.0 * (step - step.detach())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format} with a learned step"

    # --- what the end of an optimizer step asks of a layer (`step_end`)

    recipe = peers = scaling = sampling = None  # nothing that ranks would have to agree on: their weights are the same
    warned_of_ranks = False
    suspects = ()  # no casts are kept

    def _for_step_end(self) -> None:
        self.step_ended = False
        step_end.follow_layer(self)

    def end_step(self) -> None:
        """Nothing is kept from step to step but the learned step."""

    def empty_cache(self, keep: bool = False) -> None:
        """As above."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._for_step_end()


class _Rounded(torch.autograd.Function):
    """y of x, [..., K] of any float type, and the step, [1] float32. Keeps x alone for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, most: float, scale: float) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.most, ctx.scale = most, scale
        return ((x.float() / step).clamp(-most, most).round() * step).to(x.dtype)

    @staticmethod
    @no_double_backward("an embedding with a learned step", "Compute inside `with narrowgauge.suspended(model):`.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, step = ctx.saved_tensors
        ratio = x.float() / step
        inside = ratio.abs() <= ctx.most
        error = ratio.clamp(-ctx.most, ctx.most).round() - torch.where(inside, ratio, 0.0)
        return torch.where(inside, gy, 0.0), (gy.float() * error).sum().reshape(1) * ctx.scale, None, None
