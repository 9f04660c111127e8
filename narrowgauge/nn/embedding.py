"""Embeddings whose looked-up rows are rounded to INT4 or INT8 with a learned step size (LSQ).

    W [V, K] weight, x [..., K] looked-up rows, s step size of the table, max 7 or 127

    forward      q = round(clip(x / s)),  clip to -max ... max
                 y = s q                                                              [..., K]
    backward     grad_x    = gy where x was not clipped, else 0; likewise for the rows of W
                 grad_step = sum gy * (q - x / s where not clipped, else q) / sqrt(V K max)

Source: LSQ (arXiv 1902.08153), as applied to embeddings in "Training Transformers
with 4-bit Integers" (arXiv 2306.11987, section 5). s is a parameter of the layer.
It starts at 2 mean|W| / sqrt(max), the rule for Linears (`learned_step`), with a
cold start of one step. Arithmetic is float32, and y has W's dtype.

The optimizer updates the weight in its own precision, so nothing gets smaller: the model learns to
work with a quantized table. A tied output head reads W itself, or W cast by its own recipe. Left
out from the paper's code: a rotation of the rows and a rounding of their gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowgauge.addresses import is_compiling
from narrowgauge.formats import INT4, INT8, IntFormat
from narrowgauge.nn import step_end, transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.nn.converted_state import SETTING, ConvertedState, StateField
from narrowgauge.nn.learned_step import LearnedSteps
from narrowgauge.recipe import LearnedStep

Codes = Literal["int4", "int8"]
FORMATS: dict[str, IntFormat] = {"int4": INT4, "int8": INT8}
WEIGHT = "w"


@dataclass(eq=False, kw_only=True)
class EmbeddingState(ConvertedState):
    """The attributes of a QEmbedding. format: INT4 or INT8."""

    format: IntFormat = field(default=INT8, metadata=SETTING)


class QEmbedding(nn.Embedding):
    """nn.Embedding whose rows are integers times a learned step size.

    `convert(embeddings=...)` creates it.

    format        INT4 or INT8
    steps         the learned step, parameter `steps.w`: log(step) / RATE, [1] float32
    is_suspended  True: return the rows unquantized
    """

    state: EmbeddingState
    steps: LearnedSteps
    format = StateField[IntFormat]()
    is_suspended = StateField[bool]()
    __prepare_scriptable__ = transforms.refuse_script  # called by torch.jit.script
    qconfig = property(None, transforms.refuse_qconfig)  # set by torch.ao.quantization

    @classmethod
    def adopt(cls, module: nn.Embedding, codes: Codes) -> QEmbedding:
        """Turn an nn.Embedding into a QEmbedding in place.

        The module object, its parameters, hooks and users stay the same.
        """
        module.__class__ = cls
        assert isinstance(module, cls)
        module.state = EmbeddingState(format=FORMATS[codes])
        step_end.follow_layer(module)
        steps = LearnedSteps({WEIGHT: LearnedStep(cold_steps=1)}, module.weight.device)
        module.steps = steps.requires_grad_(module.weight.requires_grad)
        return module

    def restore(self) -> None:
        """Turn it into an nn.Embedding again, in place."""
        step_end.forget(self)
        del self.steps
        del self.__dict__["state"]
        self.__class__ = nn.Embedding  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        if self.state.is_suspended:
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
        """[1] float32. In the cold start the step is computed from the weight."""
        step = self.steps.get(WEIGHT)
        assert step is not None
        if not self.steps.is_cold:
            return step
        # Read before no_grad below, where is_grad_enabled is always False
        # and the cold start would never end.
        writes = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            found = (
                2
                * self.weight.detach().float().abs().mean().reshape(1)
                / math.sqrt(self.format.max)
            )
            there = found.isfinite() & (found > 0)
            found = self.steps.put(WEIGHT, torch.where(there, found, step.detach()), there, writes)
        # Add the parameter times zero: it then has a gradient on every rank, which DDP waits for.
        return found + 0.0 * (step - step.detach())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format} with a learned step"

    # --- interface that `step_end` requires of a layer

    recipe = scaling = sampling = None  # ranks exchange nothing: equal weights, equal steps

    def end_step(self) -> None:
        """Do nothing: the learned step is the only state."""

    def empty_cache(self, keep: bool = False) -> None:
        """Do nothing: no casts are cached."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        step_end.follow_layer(self)

    def __getstate__(self) -> dict[str, Any]:
        plain: dict[str, Any] = super().__getstate__()  # without the compiled call
        return plain | {"state": self.state.copied()}


class _Rounded(torch.autograd.Function):
    """Fake quantization with LSQ's gradients. Saves x and the step for backward.

    x       [..., K], any float dtype
    step    [1] float32
    most    largest code
    scale   factor of the gradient of the step
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, most: float, scale: float) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.most, ctx.scale = most, scale
        return ((x.float() / step).clamp(-most, most).round() * step).to(x.dtype)

    @staticmethod
    @no_double_backward(
        "an embedding with a learned step", "Compute inside `with narrowgauge.suspended(model):`."
    )
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, step = ctx.saved_tensors
        ratio = x.float() / step
        inside = ratio.abs() <= ctx.most
        error = ratio.clamp(-ctx.most, ctx.most).round() - torch.where(inside, ratio, 0.0)
        return (
            torch.where(inside, gy, 0.0),
            (gy.float() * error).sum().reshape(1) * ctx.scale,
            None,
            None,
        )
