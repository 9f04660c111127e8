"""How tests expect an error: by its class, its code and the values in its sentence, never by the sentence's words.

with raises(ConfigError, "cast.tile", (0, 1)):
    Cast(format=E4M3, tile=(0, 1))

@pytest.mark.parametrize(("build", "expected"), [(lambda: DelayedScaling(length=0), coded("window.length", 0))])
def test_settings_that_cannot_work_are_refused(build, expected):
    with raises(ConfigError, expected):
        build()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from narrowgauge import cli
from narrowgauge.errors import NarrowgaugeError, NarrowgaugeWarning


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
    require(caught.value, code, *values)


def require(found: Any, code: str, *values: object) -> None:
    """Fails unless an error, a warning, a refusal or a reason has the code and names the values."""
    __tracebackhide__ = True
    text = str(found)
    assert found.code == code, f"code is {found.code!r}, expected {code!r}: {text}"
    for value in values:
        assert str(value) in text, f"{str(value)!r} is not in: {text}"


def refusal_of(registry: Any, kernel: str, spec: Any) -> Any:
    """The refusal with which the registry's kernel of that name answers the call, or None."""
    [found] = [each for each in registry.kernels if each.name == kernel]
    return found.refuse(spec)


def with_code(found: Iterable[Any], code: str) -> list[Any]:
    """Those of the notes, reasons or recorded warnings that have the code, in their order."""
    unwrapped = (getattr(each, "message", each) for each in found)
    return [each for each in unwrapped if getattr(each, "code", None) == code]


@contextmanager
def warns(
    code: str, *values: object, category: type[NarrowgaugeWarning] = NarrowgaugeWarning
) -> Iterator[pytest.WarningsRecorder]:
    """Fails unless the block issues a warning with the code that names the values."""
    __tracebackhide__ = True
    with pytest.warns(category) as caught:
        yield caught
    codes = [getattr(each.message, "code", each.category.__name__) for each in caught]
    found = with_code(caught, code)
    assert found, f"no warning has the code {code!r}, but {codes}"
    assert any(all(str(value) in str(each) for value in values) for each in found), (
        f"{values} are not in: {[str(each) for each in found]}"
    )


def cli_error(arguments: Sequence[str]) -> NarrowgaugeError:
    """The error with which the command line ends, whose exit code is the one of its class."""
    __tracebackhide__ = True
    caught: list[NarrowgaugeError] = []
    dispatch = cli._dispatch

    def recorded(words: list[str]) -> int:
        try:
            return dispatch(words)
        except NarrowgaugeError as error:
            caught.append(error)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_dispatch", recorded)
        code = cli.main(arguments)
    assert caught, f"the command ended with {code} and no error of the package"
    assert code == caught[0].exit_code
    return caught[0]


def cli_raises(
    arguments: Sequence[str],
    error: type[NarrowgaugeError],
    expected: str | Coded,
    *values: object,
) -> None:
    """Fails unless the command line ends with `error`, the expected code, and the values in its text."""
    __tracebackhide__ = True
    with raises(error, expected, *values):
        raise cli_error(arguments)
