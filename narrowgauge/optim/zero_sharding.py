"""ZeRO with whole tensors, distributed greedily as in FP8-LM (arXiv 2310.18313).

    # under DDP, instead of ng.optim.AdamW(model, ...)
    optimizer = ng.optim.zero(model, ng.optim.AdamW, lr=1e-3, states="8bit")
    # before the run: bytes of the fullest rank, and the mean
    print(ng.optim.zero_balance(model, 8, states="8bit"))

It builds on torch's ZeroRedundancyOptimizer. In each group, the largest remaining tensor goes to
the rank with the fewest elements so far. Every rank has all gradients, steps its own tensors, and
broadcasts them.

Weights and states are bit-identical to one process, because noise depends on names and tensors stay
whole. Every rule works, including rules on whole matrices. The balance fails if one tensor exceeds
a rank's share. Then shard rows with FSDP2, which works for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.optim import param_groups, shards
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.optim.size import state_bytes

if TYPE_CHECKING:
    from narrowgauge.optim.zero_optimizer import ZeroOptimizer


def zero(
    model: nn.Module | Sequence[Mapping[str, Any]],
    optimizer: type[LowPrecisionOptimizer] = AdamW,
    *,
    process_group: Any = None,
    **options: Any,
) -> ZeroOptimizer:
    """Build an optimizer whose parameters and states are distributed over a process group.

        model    a model, or groups of named parameters as from `narrowgauge.optim.groups`
        options  options of `optimizer`

    Every rank calls it with the same arguments.
    Raises ConfigError for parameters without names, for DTensors (their states are sharded
    already), and without a process group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigError(
            "zero: there is no process group whose ranks could share the tensors. Call torch.distributed.init_process_group first, under "
            f"torchrun; in one process take {getattr(optimizer, '__name__', optimizer)} itself.",
            code="zero.no-group",
        )
    from narrowgauge.optim.zero_optimizer import ZeroOptimizer

    plain, names = _groups_and_names(model, options)
    if not issubclass(optimizer, LowPrecisionOptimizer):
        raise ConfigError(
            f"zero: {optimizer!r} is none of narrowgauge.optim. Give torch's own to ZeroRedundancyOptimizer itself.",
            code="zero.optimizer",
        )
    return ZeroOptimizer(plain, names, optimizer, process_group, options)


@dataclass(frozen=True)
class ZeroBalance:
    """Parameters that each rank steps, and bytes of its states; printable."""

    parameters: tuple[int, ...]
    state_bytes: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Bytes of the fullest rank over the mean: from 1 (even) to the number of ranks (worst)."""
        return max(self.state_bytes) * len(self.state_bytes) / max(sum(self.state_bytes), 1)

    def __str__(self) -> str:
        fullest = max(range(len(self.state_bytes)), key=self.state_bytes.__getitem__)
        idle = sum(not count for count in self.parameters)
        return (
            f"{len(self.state_bytes)} ranks: the fullest, rank {fullest}, keeps {self.state_bytes[fullest]:,} bytes of states for "
            f"{self.parameters[fullest]:,} parameters, {self.ratio:.2f} of the mean" + (f"; {idle} ranks keep nothing" if idle else "")
        )  # fmt: skip


def zero_balance(
    model: nn.Module | Sequence[Mapping[str, Any]],
    world: int,
    optimizer: type[LowPrecisionOptimizer] = AdamW,
    **options: Any,
) -> ZeroBalance:
    """Predict the balance of `zero` on `world` ranks.

    Needs neither ranks nor memory: a model on the device "meta" is enough.
    """
    if type(world) is not int or world < 1:
        raise ConfigError(
            f"zero_balance: world = {world!r}: must be a number of ranks, at least 1.",
            code="zero.world",
        )
    plain, _ = _groups_and_names(model, options)
    sizes = state_bytes(optimizer(plain, **options))
    counts, found = [0] * world, [0] * world
    # The same greedy order as ZeroRedundancyOptimizer, torch 2.11 to 2.13.
    for group in plain:
        for parameter in sorted(group["params"], key=Tensor.numel, reverse=True):
            rank = counts.index(min(counts))
            counts[rank] += parameter.numel()
            found[rank] += sizes.of(parameter)
    return ZeroBalance(tuple(counts), tuple(found))


def _groups_and_names(
    model: Any, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Tensor, str]]:
    """Return (groups without names, names of parameters): torch's ZeRO rejects named parameters."""
    groups = model
    if isinstance(model, nn.Module):
        groups = param_groups.groups(model, embeddings=options.get("embeddings", "fp32"))
    names: dict[Tensor, str] = {}
    plain = []
    for group in groups:
        named = list(group["params"]) if isinstance(group, Mapping) and "params" in group else []
        if not named or not all(isinstance(each, tuple) for each in named):
            raise ConfigError(
                "zero: parameters have no names, by which every rank draws the noise of one process. Pass the model, or groups of "
                "model.named_parameters().",
                code="zero.no-names",
            )
        for name, parameter in named:
            if shards.is_sharded(parameter):
                raise ConfigError(
                    f"zero: {name} is a DTensor, whose states are sharded already. Build an optimizer of narrowgauge.optim of the model "
                    "itself.",
                    code="zero.dtensor",
                )
        names |= {parameter: name for name, parameter in named}
        plain.append({**group, "params": [parameter for _, parameter in named]})
    if not plain:
        raise ConfigError(
            "zero: no parameter requires a gradient. Unfreeze a layer, or pass the model that trains.",
            code="zero.nothing-trains",
        )
    return plain, names
