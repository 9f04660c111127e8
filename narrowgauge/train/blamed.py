"""Former place of `narrowgauge.lab.blamed`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.blamed")
