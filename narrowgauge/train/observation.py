"""Measurements beside the steps of a run: tensor statistics, GPU idle time, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from narrowgauge.nn.converted_model import nonfinite_amax
from narrowgauge.train import launches
from narrowgauge.train.device import peak_bytes
from narrowgauge.train.tensor_stats import NonfiniteAmax, watched

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.console import Console
    from narrowgauge.train.metrics import MetricsLog
    from narrowgauge.train.passes import Passes

Taken = TypeVar("Taken")


class RunObservation:
    """Decides which steps of a run are measured, and logs the results.

    has_own_peak  the process's peak memory belongs to this run alone
    """

    def __init__(
        self, config: TrainConfig, passes: Passes, log: MetricsLog, has_own_peak: bool
    ) -> None:
        self.config, self.passes, self.log, self.has_own_peak = config, passes, log, has_own_peak
        self._amax = NonfiniteAmax()
        self._monitor = passes.monitor()

    def taken(self, step: int, take: Callable[[], Taken], show: Console) -> Taken:
        """Runs the step after `step`, with tensor statistics or a measurement of idle time if due."""
        config, number = self.config, step + 1
        watches = config.tensor_every > 0 and not (config.compile or config.cuda_graph)
        if watches and number % config.tensor_every == 0:
            with watched(self.passes.model) as events:
                taken = take()
            for kind, fields in self.passes.parallel.of_all(events).values():
                self.log.write(kind, number, **fields)
            return taken
        # A step with tensor statistics waits for the device all the time, so its idle time means
        # nothing. Measure the next step instead.
        follows = watches and step % config.tensor_every == 0
        if self._monitor.measures(number) or (follows and self._monitor.measures(step)):
            return self._monitor.measured(number, take, self.log, show)
        return take()

    def must_read_after(self, number: int) -> bool:
        """True if the measurement of this step or the next one needs an empty queue."""
        # A step with tensor statistics waits for the device, so its time must not be shared with
        # earlier steps: read them before it.
        every = self.config.tensor_every
        is_watched = every > 0 and (number + 1) % every == 0
        return is_watched or self._monitor.measures(number + 1) or self._monitor.measures(number)

    def fields(self) -> dict[str, int]:
        """Fields of a step's event."""
        found = {"peak_bytes": peak_bytes(self.passes.device) if self.has_own_peak else 0}
        return found | (
            {"compiled_graphs": launches.compiled_graphs()} if self.config.compile else {}
        )

    def report(self, number: int, show: Console) -> None:
        """Prints news on captured graphs and recompilation."""
        self._monitor.report(number, show)

    def report_amax(self, number: int, show: Console) -> None:
        """Logs and prints amax readings that were not finite."""
        counts = self.passes.parallel.of_all(nonfinite_amax(self.passes.model))
        self._amax.report(number, counts, self.log, show)
