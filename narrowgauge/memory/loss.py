"""Fused output head and cross-entropy over chunks of tokens; the full logits never exist.

    hidden [T, K], weight [V, K], targets [T]

    z     = hidden @ weight.T + bias                  [rows, V], one chunk at a time
    z     = softcap * tanh(z / softcap)               optional
    loss  = sum over valid t of  lse(z[t]) - z[t, target] + z_loss * lse(z[t])^2

Forward computes the gradients too, while a chunk's logits exist; backward multiplies them by the
gradient of the loss. There are three GEMMs, as in the unfused loss. Saved for backward are
grad_hidden [T, K] and grad_weight [V, K] in float32, which the unfused loss would allocate in
backward. Ignored tokens are removed before the first GEMM.

dtypes are as in the unfused loss: operands in autocast's dtype (else hidden's), logits rounded to
that dtype, softmax and loss in float32. grad_weight is summed over chunks in float32, where the
unfused loss rounds once per GEMM.
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
# Size of a chunk's float32 logits. The CPU's value is measured: below 8 MiB many small GEMMs cost
# more than the cache saves (docs/limited-memory.md). A guess of 2 MiB was slower. The GPU's value
# is an estimate: enough rows to fill the multiprocessors.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
# Lower limits for huge vocabularies or batches: smaller GEMMs would be inefficient.
MIN_VOCAB_SLICE = 256
MIN_ROWS = {"cpu": 32, "cuda": 256}


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
    """Sum -log softmax(hidden @ weight.T + bias)[target] over the valid targets, and count them.

    hidden   [..., K] float, the last hidden states
    weight   [V, K] float, of the output head
    targets  [...] int64, with hidden's leading shape; `ignore_index` marks targets that do not
             count
    bias     [V] float, of the output head, or None
    softcap  replace logits by softcap * tanh(logits / softcap)
    z_loss   add this factor times the squared log-sum-exp per valid target
    chunk    tokens per chunk, and words per slice; None: sized for 16 MiB of logits on the CPU and
             256 MiB on a GPU, half as much per slice
    checked  targets are known to be in range: no readback from the GPU, and ignored tokens are
             computed
    slices   recompute logits in backward over slices of the vocabulary: no float32 gradient of the
             head, for one more GEMM with the head (loss_slices.py)
    ->       (loss, count), 0-d: float32 (float64 for float64 inputs) and int64; 0 and 0 without
             valid targets

    Targets belong to the same positions as the hidden states. A language model shifts them:
    hidden[:, :-1] and ids[:, 1:]. Divide the loss by the count (at least 1), or by the count of all
    micro-batches. A vocabulary-sharded head (DTensor) needs DTensor hidden states; loss and count
    then cover all words and are equal on every rank (loss_parallel.py).

    Differentiable once with respect to hidden, weight and bias; retain_graph=True is supported.
    Raises ShapeError, and DataError for a target outside 0 ... V - 1, which synchronizes with the
    GPU. Under torch.compile, targets are not checked and ignored tokens are computed, since both
    depend on data.
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
        # Readback from the GPU. Ignored tokens are dropped before the first GEMM.
        if int(count) < labels.numel():
            states, labels = states[valid], labels[valid]
            valid = torch.ones_like(labels, dtype=torch.bool)
        _check_targets(labels, words)

    device_type = hidden.device.type
    autocasts = hidden.dtype != torch.float64 and torch.is_autocast_enabled(device_type)
    compute_dtype = torch.get_autocast_dtype(device_type) if autocasts else hidden.dtype
    if slices and shard is not None:
        raise ConfigError(
            "chunked_cross_entropy: slices = True, but ranks share the words of the head, a DTensor. Leave slices out: its gradient is "
            "divided among them already.",
            code="chunked-loss.slices",
        )

    kind = device_facts(device_type, hidden.device.index).type
    limit = CHUNK_BYTES.get(kind, CHUNK_BYTES["cuda"])
    options = LossOptions(
        rows=chunk or _rows(kind, words if shard is None else shard.most),
        # Half the limit: a slice's logits and their gradient exist together.
        vocab_slice=chunk or max(MIN_VOCAB_SLICE, limit // (8 * max(len(labels), 1))),
        compute_dtype=compute_dtype,
        gemm_dtype=_gemm_dtype(compute_dtype, hidden.device),
        softcap=softcap or 0.0,
        z_loss=z_loss,
        needs_gradients=torch.is_grad_enabled(),
        has_ignored=not checks_targets,
        shard=shard,
    )
    # Under autocast the GEMMs would round their operands again, and run in bfloat16 on CPUs where
    # float32 was chosen for speed.
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
        accumulate_dtype = options.accumulate_dtype
        needs = [options.needs_gradients and need for need in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        # float32 sums over chunks: rounding to 16 bits once per chunk would add up.
        grad_weight = torch.zeros_like(weight, dtype=accumulate_dtype) if needs[1] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=accumulate_dtype)
            if needs[2] and bias is not None
            else None
        )

        rhs = options.operand(weight)
        loss = torch.zeros((), dtype=accumulate_dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], options.rows):
            rows = slice(start, start + options.rows)
            lhs = options.operand(hidden[rows])
            logits = options.logits(lhs, rhs, bias)
            chunk_loss, grad = _loss_and_gradient(
                logits, labels[rows], valid[rows], options, any(needs)
            )
            loss += chunk_loss
            if grad is None:
                continue
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = options.operand(grad)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ rhs).to(options.compute_dtype)
            if grad_weight is not None:
                if grad_weight.dtype == grad.dtype:
                    # In place: `grad.T @ lhs` would allocate another [V, K].
                    grad_weight.addmm_(grad.T, lhs)
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
            # In place unless the graph is retained for another backward: a copy of [V, K] would be
            # the largest tensor here.
            keeps_graph = (
                torch.compiler.is_compiling()
                or torch._C._autograd._get_current_graph_task_keep_graph()
            )
            grad_weight = (
                grad_weight * grad_loss if keeps_graph else grad_weight.mul_(grad_loss)
            ).to(ctx.dtypes[0])
        if grad_bias is not None:
            grad_bias = (grad_bias * grad_loss).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, valid: Tensor, options: LossOptions, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a chunk and its gradient [rows, V] with respect to the uncapped logits.

    The gradient is None unless `needs_gradient`.
    """
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
    # Softmax in place of log_softmax: no second [rows, V].
    grad = log_p.exp_() if options.shard is None else p
    if options.z_loss or options.has_ignored:
        grad = grad.mul_(factor)
    grad = (
        grad.scatter_add_(1, labels, -weight)
        if options.shard is None
        else options.shard.subtract(grad, labels, weight)
    )
    if options.softcap:
        grad = grad.mul_(1 - (capped / options.softcap).square())
    return total, grad


def _rows(device_type: str, vocabulary: int) -> int:
    """Return the tokens per chunk, a power of two."""
    limit = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // (4 * vocabulary)
    return max(MIN_ROWS.get(device_type, MIN_ROWS["cuda"]), 1 << max(limit, 1).bit_length() - 1)


def _gemm_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    is_16bit = compute_dtype in (torch.bfloat16, torch.float16)
    facts = device_facts(device.type, device.index)
    # float32 holds the same values as the 16-bit operands, and such CPUs are faster with it.
    slow = facts.type == "cpu" and (compute_dtype == torch.float16 or not facts.bf16_gemm)
    return torch.float32 if is_16bit and slow else compute_dtype


def _check_options(softcap: float | None, z_loss: float, chunk: int | None) -> None:
    if (softcap is not None and not 0 < softcap < math.inf) or (
        chunk is not None and (not isinstance(chunk, int) or chunk < 1)
    ):
        raise ConfigError(
            f"chunked_cross_entropy: softcap = {softcap} and chunk = {chunk} must be positive, chunk whole. Or leave them out.",
            code="chunked-loss.positive",
        )
    if not 0 <= z_loss < math.inf:
        raise ConfigError(
            f"chunked_cross_entropy: z_loss = {z_loss}; it must be at least 0. 0 leaves it out.",
            code="chunked-loss.z-loss",
        )


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise ShapeError(
                f"chunked_cross_entropy: {name} is {list(tensor.shape)} {tensor.dtype}; it must be of a float type. "
                "Pass the hidden states, not token ids, and the head's own weight and bias.",
                code="chunked-loss.dtype",
            )
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"chunked_cross_entropy: hidden is {list(hidden.shape)}, weight {list(weight.shape)}; hidden must be [..., K] "
            "and weight [V, K] with the same K. Pass the hidden states that the output head receives.",
            code="chunked-loss.shapes",
        )
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise ShapeError(
            f"chunked_cross_entropy: targets are {list(targets.shape)} {targets.dtype}; they must be "
            f"{list(hidden.shape[:-1])} torch.int64. Shift and convert the labels first.",
            code="chunked-loss.targets",
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(
            f"chunked_cross_entropy: bias is {list(bias.shape)}, it must be [{weight.shape[0]}]. Pass the head's own bias.",
            code="chunked-loss.bias",
        )


def _check_targets(labels: Tensor, vocabulary: int) -> None:
    """Raise DataError for targets out of range; one synchronization with the GPU."""
    if not labels.numel():
        return
    # On a GPU an index out of range would abort the CUDA context instead of raising.
    low, high = torch.stack(labels.aminmax()).tolist()
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"chunked_cross_entropy: target {low if low < 0 else high} is outside the {vocabulary} classes (0 ... "
            f"{vocabulary - 1}). Use the tokenizer that the model was made for, or ignore_index for tokens that do not count.",
            code="chunked-loss.class",
        )
