"""Fork: the snapshot of a training loop that may be exchanged with the present state.

    fork = Fork.take(model, optimizer, scaler)     copies the present state
    ... n steps ...
    fork.restore()                                 as if the steps had not happened
    ... or fork.swap() ...                         the former state, and the fork holds the present

`narrowgauge.snapshot` says which state is copied, and its cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge.snapshot import NAME, Snapshot, Training
from narrowgauge.snapshot import snapshot_bytes as fork_bytes
from narrowgauge.snapshot.bytes_apart import refuse_room

__all__ = ["NAME", "Fork", "fork_bytes", "refuse_room"]


class Fork:
    """Copy of the state of a loop's model, optimizer and further objects. Made by `take`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @classmethod
    def take(
        cls, model: nn.Module, optimizer: Any, scaler: Any = None, where: str | Path = "host", also: Iterable[Any] = ()
    ) -> Fork:  # fmt: skip
        """Copies the present state.

        optimizer  an optimizer of torch or narrowgauge, or a list of optimizers
        where      "host" for host memory, or a folder on a disk
        also       further objects that a step changes: schedulers, averaged models,
                   torch.Generators, anything with `state_dict` and `load_state_dict`

        Raises OutOfMemoryError or StorageError before anything is copied if there is no space, and
        ConfigError for objects that cannot be restored.
        """
        training = Training(model=model, optimizer=optimizer, scaler=scaler, also=tuple(also))
        return cls(Snapshot.take(training, where=where))

    @property
    def nbytes(self) -> int:
        """Bytes of the copied tensors."""
        return self._snapshot.nbytes

    def restore(self) -> None:
        """Restores the copied state. The copy stays and can be restored again."""
        self._snapshot.restore()

    def swap(self) -> None:
        """Exchanges the copy with the present state. Swapping twice changes nothing."""
        self._snapshot.swap()
