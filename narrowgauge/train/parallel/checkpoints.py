"""The checkpoints of a run, its best weights and its trained ones: of one process whole, of several ranks in parts that each writes.

One process writes what `store` says, several ranks what `sharded` says, copies of a model (dp) too: ranks compare what they hold alike
before they keep it, and share the bytes. Either is read on any number of ranks, so a run may change it from start to start. All ranks
call each function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge import manifest
from narrowgauge.distributed.gathering import gather_state_dict
from narrowgauge.train.checkpoint import sharded, state, store
from narrowgauge.train.checkpoint.store import Best, Checkpoint, Tensors
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.parallel.stage_state import WholeNumbers


def save(folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], keep: int, ranks: Ranks) -> Path:
    """Writes checkpoint `step`, then removes all but the `keep` newest. Returns its path."""
    if ranks.world == 1:
        path = store.save(folder, step, tensors, facts)
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
    """The intact checkpoint with the largest step, for `state.restore`, and the newer ones passed over, with reasons.

    prepare: of its step and facts, gives the model the form that it had then, or raises because it belongs to another run. Several ranks
    read weights into the model itself, and of the optimizer's state the shards that each is to hold. numbers: of a model in stages.
    at: of one process, the only step that counts; 0: none does.
    """
    if ranks.world == 1:
        found, skipped = _of_step(folder, at) if at is not None else store.newest_valid(folder)
        if found is not None:
            prepare(found)
        return found, skipped

    def room(found: Checkpoint) -> Tensors:
        prepare(found)
        where = str(found.path)
        if numbers is None:
            return state.room(model, optimizer, found.tensors, where)
        with state.unusable(where):
            own = numbers.own_tensors(found.tensors, model, optimizer, is_whole=True)
        return numbers.in_whole(state.room(model, optimizer, own, where), model, optimizer)

    return sharded.newest_valid(folder, room, in_part=numbers is not None)


def _of_step(folder: Path, step: int) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    return store.load(folder / f"step-{step:08d}") if step else None, []


def best_of(folder: Path, metric: str, ranks: Ranks) -> Best:
    return Best(folder, metric) if ranks.world == 1 else sharded.Best(folder, metric)


def trained_weights(model: nn.Module, best: Best) -> dict[str, Tensor]:
    """Ordinary tensors for the final folder, on rank 0; {} on the others. The best by the run's metric, else those of the model.

    Beside its shard rank 0 holds them once, and while it gathers them one tensor twice.
    """
    chosen = best.weights()
    return gather_state_dict(model) if chosen is None else _as_tied(model, chosen)


def _as_tied(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, where names of one parameter are one tensor, as in the model: shards read from the disk are a tensor for each name."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {name: weights[names.get(name, name)] for name in weights}
