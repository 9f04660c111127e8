"""Former place of `narrowgauge.lab.probe`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.probe")
