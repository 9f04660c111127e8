"""Reads files that another program, another user or a crash may have left.

Records, caches, checkpoints and logs all pass through this module. A file is opened without
blocking (O_NONBLOCK), so that a named pipe cannot hang the process. It is read only if it is a
regular file of at most `Kind.most_bytes`. A symbolic link as the last component of the path is
refused unless the kind follows links, because narrowgauge never creates one there. Parent folders
may be links, such as a run folder on another disk.

JSON must be strict UTF-8 with finite numbers, at most DEPTH levels deep, in the form that its kind
requires. Every fault raises the kind's error with the path, the reason and the next step.

Out of scope: ownership of files that the user names as input (follow_links), and kernel files under
/proc and /sys.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NoReturn

from narrowgauge.errors import ConfigError, NarrowgaugeError

LONGEST_REASON = 600  # characters of a reason in a message
DEPTH = 100  # levels of nested lists and objects; narrowgauge's own records have 12
KIB, MIB, GIB = 2**10, 2**20, 2**30
NOT_REGULAR = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file and the rules for reading it.

    most_bytes    largest size
    step          next step for the user, in sentences
    error         error class for an unusable file
    refused       error class if the file system refuses, if it differs
    follow_links  True if the file may be a symbolic link
    only_own      True if the file must belong to this user or root, and others must not write
                  it
    form          returns a clause about a JSON value that does not fit, or ''
    """

    most_bytes: int
    step: str
    error: type[NarrowgaugeError] = ConfigError
    refused: type[NarrowgaugeError] | None = None
    follow_links: bool = False
    only_own: bool = False
    form: Callable[[Any], str] | None = None

    def refusal(self, path: Path, reason: str, code: str) -> NarrowgaugeError:
        """The error for a file, with the reason and the next step. code: as "file.damaged"."""
        if len(reason) > LONGEST_REASON:  # a reason may quote the file's content
            reason = f"{reason[:LONGEST_REASON]} ..."
        return self.error(
            f"{os.fsencode(path).decode('utf-8', 'backslashreplace')}: {reason}. {self.step}",
            code=code,
        )


@contextmanager
def opened(path: Path, kind: Kind) -> Iterator[BufferedReader]:
    """Opens a regular file for reading.

    An OSError while the body reads raises the kind's error, too.
    """
    with _refusing(path, kind):
        descriptor = _descriptor(path, kind, os.O_RDONLY)
        with open(descriptor, "rb") as file:
            yield file


