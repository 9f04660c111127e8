"""Reads and writes configurations as TOML; errors name the file and line.

A file holds the tables of `TrainConfig`, and a few settings at its top:

    output = "runs/first"

    [model]
    hidden_size = 512

    [recipe]
    name = "fp8-row"
    layers = { lm_head = "bf16" }

A table that has a setting of its own name may be that setting alone: recipe = "fp8-row". The tables
of `guard` and `parallel` may also hold the parts of this setting: every = 2000 in `[guard]`.

Former keys, all at the top of the file, are understood for one release: `FORMER`.

`tomllib` reports lines for syntax errors only, so `_lines` searches for the lines of keys.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import ConfigError, closest
from narrowgauge.storage import reading
from narrowgauge.train.config import foreign_names, recipe_syntax
from narrowgauge.train.config.merged_settings import MERGED
from narrowgauge.train.config.settings import (
    NUMBERS,
    TABLE,
    InvalidSettings,
    TrainConfig,
    by_path,
    key_of,
    key_of_name,
    shown,
)

MAX_BYTES = 2**16
STORED = reading.Kind(
    most_bytes=MAX_BYTES,
    step="Restore a copy of it, or name another folder that narrowgauge train wrote.",
)
MULTILINE = re.compile(r"(?s)(\"{3}|'{3}).*?\1")
NAME = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
LINE = re.compile(
    rf"[ \t]*(?:\[[ \t]*(?P<table>{NAME}(?:[ \t]*\.[ \t]*{NAME})*)[ \t]*\]|(?P<key>{NAME}(?:[ \t]*\.[ \t]*{NAME})*)[ \t]*=)"
)


class Entry(NamedTuple):
    """A setting that was given.

    value   unchecked value
    origin  its place, such as 'tiny.toml:3' or '--training.steps'
    former  its former key, if it was given by that
    """

    value: Any
    origin: str
    former: str = ""


# Field name, or "guard.every" or "columns.text" for a part of a setting -> what was given
Given = Mapping[str, Entry]


def build(*layers: Given) -> TrainConfig:
    """Merges layers of settings into a configuration; later layers override earlier ones."""
    given: dict[str, Entry] = {}
    for layer in layers:
        whole = {name: entry for name, entry in layer.items() if "." not in name}
        # A setting that is given whole overrides the parts of earlier layers.
        given = {
            name: entry for name, entry in given.items() if name.partition(".")[0] not in whole
        }
        given |= layer
    try:
        return TrainConfig(**_composed(given))
    except InvalidSettings as error:
        # Only here are the origins of all layers known; the dataclass knows values alone.
        origins = {name.partition(".")[0]: entry.origin for name, entry in given.items()}
        origins |= {name: entry.origin for name, entry in given.items()}
        raise InvalidSettings(error.problems, origins) from None


def _composed(given: Given) -> dict[str, Any]:
    """Values by field name, with the parts of a setting in one table, or in its own language."""
    values = {name: entry.value for name, entry in given.items() if "." not in name}
    for name in PARTS:
        parts = {
            key.partition(".")[2]: entry
            for key, entry in given.items()
            if key.startswith(f"{name}.")
        }
        whole = values.get(name, {} if name in OF_ENTRIES else "")
        if parts and isinstance(whole, Mapping):
            values[name] = {**whole, **{part: entry.value for part, entry in parts.items()}}
        elif parts and isinstance(whole, str):
            kept = [
                words
                for words in whole.split(",")
                if words.strip() and words.partition("=")[0].strip() not in parts
            ]
            values[name] = ",".join([*kept, *_written(name, parts)])
    for name, merged in MERGED.items():
        parts = {
            part: given[f"{name}.{part}"] for part in merged.kinds if f"{name}.{part}" in given
        }
        for part, entry in parts.items():
            if not _is_of(entry.value, merged.kinds[part]):
                words = {bool: "true or false", int: "a whole number", float: "a number"}
                raise ConfigError(
                    f"{entry.origin}: {part} = {shown(entry.value)}: must be {words[merged.kinds[part]]}.",
                    code=f"config.{part}",
                )
        if parts:
            whole = values.get(name, TrainConfig.__dataclass_fields__[name].default)
            values[name] = merged.combine(whole, {part: each.value for part, each in parts.items()})
    return values


def _is_of(value: object, kind: type) -> bool:
    """True if a TOML value has the kind: true is no number, and a whole number is one."""
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int if kind is int else int | float)


def _written(name: str, parts: Given) -> Iterator[str]:
    """Parts of a setting as text: every=2000."""
    for part, entry in parts.items():
        is_plain = isinstance(entry.value, bool | int | float | str)
        if not is_plain or (isinstance(entry.value, str) and "," in entry.value):
            raise ConfigError(
                f"{entry.origin}: {name}.{part} = {shown(entry.value)}: must be one number or word. Give one.",
                code=f"config.{name}",
            )
        if entry.value is True:
            yield part
        elif entry.value is not False:
            yield f"{part}={entry.value}"


def given(entries: Iterable[tuple[str, str, Entry]]) -> Given:
    """Settings of one file or command line; (field name, key as written, entry) each.

    Raises ConfigError if two keys of one setting have different values.
    """
    found: dict[str, tuple[str, Entry]] = {}
    for name, key, entry in (part for each in entries for part in _split(*each)):
        before, other = found.setdefault(name, (key, entry))
        if other is not entry and other.value != entry.value:
            (former, first), (now, second) = sorted(
                ((before, other), (key, entry)), key=lambda each: not each[1].former
            )
            raise ConfigError(
                f"{first.origin}: {former} = {shown(first.value)}: is the same setting as {now}, which is {shown(second.value)} "
                f"({second.origin}). Remove {former}.",
                code="config.both-keys",
            )
        if other.former:
            found[name] = key, entry
    _refuse_both(found)
    return {name: entry for name, (_, entry) in found.items()}


def _refuse_both(found: Mapping[str, tuple[str, Entry]]) -> None:
    """Raise ConfigError if a former key contradicts the setting that replaces it."""
    for name, merged in MERGED.items():
        for part in merged.kinds:
            if name not in found or f"{name}.{part}" not in found:
                continue
            (now, whole), (former, entry) = found[name], found[f"{name}.{part}"]
            combined = merged.combine(whole.value, {part: entry.value})
            if combined != whole.value and whole.value not in merged.beside:
                raise ConfigError(
                    f"{entry.origin}: {former} = {shown(entry.value)}: is a part of {now}, which is {shown(whole.value)} "
                    f"({whole.origin}). Remove {former}.",
                    code="config.both-keys",
                )


def _split(name: str, key: str, entry: Entry) -> Iterator[tuple[str, str, Entry]]:
    """A setting as `given` takes it; of a table whose entries are parts, each entry."""
    if name in OF_ENTRIES and isinstance(entry.value, Mapping):
        for part, value in entry.value.items():
            yield f"{name}.{part}", f"{key}.{part}", entry._replace(value=value)
    else:
        yield name, key, entry


def former_keys(*layers: Given) -> str:
    """A line on the former keys that were used, or ''."""
    used = {
        entry.former: f"--{key.replace('_', '-')}" if entry.former[0] == "-" else key
        for layer in layers
        for name, entry in layer.items()
        if entry.former
        for key in (key_of_name(name),)
    }
    listed = ", ".join(f"{former} (now {now})" for former, now in used.items())
    return (
        f"former names of settings, which the next release does not know: {listed}." if used else ""
    )


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
    lines = _lines(outside)

    def place(path: str) -> str:
        """File and line of a key; of its table or the file alone if it is written unusually."""
        line = lines.get(path) or lines.get(path.rpartition(".")[0])
        return f"{name}:{line}" if line else name

    entries: list[tuple[str, str, Entry]] = []
    problems: list[tuple[tuple[str, ...], str]] = []
    origins: dict[str, str] = {}
    for path, value in _paths(values):
        is_former = path in {*FORMER, *EARLIER} and path not in SHORT
        origin, former = place(path), path if is_former else ""
        field = _name(FORMER.get(path, path)) if path not in TABLES or path in SHORT else None
        if field is None:
            problems.append(((path,), _unknown(path, value)))
            origins[path] = origin
        else:
            entries.append((field, path, Entry(_table(field, value, path, origin), origin, former)))
    if problems:
        raise InvalidSettings(problems, origins)
    return given(entries)


def _paths(values: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """(key as in `by_path`, value) of all settings of a file, and of unknown keys."""
    for key, value in values.items():
        path = f"{table}.{key}" if table else key
        if isinstance(value, dict) and (path in TABLES or path in OF_ENTRIES.values()):
            yield from _paths(value, path)
        else:
            yield path, value


def _name(path: str) -> str | None:
    """Field name of a setting, "columns.text" for an entry of its table; None for no setting."""
    for name, table in OF_ENTRIES.items():
        if path.startswith(f"{table}."):
            return f"{name}.{path.removeprefix(f'{table}.')}"
    return NAMES.get(path)


def _table(field: str, value: Any, key: str, origin: str) -> Any:
    """The value; of a list of 'pattern=recipe', the table that it stands for; a pair of numbers."""
    if field in OF_NUMBERS and isinstance(value, list):
        return tuple(value)
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not is_list or field not in OF_PATTERNS:
        return value
    try:
        return recipe_syntax.table(value, FORMS.get(field, "pattern=recipe"))
    except ValueError as error:
        raise ConfigError(
            f"{origin}: {key}: {error}. Write each once.", code="config.pattern"
        ) from None


def _unknown(path: str, value: Any) -> str:
    """Why a key is no setting, and the nearest one."""
    table, _, key = path.rpartition(".")
    if path in TABLES:
        return f"[{path}] is a table, and not {shown(value)}. Its settings are {', '.join(_keys_of(path))}."
    if isinstance(value, dict) and not table:
        near = closest(path.lower(), TABLES, limit=1)
        return (
            f"[{path}] is not a table of the configuration. "
            f"{f'Closest: {near}. ' if near else ''}Tables are {', '.join(TABLES)}."
        )
    asked = key.replace("-", "_").lower()
    # Keys of the same table first; else the key may stand in another table.
    near = closest(asked, _keys_of(table), limit=1) if table else ""
    if not near:
        known = {each.rpartition(".")[2]: each for each in (*PATHS, *SHORT)} | FORMER
        found = closest(asked, known, limit=1).strip("'")
        near = f"'{known[found]}'" if found else ""
    where = f" of [{table}]" if table else ""
    if words := foreign_names.answer(asked, str(value), _with_keys):
        return f"{key!r} is not a setting{where}, but one of another trainer. Here: {words}"
    return f"{key!r} is not a setting{where}. " + (
        f"Closest: {near}." if near else "See narrowgauge train --help."
    )


# A word behind a flag that is its value, and no word of the sentence
VALUE = r"'[^']*'|true|none|full|(?=[^ ]*[0-9=])[A-Za-z0-9=,.-]*[A-Za-z0-9]|[A-Z]+"


def _with_keys(words: str) -> str:
    """A text with flags as a file has them: --batch.size 32 is batch.size = 32."""

    def key(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2] or ""
        if name not in NAMES:
            return found[0]
        plain = (
            value
            if re.fullmatch(r"N|[0-9.e-]+|true|false", value)
            else json.dumps(value.strip("'"))
        )
        return f"{name} = {plain}" if value else name

    keys = re.sub(rf"--([a-z][a-z0-9.-]*[a-z0-9])(?: ({VALUE})(?![A-Za-z]))?", key, words)
    return re.sub(r"( = \S+) (?=[a-z_]+\.[a-z_]+ = )", r"\1, ", keys)


def _keys_of(table: str) -> list[str]:
    own = [path.rpartition(".") for path in PATHS]
    return [*(key for owner, _, key in own if owner == table), *PARTS.get(table, ())]


PATHS = by_path()
# Settings with parts that may also be keys and flags of their own
PARTS: dict[str, Mapping[str, str]] = {
    each.name: each.metadata["parts"] for each in PATHS.values() if each.metadata["parts"]
}
# Those of them that are a table, whose entries are the parts -> its name in a file
OF_ENTRIES = {
    each.name: path for path, each in PATHS.items() if each.type is TABLE and each.name in PARTS
}
TABLES = tuple(
    dict.fromkeys(each.metadata["table"] for each in PATHS.values() if each.metadata["table"])
)
SHORT = tuple(key_of(each) for each in PATHS.values() if each.metadata["short"])
OF_NUMBERS = tuple(each.name for each in PATHS.values() if each.type is NUMBERS)
# Keys of settings that are one with others now -> "betas.beta1"
EARLIER = {
    f"{path.rpartition('.')[0]}.{part}": f"{each.name}.{part}"
    for path, each in PATHS.items()
    if each.name in MERGED
    for part in MERGED[each.name].kinds
}
OF_PATTERNS = tuple(each.name for each in PATHS.values() if each.type is TABLE)
# Form of the entries of a table that is written as text, where it is not 'pattern=recipe'
FORMS = {"columns": "name=column"}
# Every spelling but the former ones -> field name, or "guard.every" for a part of a setting
NAMES = (
    {path: each.name for path, each in PATHS.items()}
    | {key_of(each): each.name for each in PATHS.values()}
    | EARLIER
    | {key_of_name(f"{name}.{part}"): f"{name}.{part}" for name in PARTS for part in PARTS[name]}
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
            words = (
                "this key was given before; a key is given once. A name that is a table here, as [data], takes no value of its own: "
                "source of [data], name of [recipe], checks of [guard]"
            )
        raise ConfigError(
            f"{name}:{line or text.count(chr(10)) + 1}: {words}. Correct the line; strings stand in quotes.",
            code="config.line",
        ) from None
    # ValueError: an integer of 5,000 digits. RecursionError: brackets nested 1,000 deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: cannot be read as TOML: {error}. Simplify the file.", code="config.toml"
        ) from None


def _lines(outside: str) -> dict[str, int]:
    """Line of each key and of each table's header, by "key", "table" or "table.key"."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(outside.splitlines(), 1):
        match = LINE.match(line)
        if match is None:
            continue
        words = ".".join(
            word.strip("\"'") for word in re.findall(NAME, match["table"] or match["key"])
        )
        if match["table"]:
            table = words
        else:
            words = f"{table}.{words}" if table else words
        # The line of [recipe.layers] is also that of [recipe], should that have no header.
        for end in range(words.count(".") + 1):
            found.setdefault(words.rsplit(".", end)[0] if end else words, number)
    return found


def dump(config: TrainConfig) -> str:
    """TOML text with every key, in its table; reading it restores the configuration."""
    tables: dict[str, list[str]] = {}
    for path, each in PATHS.items():
        value, (table, _, key) = getattr(config, each.name), path.rpartition(".")
        if each.type is TABLE:
            name = str if each.name in OF_ENTRIES else _text  # a pattern stands in quotes
            tables[path] = [f"{name(a)} = {_text(b)}" for a, b in value.items()]
            continue
        tables.setdefault(table, []).append(f"{key} = {_literal(each.type, value)}")
    return (
        "\n\n".join(
            "\n".join([f"[{table}]", *lines] if table else lines) for table, lines in tables.items()
        )
        + "\n"
    )


def _literal(kind: Any, value: Any) -> str:
    if kind is NUMBERS:
        return repr([*map(float, value)])
    # The field's own type converts an int given for a float, so that 1 is written as 1.0.
    literal = _text(value) if kind is str else repr(kind(value))
    return literal.lower() if kind is bool else literal


def _text(value: str) -> str:
    """TOML basic string. JSON escapes are valid TOML; DEL alone must be escaped in TOML only."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
