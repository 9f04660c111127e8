"""Former place of `narrowgauge.lab.study.runner`."""

from narrowgauge.diagnose.moved import moved

__getattr__ = moved(__name__, "narrowgauge.lab.study.runner")
