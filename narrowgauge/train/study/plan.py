"""Former place of `narrowgauge.lab.study.plan`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.study.plan")
