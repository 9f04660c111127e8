"""Linear and cross-entropy in one, over chunks of tokens: the logits of all tokens never exist at once.

    hidden [T, K], weight [V, K], targets [T]

    z      = hidden @ weight.T + bias                  [rows, V], one chunk at a time
    z      = softcap * tanh(z / softcap)               where asked for
    loss   = sum over valid t of  lse(z[t]) - z[t, target] + z_loss * lse(z[t])^2

Gradients are computed in forward, while a chunk's logits are there, for the sum itself; backward multiplies them by the gradient
of the loss. So no product is computed twice: the same three as the plain path's. Kept for backward: grad_hidden [T, K], and
grad_weight [V, K] in float32, which the plain path would make in backward. Ignored tokens are left out before the first product.
A backward that keeps its graph (retain_graph=True) leaves both as they are, and so has a second [V, K] for its result; one that
frees it multiplies in place.

Types are the plain path's: operands in autocast's dtype, or hidden's without autocast; logits rounded to it; softmax and loss in
float32. grad_weight is summed over chunks in float32, where the plain path rounds once per GEMM. A CPU without bfloat16
instructions multiplies 16-bit operands in float32, which holds the same values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers
from narrowgauge.errors import ConfigError, DataError, ShapeError
from narrowgauge.memory.loss_options import LossOptions
from narrowgauge.nn.autograd_rules import alias_while_compiling, no_double_backward
from narrowgauge.ops.registry import device_facts

IGNORED = -100
# Of a chunk's logits in float32. The CPU's is measured: below 8 MiB the many small products cost more than the cache gives
# (docs/limited-memory.md). A GPU's is an estimate: enough rows to fill the multiprocessors.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
FEWEST_WORDS = 256
FEWEST_ROWS = {"cpu": 32, "cuda": 256}


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    checked: bool = False,
    slices: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum of -log softmax(hidden @ weight.T + bias)[target] over the valid targets, and their number.

    hidden   [..., K] float, last hidden states      weight  [V, K] float, the output head's      bias  [V] float or None
    targets  [...] int64, of hidden's leading shape; ignore_index marks the ones that do not count
    softcap  logits become softcap * tanh(logits / softcap)
    z_loss   this times the squared log-sum-exp is added for each valid target
    chunk    tokens of a chunk, and words of a slice; None: as many as make a few MiB of logits on the CPU; on a GPU 256 MiB, 128 of a slice
    slices   backward computes the logits again, over slices of the vocabulary: no gradient of the head is held in float32, for one product
             with the head more (loss_slices.py)
    checked  the caller knows that targets lie in range: nothing is read back from a GPU, and ignored tokens are computed
    ->       loss float32 (float64 for float64), count int64, both 0-d; 0 and 0 if no target is valid

    Targets are those of their own positions: a language model's are shifted, hidden[:, :-1] and ids[:, 1:]. Divide the loss by the
    count, at least 1, or by that of all micro-batches. A head that is sharded by its words, a DTensor, takes hidden states that are one
    too (loss_parallel.py); loss and count are then of all words, the same on every rank.

    Differentiable once in hidden, weight and bias, by as many backward passes as keep the graph. Raises ShapeError and, for a target
    outside 0 ... V - 1, DataError (which synchronises with a GPU). While compiling, targets are not checked and ignored tokens are
    computed, since both depend on data.
    """
    _check_options(softcap, z_loss, chunk)
    _check(hidden, weight, targets, bias)
    words, shard = weight.shape[0], None
    if type(weight).__name__ == "DTensor":
        from narrowgauge.memory.loss_parallel import unwrapped

        hidden, weight, bias, targets, shard = unwrapped(hidden, weight, bias, targets)
    states, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    valid = labels != ignore_index
    count = valid.sum()
    checks_targets = not checked and not torch.compiler.is_compiling() and holds_numbers(labels)
    if checks_targets:
        if int(count) < labels.numel():
            states, labels = states[valid], labels[valid]
            valid = torch.ones_like(labels, dtype=torch.bool)
        _check_targets(labels, words)
    device_type = hidden.device.type
    autocasts = hidden.dtype != torch.float64 and torch.is_autocast_enabled(device_type)
    computes_in = torch.get_autocast_dtype(device_type) if autocasts else hidden.dtype
    if slices and shard is not None:
        raise ConfigError(
            "chunked_cross_entropy: slices = True, but ranks share the words of the head, a DTensor. Leave slices out: its gradient is "
            "divided among them already."
        )
    kind = device_facts(device_type, hidden.device.index).type
    limit = CHUNK_BYTES.get(kind, CHUNK_BYTES["cuda"])
    options = LossOptions(
        rows=chunk or _rows(kind, words if shard is None else shard.most),
        words=chunk or max(FEWEST_WORDS, limit // (8 * max(len(labels), 1))),  # beside logits their gradient's products
        computes_in=computes_in,
        multiplies_in=_multiplies_in(computes_in, hidden.device),
        softcap=softcap or 0.0,
        z_loss=z_loss,
        needs_gradients=torch.is_grad_enabled(),
        has_ignored=not checks_targets,
        shard=shard,
    )
    # Autocast would round the operands of these products again, and multiply in bfloat16 where float32 was chosen for speed.
    with torch.autocast(device_type, enabled=False):
        labels = labels.where(valid, 0)
        if slices:
            from narrowgauge.memory.loss_slices import sliced

            return sliced(states, weight, bias, labels, valid, options), count
        loss = _ChunkedCrossEntropy.apply(states, weight, bias, labels, valid, options)
    return loss, count


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        valid: Tensor,
        options: LossOptions,
    ) -> Tensor:
        wide = options.wide
        needs = [options.needs_gradients and need for need in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None
        rhs = options.operand(weight)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], options.rows):
            rows = slice(start, start + options.rows)
            lhs = options.operand(hidden[rows])
            logits = options.logits(lhs, rhs, bias)
            chunk_loss, grad = _loss_and_gradient(logits, labels[rows], valid[rows], options, any(needs))
            loss += chunk_loss
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = options.operand(grad)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ rhs).to(options.computes_in)
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.T, lhs)  # without a second [V, K]
                else:
                    grad_weight += grad.T @ lhs
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return alias_while_compiling(loss)

    @staticmethod
    @no_double_backward("chunked_cross_entropy", "Use torch.nn.functional.cross_entropy for them.")
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            # In place unless another backward pass may come: a second copy would be the largest tensor here.
            keeps_graph = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
            grad_weight = (grad_weight * grad_loss if keeps_graph else grad_weight.mul_(grad_loss)).to(ctx.dtypes[0])
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_loss).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, valid: Tensor, options: LossOptions, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum over the chunk, and its gradient with respect to the logits before the softcap [rows, V]."""
    capped = options.capped(logits)
    weight = valid[:, None].to(capped.dtype)
    if options.shard is not None:
        p, log_sum, target = options.shard.softmax(capped, labels)
        log_sum = log_sum[:, None]
        log_p_target = target[:, None] - log_sum
    else:
        labels = labels[:, None]
        log_p = torch.log_softmax(capped, dim=-1)
        log_p_target = log_p.gather(1, labels)
    loss = -log_p_target
    factor = weight
    if options.z_loss:
        log_sum = capped.gather(1, labels) - log_p_target if options.shard is None else log_sum
        loss = loss + options.z_loss * log_sum.square()
        factor = weight * (1 + 2 * options.z_loss * log_sum)
    total = (loss * weight).sum()
    if not needs_gradient:
        return total, None
    grad = log_p.exp_() if options.shard is None else p
    if options.z_loss or options.has_ignored:
        grad = grad.mul_(factor)
    grad = (
        grad.scatter_add_(1, labels, -weight) if options.shard is None else options.shard.subtract(grad, labels, weight)
    )
    if options.softcap:
        grad = grad.mul_(1 - (capped / options.softcap).square())
    return total, grad


def _rows(device_type: str, vocabulary: int) -> int:
    """Tokens of a chunk, a power of two."""
    limit = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // (4 * vocabulary)
    return max(FEWEST_ROWS.get(device_type, FEWEST_ROWS["cuda"]), 1 << max(limit, 1).bit_length() - 1)


def _multiplies_in(computes_in: torch.dtype, device: torch.device) -> torch.dtype:
    is_narrow = computes_in in (torch.bfloat16, torch.float16)
    facts = device_facts(device.type, device.index)
    slow = facts.type == "cpu" and (computes_in == torch.float16 or not facts.bf16_gemm)
    return torch.float32 if is_narrow and slow else computes_in


def _check_options(softcap: float | None, z_loss: float, chunk: int | None) -> None:
    if (softcap is not None and not 0 < softcap < math.inf) or (
        chunk is not None and (not isinstance(chunk, int) or chunk < 1)
    ):
        raise ConfigError(
            f"chunked_cross_entropy: softcap = {softcap} and chunk = {chunk} must be positive, chunk whole. Or leave them out."
        )
    if not 0 <= z_loss < math.inf:
        raise ConfigError(f"chunked_cross_entropy: z_loss = {z_loss}; it must be at least 0. 0 leaves it out.")


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise ShapeError(
                f"chunked_cross_entropy: {name} is {list(tensor.shape)} {tensor.dtype}; it must be of a float type. "
                "Pass the hidden states, not token ids, and the head's own weight and bias."
            )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"chunked_cross_entropy: hidden is {list(hidden.shape)}, weight {list(weight.shape)}; hidden must be [..., K] "
            "and weight [V, K] with the same K. Pass the hidden states that the output head receives."
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ShapeError(
            f"chunked_cross_entropy: targets are {list(targets.shape)} {targets.dtype}; they must be "
            f"{list(hidden.shape[:-1])} torch.int64. Shift and convert the labels first."
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(
            f"chunked_cross_entropy: bias is {list(bias.shape)}, it must be [{weight.shape[0]}]. Pass the head's own bias."
        )


def _check_targets(labels: Tensor, vocabulary: int) -> None:
    """One synchronisation; a target out of range would end the CUDA context instead."""
    if not labels.numel():
        return
    low, high = torch.stack(labels.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"chunked_cross_entropy: target {low if low < 0 else high} is outside the {vocabulary} classes (0 ... "
            f"{vocabulary - 1}). Use the tokenizer that the model was made for, or ignore_index for tokens that do not count."
        )
