"""Former place of `narrowgauge.lab.guard.evidence`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.guard.evidence")
