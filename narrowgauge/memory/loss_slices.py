"""Chunked loss (loss.py) that recomputes the logits in backward, over slices of the vocabulary.

    saved for backward  hidden [T, K] and lse [T], the float32 log-sum-exp of each token
    backward            for each slice of v words:
                            z = hidden @ weight[v].T + bias[v]
                            g = d loss / d z                  [T, v]
                            grad_hidden += g @ weight[v]      float32
                            grad_weight[v] = g.T @ hidden     all tokens in one GEMM, rounded once

The head has no gradient between forward and backward, and never one in float32. For 128,256 words
of 4,096 elements that saves 2 GiB. hidden exists in the model anyway. Cost: four GEMMs with the
head instead of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.nn.autograd_rules import alias_while_compiling, no_double_backward

if TYPE_CHECKING:
    from narrowgauge.memory.loss_options import LossOptions


def sliced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    valid: Tensor,
    options: LossOptions,
) -> Tensor:
    """Return the loss; arguments as in `loss._ChunkedCrossEntropy`."""
    loss: Tensor = _SlicedCrossEntropy.apply(hidden, weight, bias, labels, valid, options)
    return loss


class _SlicedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: Tensor, options: LossOptions
    ) -> Tensor:  # fmt: skip
        accumulate_dtype = options.accumulate_dtype
        rhs = options.operand(weight)
        lse = torch.empty(len(hidden), dtype=accumulate_dtype, device=hidden.device)
        loss = torch.zeros((), dtype=accumulate_dtype, device=hidden.device)
        for start in range(0, len(hidden), options.rows):
            rows = slice(start, start + options.rows)
            z = options.logits(options.operand(hidden[rows]), rhs, bias)
            z = options.capped(z)
            target_logits = z.gather(1, labels[rows, None]).squeeze(1)
            lse[rows] = _log_sum_exp_(z)
            token_loss = lse[rows] - target_logits
            if options.z_loss:
                token_loss = token_loss + options.z_loss * lse[rows].square()
            loss += (token_loss * valid[rows]).sum()
        ctx.save_for_backward(hidden, weight, bias, labels, valid, lse)
        ctx.options = options
        return alias_while_compiling(loss)

    @staticmethod
    @no_double_backward("chunked_cross_entropy", "Use torch.nn.functional.cross_entropy for them.")
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, valid, lse = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=options.accumulate_dtype) if needs[0] else None
        grad_weight = torch.empty_like(weight) if needs[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
        # Multiply by the gradient of the loss before rounding g, as in the unfused loss.
        scale = valid.to(options.accumulate_dtype) * grad_loss
        factor = scale * (1 + 2 * options.z_loss * lse) if options.z_loss else scale
        lhs = options.operand(hidden)
        for words in _slices(len(weight), options.vocab_slice):
            rhs = options.operand(weight[words])
            z = options.capped(options.logits(lhs, rhs, None if bias is None else bias[words]))
            # In place, except with a softcap: its derivative below needs z.
            g = z - lse[:, None] if options.softcap else z.sub_(lse[:, None])
            g = g.exp_().mul_(factor[:, None])

            inside = (labels >= words.start) & (labels < words.stop)
            # Words of other slices get index 0 and the value 0.
            place = torch.where(inside, labels - words.start, 0)[:, None]
            g = g.scatter_add_(1, place, torch.where(inside, -scale, 0.0)[:, None])
            if options.softcap:
                g = g.mul_(1 - (z / options.softcap).square())
            if grad_bias is not None:
                grad_bias[words] = g.sum(dim=0)

            g = options.operand(g)
            del z
            if grad_hidden is not None:
                grad_hidden += g @ rhs
            if grad_weight is not None:
                grad_weight[words] = (g.T @ lhs).to(weight.dtype)
            # Free the memory before the next slice allocates its own.
            del g
        grad_hidden_rounded = (
            None if grad_hidden is None else grad_hidden.to(options.compute_dtype).to(hidden.dtype)
        )
        return grad_hidden_rounded, grad_weight, grad_bias, None, None, None


def _log_sum_exp_(z: Tensor) -> Tensor:
    """Return logsumexp of each row, bit-identical to torch.logsumexp, computed in z's own memory."""
    # torch.logsumexp allocates a second [rows, V], which fake tensors do not show: memory plans
    # were 18 % too low.
    largest = z.amax(dim=-1)
    # As in torch: a row of -inf gives -inf and not NaN.
    largest = torch.where(largest.isinf(), 0.0, largest)
    return z.sub_(largest[:, None]).exp_().sum(dim=-1).log_().add_(largest)


def _slices(vocabulary: int, words: int) -> Iterator[slice]:
    for start in range(0, vocabulary, words):
        yield slice(start, min(start + words, vocabulary))
