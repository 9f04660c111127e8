"""Chunked loss (loss.py) for a vocabulary-sharded head; no rank has a token's full logits.

    logits of this rank  z [rows, V / ranks], for words start ... start + V / ranks

    top    = max over ranks of max z              one all-reduce of [rows]
    total  = sum over ranks of sum exp(z - top)   one all-reduce of [2, rows],
    target = sum over ranks of z[target]          together with `total`
    lse    = log total + top

z[target] is 0 on ranks that do not have the word. The gradients of logits, weight and bias are
local. The gradient of hidden is a partial sum, which DTensor reduces: all-reduce, or reduce-scatter
if hidden is sharded by tokens.

Computed in float32 (or float64); only the order of sums over ranks differs from a single process.
Messages: 4 and 8 bytes per token, independent of V. This module is imported only if the weight is a
DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from narrowgauge.errors import ConfigError
from narrowgauge.nn.sharded import local_part


@dataclass(frozen=True)
class VocabularyShard:
    """The words of one rank.

    start  first word of this rank
    most   largest number of words on any rank; the last ranks may have fewer
    group  the ranks that share the vocabulary
    """

    start: int
    most: int
    group: dist.ProcessGroup

    def softmax(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (softmax of this rank's words, log-sum-exp over all words, target logits).

        logits  [rows, words of this rank]
        labels  [rows], indices into all words
        ->      [rows, words], [rows], [rows]
        """
        # The last ranks may have no words; amax over an empty axis raises.
        top = logits.amax(dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        is_local, index = self.local_indices(labels, logits.shape[1])
        own = logits.gather(1, index[:, None])[:, 0] if logits.shape[1] else torch.zeros_like(top)
        p = (logits - top[:, None]).exp_()
        sums = torch.stack((p.sum(dim=1), torch.where(is_local, own, 0.0)))
        # NaN and infinity reach every rank by this sum, although the MAX above may lose them.
        dist.all_reduce(sums, group=self.group)
        total, target = sums.unbind()
        return p.div_(total[:, None]), total.log() + top, target

    def local_indices(self, labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Return (mask of labels on this rank, their local index or 0), both [rows]."""
        is_local = (labels >= self.start) & (labels < self.start + words)
        return is_local, torch.where(is_local, labels - self.start, 0)

    def subtract(self, grad: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Subtract weight [rows, 1] from grad [rows, words] at the labels, in place."""
        if not grad.shape[1]:
            return grad
        is_local, index = self.local_indices(labels, grad.shape[1])
        return grad.scatter_add_(1, index[:, None], -weight * is_local[:, None])


def unwrapped(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, VocabularyShard]:
    """Return the local tensors and this rank's VocabularyShard.

    hidden and targets cover all tokens, weight and bias the words of this rank. Raises ConfigError
    if the head is not sharded by words alone, or if the placement of hidden is unknown.
    """
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    axes = [
        axis
        for axis, placement in enumerate(weight.placements)
        if placement.is_shard() and mesh.size(axis) > 1
    ]
    by_words = all(
        type(weight.placements[axis]) is Shard and weight.placements[axis].is_shard(0)
        for axis in axes
    )
    if len(axes) > 1 or not by_words or any(each.is_partial() for each in weight.placements):
        raise ConfigError(
            f"chunked_cross_entropy: weight lies as {weight.placements} on the mesh; the loss reads a head that is sharded by its words "
            "on one axis, Shard(0), as ColwiseParallel leaves it. Under fully_shard compute the loss inside the model's forward pass, "
            "where the weight is gathered.",
            code="chunked-loss.weight-placement",
        )
    if not isinstance(hidden, DTensor) or hidden.device_mesh != mesh:
        where = f"on {hidden.device_mesh}" if isinstance(hidden, DTensor) else "no DTensor"
        raise ConfigError(
            f"chunked_cross_entropy: weight lies on {mesh}, hidden is {where}, so whether ranks have the same tokens is not known. "
            "Pass DTensor.from_local(hidden, mesh, [Replicate()]) if they do, [Shard(i)] if they hold parts.",
            code="chunked-loss.hidden-mesh",
        )
    axis = axes[0] if axes else 0
    # Another mesh axis may shard the batch. Its ranks sum their own tokens, and the user sums over
    # them, as with an unsharded head.
    placements = tuple(
        Replicate() if each == axis else placement
        for each, placement in enumerate(hidden.placements)
    )
    if any(not placement.is_replicate() for placement in placements):
        raise ConfigError(
            f"chunked_cross_entropy: hidden lies as {hidden.placements}; on axes other than the words' it must be Replicate. "
            "Pass each rank's own tokens on the mesh of the words alone.",
            code="chunked-loss.hidden-placement",
        )
    replicated: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    partial = tuple(Partial() if each == axis else Replicate() for each in range(mesh.ndim))
    whole = (
        hidden if hidden.placements == replicated else hidden.redistribute(placements=replicated)
    )
    # Shard splits in equal parts, rounded up; the last ranks get fewer.
    words = -(-weight.shape[0] // mesh.size(axis))
    shard = VocabularyShard(words * mesh.get_local_rank(axis), words, mesh.get_group(axis))
    return (
        local_part(whole, partial), local_part(weight, weight.placements), None if bias is None else _own_bias(bias, weight),
        targets.full_tensor() if isinstance(targets, DTensor) else targets, shard,
    )  # fmt: skip


def _own_bias(bias: Tensor, weight: DTensor) -> Tensor:
    if (
        not isinstance(bias, DTensor)
        or bias.device_mesh != weight.device_mesh
        or bias.placements != weight.placements
    ):
        raise ConfigError(
            "chunked_cross_entropy: bias does not lie as weight does. Shard both by their words.",
            code="chunked-loss.bias-placement",
        )
    return local_part(bias, bias.placements)
