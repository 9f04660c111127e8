"""`narrowgauge train` with a corrupt batch: python spiking_run.py RANK PLACE STEP train ...

The batch of that step is corrupt; that rank is killed at the judgement's PLACE-th step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.lab import probe
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.train.tasks.text import TextFeed
from narrowgauge.train.trainer import Trainer

PLANTED = 94
LONG: dict[str, Any] = {
    "steps": 104, "warmup_steps": 4, "checkpoint_every": 20, "learning_rate": 3e-3, "batch_size": 4, "recipe": "fp8-delayed",
}  # fmt: skip


def corrupt(patch: pytest.MonkeyPatch, at: int = PLANTED) -> None:
    """The batch of that step is noise."""
    real = TextFeed.draw

    def draw(feed: Any, step: int) -> Any:
        found = real(feed, step)
        if step + 1 == at:
            for batch in found.batches:
                noise = torch.Generator().manual_seed(3)
                batch["input_ids"] = torch.randint(
                    0, 300, batch["input_ids"].shape, generator=noise
                )
                batch["labels"] = torch.randint(0, 300, batch["labels"].shape, generator=noise)
        return found

    patch.setattr(TextFeed, "draw", draw)


def saturate(patch: pytest.MonkeyPatch, at: int = PLANTED) -> None:
    """The windows of that step are far too small, once."""
    real, done = Trainer._optimizer_step, list[int]()

    def step(trainer: Any) -> Any:
        if trainer.step + 1 == at and not done:
            done.append(at)
            for window in trainer.model.modules():
                if isinstance(window, AmaxHistory):
                    window.live[0] /= 4096
                    window.history /= 4096
        return real(trainer)

    patch.setattr(Trainer, "_optimizer_step", step)


def at_judged_step(patch: pytest.MonkeyPatch, place: int, do: Any) -> None:
    """do(trainer) before the place-th step of judgements."""
    real, count = probe._step, [0]

    def step(trainer: Any, *given: Any) -> Any:
        count[0] += 1
        if count[0] == place:
            do(trainer)
        return real(trainer, *given)

    patch.setattr(probe, "_step", step)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        corrupt(patch, int(sys.argv[3]))
        if os.environ["RANK"] == sys.argv[1]:
            at_judged_step(
                patch, int(sys.argv[2]), lambda trainer: os.kill(os.getpid(), signal.SIGKILL)
            )
        sys.exit(main(sys.argv[4:]))
