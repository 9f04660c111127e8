"""Storage for a copy of many tensors: in host memory, or in a memory-mapped file on a disk.

    host    blocks of at most BLOCK bytes, pinned if a GPU copies to and from them
    folder  one unnamed file: allocated as a whole before anything is written, and freed when the
            process ends in any way

A copy consists of bytes in blocks, and at most BLOCK bytes are in transit, so an exchange needs no
more than that on the device.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from narrowgauge import storage
from narrowgauge.errors import OutOfMemoryError

BLOCK = 2**26  # a power of two: torch rounds pinned memory up to one
SPARE = 0.9  # of the free host memory; the rest is left for other allocations
LIMITS = Path("/sys/fs/cgroup")


class BlockStorage:
    """Blocks of bytes that can grow.

    where   "host", or a folder on the disk
    pinned  True if a GPU copies to and from the blocks
    """

    def __init__(self, where: str | Path, pinned: bool) -> None:
        self.where, self.pinned, self.nbytes = where, pinned, 0
        self._blocks: list[Tensor] = []

    def add(self, sizes: list[int], what: str) -> list[list[Tensor]]:
        """Allocate `sizes` bytes each, in pieces of at most BLOCK bytes.

        what  name of the copy, for error messages

        Raises OutOfMemoryError or StorageError before anything is allocated.
        """
        total = sum(sizes)
        if total == 0:
            return [[] for _ in sizes]
        require_free_space(total, self.where, what)
        blocks = list(
            self._of_host(total) if self.where == "host" else self._of_file(total, Path(self.where))
        )
        self.nbytes += total
        found, place = [], 0
        for size in sizes:
            # A size may cross the borders of blocks: cut it there.
            ends = (
                [*range(place - place % BLOCK + BLOCK, place + size, BLOCK), place + size]
                if size
                else []
            )
            begins = [place, *ends[:-1]]
            found.append(
                [
                    blocks[a // BLOCK][a % BLOCK : a % BLOCK + b - a]
                    for a, b in zip(begins, ends, strict=True)
                ]
                if size
                else []
            )
            place += size
        return found

    def _of_host(self, nbytes: int) -> Iterator[Tensor]:
        for first in range(0, nbytes, BLOCK):
            size = min(BLOCK, nbytes - first)
            yield torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)

    def _of_file(self, nbytes: int, folder: Path) -> Iterator[Tensor]:
        path = folder / f".fork-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        with storage.refusals("copy the state of the run to", folder, "choose another folder"):
            storage.make_folder(folder)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                # Writing to a hole in the file would end the process by SIGBUS if the disk is full.
                try:
                    os.posix_fallocate(descriptor, 0, nbytes)
                finally:
                    os.close(descriptor)
                whole = torch.from_file(
                    str(path), shared=True, size=nbytes, dtype=torch.uint8, device="cpu"
                )
            finally:
                # Unlinked while mapped: the kernel frees the file when the process ends, even by
                # SIGKILL.
                path.unlink(missing_ok=True)
        return iter(whole.split(BLOCK))


def require_free_space(nbytes: int, where: str | Path, what: str) -> None:
    """Raise OutOfMemoryError or StorageError if `nbytes` do not fit in memory or on the disk."""
    if where != "host":
        folder = Path(where)
        nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        storage.require_space(nearest, nbytes, what)
    elif (room := free_host_bytes()) is not None and nbytes > SPARE * room:
        raise OutOfMemoryError(
            f"{what} needs {nbytes / 2**30:.2f} GiB of the host's memory, and {room / 2**30:.2f} GiB are free. "
            "Name a folder on a disk for it, or train with states that are narrower.",
            code="memory.host-copy",
        )


def free_host_bytes() -> int | None:
    """Free host memory of this process in bytes, by the kernel and by its control group.

    None: not known.
    """
    # The kernel's figure ignores the limit of a container, so the smaller of both counts.
    rooms = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                rooms.append(int(line.split()[1]) * 1024)
        limit, used = (
            (LIMITS / name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
        if limit != "max":
            rooms.append(int(limit) - int(used) + _reclaimable())
    except (OSError, ValueError):
        pass  # not Linux, or no limits
    return min(rooms) if rooms else None


def _reclaimable() -> int:
    """Bytes that a control group counts as used but the kernel can reclaim: the page cache."""
    for line in (LIMITS / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, count = line.partition(" ")
        if name == "inactive_file":
            return int(count)
    return 0
