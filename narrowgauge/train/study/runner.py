"""Former place of `narrowgauge.lab.study.runner`."""

from narrowgauge.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.study.runner")
