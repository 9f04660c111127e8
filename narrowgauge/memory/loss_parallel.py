"""The chunked loss (loss.py) over a head whose vocabulary is sharded: no rank ever has the logits of all V words of a token.

    logits of this rank  z [rows, V / ranks], words start ... start + V / ranks

    top    = max over ranks of max z                                   one all-reduce of [rows]
    total  = sum over ranks of sum exp(z - top)                        one all-reduce of [2, rows] with
    target = sum over ranks of z[target], where this rank has it       this one
    lse    = log total + top

What follows is as in loss.py: the gradient of the logits is local, that of weight and bias too; that of hidden is a part of a sum,
which DTensor adds up (all-reduce, or reduce-scatter where hidden is cut along the tokens). In float32, or float64; sums over ranks
alone are in another order than one process's. Two messages of 4 and 8 bytes per token, whatever V.

Imported when the weight is a DTensor.
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
    """The words of this rank: from `start` on, at most `most`, as on every rank; `group` has the others."""

    start: int
    most: int
    group: dist.ProcessGroup

    def softmax(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(softmax of this rank's words, log-sum-exp of all words, logits of the labels).

        logits [rows, words], labels [rows] of all words; -> [rows, words], [rows], [rows]. NaN and infinity reach the last two on
        every rank: a MAX may lose them, the sum does not.
        """
        # The last ranks may have no words.
        top = logits.amax(dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        here, place = self.places(labels, logits.shape[1])
        own = logits.gather(1, place[:, None])[:, 0] if logits.shape[1] else torch.zeros_like(top)
        p = (logits - top[:, None]).exp_()
        sums = torch.stack((p.sum(dim=1), torch.where(here, own, 0.0)))
        dist.all_reduce(sums, group=self.group)
        total, target = sums.unbind()
        return p.div_(total[:, None]), total.log() + top, target

    def places(self, labels: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """(whether this rank has the word, its place or 0), both [rows]."""
        here = (labels >= self.start) & (labels < self.start + words)
        return here, torch.where(here, labels - self.start, 0)

    def subtract(self, grad: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """grad [rows, words] less weight [rows, 1] at the labels, in place."""
        if not grad.shape[1]:
            return grad
        here, place = self.places(labels, grad.shape[1])
        return grad.scatter_add_(1, place[:, None], -weight * here[:, None])


def unwrapped(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, VocabularyShard]:
    """The local tensors: hidden and targets of all tokens, weight and bias of the words of this rank.

    Raises ConfigError for a head that is not sharded by its words alone, and for hidden states that do not say how they lie.
    """
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    axes = [axis for axis, placement in enumerate(weight.placements) if placement.is_shard() and mesh.size(axis) > 1]
    by_words = all(type(weight.placements[axis]) is Shard and weight.placements[axis].is_shard(0) for axis in axes)
    if len(axes) > 1 or not by_words or any(each.is_partial() for each in weight.placements):
        raise ConfigError(
            f"chunked_cross_entropy: weight lies as {weight.placements} on the mesh; the loss reads a head that is sharded by its words "
            "on one axis, Shard(0), as ColwiseParallel leaves it. Under fully_shard compute the loss inside the model's forward pass, "
            "where the weight is gathered."
        )
    if not isinstance(hidden, DTensor) or hidden.device_mesh != mesh:
        where = f"on {hidden.device_mesh}" if isinstance(hidden, DTensor) else "no DTensor"
        raise ConfigError(
            f"chunked_cross_entropy: weight lies on {mesh}, hidden is {where}, so whether ranks have the same tokens is not known. "
            "Pass DTensor.from_local(hidden, mesh, [Replicate()]) if they do, [Shard(i)] if they hold parts."
        )
    axis = axes[0] if axes else 0
    # Another axis may cut the batch: its ranks sum their own tokens, and users sum over them as without a head that is sharded.
    laid = tuple(Replicate() if each == axis else place for each, place in enumerate(hidden.placements))
    if any(not place.is_replicate() for place in laid):
        raise ConfigError(
            f"chunked_cross_entropy: hidden lies as {hidden.placements}; on axes other than the words' it must be Replicate. "
            "Pass each rank's own tokens on the mesh of the words alone."
        )
    there: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    partly = tuple(Partial() if each == axis else Replicate() for each in range(mesh.ndim))
    whole = hidden if hidden.placements == there else hidden.redistribute(placements=there)
    words = -(-weight.shape[0] // mesh.size(axis))  # of all ranks but the last ones: how Shard cuts
    shard = VocabularyShard(words * mesh.get_local_rank(axis), words, mesh.get_group(axis))
    return (
        local_part(whole, partly), local_part(weight, weight.placements), None if bias is None else _own_bias(bias, weight),
        targets.full_tensor() if isinstance(targets, DTensor) else targets, shard,
    )  # fmt: skip


def _own_bias(bias: Tensor, weight: DTensor) -> Tensor:
    if not isinstance(bias, DTensor) or bias.device_mesh != weight.device_mesh or bias.placements != weight.placements:
        raise ConfigError("chunked_cross_entropy: bias does not lie as weight does. Shard both by their words.")
    return local_part(bias, bias.placements)
