"""What a run shows while it goes on: a progress bar on a terminal, plain lines in a file or a pipe.

    with console(total_steps=300, log_every=10) as show:
        show.say("fp8-current on cpu")
        show.step(1, loss=8.31, tokens_per_s=5200.0, peak_bytes=3 * 2**30)

Everything goes to standard error, so that standard output is left for results.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.text import Text


def console(total_steps: int, log_every: int, start_step: int = 0) -> Lines | Bar:
    """A bar if standard error is a terminal, else lines, one in `log_every` steps and one for the last."""
    kind = Bar if sys.stderr.isatty() else Lines
    return kind(total_steps, log_every, start_step)


class Lines:
    """Plain ASCII lines."""

    def __init__(self, total_steps: int, log_every: int, start_step: int) -> None:
        self._total, self._every, self._start = total_steps, log_every, start_step
        self._started_at_s = time.monotonic()

    def say(self, text: str | Text) -> None:
        print(text, file=sys.stderr, flush=True)

    def step(self, step: int, *, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        if step % self._every and step != self._total:
            return
        done = step - self._start
        left_s = (time.monotonic() - self._started_at_s) / max(1, done) * (self._total - step)
        facts = f"loss {loss:.4f} | {tokens_per_s:,.0f} tokens/s | {gib(peak_bytes)} | {clock(left_s)} left"
        self.say(f"step {step}/{self._total} | {facts}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Bar:
    """One line that moves, by rich. `say` prints above it."""

    def __init__(self, total_steps: int, log_every: int, start_step: int) -> None:
        from rich import console, progress  # 60 ms of imports that a pipe does without

        columns: list[Any] = [
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(),
            progress.TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  {task.fields[peak]}"),
            progress.TimeRemainingColumn(),
        ]
        target = console.Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = progress.Progress(*columns, console=target, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("", total=total_steps, completed=start_step, loss="-", speed="", peak="")

    def say(self, text: str | Text) -> None:
        self._bar.console.print(text, soft_wrap=True)

    def step(self, step: int, *, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        self._bar.update(
            self._task, completed=step, loss=f"{loss:.4f}", speed=f"{tokens_per_s:,.0f} tokens/s", peak=gib(peak_bytes)
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


Console = Lines | Bar


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
