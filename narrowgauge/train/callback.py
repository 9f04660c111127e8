"""Callbacks of the training loop. The base class does nothing.

prepare(facts)          before a checkpoint is loaded: repeats changes that the callback made to the
                        model during the run
restore(facts)          after a checkpoint was loaded
before_step(show)       the host has read all previous steps if `reads_after` returned True
saw(number, loss, grad_norm)    once per step, as soon as the host has read it
after_step(show)        before evaluation and checkpoint
facts(), saved()        contents for a checkpoint, and after the checkpoint is on the disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.train.console import Console


class Callback:
    """Callbacks that Trainer calls at fixed places of its loop."""

    def prepare(self, facts: Mapping[str, Any]) -> None: ...

    def restore(self, facts: Mapping[str, Any]) -> None: ...

    def before_step(self, show: Console) -> None: ...

    def saw(self, number: int, loss: float, grad_norm: float) -> None: ...

    def after_step(self, show: Console) -> None: ...

    def reads_after(self, number: int) -> bool:
        """True if the host must read the losses up to this step before the next one."""
        return False

    def facts(self) -> dict[str, Any]:
        return {}

    def saved(self) -> None: ...

    def announce(self, show: Console) -> None:
        """Prints a line before the first step. Raises an error for settings that cannot work."""

    def last_words(self) -> str:
        """Returns a sentence for the console after the last step, or ''."""
        return ""


class Several(Callback):
    """Calls several independent watches in order."""

    def __init__(self, watches: Sequence[Callback]) -> None:
        self.watches = watches

    def prepare(self, facts: Mapping[str, Any]) -> None:
        for each in self.watches:
            each.prepare(facts)

    def restore(self, facts: Mapping[str, Any]) -> None:
        for each in self.watches:
            each.restore(facts)

    def before_step(self, show: Console) -> None:
        for each in self.watches:
            each.before_step(show)

    def saw(self, number: int, loss: float, grad_norm: float) -> None:
        for each in self.watches:
            each.saw(number, loss, grad_norm)

    def after_step(self, show: Console) -> None:
        for each in self.watches:
            each.after_step(show)

    def reads_after(self, number: int) -> bool:
        return any(each.reads_after(number) for each in self.watches)

    def facts(self) -> dict[str, Any]:
        return {key: value for each in self.watches for key, value in each.facts().items()}

    def saved(self) -> None:
        for each in self.watches:
            each.saved()

    def announce(self, show: Console) -> None:
        for each in self.watches:
            each.announce(show)

    def last_words(self) -> str:
        return " ".join(filter(None, (each.last_words() for each in self.watches)))
