"""What a run shows while it goes on: a progress bar on a terminal, plain lines in a file or a pipe.

Everything goes to standard error, so that standard output is left for results.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self


def tell(text: object) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def counting() -> Iterator[Callable[[int], None]]:
    """What shows, on a terminal alone, how many steps have been counted; what it was goes when the body ends."""
    if not sys.stderr.isatty():
        yield lambda number: None
        return
    from rich.console import Console as Terminal

    with Terminal(stderr=True).status("Counting a step ...") as status:
        yield lambda number: status.update(f"Counting a step, the {number}. of those that were tried ...")


class Console:
    """A bar of rich's if standard error is a terminal; else plain lines, one in `log_every` steps and one for the last."""

    def __init__(self, total_steps: int, log_every: int, start_step: int = 0) -> None:
        self._total, self._every, self._start = total_steps, log_every, start_step
        self._started_at_s = time.monotonic()
        self.bar = _bar(total_steps, start_step) if sys.stderr.isatty() else None

    def say(self, text: object) -> None:
        """Prints a line, text or rich's Text, above the bar if there is one."""
        if self.bar:
            self.bar.console.print(text, soft_wrap=True)
        else:
            tell(text)

    def step(self, step: int, *, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        """peak_bytes: 0 if it was not measured."""
        words, speed = f"{loss:.4f}", f"{tokens_per_s:,.0f} tokens/s"
        peak = f"{peak_bytes / 2**30:.2f} GiB" if peak_bytes else "-"
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=step, loss=words, speed=speed, peak=peak)
        elif step % self._every == 0 or step == self._total:
            spent_s = time.monotonic() - self._started_at_s
            left_s = spent_s / max(1, step - self._start) * (self._total - step)
            self.say(f"step {step}/{self._total} | loss {words} | {speed} | {peak} | {clock(left_s)} left")

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()


def _bar(total_steps: int, start_step: int) -> Any:
    from rich import console, progress  # 60 ms of imports that a pipe does without

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
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
