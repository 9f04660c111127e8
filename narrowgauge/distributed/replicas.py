"""Before saving: check on rank 0 that tensors and values shared by several ranks are identical.

The check covers replicas (the same part of one tensor on several ranks: plain tensors and
replicated DTensors) and values of the same name. Each rank sends digests with its save plan.

A digest has two sums modulo 2^64 over the 64-bit words w[i]: the sum of w[i], and the sum of (2i+1)
w[i]. It detects accidental differences, not attacks. It is computed at memory speed on the tensor's
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from narrowgauge.distributed import state_tree
from narrowgauge.errors import CheckpointError

# Words per chunk, to bound the memory of the int64 temporaries.
DIGEST_WORDS = 2**20


@dataclass(frozen=True)
class RankFacts:
    """Facts that a rank sends to rank 0 with its save plan.

    values    name -> encoded value
    paths     name -> path in the nested state
    forms     tensor name -> kind (tensor or DTensor), dtype and full shape
    replicas  (name, offsets) -> digest
    """

    values: dict[str, Any]
    paths: dict[str, state_tree.Path]
    forms: dict[str, str]
    replicas: dict[tuple[str, tuple[int, ...]], str]


def rank_facts(plan: SavePlan, flat: state_tree.Flat) -> RankFacts:
    """Return this rank's RankFacts for a save plan and a flat state."""
    replicas = {
        (item.index.fqn, tuple(item.index.offset or ())): _digest(flat.tensors[item.index.fqn])
        for item in plan.items
        if _is_replicated(flat.tensors[item.index.fqn])
    }
    return RankFacts(
        flat.values,
        flat.paths,
        {name: _form(tensor) for name, tensor in flat.tensors.items()},
        replicas,
    )


class CheckedSavePlanner(DefaultSavePlanner):
    """torch's save planner for a flat state, preceded by the comparison of all ranks' facts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # Called on rank 0 alone; torch raises its errors on all ranks.
        facts = [plan.storage_data for plan in all_plans]
        _require_same_entries(facts)
        _require_same_replicas(facts)
        _require_same_values(facts)
        return super().create_global_plan(all_plans)


def _is_replicated(tensor: Tensor) -> bool:
    """Return True if another rank may have the same part of the tensor."""
    return not isinstance(tensor, DTensor) or any(
        placement.is_replicate() for placement in tensor.placements
    )


def _form(tensor: Tensor) -> str:
    kind = "DTensor" if isinstance(tensor, DTensor) else "tensor"
    return f"a {kind} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _digest(tensor: Tensor) -> str:
    """Return the two sums over the local part, and the trailing bytes that fill no word."""
    local = (
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .resolve_conj()
        .resolve_neg()
    )
    octets = local.contiguous().reshape(-1).view(torch.uint8)
    words_end = octets.numel() // 8 * 8
    words = octets[:words_end]
    # view(int64) needs a storage offset that is a multiple of 8 bytes.
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=octets.device)
    placed = plain.clone()
    for start in range(0, len(words), DIGEST_WORDS):
        part = words[start : start + DIGEST_WORDS]
        plain += part.sum()
        # Odd weights are invertible modulo 2^64, so a single changed word always changes the sum.
        placed += (
            part * torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, device=part.device)
        ).sum()
    return f"{int(plain)} {int(placed)} {octets[words_end:].tolist()}"


def _require_same_entries(facts: list[RankFacts]) -> None:
    """Raise CheckpointError if a name has different kinds or paths on two ranks."""
    entries: dict[str, tuple[int, str, state_tree.Path]] = {}
    for rank, each in enumerate(facts):
        for name, path in each.paths.items():
            form = each.forms.get(name, "a value")
            first, first_form, first_path = entries.setdefault(name, (rank, form, path))
            if form != first_form or path != first_path:
                other = f"{form}, at another place" if form == first_form else form
                raise CheckpointError(
                    f"save: {name!r} is {first_form} on rank {first} and {other} on rank {rank}. "
                    "Give what differs between ranks names of its own.",
                    code="checkpoint.forms-differ",
                )
    try:
        # Also detects nesting conflicts: a value on one rank where another has a dict.
        state_tree.unflatten(
            {name: path for name, (_, _, path) in entries.items()}, dict.fromkeys(entries)
        )
    except ValueError as error:
        raise CheckpointError(
            f"save: the states of the ranks are not parts of one state: {error}. Rename it.",
            code="checkpoint.not-one-state",
        ) from error


def _require_same_replicas(facts: list[RankFacts]) -> None:
    replicas: dict[Any, tuple[int, str]] = {}
    for rank, each in enumerate(facts):
        for part_key, digest in each.replicas.items():
            first, expected = replicas.setdefault(part_key, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"save: {part_key[0]!r} differs between rank {first} and rank {rank}, and is one tensor of all ranks by invariant. "
                    "The ranks have drifted apart: find the first difference, and resume from the last checkpoint.",
                    code="checkpoint.tensor-drift",
                )


def _require_same_values(facts: list[RankFacts]) -> None:
    values: dict[str, tuple[int, Any]] = {}
    for rank, each in enumerate(facts):
        for name, value in each.values.items():
            first, expected = values.setdefault(name, (rank, value))
            if not state_tree.same(value, expected):
                raise CheckpointError(
                    f"save: {name!r} is {_shown(expected)} on rank {first} and {_shown(value)} on rank {rank}, and is one value of "
                    "all ranks by invariant. Save what is a rank's own under a name of its own.",
                    code="checkpoint.value-drift",
                )


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) < 80 else f"{words[:76]}..."
