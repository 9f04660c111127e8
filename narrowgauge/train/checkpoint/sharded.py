"""Checkpoints written by several ranks.

Same folders and facts as in `store`, which serves one process.

All ranks call each function, with equal arguments apart from their own shards, and get the same
result or the same error. Files have the format of `narrowgauge.distributed.storage`, with the
groups of tensors and "facts" as outermost entries. Any number of ranks can read it. `store.load` reads it
in one process, and `newest_valid` reads checkpoints written by `store`.
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
from narrowgauge.distributed.all_ranks import Group, rank_and_world, run_on_all_ranks
from narrowgauge.errors import CheckpointError, NumericsError
from narrowgauge.train.checkpoint import store
from narrowgauge.train.checkpoint.store import Checkpoint, Tensors, nonfinite

FACTS = "facts"
OF_FIRST_RANK = frozenset({"rng"})  # groups that differ between ranks: generators


def save(
    folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], process_group: Group = None
) -> Path:
    """Writes checkpoint `step` into `folder` and returns its path.

    It is on the disk when this returns.

    tensors, facts  from `state.collect`; tensors that several ranks hold in full must be equal

    The facts and generators of rank 0 are stored. Raises the errors of `store.save`, on all ranks.
    """
    rank, _ = rank_and_world(process_group)

    def prepare() -> dict[str, Any]:
        if not 0 <= step < 10**8 or FACTS in tensors:
            raise CheckpointError(
                f"save: step {step} is not from 0 to 99999999, or a group is called {FACTS!r}.",
                code="checkpoint.step",
            )
        for name, tensor in local(tensors.get("weights", {})).items():
            if count := nonfinite(tensor):
                raise NumericsError(
                    f"refuse to save: weight {name!r} holds {count} values that are not finite. "
                    "Resume from the last checkpoint with a lower learning rate or a wider recipe.",
                    code="weights.not-finite",
                )
        return {
            group: dict(members)
            for group, members in tensors.items()
            if rank == 0 or group not in OF_FIRST_RANK
        }

    state = run_on_all_ranks(prepare, process_group)
    if rank == 0:
        state[FACTS] = facts
    path = folder / f"step-{step:08d}"
    # Rank 0 removes the leftovers while the others wait, so no rank writes into a folder that is
    # about to vanish.
    run_on_all_ranks(lambda: _clear(path) if rank == 0 else None, process_group)
    ranks.save(state, path, process_group)
    return path


def newest_valid(
    folder: Path,
    room: Callable[[Checkpoint], Tensors],
    process_group: Group = None,
    in_part: bool = False,
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Reads the newest intact checkpoint. Returns (checkpoint or None, [(skipped path, reason)]).

    room     f(checkpoint with tensors on "meta") -> tensors of the same groups, names, dtypes and
             shapes, sharded as they are to be now; the checkpoint is read into them. Generators are
             read separately.
    in_part  `room` returns only a part of the tensors, as for a pipeline stage

    Returns (None, []) without any checkpoint. Raises the errors of `store.newest_valid`. A
    checkpoint that does not fit its room is an error.
    """
    rank, world = rank_and_world(process_group)
    found: list[Any] = [
        run_on_all_ranks(lambda: manifest.newest_first(folder) if rank == 0 else [], process_group)
    ]
    if world > 1:
        dist.broadcast_object_list(found, group=process_group, group_src=0)
    skipped: list[tuple[Path, str]] = []
    for path in found[0]:
        try:
            _, listing, index = ranks.opened(path, process_group)
            facts = index.part(lambda key: key == FACTS).tree({}, path).get(FACTS, {})
            part = index.part(lambda key: key not in {FACTS, *OF_FIRST_RANK}).tensors_alone()
            forms = {
                name: torch.empty(x.shape, dtype=x.dtype, device="meta")
                for name, x in part.tensors.items()
            }
            stored = Checkpoint(listing.step, part.tree(forms, path), facts, path)
        except manifest.NewerFormatError:
            raise
        except CheckpointError as error:
            skipped.append((path, str(error)))
            continue
        # Outside the `try`: an error of `room` concerns this run, and an older checkpoint would not
        # help.
        given = room(stored)
        state = {group: dict(members) for group, members in given.items() if members}
        ranks.load_opened(state, path.absolute(), listing, part, process_group, partial=in_part)
        # The model's weights are overwritten by now. The next checkpoint overwrites them again, or
        # the function raises.
        if reason := _refuse_nonfinite(state, path, process_group):
            skipped.append((path, reason))
            continue
        found[0] = run_on_all_ranks(
            partial(_of_first_rank, path) if rank == 0 else dict, process_group
        )
        # Rank 0 reads the generators and broadcasts: they share a file with many other tensors
        if world > 1:
            dist.broadcast_object_list(found, group=process_group, group_src=0)
        return Checkpoint(listing.step, {**given, **state, **found[0]}, facts, path), skipped
    if skipped:
        reasons = "\n".join(f"  {reason}" for _, reason in skipped)
        raise CheckpointError(
            f"{folder}: none of the {len(skipped)} checkpoints is intact. Restore one, or start anew in another --output.\n{reasons}",
            code="checkpoint.none-intact",
        )
    return None, []


def prune(folder: Path, keep: int | Path, process_group: Group = None) -> None:
    """Calls `manifest.prune` on rank 0, and raises its error on all ranks."""
    rank, _ = rank_and_world(process_group)
    run_on_all_ranks(lambda: manifest.prune(folder, keep) if rank == 0 else [], process_group)


class Best(store.Best):
    """`store.Best` for several ranks. All ranks call each method with the same metrics.

    `weights` returns plain tensors on rank 0.
    """

    def __init__(self, folder: Path, metric: str, process_group: Group = None) -> None:
        super().__init__(folder, metric)
        self.process_group = process_group
        self.is_first = rank_and_world(process_group)[0] == 0

    def save(self, step: int, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
        save(self.folder, step, {"weights": weights}, facts, self.process_group)

    def verify(self, path: Path) -> None:
        run_on_all_ranks(
            lambda: manifest.verify(path) if self.is_first else None, self.process_group
        )

    def clear(self) -> None:
        run_on_all_ranks(super().clear if self.is_first else lambda: None, self.process_group)

    def weights(self) -> dict[str, Tensor] | None:
        """The best weights on rank 0, {} on the others; None if there are none."""
        if not self.step:
            return None
        return run_on_all_ranks(
            lambda: (
                ranks.read(self.path(self.step), only="weights")["weights"] if self.is_first else {}
            ),
            self.process_group,
        )


def _clear(path: Path) -> None:
    """Removes the rest of a damaged checkpoint: a file, link, or folder without a manifest."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir() and not (path / manifest.NAME).exists():
        shutil.rmtree(path)


def _of_first_rank(path: Path) -> Tensors:
    return {
        group: members
        for each in OF_FIRST_RANK
        for group, members in ranks.read(path, only=each).items()
    }


def _refuse_nonfinite(state: Tensors, path: Path, group: Group) -> str:
    try:
        run_on_all_ranks(
            partial(store.refuse_nonfinite, {"weights": local(state.get("weights", {}))}, path),
            group,
        )
    except CheckpointError as error:
        return str(error)
    return ""


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The local parts of tensors, as plain tensors."""
    return {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in tensors.items()
    }
