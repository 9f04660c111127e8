"""Files that are whole or not there: written beside their place, synced, then renamed over it.

Every refusal of the file system (full, read-only, not permitted, over a limit, broken) becomes a StorageError that
names the path and what was being done.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.errors import StorageError

PROBE_BYTES = 2**20


@contextmanager
def refusals(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a StorageError: "cannot <doing> <path>: <reason>"."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise StorageError(
            f"cannot {doing} {path}: {error.strerror or error}{place}. Free or unlock the disk, or choose another --output."
        ) from error


def write_synced(path: Path, data: bytes) -> None:
    """Creates `path`, which must not exist, with `data` on the disk itself. Its mode follows the umask."""
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(data)
        while rest:  # an unbuffered write may be short: Linux stops at 2 GiB
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes the names in a folder, as opposed to the files' contents, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Writes `text` to `path`: a reader, or a crash, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with refusals("write", path):
        try:
            temporary.unlink(missing_ok=True)
            write_synced(temporary, text.encode())
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def require_space(folder: Path, needed_bytes: float, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageError(
            f"{what} needs {needed_bytes / 2**20:.1f} MiB, but {folder} has {free / 2**20:.1f} MiB free. "
            "Free some space, keep fewer checkpoints, or choose another --output."
        )


def probe(folder: Path) -> None:
    """Writes and removes a small file, so that a full or read-only disk is found before any work is done."""
    path = folder / f".probe-{os.getpid()}"
    with refusals("write to", folder):
        try:
            write_synced(path, bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)
