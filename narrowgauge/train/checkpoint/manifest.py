"""The list of a checkpoint's files, with size and SHA-256 of each, in a file that also hashes itself.

    {"kind": ..., "format": 1, "step": 100, "groups": [...], "ties": {...}, "files": {name: {"bytes", "sha256"}}, "sha256": ...}

The last key is the SHA-256 of the bytes that the manifest has without it. A reader writes what it parsed once more and
compares, so a changed byte is noticed even where JSON does not care, as in white space. A right hash proves that
nothing was damaged, not that nobody meant harm: names are checked as well, and nothing outside the folder is opened.
"""

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import CheckpointError

FORMAT = 1
KIND = "narrowgauge checkpoint"
NAME, FACTS = "manifest.json", "facts.json"
STEP = re.compile(r"step-\d{8}")
GROUP = re.compile(r"[a-z][a-z0-9_]{0,40}")
FILE = re.compile(r"([a-z][a-z0-9_]{0,40})-\d+\.safetensors|facts\.json")


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer narrowgauge wrote."""


@dataclass(frozen=True)
class Manifest:
    """`ties`: group -> name -> the name under which the same tensor is stored. `files`: name -> bytes and sha256."""

    step: int
    groups: list[str]
    ties: dict[str, dict[str, str]]
    files: dict[str, dict[str, Any]]

    def signed(self) -> bytes:
        body = {"kind": KIND, "format": FORMAT, **asdict(self)}
        return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})

    def refuse(self) -> str:
        """What does not make sense in it, or ''."""
        if not isinstance(self.step, int) or isinstance(self.step, bool) or not 0 <= self.step < 10**8:
            return f"has step = {self.step!r}, not a whole number from 0 to 99999999"
        if FACTS not in self.files:
            return f"lists no {FACTS}"
        for group in [*self.groups, *self.ties]:
            if not GROUP.fullmatch(group) or group not in self.groups:
                return f"has a group {group!r}"
        for name, listed in self.files.items():
            match = FILE.fullmatch(name)
            if not match or match[1] not in (None, *self.groups) or listed.keys() != {"bytes", "sha256"}:
                return f"lists a file {name!r}"
        return ""


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, indent=1).encode()


def listed(data: bytes) -> dict[str, Any]:
    """A file's entry in the manifest."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read(folder: Path) -> Manifest:
    """The manifest of an existing checkpoint folder that holds the files it lists, and no others."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder}: is not a folder. Remove it, or restore the checkpoint.")
    manifest = _parse(folder, _read_plain(folder / NAME))
    foreign = set(os.listdir(folder)) ^ {*manifest.files, NAME}
    if foreign:
        raise CheckpointError(
            f"{folder}: has missing or foreign files: {', '.join(sorted(foreign))}. Restore the checkpoint."
        )
    return manifest


def _parse(folder: Path, data: bytes) -> Manifest:
    try:
        body = json.loads(data)
        if body["kind"] == KIND and isinstance(body["format"], int) and body["format"] > FORMAT:
            raise NewerFormatError(
                f"{folder}: has format {body['format']}, but this narrowgauge reads formats up to {FORMAT}. "
                "Upgrade narrowgauge."
            )
        manifest = Manifest(body["step"], body["groups"], body["ties"], body["files"])
        reason = "was changed or cut" if manifest.signed() != data else manifest.refuse()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        reason = "was changed or cut"
    if not reason and STEP.fullmatch(folder.name) and folder.name != f"step-{manifest.step:08d}":
        reason = f"is that of step {manifest.step}"
    if reason:
        raise CheckpointError(f"{folder}: its manifest {reason}. Restore the checkpoint.")
    return manifest


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of a file that the manifest lists, once they are known to be the ones that were written."""
    data = _read_plain(folder / name)
    found, expected = listed(data), manifest.files[name]
    if found != expected:
        raise CheckpointError(
            f"{folder / name}: was changed: {found['bytes']} bytes with SHA-256 {found['sha256'][:12]}..., "
            f"not {expected['bytes']} with {str(expected['sha256'])[:12]}.... Restore the checkpoint."
        )
    return data


def _read_plain(path: Path) -> bytes:
    """The bytes of a regular file; a link, pipe or folder in its place is refused before anything is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(f"{path}: is not a regular file. Restore the checkpoint.")
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}. Restore the checkpoint.") from error
