"""Former place of `narrowgauge.lab.blame`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.blame")
