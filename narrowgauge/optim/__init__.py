"""Optimizers for weights in 16 bits, and the ladder of precisions that a training step can stand on."""

from narrowgauge.optim.masters import MasterWeights
from narrowgauge.optim.precision import PRECISIONS, Precision
from narrowgauge.optim.stochastic import StochasticAdamW, round_to_bfloat16

__all__ = ["PRECISIONS", "MasterWeights", "Precision", "StochasticAdamW", "round_to_bfloat16"]
