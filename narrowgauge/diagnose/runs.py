"""Reads and writes the records of a run folder: `run.json` and `metrics.jsonl` (docs/architecture.md).

Both are strict JSON, which has no NaN or infinity: `encode` writes the strings "NaN", "Infinity" and "-Infinity", and `decode`
turns them back into floats, except under the keys in TEXT_KEYS.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.forms import refuse
from narrowgauge.diagnose.recorded_forms import EVENTS, RUN
from narrowgauge.errors import ConfigError

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
TEXT_KEYS = {
    "event", "module", "role", "format", "prompt", "text", "path", "skipped", "reason", "where", "switch", "before", "after",
    "words", "advice",
}  # fmt: skip


def encode(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict ASCII JSON of a record, on one line unless indented."""
    return json.dumps(_named(record), allow_nan=False, indent=indent)


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def decode(text: str | bytes) -> dict[str, Any]:
    """The record that `encode` wrote. Raises ValueError if it is not strict JSON, TypeError if it is not an object."""
    record = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    return dict(_numbers(record))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: value if key in TEXT_KEYS else _numbers(value) for key, value in value.items()}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a run in order of time, as if it had never been interrupted; [] if the file does not exist.

    A `resume` from step k removes earlier events of later steps. Of events that agree in (event, step, module, role, switch)
    the last one counts. Skips a last line that a crash cut short. Raises ConfigError if any other line is not an event.
    """
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    reached = 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = _event(line, reached)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: is not an event of a run: {error}. Remove the line.") from None
        kind, step = event["event"], event["step"]
        if kind == "resume":
            events = {key: each for key, each in events.items() if each["step"] <= step}
            reached = step - 1
        elif kind == "step":
            reached = step
        key = (kind, step, event.get("module"), event.get("role"), event.get("switch"))
        events.pop(key, None)  # so that the last of its kind also stands last
        events[key] = event
    return list(events.values())


def _event(line: bytes, reached: int) -> dict[str, Any]:
    """The event on a line that follows events of step `reached`. Raises ValueError if a value in it is impossible."""
    event = decode(line)
    kind = event.get("event")
    if kind not in EVENTS:
        raise ValueError(f"event = {kind!r} is not one of {', '.join(EVENTS)}")
    if problem := refuse(event, EVENTS[kind]):
        raise ValueError(problem)
    if kind == "step" and event["step"] <= reached:
        raise ValueError(f"step = {event['step']} comes after step {reached}, but only a resumption goes back")
    return event


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be read: {error.strerror}. Name a folder that narrowgauge train wrote.")


def read_run(path: Path) -> dict[str, Any]:
    """The contents of a run.json. Raises ConfigError if it is missing or damaged."""
    try:
        run = decode(path.read_bytes())
        if not (problem := refuse(run, RUN)):
            return run
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, TypeError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(
        f"{path}: damaged: {problem}. Restore a copy of it; or remove it and continue the run with --resume, which writes it again "
        'without the facts of the first start and chooses again where recipe "auto" chose.'
    )
