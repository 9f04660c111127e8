"""What looks after a run while it trains: called at fixed places of the loop of `Trainer`. This one does nothing.

prepare(facts)          before a checkpoint is taken up, of its facts: what the model was given since the run began is given again
restore(facts)          after it was taken up
before_step(show)       the numbers of all steps so far are known if `reads_after` said so
saw(number, loss)       the loss of a step, as soon as it is known
after_step(show)        before evaluation and checkpoint
facts(), saved()        for a checkpoint; when that is on the disk
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge.train.console import Console


class Watch:
    def prepare(self, facts: Mapping[str, Any]) -> None: ...

    def restore(self, facts: Mapping[str, Any]) -> None: ...

    def before_step(self, show: Console) -> None: ...

    def saw(self, number: int, loss: float) -> None: ...

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
