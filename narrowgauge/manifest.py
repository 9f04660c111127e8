"""Checkpoint manifest: size and SHA-256 of each file of a checkpoint, and its own SHA-256.

    {"kind": ..., "format": 1, "step": 100, "groups": [...], "ties": {...},
     "files": {name: {"bytes", "sha256"}}, "sha256": ...}

    format 1   written by one process (narrowgauge/train/checkpoint/store.py)
    format 2   written by several ranks together (narrowgauge/distributed/storage.py): no groups and
               ties, but a "save" id that all shards of this save share

The last key is the SHA-256 of the manifest's bytes without that key. A reader serializes the parsed
manifest again and compares all bytes, so a changed byte is noticed even in white space. A correct
hash proves absence of damage, not of malice: names are checked too, and no file outside the folder
is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge import storage
from narrowgauge.errors import CheckpointError
from narrowgauge.storage import reading

FORMAT = 2
KIND = "narrowgauge checkpoint"
# Size limit of one file of tensors: this much is in memory twice while it is written or read.
SHARD_BYTES = 2**29
# Names of torch's types that safetensors 0.8 both writes and reads. It writes float8_e8m0fnu too, but fails to read it back.
DTYPES = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "complex64",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    }
    | {
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
    }
)
NAME, FACTS, INDEX = "manifest.json", "facts.json", "index.json"
STEP = re.compile(r"step-\d{8}")
GROUP = re.compile(r"[a-z][a-z0-9_]{0,40}")
FILE = re.compile(r"([a-z][a-z0-9_]{0,40})-\d+\.safetensors|facts\.json")
RANK_FILE = re.compile(r"rank-\d{5,8}-\d+\.safetensors|index\.json")
SAVE = re.compile(r"[0-9a-f]{32}")
SHA256 = re.compile(r"[0-9a-f]{64}")
LISTING = reading.Kind(
    most_bytes=64 * reading.MIB, error=CheckpointError, step="Restore the checkpoint."
)
# A file of a checkpoint: the manifest lists its size, so this limit is not needed.
PART = replace(LISTING, most_bytes=2**62)


class NewerFormatError(CheckpointError):
    """A checkpoint written by a newer narrowgauge."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a manifest.

    step     optimizer step of the checkpoint
    groups   names of the groups of tensors; empty in format 2
    ties     group -> name -> the name under which the same tensor is stored
    files    file name -> {"bytes", "sha256"}
    save     format 2: id of the save call that wrote the checkpoint; '' in format 1
    """

    step: int
    groups: list[str]
    ties: dict[str, dict[str, str]]
    files: dict[str, dict[str, Any]]
    save: str = ""

    def signed(self) -> bytes:
        """Bytes of the manifest file, including its own hash."""
        fields = asdict(self)
        if not self.save:
            del fields["save"]
        body = {"kind": KIND, "format": 2 if self.save else 1, **fields}
        digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
        return json.dumps({**body, "sha256": digest}, indent=1).encode()

    def refuse(self) -> str:
        """Reason why the contents are invalid, or ''."""
        if (
            not isinstance(self.step, int)
            or isinstance(self.step, bool)
            or not 0 <= self.step < 10**8
        ):
            return f"has step = {self.step!r}, not a whole number from 0 to 99999999"
        needed = INDEX if self.save else FACTS
        if needed not in self.files:
            return f"lists no {needed}"
        if self.save and (not SAVE.fullmatch(self.save) or self.groups or self.ties):
            return "mixes two formats"
        for group in [*self.groups, *self.ties]:
            if not GROUP.fullmatch(group) or group not in self.groups:
                return f"has a group {group!r}"
        for name, listed in self.files.items():
            match = (RANK_FILE if self.save else FILE).fullmatch(name)
            is_foreign = not match or not (self.save or match[1] in (None, *self.groups))
            if is_foreign or listed.keys() != {"bytes", "sha256"}:
                return f"lists a file {name!r}"
            # type() and not isinstance(): JSON's true is an int to isinstance.
            if (
                type(listed["bytes"]) is not int
                or listed["bytes"] < 0
                or not SHA256.fullmatch(listed["sha256"])
            ):
                return f"lists no size and SHA-256 of {name!r}"
        return ""


def listed(data: bytes) -> dict[str, Any]:
    """Entry of a file in the manifest."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises CheckpointError if the folder holds other files than the manifest lists.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is not a folder. Remove it, or restore the checkpoint.",
            code="checkpoint.not-a-folder",
        )
    data = reading.bytes_of(folder / NAME, LISTING)
    reason = "was changed or cut"
    try:
        body = reading.strict_json(data)
        if body["kind"] == KIND and isinstance(body["format"], int) and body["format"] > FORMAT:
            raise NewerFormatError(
                f"{folder}: has format {body['format']}, but this narrowgauge reads formats up to {FORMAT}. "
                "Upgrade narrowgauge."
            )
        manifest = Manifest(
            body["step"], body["groups"], body["ties"], body["files"], body.get("save", "")
        )
        # Compares bytes and not only the hash: white space would not change the parsed contents.
        if manifest.signed() == data:
            reason = manifest.refuse()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    if not reason and STEP.fullmatch(folder.name) and folder.name != f"step-{manifest.step:08d}":
        reason = f"is that of step {manifest.step}"
    if reason:
        raise CheckpointError(
            f"{folder}: its manifest {reason}. Restore the checkpoint.", code="checkpoint.manifest"
        )
    if foreign := set(os.listdir(folder)) ^ {*manifest.files, NAME}:
        names = ", ".join(sorted(foreign))
        raise CheckpointError(
            f"{folder}: has missing or foreign files: {names}. Restore the checkpoint.",
            code="checkpoint.files",
        )
    return manifest


