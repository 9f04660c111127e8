"""Former place of `narrowgauge.lab.transformers_trainer`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.transformers_trainer")
