"""Former place of `narrowgauge.lab.probe`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.probe")
