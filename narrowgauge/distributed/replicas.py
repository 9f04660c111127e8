"""What ranks hold in common is equal by invariant: rank 0 compares it before anything is saved.

Common are replicas (one place of one tensor on several ranks: plain tensors, replicated DTensors), and values of one name. All ranks'
digests travel with their plans. A digest is two sums of the 64-bit words w[i], modulo 2^64: of w[i], and of (2 i + 1) w[i]. It finds
what went wrong by accident, at the speed of memory, on the device that holds the tensor.
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

DIGEST_WORDS = 2**20  # at once


@dataclass(frozen=True)
class Told:
    """What a rank tells rank 0 with its plan."""

    values: dict[str, Any]
    paths: dict[str, state_tree.Path]
    forms: dict[str, str]  # of tensors: type, shape of the whole, whether it is a DTensor
    replicas: dict[tuple[str, tuple[int, ...]], str]  # (name, offsets) -> digest


def told(plan: SavePlan, flat: state_tree.Flat) -> Told:
    """What a rank with this plan and state has to tell."""
    replicas = {
        (item.index.fqn, tuple(item.index.offset or ())): _digest(flat.tensors[item.index.fqn])
        for item in plan.items
        if _is_replicated(flat.tensors[item.index.fqn])
    }
    return Told(flat.values, flat.paths, {name: _form(tensor) for name, tensor in flat.tensors.items()}, replicas)


class AgreedSavePlanner(DefaultSavePlanner):
    """torch's planner for a flat state, which rank 0 asks only once what the ranks told agrees."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        told = [plan.storage_data for plan in all_plans]
        _refuse_other_entries(told)
        _refuse_other_bits(told)
        _refuse_other_values(told)
        return super().create_global_plan(all_plans)


def _is_replicated(tensor: Tensor) -> bool:
    """Whether another rank may hold the same part of it."""
    return not isinstance(tensor, DTensor) or any(placement.is_replicate() for placement in tensor.placements)


def _form(tensor: Tensor) -> str:
    kind = "DTensor" if isinstance(tensor, DTensor) else "tensor"
    return f"a {kind} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _digest(tensor: Tensor) -> str:
    """The two sums of the part that is here, and the bytes that are no whole word."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().resolve_conj().resolve_neg()
    octets = local.contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    words = octets[:whole]
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=octets.device)
    placed = plain.clone()
    for start in range(0, len(words), DIGEST_WORDS):
        part = words[start : start + DIGEST_WORDS]
        plain += part.sum()
        placed += (part * torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, device=part.device)).sum()
    return f"{int(plain)} {int(placed)} {octets[whole:].tolist()}"


def _refuse_other_entries(told: list[Told]) -> None:
    """What has one name on several ranks is one kind of thing in one place of the state."""
    entries: dict[str, tuple[int, str, state_tree.Path]] = {}
    for rank, each in enumerate(told):
        for name, path in each.paths.items():
            form = each.forms.get(name, "a value")
            first, first_form, first_path = entries.setdefault(name, (rank, form, path))
            if form != first_form or path != first_path:
                other = f"{form}, at another place" if form == first_form else form
                raise CheckpointError(
                    f"save: {name!r} is {first_form} on rank {first} and {other} on rank {rank}. "
                    "Give what differs between ranks names of its own."
                )
    try:
        state_tree.unflatten({name: path for name, (_, _, path) in entries.items()}, dict.fromkeys(entries))
    except ValueError as error:
        raise CheckpointError(
            f"save: the states of the ranks are not parts of one state: {error}. Rename it."
        ) from error


def _refuse_other_bits(told: list[Told]) -> None:
    replicas: dict[Any, tuple[int, str]] = {}
    for rank, each in enumerate(told):
        for place, digest in each.replicas.items():
            first, expected = replicas.setdefault(place, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"save: {place[0]!r} differs between rank {first} and rank {rank}, and is one tensor of all ranks by invariant. "
                    "The ranks have drifted apart: find the first difference, and resume from the last checkpoint."
                )


def _refuse_other_values(told: list[Told]) -> None:
    values: dict[str, tuple[int, Any]] = {}
    for rank, each in enumerate(told):
        for name, value in each.values.items():
            first, expected = values.setdefault(name, (rank, value))
            if not state_tree.same(value, expected):
                raise CheckpointError(
                    f"save: {name!r} is {_shown(expected)} on rank {first} and {_shown(value)} on rank {rank}, and is one value of "
                    "all ranks by invariant. Save what is a rank's own under a name of its own."
                )


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) < 80 else f"{words[:76]}..."
