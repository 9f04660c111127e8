"""Reads and writes configurations as TOML; errors name the file and line.

A file holds the keys of `TrainConfig` at its top level, and one table, `[recipes]`, from pattern to
recipe:

    hidden_size = 512
    recipe = "fp8-row"

    [recipes]
    "lm_head" = "bf16"

The table may also be written as a list: recipes = ["lm_head=bf16"].

`tomllib` reports lines for syntax errors only, so `_place` searches for the lines of keys.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError, closest
from narrowgauge.storage import reading
from narrowgauge.train.config import recipe_syntax
from narrowgauge.train.config.settings import TABLE, InvalidSettings, TrainConfig, by_key, key_of

MAX_BYTES = 2**16
STORED = reading.Kind(
    most_bytes=MAX_BYTES,
    step="Restore a copy of it, or name another folder that narrowgauge train wrote.",
)
MULTILINE = re.compile(r"(?s)(\"{3}|'{3}).*?\1")
# key -> (unchecked value, its origin such as 'tiny.toml:3' or '--steps')
Given = Mapping[str, tuple[Any, str]]


def build(*layers: Given) -> TrainConfig:
    """Merges layers of settings into a configuration; later layers override earlier ones by key."""
    given = {key: entry for layer in layers for key, entry in layer.items()}
    known = by_key()
    try:
        return TrainConfig(**{known[key].name: value for key, (value, _) in given.items()})
    except InvalidSettings as error:
        # Only here are the origins of all layers known; the dataclass knows values alone.
        raise InvalidSettings(
            error.problems, {key: origin for key, (_, origin) in given.items()}
        ) from None


def load(path: Path) -> TrainConfig:
    """Configuration from a user's file."""
    return build(read(path))


def load_stored(path: Path) -> TrainConfig:
    """Configuration from a config.toml that narrowgauge wrote."""
    return build(read_stored(path))


def read(path: Path) -> Given:
    """Settings of a file that the user names.

    Raises ConfigError if it is unreadable, not TOML, or has an unknown key. The file may be a pipe,
    such as a shell's <(...), and reading then blocks.
    """
    try:
        with open(path, "rb") as file:
            # One byte more than allowed, to detect a larger file: a pipe has no size to check
            # first.
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be read as a configuration: {reason}. Give the path of a TOML file.",
            code="config.unreadable",
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: is larger than {MAX_BYTES} bytes, so it is no configuration. Give a TOML file.",
            code="config.too-large",
        )
    return _decoded(path, data)


def read_stored(path: Path) -> Given:
    """As `read`, for the config.toml of a run or a study; rejects anything but a regular file."""
    return _decoded(path, reading.bytes_of(path, STORED))


def _decoded(path: Path, data: bytes) -> Given:
    try:
        return settings(data.decode("utf-8-sig"), str(path))  # -sig: Windows editors add a BOM
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: is not UTF-8 text. Save the file as UTF-8.", code="config.utf8"
        ) from None


def settings(text: str, name: str) -> Given:
    """Settings in the TOML text `text`; errors call the file `name`."""
    text = text.replace("\r\n", "\n")
    values = _tomllib(text, name)
    # Blank out multi-line strings, whose content could look like a key, but keep the line count.
    outside = MULTILINE.sub(lambda found: "\n" * found[0].count("\n"), text)
    origins = {key: _place(name, outside, key) for key in values}
    known = by_key()
    for key, value in values.items():
        if (
            isinstance(value, list)
            and key in known
            and known[key].type is TABLE
            and all(isinstance(each, str) for each in value)
        ):
            try:
                values[key] = recipe_syntax.table(value)
            except ValueError as error:
                raise ConfigError(
                    f"{origins[key]}: {key}: {error}. Write each pattern once.",
                    code="config.pattern",
                ) from None
    problems = [
        ((key,), reason)
        for key, value in values.items()
        if (reason := _misplaced(key, value, known))
    ]
    if problems:
        raise InvalidSettings(problems, origins)
    return {key: (value, origins[key]) for key, value in values.items()}


def _misplaced(key: str, value: Any, known: Mapping[str, Field[Any]]) -> str:
    """Reason why a key cannot stand at the top level, or ''."""
    if isinstance(value, dict) and (key not in known or known[key].type is not TABLE):
        return f"[{key}] is not a table of the configuration. Only [recipes] is one; all other keys stand at the top."
    if key in known:
        return ""
    near = closest(key.replace("-", "_").lower(), known, limit=1)
    return f"{key!r} is not a setting. " + (
        f"Closest: {near}." if near else "See narrowgauge train --help."
    )


def _tomllib(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = re.fullmatch(
            r"(?s)(.*?) \(at (?:line (\d+), column \d+|end of document)\)", str(error)
        )
        words, line = match.groups() if match else (str(error), None)
        # tomllib's words for a repeated key.
        if words == "Cannot overwrite a value":
            words = "this key was given before; a key is given once"
        raise ConfigError(
            f"{name}:{line or text.count(chr(10)) + 1}: {words}. Correct the line; strings stand in quotes.",
            code="config.line",
        ) from None
    # ValueError: an integer of 5,000 digits. RecursionError: brackets nested 1,000 deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: cannot be read as TOML: {error}. Simplify the file.", code="config.toml"
        ) from None


def _place(name: str, outside: str, key: str) -> str:
    """File and line of a top-level key or table; the file alone if the key is written unusually."""
    found = re.search(rf"""(?m)^[ \t]*\[?[ \t]*(["']?){re.escape(key)}\1[ \t]*[=.\]]""", outside)
    return f"{name}:{outside.count(chr(10), 0, found.start()) + 1}" if found else name


def dump(config: TrainConfig) -> str:
    """TOML text with every key, grouped; reading it restores the configuration."""
    groups: dict[str, list[str]] = {}
    for each in fields(TrainConfig):
        if each.type is not TABLE:
            # TOML requires top-level keys before the first table, so [recipes] is written last.
            value = getattr(config, each.name)
            # The field's own type converts an int given for a float, so that 1 is written as 1.0.
            literal = _text(value) if each.type is str else repr(each.type(value))  # type: ignore[operator]
            lines = groups.setdefault(f"# {each.metadata['group']}", [])
            lines.append(f"{key_of(each)} = {literal.lower() if each.type is bool else literal}")
    groups["# precision, by layer\n[recipes]"] = [
        f"{_text(a)} = {_text(b)}" for a, b in config.layers_recipe.items()
    ]
    return "\n\n".join("\n".join([head, *lines]) for head, lines in groups.items()) + "\n"


def _text(value: str) -> str:
    """TOML basic string. JSON escapes are valid TOML; DEL alone must be escaped in TOML only."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
