"""What looks after a run while it trains: called at fixed places of the loop of `Trainer`. This one does nothing.

prepare(facts)          before a checkpoint is taken up, of its facts: what the model was given since the run began is given again
restore(facts)          after it was taken up
before_step(show)       the numbers of all steps so far are known if `reads_after` said so
saw(number, loss, grad_norm)    of a step, as soon as they are known
after_step(show)        before evaluation and checkpoint
facts(), saved()        for a checkpoint; when that is on the disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.train.console import Console


class Watch:
    def prepare(self, facts: Mapping[str, Any]) -> None: ...

    def restore(self, facts: Mapping[str, Any]) -> None: ...

    def before_step(self, show: Console) -> None: ...

    def saw(self, number: int, loss: float, grad_norm: float) -> None: ...

    def after_step(self, show: Console) -> None: ...

    def reads_after(self, number: int) -> bool:
        """Whether the losses up to this step have to be known after it."""
        return False

    def facts(self) -> dict[str, Any]:
        return {}

    def saved(self) -> None: ...

    def announce(self, show: Console) -> None:
        """Before the first step; raises for what will not work."""

    def last_words(self) -> str:
        """For the console after the last step, or ''."""
        return ""


class Several(Watch):
    """Watches that know nothing of each other, called in order."""

    def __init__(self, watches: Sequence[Watch]) -> None:
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
