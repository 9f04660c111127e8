"""How tests expect an error: by its class, its code and the values in its sentence, never by the sentence's words.

with raises(ConfigError, "cast.tile", (0, 1)):
    Cast(format=E4M3, tile=(0, 1))

@pytest.mark.parametrize(("build", "expected"), [(lambda: DelayedScaling(length=0), coded("window.length", 0))])
def test_settings_that_cannot_work_are_refused(build, expected):
    with raises(ConfigError, expected):
        build()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from narrowgauge.errors import NarrowgaugeError


class Coded(NamedTuple):
    """A code, and the values that the sentence must name."""

    code: str
    values: tuple[object, ...]


def coded(code: str, *values: object) -> Coded:
    return Coded(code, values)


@contextmanager
def raises(
    error: type[NarrowgaugeError], expected: str | Coded, *values: object
) -> Iterator[pytest.ExceptionInfo[NarrowgaugeError]]:
    """Fails unless the block raises `error` with the expected code and str(value) of each value in its text."""
    __tracebackhide__ = True
    code, values = expected if isinstance(expected, Coded) else (expected, values)
    with pytest.raises(error) as caught:
        yield caught
    found = caught.value
    text = str(found)
    assert found.code == code, f"code is {found.code!r}, expected {code!r}: {text}"
    for value in values:
        assert str(value) in text, f"{str(value)!r} is not in: {text}"
