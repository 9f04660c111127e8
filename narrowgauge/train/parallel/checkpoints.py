"""Checkpoints, best weights and final weights of a run on one process or several ranks.

One process writes the format of `checkpoint.store`. Several ranks write the format of
`checkpoint.sharded`, each rank its part; copies (dp) also split the bytes. Ranks compare replicated
tensors before they save. Both formats load on any number of ranks, so a resumed run may change that
number.

All functions here are collective: every rank must call them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from narrowgauge import manifest
from narrowgauge.distributed.gathering import gather_state_dict
from narrowgauge.train.checkpoint import sharded, state, store
from narrowgauge.train.checkpoint.store import Best, Checkpoint, Tensors

if TYPE_CHECKING:
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.parallel.stage_state import WholeNumbers


def save(
    folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], keep: int, ranks: Ranks
) -> Path:
    """Writes checkpoint `step`, then removes all but the `keep` newest. Returns its path."""
    if ranks.world == 1:
        path = store.save(folder, step, tensors, facts)
        # Prune after the save: a crash in between leaves one checkpoint too many, never one too
        # few.
        manifest.prune(folder, keep)
    else:
        path = sharded.save(folder, step, tensors, facts)
        sharded.prune(folder, keep)
    return path


def newest_valid(
    folder: Path,
    prepare: Callable[[Checkpoint], None],
    model: nn.Module,
    optimizer: Any,
    ranks: Ranks,
    numbers: WholeNumbers | None = None,
    at: int | None = None,
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Loads the intact checkpoint with the largest step, and lists newer ones that were skipped.

    folder   folder of checkpoints
    prepare  gives the model the layout in the checkpoint's facts, before weights are read,
             or raises because the checkpoint belongs to another run
    numbers  parameter numbers of the whole model, for pipeline stages
    at       one process only: the single step to load; 0 loads none
    ->       (checkpoint for `state.restore` or None, [(skipped path, reason)])

    Several ranks read weights directly into the model, and only their own shards of the optimizer
    state.
    """
    if ranks.world == 1:
        found, skipped = _of_step(folder, at) if at is not None else store.newest_valid(folder)
        if found is not None:
            prepare(found)
        return found, skipped

    # Called by `sharded` once a checkpoint is verified: allocates the tensors that its shards are
    # read into.
    def room(found: Checkpoint) -> Tensors:
        prepare(found)
        where = str(found.path)
        if numbers is None:
            return state.room(model, optimizer, found.tensors, where)
        with state.unusable(where):
            # A stage's optimizer numbers its parameters from 0, a checkpoint numbers those of the
            # whole model.
            own = numbers.own_tensors(found.tensors, model, optimizer, is_whole=True)
        return numbers.in_whole(state.room(model, optimizer, own, where), model, optimizer)

    return sharded.newest_valid(folder, room, in_part=numbers is not None)


def _of_step(folder: Path, step: int) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    return store.load(folder / f"step-{step:08d}") if step else None, []


def best_of(folder: Path, metric: str, ranks: Ranks) -> Best:
    """Store of the best weights by `metric`."""
    return Best(folder, metric) if ranks.world == 1 else sharded.Best(folder, metric)


def trained_weights(model: nn.Module, best: Best) -> dict[str, Tensor]:
    """Weights for the final folder as plain tensors on rank 0, {} on other ranks.

    The best weights by the run's metric if there are any, else the current ones. Memory on rank 0:
    one full copy beside its shard, and one tensor twice during the gather.
    """
    chosen = best.weights()
    if (adapters := state.adapter_weights(model)) is not None:  # on one process
        return chosen or adapters
    return gather_state_dict(model) if chosen is None else _as_tied(model, chosen)


def _as_tied(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restores tied weights: names of one parameter get one tensor again.

    Shards are read from disk by name, one tensor each. Without this, an export of Marian was a
    third larger.
    """
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {name: weights[names.get(name, name)] for name in weights}
