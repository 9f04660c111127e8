"""Parts of a run that the lab supplies: guard, spike watch and branch. Refuses a run that lacks them.

This package must not import the lab, so `lab.training` hands the parts over as `Extensions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import key_of
from narrowgauge.train.console import tell
from narrowgauge.train.guard_state import Unguarded

if TYPE_CHECKING:
    from narrowgauge.train.callback import Callback
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.run_folder import RunFolder
    from narrowgauge.train.tasks import TrainTask
    from narrowgauge.train.trainer import Trainer

    Plugin = Callable[[Trainer], Callback]
    BeginBranch = Callable[[TrainConfig, RunFolder, TrainTask], list[str]]
    BeginBranchApart = Callable[[TrainConfig, Path], list[str]]


def _without_lab(config: TrainConfig) -> Sequence[Plugin]:
    """Plugins of a run without a guard or spike watch. Raises ConfigError if it asks for one."""
    for name in ("guard", "on_spike"):
        if value := getattr(config, name):
            raise ConfigError(
                f"{key_of(config.__dataclass_fields__[name])} = {value!r}: needs narrowgauge.lab. Train with "
                "narrowgauge.lab.training.run, or remove it.",
                code="train.needs-lab",
            )
    return [Unguarded]


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """Parts of a run that `lab.training` supplies, since this package must not import the lab.

    plugins             plugins(config) -> functions that make a Callback from a Trainer
    begin_branch        writes the first checkpoint of a branch and returns sentences
    begin_branch_apart  the same in a process of its own, for rank 0 of several
    """

    plugins: Callable[[TrainConfig], Sequence[Plugin]] = _without_lab
    begin_branch: BeginBranch | None = None
    begin_branch_apart: BeginBranchApart | None = None


ALONE = Extensions()


def of_former_calls(config: TrainConfig) -> Extensions:
    """Extensions for calls of `run` from before the lab had a package of its own."""
    needs = [name for name in ("guard", "on_spike", "parent") if getattr(config, name)]
    if not needs:
        return ALONE
    warnings.warn(
        f"{', '.join(needs)}: call narrowgauge.lab.training.run(config) in place of train.loop.run since 0.1.0.",
        DeprecationWarning,
        stacklevel=3,
    )
    # By name, as no other code of this package may: remove it with the deprecation.
    found: Extensions = import_module("narrowgauge.lab.training").EXTENSIONS
    return found


def begin_branch(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    ranks: Ranks,
    extensions: Extensions,
) -> None:
    """Writes the first checkpoint of a branch, unless the branch has one."""
    if config.parent and not ranks.told_by_first(folder.has_run):
        if extensions.begin_branch is None or extensions.begin_branch_apart is None:
            raise ConfigError(
                f"from = {config.parent!r}: a branch needs narrowgauge.lab. Train with narrowgauge.lab.training.run.",
                code="train.needs-lab",
            )
        begin = (
            partial(extensions.begin_branch, config, folder, task)
            if ranks.world == 1
            else partial(extensions.begin_branch_apart, config, folder.path)
        )
        for line in ranks.first(begin) or ():
            tell(f"Branch of {config.parent}: {line}")
