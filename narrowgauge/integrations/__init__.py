"""One line each for training loops that are not ours.

    RunFolder           the run folder of `narrowgauge train`, written by transformers' Trainer, with
                        Accelerate, or by hand
    LightningRunFolder  the same, written by Lightning's Trainer
    convert_trainer     a recipe for a Trainer's model and for the frozen reference beside it
    ConvertCallback     a recipe for the model of a Trainer that the loop makes itself (LLaMA-Factory)
    axolotl             plugin that axolotl's configuration names

The guard for transformers' Trainer is `narrowgauge.lab.transformers_trainer`.
"""

from narrowgauge.integrations.convert_trainer import ConvertCallback, convert_trainer
from narrowgauge.integrations.lightning import LightningRunFolder
from narrowgauge.integrations.run_folder import RunFolder

__all__ = ["ConvertCallback", "LightningRunFolder", "RunFolder", "convert_trainer"]
