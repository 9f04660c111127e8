"""Estimate a rank's memory from the plan of one process.

The estimate subtracts shards of other ranks, and adds tensors that are gathered temporarily.

fsdp  weights, gradients and states: 1/F each. Whole on every rank during the computation: weights
      outside of the blocks, the current block and the next one; in backward also the gradients of a
      block, before and after their reduction
tp    weights, gradients and states of the blocks and of an untied head, and tensors that the
      blocks' inner layers save: 1/T. Tensors that norms and residuals save, and the embedding:
      whole
pp    1/P of the blocks. A rank saves several micro-batches for backward, as `micro_batches_in_flight`
      says for each schedule; embeddings and head count on every stage. With fsdp the weights of a stage stay whole through the step, and
      so do its gradients
sp    as tp; tensors that norms and residuals save are 1/T as well, which is not subtracted
dp    a copy on each rank. DistributedDataParallel keeps gradients as views of its buckets, which
      exist from step to step
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.plan.forecast import Forecast
    from narrowgauge.plan.moments import Kind, MemoryMoment

# Two CPU ranks are off by 0.6 and 0.7 % (tests/plan/planned_ranks.py). GPUs are not measured, and
# NCCL's buffers are left out.
ERROR = {"fsdp": 0.05, "tp": 0.05, "pp": 0.20}
OWNED = ("weights", "gradients", "states")


def divided(
    whole: Forecast,
    layers: int,
    *,
    copies: int = 1,
    fsdp: int = 1,
    tp: int = 1,
    stages: int = 1,
    in_flight: float = 1,
    steady: bool = True,
) -> Forecast:
    """Return the forecast of one rank.

    whole      forecast of one process with a rank's batch and, with stages, a stage's layers
    layers     blocks of each stack in `whole`
    copies     ranks of DistributedDataParallel
    fsdp, tp   numbers of shards
    stages     pipeline stages
    in_flight  micro-batches whose activations a rank saves for backward, from
               `micro_batches_in_flight`
    steady     True if new micro-batches start while gradients are summed; else (at most as many as
               stages) each backward pass leaves one less in flight
    """
    if fsdp * tp * stages == 1:
        return _in_buckets(whole) if copies > 1 else whole
    blocks = whole.block_weights * layers
    weights = max((each.parts.get(("weights", ""), 0) for each in whole.moments), default=0)
    around = max(0, weights - blocks)
    cut = min(blocks + whole.head_weights, weights)  # split by tp

    def share(moment: MemoryMoment) -> MemoryMoment:
        parts = dict(moment.parts)
        for part in OWNED:
            size = parts.get((part, ""), 0)
            in_cut = size * cut // weights if weights else 0
            parts[part, ""] = (in_cut // tp + size - in_cut) // fsdp
        kept = in_flight if steady or moment.micro_batch == 1 else max(1, in_flight - 1)
        parts = {kind: _saved(kind, size, tp, kept) for kind, size in parts.items()}
        if fsdp > 1 and moment.phase != "step":
            # fully_shard prefetches the next block; a pipeline stage with fsdp stays gathered.
            at_once = blocks if stages > 1 else 2 * whole.block_weights
            gathered = around - (cut - blocks) + (cut - blocks) // tp + at_once // tp
            gradients = gathered if stages > 1 else at_once // tp
            gradients = gradients if moment.phase.startswith("backward") else 0
            parts["transient", ""] = parts.get(("transient", ""), 0) + gathered + gradients
        change = sum(parts.values()) - moment.alive
        return replace(
            moment, parts=parts, alive=moment.alive + change, allocated=moment.allocated + change, end=max(0, moment.end + change)
        )  # fmt: skip

    moments = tuple(map(share, whole.moments))
    sizes = {"fsdp": fsdp, "tp": tp, "pp": stages}
    error = max(ERROR[key] for key, size in sizes.items() if size > 1)
    words = ", ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
    own = replace(
        whole,
        moments=moments,
        allocated_error=error,
        reserved_error=max(error, whole.reserved_error),
    )
    note = f"one rank's share with {words} is an estimate: cut as they are sharded, gathered blocks added"
    return replace(
        own,
        reserved=own.allocated + max(0, whole.reserved - whole.allocated),
        notes=(*whole.notes, note),
    )


def micro_batches_in_flight(schedule: str, ranks: int, micro_batches: int) -> float:
    """Return the most micro-batches that one rank saves for backward, on the rank with the most.

    schedule   name in torch.distributed.pipelining, as the setting `schedule`
    ranks      ranks of one pipeline, P

    GPipe runs all forward passes first. The schedules below 1F1B place two stages on a rank, so
    one micro-batch in one stage counts half. The counts equal torch 2.13's own order of work. A
    zero-bubble schedule delays weight gradients, and a delayed one keeps its input alive.
    """
    most = {
        "GPipe": micro_batches,
        "1F1B": ranks,
        "Interleaved1F1B": (3 * ranks - 1) / 2,
        "InterleavedZeroBubble": ranks,
        "ZBVZeroBubble": ranks,
        "DualPipeV": (2 * ranks + 1) / 2,
    }[schedule]
    return min(most, micro_batches)


def _in_buckets(whole: Forecast) -> Forecast:
    """Add all gradients to every moment. This is exact except for the padding of buckets."""
    gradients = ("gradients", "")
    most = max((each.parts.get(gradients, 0) for each in whole.moments), default=0)

    def held(moment: MemoryMoment) -> MemoryMoment:
        more = most - moment.parts.get(gradients, 0)
        sizes = {name: getattr(moment, name) + more for name in ("alive", "allocated", "end")}
        return replace(moment, parts={**moment.parts, gradients: most}, **sizes)

    own = replace(whole, moments=tuple(map(held, whole.moments)))
    return replace(own, reserved=own.allocated + max(0, whole.reserved - whole.allocated))


def _saved(kind: Kind, size: int, tp: int, in_flight: float) -> int:
    part, module = kind
    if part != "saved":
        return size
    # tp splits attention, MLP and the layers in them, but not tensors of the block itself, such as
    # residual sums.
    inner = "." in module or "attn" in module or "mlp" in module
    return int(size * in_flight) // (tp if inner else 1)