def opened_to_append(path: Path, kind: Kind) -> IO[bytes]:
    """Opens or creates a regular file for reading and unbuffered appends, without a size limit."""
    with _refusing(path, kind):
        return open(
            _descriptor(path, kind, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab+", buffering=0
        )


def bytes_of(path: Path, kind: Kind) -> bytes:
    """The whole content. If the file grows meanwhile, it is read up to its earlier size."""
    with opened(path, kind) as file:
        # read(most_bytes) would allocate a buffer of the largest allowed size.
        return file.read(os.fstat(file.fileno()).st_size)


def text_of(path: Path, kind: Kind, errors: str = "strict") -> str:
    """Content decoded as UTF-8."""
    try:
        return bytes_of(path, kind).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise kind.refusal(path, f"is damaged: {_not_utf8(error)}", "file.not-utf8") from None


def json_of(path: Path, kind: Kind) -> Any:
    """Value of a JSON file in the kind's form."""
    data = bytes_of(path, kind)
    try:
        value = strict_json(data)
    except ValueError as error:
        raise kind.refusal(path, f"is damaged: {error}", "file.json") from None
    if kind.form is not None and (problem := kind.form(value).removeprefix(".").strip()):
        raise kind.refusal(path, f"is damaged: {problem}", "file.form")
    return value


@contextmanager
def opened_tensors(path: Path, kind: Kind) -> Iterator[Any]:
    """Opens a safetensors file, as `safetensors.safe_open` does for torch.

    That function would wait for a named pipe, and raises errors of its own for damaged files.
    """
    from safetensors import SafetensorError, safe_open

    # `opened` refuses what is no regular file, and turns an OSError of the body into the kind's.
    with opened(path, kind):
        try:
            with safe_open(path, "pt") as found:
                yield found
        except SafetensorError as error:
            raise kind.refusal(
                path, f"is damaged: it is no safetensors file: {error}", "file.safetensors"
            ) from error


def strict_json(data: bytes | str) -> Any:
    """Value of a JSON text.

    Raises ValueError for NaN, infinite numbers, more than DEPTH levels, and text that is not UTF-8.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = STRICT.decode(text)
        _refuse_depth(value)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    # json's C scanner raises RecursionError too, depending on the interpreter's stack.
    except RecursionError:
        raise ValueError(f"its lists and objects are more than {DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    return value


def refuse_special_files(folder: Path, kind: Kind) -> None:
    """Raises the kind's error if `folder` holds a file that its reader would block on.

    Such files are pipes, devices, dangling links, and .json files above the limit. For folders that
    a library reads by itself, as transformers reads a model's. Only files directly in the folder
    are checked.
    """
    with _refusing(folder, kind):
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            path = Path(entry.path)
            try:
                # stat follows links: Hub snapshots consist of links.
                found = os.stat(path)
            except FileNotFoundError:
                raise kind.refusal(
                    path, "is a link to a file that is not there", "file.dangling-link"
                ) from None
            if not stat.S_ISDIR(found.st_mode):
                _refuse_stat(found, path, kind, limits_size=path.suffix == ".json")


def _descriptor(path: Path, kind: Kind, flags: int) -> int:
    nofollow = 0 if kind.follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, flags | nofollow | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        # fstat on the open file, not stat on the path: the path could be exchanged in between.
        found = os.fstat(descriptor)
        _refuse_stat(found, path, kind, limits_size=not flags & os.O_APPEND)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_stat(found: os.stat_result, path: Path, kind: Kind, limits_size: bool = True) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = next(
            (words for matches, words in NOT_REGULAR if matches(found.st_mode)), "something else"
        )
        raise kind.refusal(
            path, f"cannot be read: it is {what}, not a regular file", "file.irregular"
        )
    if limits_size and found.st_size > kind.most_bytes:
        raise kind.refusal(
            path,
            f"cannot be read: it has {found.st_size} bytes, and at most {kind.most_bytes} are read",
            "file.too-large",
        )
    if kind.only_own and found.st_uid not in (0, os.getuid()):
        raise kind.refusal(
            path,
            f"cannot be trusted: it belongs to user {found.st_uid}, and you are user {os.getuid()}",
            "file.owner",
        )
    if kind.only_own and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise kind.refusal(
            path,
            f"cannot be trusted: others may write to it (mode {stat.S_IMODE(found.st_mode):04o})",
            "file.writable",
        )


@contextmanager
def _refusing(path: Path, kind: Kind) -> Iterator[None]:
    """Converts an OSError to the kind's error."""
    try:
        yield
    except OSError as error:
        # O_NOFOLLOW on a link gives ELOOP, as does a cycle of links.
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise kind.refusal(
                path, "cannot be read: it is a symbolic link, not a regular file", "file.link"
            ) from error
        # open() on a socket gives ENXIO.
        if error.errno == errno.ENXIO:
            raise kind.refusal(
                path,
                "cannot be read: it is a socket or a device, not a regular file",
                "file.irregular",
            ) from error
        refused = replace(kind, error=kind.refused or kind.error)
        raise refused.refusal(
            path, f"cannot be read: {error.strerror or error}", "file.unreadable"
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    # float("1e999") is inf without an error.
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is larger than any float64")
    return value


STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_depth(value: Any) -> None:
    """Raises RecursionError if a value is nested more than DEPTH levels deep."""
    # Level by level instead of recursively, so that the check itself needs no stack.
    level = [value]
    for _ in range(DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise RecursionError


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.start} is not UTF-8 text"
