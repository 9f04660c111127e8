"""A training run with everything that its settings may ask for: guard, spike watch, branch.

`narrowgauge.train.loop` trains without them, since `train` does not import the lab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from narrowgauge.lab import branch, run_guard
from narrowgauge.lab.spike_watch import SpikeWatch
from narrowgauge.train import loop
from narrowgauge.train.extensions import Extensions

if TYPE_CHECKING:
    from narrowgauge.train.callback import Callback
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.trainer import Trainer


def plugins(config: TrainConfig) -> Sequence[Callable[[Trainer], Callback]]:
    """Plugins of a run: its guard, and the spike watch if `on_spike` is set."""
    return [run_guard.plugin, *([SpikeWatch] if config.on_spike else [])]


EXTENSIONS = Extensions(
    plugins=plugins, begin_branch=branch.begin, begin_branch_apart=branch.begin_apart
)


def run(config: TrainConfig) -> int:
    """Train the run of `config`, as `narrowgauge train` does. Returns the exit code."""
    return loop.run(config, EXTENSIONS)
