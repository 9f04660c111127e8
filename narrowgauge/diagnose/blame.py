"""Former place of `narrowgauge.lab.blame`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.blame")
