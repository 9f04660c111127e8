"""Two steps of `narrowgauge train`: a Llama of two layers, two micro-batches a step, AdamW with 8-bit states.

Counted are the fourth and the fifth step, from the moment that one begins to that at which the sixth does, where the run is ended:
drawing the batch, forward and backward, the update, what is logged. None of them is printed, evaluated or saved.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.train import loop
from narrowgauge.train.trainer import Trainer
from tests.gpu_dry_run import log, tally
from tests.gpu_dry_run.log import Summary
from tests.gpu_dry_run.tally import Case, Numbers
from tests.train import tiny

FIRST, LAST = 4, 6
SIZES: dict[str, Any] = {
    "hidden_size": 256, "heads": 4, "intermediate_size": 512, "layers": 2, "sequence_length": 128, "batch_size": 8,
    "micro_batches": 2, "steps": 100, "log_every": 100, "device": "cuda", "precision": "bf16-o2", "states": "8bit",
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": "bf16"},
    "fp8-current": {"recipe": "fp8-current"},
    "fp8-delayed": {"recipe": "fp8-delayed"},
    "fp8-block": {"recipe": "fp8-block"},
    "fp8-delayed, fused": {"recipe": "fp8-delayed", "fuse": True},
}


class _Enough(Exception):
    """The steps that count are over. A run to its end would save weights that nothing has computed."""


def measured(name: str) -> tuple[Summary, Numbers]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr), _marked():
        text = tiny.write_text(Path(folder) / "text")
        config = tiny.settings(text, Path(folder) / "run", **SIZES, **RUNS[name])
        with contextlib.suppress(_Enough):
            loop.run(config)
    return log.between(f"step {FIRST}", f"step {LAST}"), {}


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """The log has a mark where each step of the trainer begins."""
    real = Trainer._optimizer_step

    def step(self: Trainer) -> Any:
        log.mark(f"step {self.step + 1}")
        if self.step + 1 == LAST:
            raise _Enough
        return real(self)

    Trainer._optimizer_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._optimizer_step = real  # type: ignore[method-assign]


CASES: dict[str, Case] = {name: partial(measured, name) for name in RUNS}

if __name__ == "__main__":
    tally.told(CASES)
