"""Former place of `narrowgauge.lab.guard.evidence`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.guard.evidence")
