"""Former place of `narrowgauge.lab.study.plan`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.study.plan")
