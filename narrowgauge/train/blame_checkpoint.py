"""Former place of `narrowgauge.lab.blame_checkpoint`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.blame_checkpoint")
