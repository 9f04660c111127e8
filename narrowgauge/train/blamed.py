"""Former place of `narrowgauge.lab.blamed`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.blamed")
