"""The file that a volunteer sends back: one zip of at most 5 MB, without anything private.

    card-report/report.json     format, date, versions, the card, how the report ended
    card-report/lines.jsonl     one JSON object for each process (`runner`)

Nothing else is in it. Names of the user, of the host and of folders are taken out of every text:
the last two parts of a path stay, since they name a file of a package.

An archive comes from another machine, so `read` takes these two members alone, limits their sizes
before it unpacks, and parses strict JSON. It also reads the folder of a report that was cut off.
"""

from __future__ import annotations

import getpass
import io
import os
import platform
import re
import socket
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.runs import decode, encode
from narrowgauge.errors import ConfigError
from narrowgauge.lab.card.process import STATUSES
from narrowgauge.storage import reading, replace_file

FORMAT = 1
MOST_BYTES = 5_000_000
UNPACKED_BYTES = 64 * reading.MIB
REPORT, LINES = "report.json", "lines.jsonl"
INSIDE = "card-report/"
STEP = "Name the .zip that narrowgauge card-report wrote, or its folder."
KIND = reading.Kind(most_bytes=MOST_BYTES, step=STEP, follow_links=True)
MEMBER = reading.Kind(most_bytes=UNPACKED_BYTES, step=STEP, follow_links=True)
MOST_LINES = 2_000  # a whole report has some hundreds
# What is left of a process's output and of its kernels, tried in turn until the archive is small.
CUTS = ((4096, 40), (512, 12), (0, 4), (0, 0))
SHORTEST = 3  # letters of a name that is taken out: shorter ones are parts of words
PATH = re.compile(r"(?<![\w.:/])(?:/[^\s/:'\"<>|,;)\\]+){2,}|\b[A-Za-z]:\\[^\s'\"<>|,;)]+")


@dataclass(frozen=True)
class Report:
    """Content of an archive: report.json and the lines. source: the archive, for sentences."""

    facts: Mapping[str, Any]
    lines: list[dict[str, Any]]
    source: Path = Path("the report")


def cleaner() -> Callable[[str], str]:
    """A function that takes the names of this user, host and their folders out of a text."""
    names: set[str] = {platform.node(), socket.gethostname(), os.environ.get("USER", "")}
    with suppress(OSError, KeyError):  # a user without an entry
        names.add(getpass.getuser())
    # A host is called by its first label too, and a home folder need not have the user's name.
    names |= {name.partition(".")[0] for name in names} | {Path.home().name}
    known = sorted((name for name in names if len(name) >= SHORTEST), key=len, reverse=True)
    private = re.compile(
        "|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in known) or "(?!)"
    )

    def clean(text: str) -> str:
        return private.sub("...", PATH.sub(_shortened, text))

    return clean


def _shortened(found: re.Match[str]) -> str:
    parts = re.split(r"[/\\]", found[0])
    return "/".join(["...", *parts[-2:]])


def write(path: Path, facts: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> int:
    """Write the archive and return its size in bytes, at most MOST_BYTES.

    Outputs and lists of kernels are cut as far as that needs. Raises StorageError if it cannot be
    written.
    """
    lines = list(lines)
    for output, named in CUTS:
        data = _packed({**facts, "format": FORMAT}, [_cut(line, output, named) for line in lines])
        if len(data) <= MOST_BYTES:
            break
    else:
        raise AssertionError(f"{len(lines)} lines take {len(data)} bytes without their outputs")
    replace_file(path, data, "choose another --output")
    return len(data)


def store(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write report.json of a report that runs."""
    (folder / REPORT).write_text(encode(facts, indent=1), encoding="utf-8")


def _cut(line: Mapping[str, Any], output: int, named: int) -> dict[str, Any]:
    found = dict(line)
    if "output" in found:
        found["output"] = str(found["output"])[-output:] if output else ""
    if "kernels" in found:
        found["kernels"] = list(found["kernels"])[:named]
    return found


def _packed(facts: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(INSIDE + REPORT, encode(facts, indent=1))
        archive.writestr(INSIDE + LINES, "".join(encode(line) + "\n" for line in lines))
    return packed.getvalue()


def read(path: Path) -> Report:
    """Read an archive, or the folder of a report that was cut off.

    Raises ConfigError if it is neither.
    """
    if path.is_dir():
        return _of_folder(path)
    # Unpacked in memory: names of members of a stranger's archive reach no disk.
    data = reading.bytes_of(path, KIND)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts, lines = (_member(path, archive, name) for name in (REPORT, LINES))
    except ConfigError:
        raise
    except Exception as error:  # zipfile lets errors of its decompressors and of file positions out
        raise damaged(path, f"it is no archive of card-report ({error})") from None
    return _parsed(path, facts, lines)


def _of_folder(path: Path) -> Report:
    if not (path / REPORT).exists():
        raise damaged(path, f"the folder has no {REPORT}")
    facts = reading.bytes_of(path / REPORT, MEMBER)
    lines = b""
    if (path / LINES).exists():
        lines = reading.bytes_of(path / LINES, MEMBER)
        lines = lines[: lines.rfind(b"\n") + 1]  # the last one may have been cut
    return _parsed(path, facts, lines)


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    # The header may lie about the size, so the read is limited as well.
    size = archive.getinfo(INSIDE + name).file_size
    if size > UNPACKED_BYTES:
        raise damaged(path, f"{name} has {size} bytes, more than {UNPACKED_BYTES}")
    with archive.open(INSIDE + name) as file:
        return file.read(UNPACKED_BYTES)


def _parsed(path: Path, facts: bytes, lines: bytes) -> Report:
    try:
        found = decode(facts)
        rows = [_row(decode(line)) for line in lines.splitlines() if line.strip()]
        if not isinstance(found, dict) or found.get("format") != FORMAT or found["format"] is True:
            raise ValueError(f"{REPORT} is not of format {FORMAT}")
        if len(rows) > MOST_LINES:
            raise ValueError(f"{LINES} has {len(rows)} lines, more than {MOST_LINES}")
    except (ValueError, TypeError) as error:
        raise damaged(path, str(error)) from None
    return Report(found, rows, path)


def _row(value: Any) -> dict[str, Any]:
    needed = {"job": str, "part": str, "status": str}
    if not isinstance(value, dict) or any(
        not isinstance(value.get(key), kind) for key, kind in needed.items()
    ):
        raise ValueError(f"a line of {LINES} has no {', '.join(needed)}")
    if value["status"] not in STATUSES:
        raise ValueError(f"a line of {LINES} ended as {value['status']!r}")
    return value


def damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"card-report: {path}: {reason}. {STEP}", code="card-report.damaged")
