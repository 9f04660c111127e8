"""How tests expect an error: by its class, its code and the values in its sentence, never by the sentence's words.

    with raises(ConfigError, "cast.tile", (0, 1)):
        Cast(format=E4M3, tile=(0, 1))

The form of the sentence is checked for every error: it begins with its subject, and ends with a full stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from narrowgauge.errors import NarrowgaugeError


@contextmanager
def raises(
    error: type[NarrowgaugeError], code: str, *values: object
) -> Iterator[pytest.ExceptionInfo[NarrowgaugeError]]:
    """Fails unless the block raises exactly `error` with `code`, and its text has str(value) of each of `values`."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    found = caught.value
    text = str(found)
    assert found.code == code, f"code is {found.code!r}, expected {code!r}: {text}"
    for value in values:
        assert str(value) in text, f"{str(value)!r} is not in: {text}"
    assert text.endswith("."), f"no sentence: {text}"
