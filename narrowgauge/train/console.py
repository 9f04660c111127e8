"""Console output of a run: a progress bar on a terminal, plain lines in a file or a pipe.

Everything goes to standard error, so that standard output is left for results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from narrowgauge.errors import Reason


def tell(text: object) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def tell_note(note: str) -> None:
    """Prints "Note: " and the note; a Reason keeps its code."""
    tell(Reason(getattr(note, "code", ""), f"Note: {note}"))


@contextmanager
def counting() -> Iterator[Callable[[int], None]]:
    """Shows on a terminal how many candidate steps a plan has traced; removes the line afterwards.

    Yields a function that takes the number of the current candidate. It does nothing if standard
    error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda number: None
        return
    from rich.console import Console as Terminal

    with Terminal(stderr=True).status("Counting a step ...") as status:
        yield lambda number: status.update(
            f"Counting a step, the {number}. of those that were tried ..."
        )


class Console:
    """Progress of a run: a rich progress bar if standard error is a terminal, else plain lines.

    A plain line is printed every `log_every` steps and after the last step.
    """

    def __init__(self, total_steps: int, log_every: int, start_step: int = 0) -> None:
        self._total, self._every, self._start = total_steps, log_every, start_step
        self._started_at_s = time.monotonic()
        self.bar = _bar(total_steps, start_step) if sys.stderr.isatty() else None

    def say(self, text: object) -> None:
        """Prints a line, as text or rich's Text, above the progress bar."""
        if self.bar:
            self.bar.console.print(text, soft_wrap=True)
        else:
            tell(text)

    def step(self, step: int, *, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        """Shows the progress after one step.

        peak_bytes  0 if the peak memory was not measured
        """
        words, speed = f"{loss:.4f}", f"{tokens_per_s:,.0f} tokens/s"
        peak = f"{peak_bytes / 2**30:.2f} GiB" if peak_bytes else "-"
        if self.bar:
            self.bar.update(
                self.bar.task_ids[0], completed=step, loss=words, speed=speed, peak=peak
            )
        elif step % self._every == 0 or step == self._total:
            spent_s = time.monotonic() - self._started_at_s
            left_s = spent_s / max(1, step - self._start) * (self._total - step)
            self.say(
                f"step {step}/{self._total} | loss {words} | {speed} | {peak} | {clock(left_s)} left"
            )

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()


def _bar(total_steps: int, start_step: int) -> Any:
    # Lazy: the import takes 60 ms, and output to a pipe does without it
    from rich import console, progress

    columns: list[Any] = [
        progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        progress.BarColumn(),
        progress.TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  {task.fields[peak]}"),
        progress.TimeRemainingColumn(),
    ]
    target = console.Console(stderr=True, highlight=False, markup=False, emoji=False)
    bar = progress.Progress(*columns, console=target, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=total_steps, completed=start_step, loss="-", speed="", peak="")
    return bar


def clock(seconds: float) -> str:
    """Formats seconds as hours, minutes and seconds: 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
