"""Callbacks of the training loop, the plugins of a run. The base class does nothing.

    before_load(facts)      before a checkpoint is loaded: repeats changes that the plugin made to
                            the model during the run
    on_load(facts)          after a checkpoint was loaded
    on_start(show)          once, before the first step. Prints a line, or raises an error for
                            settings that cannot work
    before_step(show)       the host has read all previous steps if `must_read_after` returned True
    on_step(number, loss, grad_norm)    once per step and in order, as soon as the host has read it
    after_step(show)        before evaluation and checkpoint
    state()                 entries of a checkpoint, which `before_load` and `on_load` get
    on_saved()              after the checkpoint is on the disk
    summary()               a sentence for the console after the last step, or ''

A plugin reads a run's attributes and changes the run through methods of `Trainer` alone: `snapshot`,
`restore` and `exchange`, `rewind`, `replace_steps`, `switch_recipes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.train.console import Console


class Callback:
    """Methods that Trainer calls at fixed places of its loop."""

    def before_load(self, facts: Mapping[str, Any]) -> None: ...

    def on_load(self, facts: Mapping[str, Any]) -> None: ...

    def on_start(self, show: Console) -> None: ...

    def before_step(self, show: Console) -> None: ...

    def on_step(self, number: int, loss: float, grad_norm: float) -> None: ...

    def after_step(self, show: Console) -> None: ...

    def must_read_after(self, number: int) -> bool:
        """True if the host must read the losses up to this step before the next one."""
        return False

    def state(self) -> dict[str, Any]:
        return {}

    def on_saved(self) -> None: ...

    def summary(self) -> str:
        return ""


class Callbacks(Callback):
    """Calls several independent callbacks in order."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self.members = members

    def before_load(self, facts: Mapping[str, Any]) -> None:
        for each in self.members:
            each.before_load(facts)

    def on_load(self, facts: Mapping[str, Any]) -> None:
        for each in self.members:
            each.on_load(facts)

    def on_start(self, show: Console) -> None:
        for each in self.members:
            each.on_start(show)

    def before_step(self, show: Console) -> None:
        for each in self.members:
            each.before_step(show)

    def on_step(self, number: int, loss: float, grad_norm: float) -> None:
        for each in self.members:
            each.on_step(number, loss, grad_norm)

    def after_step(self, show: Console) -> None:
        for each in self.members:
            each.after_step(show)

    def must_read_after(self, number: int) -> bool:
        return any(each.must_read_after(number) for each in self.members)

    def state(self) -> dict[str, Any]:
        return {key: value for each in self.members for key, value in each.state().items()}

    def on_saved(self) -> None:
        for each in self.members:
            each.on_saved()

    def summary(self) -> str:
        return " ".join(filter(None, (each.summary() for each in self.members)))
