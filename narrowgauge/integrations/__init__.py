"""Callbacks for training loops that are not ours.

    RunFolder    the run folder of `narrowgauge train`, written by transformers' Trainer or by hand

The guard for transformers' Trainer is `narrowgauge.lab.transformers_trainer`.
"""

from narrowgauge.integrations.run_folder import RunFolder

__all__ = ["RunFolder"]
