"""Checkpoints of a run on several ranks: what `store` does for one process, with the same folders and facts.

All ranks call each function, with the same arguments but for what they hold, and get the same answer or the same error. The
checkpoint is one of `narrowgauge.distributed.storage`, whose outermost entries are the groups of tensors and "facts". It is read on
any number of ranks; `store.load` reads it in one process, and `newest_valid` reads what `store` wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from narrowgauge import manifest
from narrowgauge.distributed import storage as ranks
from narrowgauge.distributed.together import Group, rank_and_world, together
from narrowgauge.errors import CheckpointError, NumericsError
from narrowgauge.train.checkpoint import store
from narrowgauge.train.checkpoint.store import Checkpoint, Tensors, nonfinite

FACTS = "facts"
OF_FIRST_RANK = frozenset({"rng"})  # groups whose tensors differ between ranks: generators


def save(folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], process_group: Group = None) -> Path:
    """Writes checkpoint `step` into `folder` and returns its path. When this returns, the checkpoint is on the disk.

    tensors, facts: as `state.collect` gives them. Facts and generators are rank 0's; tensors that ranks hold in common must be equal.
    Errors as of `store.save`, on all ranks.
    """
    rank, _ = rank_and_world(process_group)

    def prepare() -> dict[str, Any]:
        if not 0 <= step < 10**8 or FACTS in tensors:
            raise CheckpointError(f"save: step {step} is not from 0 to 99999999, or a group is called {FACTS!r}.")
        for name, tensor in local(tensors.get("weights", {})).items():
            if count := nonfinite(tensor):
                raise NumericsError(
                    f"refuse to save: weight {name!r} holds {count} values that are not finite. "
                    "Resume from the last checkpoint with a lower learning rate or a wider recipe."
                )
        return {group: dict(members) for group, members in tensors.items() if rank == 0 or group not in OF_FIRST_RANK}

    state = together(prepare, process_group)
    if rank == 0:
        state[FACTS] = facts
    path = folder / f"step-{step:08d}"
    together(lambda: _clear(path) if rank == 0 else None, process_group)
    ranks.save(state, path, process_group)
    return path


def newest_valid(
    folder: Path, room: Callable[[Checkpoint], Tensors], process_group: Group = None, in_part: bool = False
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """The intact checkpoint with the largest step, read into the tensors of `room`, and the newer ones passed over, with reasons.

    room: called with a checkpoint whose files are whole; its tensors are on "meta". Returns tensors of the same groups, names, types and
    shapes, sharded as they are to be now. Generators are read apart. in_part: it is a part of them, as a stage of a pipeline has.
    (None, []) if there is none; errors as of `store.newest_valid`. A checkpoint that does not fit its room is an error.
    """
    rank, world = rank_and_world(process_group)
    found: list[Any] = [together(lambda: manifest.newest_first(folder) if rank == 0 else [], process_group)]
    if world > 1:
        dist.broadcast_object_list(found, group=process_group, group_src=0)
    skipped: list[tuple[Path, str]] = []
    for path in found[0]:
        try:
            _, listing, index = ranks.opened(path, process_group)
            facts = index.part(lambda key: key == FACTS).tree({}, path).get(FACTS, {})
            part = index.part(lambda key: key not in {FACTS, *OF_FIRST_RANK}).tensors_alone()
            forms = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in part.tensors.items()}
            stored = Checkpoint(listing.step, part.tree(forms, path), facts, path)
        except manifest.NewerFormatError:
            raise
        except CheckpointError as error:
            skipped.append((path, str(error)))
            continue
        given = room(stored)
        state = {group: dict(members) for group, members in given.items() if members}
        ranks.load_opened(state, path.absolute(), listing, part, process_group, partial=in_part)
        if reason := _refuse_nonfinite(state, path, process_group):
            skipped.append((path, reason))
            continue
        found[0] = together(partial(_of_first_rank, path) if rank == 0 else dict, process_group)
        if world > 1:  # which reads them alone: they lie in a file with much else
            dist.broadcast_object_list(found, group=process_group, group_src=0)
        return Checkpoint(listing.step, {**given, **state, **found[0]}, facts, path), skipped
    if skipped:
        reasons = "\n".join(f"  {reason}" for _, reason in skipped)
        raise CheckpointError(
            f"{folder}: none of the {len(skipped)} checkpoints is intact. Restore one, or start anew in another --output.\n{reasons}"
        )
    return None, []


def prune(folder: Path, keep: int | Path, process_group: Group = None) -> None:
    """`manifest.prune` on rank 0, while the others wait for how it ends."""
    rank, _ = rank_and_world(process_group)
    together(lambda: manifest.prune(folder, keep) if rank == 0 else [], process_group)


class Best(store.Best):
    """`store.Best` of several ranks: all call each method, with the same metrics. `weights` gives rank 0 ordinary tensors."""

    def __init__(self, folder: Path, metric: str, process_group: Group = None) -> None:
        super().__init__(folder, metric)
        self.process_group = process_group
        self.is_first = rank_and_world(process_group)[0] == 0

    def save(self, step: int, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
        save(self.folder, step, {"weights": weights}, facts, self.process_group)

    def verify(self, path: Path) -> None:
        together(lambda: manifest.verify(path) if self.is_first else None, self.process_group)

    def clear(self) -> None:
        together(super().clear if self.is_first else lambda: None, self.process_group)

    def weights(self) -> dict[str, Tensor] | None:
        """The best ones on rank 0, {} on the others; None if there are none."""
        if not self.step:
            return None
        return together(
            lambda: ranks.read(self.path(self.step), only="weights")["weights"] if self.is_first else {},
            self.process_group,
        )


def _clear(path: Path) -> None:
    """Of the run's own folder what is no checkpoint in the place of one: left of a damaged one that was passed over."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir() and not (path / manifest.NAME).exists():
        shutil.rmtree(path)


def _of_first_rank(path: Path) -> Tensors:
    return {group: members for each in OF_FIRST_RANK for group, members in ranks.read(path, only=each).items()}


def _refuse_nonfinite(state: Tensors, path: Path, group: Group) -> str:
    try:
        together(partial(store.refuse_nonfinite, {"weights": local(state.get("weights", {}))}, path), group)
    except CheckpointError as error:
        return str(error)
    return ""


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts that are on this rank, as plain tensors."""
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}
