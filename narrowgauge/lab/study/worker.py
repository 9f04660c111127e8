"""One run of a study in its own process.

    python -m narrowgauge.lab.study.worker train SETTINGS.toml

It behaves like `narrowgauge train`, with two differences. It resumes if its folder holds a run, and
waits if another process still trains there, such as a worker whose study has just died. It also
ends with its study: standard input is a pipe from the study, which closes when the study ends, even
by kill -9. The run then finishes its step and saves a checkpoint, as after SIGTERM.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from narrowgauge.errors import (
    BusyError,
    ConfigError,
    NarrowgaugeError,
    OutOfMemoryError,
    missing_package,
    no_memory,
)
from narrowgauge.train.config import toml
from narrowgauge.train.console import tell

PATIENCE_S = 120.0
POLL_S = 0.5


def main(settings: Path) -> int:
    # Before the slow imports, so that a worker never outlives its study.
    threading.Thread(target=_end_with_study, daemon=True).start()
    try:
        return _run(settings)
    except NarrowgaugeError as error:
        tell(f"narrowgauge: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        tell(f"narrowgauge: {missing_package(error)}")
        return ConfigError.exit_code
    except MemoryError as error:
        tell(f"narrowgauge: {no_memory(error)}")
        return OutOfMemoryError.exit_code


def _end_with_study() -> None:
    """Blocks until standard input closes, then sends SIGTERM to this process."""
    while os.read(0, 4096):
        pass
    # The run's own signal handler then stops it in order.
    os.kill(os.getpid(), signal.SIGTERM)


def _run(settings: Path) -> int:
    # Imported here: torch takes seconds, and errors below must be caught by `main`.
    from narrowgauge.lab import training
    from narrowgauge.train.run_folder import RunFolder

    config = toml.load_stored(settings)
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return training.run(replace(config, resume=RunFolder(Path(config.output)).has_run()))
        except BusyError:
            if time.monotonic() > until_s:
                raise
            time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2])))
