"""Configurations as TOML: read strictly, with the file and line of every mistake, and written back.

A file holds the keys of `TrainConfig` at its top level, and one table, `[recipes]`, from pattern to recipe:

    hidden_size = 512
    recipe = "fp8-row"

    [recipes]
    "lm_head" = "bf16"

`tomllib` tells the line of a syntax error and of nothing else, so `_statements` finds the lines of the keys.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config.field_checks import Problem
from narrowgauge.train.config.settings import TABLE, InvalidSettings, TrainConfig, by_key, key_of

MAX_BYTES = 2**16


@dataclass(frozen=True)
class Settings:
    """Values by key as somebody gave them, not yet checked, and where each came from, as 'tiny.toml:3' or '--steps'."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


def build(*layers: Settings) -> TrainConfig:
    """The configuration of several layers of settings, of which the later win, key by key."""
    values = {key: value for layer in layers for key, value in layer.values.items()}
    origins = {key: layer.origins.get(key, "") for layer in layers for key in layer.values}
    names = {key: each.name for key, each in by_key().items()}
    try:
        return TrainConfig(**{names[key]: value for key, value in values.items()})
    except InvalidSettings as error:
        raise InvalidSettings(error.problems, origins) from None


def load(path: Path) -> TrainConfig:
    return build(read(path))


def read(path: Path) -> Settings:
    """The settings of a file. ConfigError if it cannot be read, is no TOML, or has a key that is not a setting."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be read as a configuration: {reason}. Give the path of a TOML file."
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes, so it is no configuration. Give a TOML file.")
    try:
        return settings(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text. Save the file as UTF-8.") from None


def parse(text: str, name: str = "config") -> TrainConfig:
    """The configuration that `text` describes; `name` stands for the file in errors."""
    return build(settings(text, name))


def settings(text: str, name: str) -> Settings:
    text = text.replace("\r\n", "\n")
    values = _tomllib(text, name)
    origins = {key: f"{name}:{line}" for key, line in _lines(text).items()}
    known = by_key()
    problems = [Problem((key,), words) for key, value in values.items() if (words := _misplaced(key, value, known))]
    if problems:
        raise InvalidSettings(problems, origins)
    return Settings(values, origins)


def _misplaced(key: str, value: Any, known: Mapping[str, Field[Any]]) -> str:
    """Why a key cannot stand at the top of the file, or ''."""
    if isinstance(value, dict) and (key not in known or known[key].type is not TABLE):
        return f"[{key}] is not a table of the configuration. Only [recipes] is one; all other keys stand at the top."
    if key in known:
        return ""
    near = closest(key.replace("-", "_").lower(), known, limit=1)
    return f"{key!r} is not a setting. " + (f"Closest: {near}." if near else "See narrowgauge train --help.")


def _tomllib(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        words, line = _where(str(error), text)
        raise ConfigError(f"{name}:{line}: {words}. Correct the line; strings stand in quotes.") from None
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, brackets 1,000 deep
        raise ConfigError(f"{name}: cannot be read as TOML: {error}. Simplify the file.") from None


def _where(message: str, text: str) -> tuple[str, int]:
    """tomllib's words and line number, out of "Words (at line 3, column 7)"."""
    match = re.fullmatch(r"(?s)(.*?) \(at (?:line (\d+), column \d+|end of document)\)", message)
    words, line = match.groups() if match else (message, None)
    if words == "Cannot overwrite a value":
        words = "this key was given before; a key is given once"
    return words, int(line) if line else text.count("\n") + 1


def _lines(text: str) -> dict[str, int]:
    """The line on which each top-level key or table begins, 1-based."""
    found: dict[str, int] = {}
    in_table = False
    for line, source, key in _statements(text):
        in_table = in_table or source.lstrip().startswith("[")
        if not in_table or source.lstrip().startswith("["):
            found.setdefault(key, line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, source and first key of each statement of valid TOML: the fewest lines that are TOML by themselves."""
    pending: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        pending.append(line)
        if len(pending) > 1 and not re.search(r"\"\"\"|'''|[]}]", line):
            continue  # nothing here closes the array or string that is open
        try:
            statement = tomllib.loads("\n".join(pending))
        except tomllib.TOMLDecodeError:
            continue
        if statement:
            yield number - len(pending) + 1, pending[0], next(iter(statement))
        pending = []


def dump(config: TrainConfig) -> str:
    """TOML with every key, under its group; `parse(dump(config)) == config`."""
    lines: list[str] = []
    group = ""
    for each in fields(TrainConfig):
        if each.type is not TABLE:
            if each.metadata["group"] != group:
                group = each.metadata["group"]
                lines += ["", f"# {group}"]
            lines.append(f"{key_of(each)} = {_literal(each.type, getattr(config, each.name))}")
    lines += ["", "# precision, by layer", "[recipes]"]
    lines += [f"{_text(pattern)} = {_text(recipe)}" for pattern, recipe in config.layers_recipe.items()]
    return "\n".join(lines[1:]) + "\n"


def _literal(kind: Any, value: Any) -> str:
    if kind is bool:
        return "true" if value else "false"
    if kind is str:
        return _text(value)
    return repr(kind(value))


def _text(value: str) -> str:
    """A TOML basic string. JSON's escapes are TOML's, but for the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