def fingerprint(folder: Path) -> str:
    """The manifest's own SHA-256, which identifies the bytes of all files of the checkpoint."""
    return str(json.loads(read(folder).signed())["sha256"])


def read_file(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Read a file that the manifest lists, after checking its size and SHA-256."""
    expected = manifest.files[name]
    with reading.opened(folder / name, PART) as file:
        size = os.fstat(file.fileno()).st_size
        # Checked before reading: a sparse file may be larger than memory.
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{folder / name}: was changed: {size} bytes, not {expected['bytes']}. Restore the checkpoint.",
                code="checkpoint.changed",
            )
        data = file.read(size)
    found = listed(data)
    if found != expected:
        raise CheckpointError(
            f"{folder / name}: was changed: {found['bytes']} bytes with SHA-256 {found['sha256'][:12]}..., "
            f"not {expected['bytes']} with {str(expected['sha256'])[:12]}.... Restore the checkpoint.",
            code="checkpoint.changed",
        )
    return data


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file at `path` is unchanged.

    Reads the whole checkpoint once.
    """
    manifest = read(path)
    for name in manifest.files:
        read_file(path, name, manifest)


# Checkpoints in a run's folder


def newest_first(folder: Path) -> list[Path]:
    """Folders named as checkpoints, the largest step first."""
    try:
        return sorted(
            (path for path in folder.iterdir() if STEP.fullmatch(path.name)), reverse=True
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be listed: {error.strerror}. Check its permissions.",
            code="checkpoint.unlistable",
        ) from error


def prune(folder: Path, keep: int | Path) -> None:
    """Remove all checkpoints except the `keep` newest by step, or except the one at path `keep`.

    Counts and removes only folders with a valid manifest whose files have the listed sizes. A
    damaged checkpoint therefore never displaces a complete one, and foreign folders are never
    touched.
    """
    if isinstance(keep, int) and keep < 1:
        raise CheckpointError(
            f"prune: keep = {keep} would remove every checkpoint. Keep at least 1.",
            code="checkpoint.prune",
        )
    whole = filter(_looks_whole, newest_first(folder))
    doomed = (
        list(whole)[keep:] if isinstance(keep, int) else [path for path in whole if path != keep]
    )
    with storage.refusals("remove old checkpoints from", folder):
        for path in doomed:
            storage.discard(path)


def _looks_whole(path: Path) -> bool:
    try:
        files = read(path).files
        return all((path / name).lstat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False
