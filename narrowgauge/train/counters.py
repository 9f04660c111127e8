"""Counters of a run, which checkpoints store and probes restore."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counters of one run. A snapshot restores every field.

    step           finished optimizer steps
    saved_step     step of the newest checkpoint
    skipped_steps  consecutive float16 overflows up to now
    trained_s      seconds of training, summed over all resumptions
    """

    step: int = 0
    saved_step: int = 0
    skipped_steps: int = 0
    trained_s: float = 0.0
