"""Silent run folder, log and console for all ranks but rank 0: same interface, no output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.train import trackers
from narrowgauge.train.console import Console
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.run_folder import RunFolder, refuse_model

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.parallel.ranks import Ranks


class FollowersFolder(RunFolder):
    """Run folder of ranks other than 0, which never writes."""

    def write_config(self, config: TrainConfig) -> None:
        pass

    def write_run(self, facts: Mapping[str, Any]) -> None:
        pass


class FollowersLog(MetricsLog):
    """Metrics log of ranks other than 0, which drops all events."""

    def __init__(self, path: Path) -> None:
        # No super().__init__(): it would open the file.
        self.path = path

    def write(self, event: str, step: int, **values: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self, has_failed: bool = False) -> None:
        pass


class FollowersConsole(Console):
    """Console of ranks other than 0, which prints nothing."""

    def __init__(self) -> None:
        self.bar = None

    def say(self, text: object) -> None:
        pass

    def step(self, step: int, *, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        pass


@contextmanager
def claimed(path: Path, resume: bool, ranks: Ranks) -> Iterator[RunFolder]:
    """Claims the run folder on rank 0, which holds the lock for all ranks.

    Its path is not `path` where runs are numbered: see `RunFolder.claim`.
    """
    with ExitStack() as held:

        def claim() -> RunFolder:
            if not RunFolder(path).has_run():
                refuse_model(path)
            return held.enter_context(RunFolder.claim(path, resume))

        # Other ranks wait here, and end with rank 0's exit code if it cannot claim the folder.
        own = ranks.first(claim)
        claimed_path = ranks.told_by_first(lambda: str(own.path) if own else "")
        yield own or FollowersFolder(Path(claimed_path))


def log_of(folder: RunFolder, config: TrainConfig, ranks: Ranks) -> MetricsLog:
    """Metrics log of this rank."""
    if not ranks.is_first:
        return FollowersLog(folder.metrics)
    board = folder.tensorboard if config.tensorboard else None
    return MetricsLog(folder.metrics, board, trackers.of_run(config, folder.path))


def console_of(total_steps: int, log_every: int, start_step: int, ranks: Ranks) -> Console:
    """Console of this rank."""
    return Console(total_steps, log_every, start_step) if ranks.is_first else FollowersConsole()


@contextmanager
def silent(ranks: Ranks) -> Iterator[None]:
    """Discards standard error on all ranks but 0, whose output they would repeat."""
    if ranks.is_first:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
