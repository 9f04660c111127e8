"""A disk that loses its power: what was not synced is gone.

    with PowerCuts() as disk:
        write()
        for name, data in disk.left(folder, names="synced").items(): ...

Each os.fsync takes a picture: of a file its bytes, of a folder its names. A disk after a cut holds at least these. Of what came
later it may hold anything, so two extremes are looked at: nothing of it ("synced"), and all names that there are now, but no bytes
("now"), as file systems do that write names before contents: the file is empty, or as it was last synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pytest


class PowerCuts:
    """Records what is synced while it is entered. `at_sync` is called after each os.fsync, `after_rename` after each rename."""

    def __init__(self, look: Callable[[str], None] | None = None) -> None:
        self.look = look  # called with what was done, after each sync and rename
        self._bytes: dict[tuple[int, int], bytes] = {}
        self._names: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        self._held: list[int] = []  # descriptors, so that no inode number is used twice
        self._patch = pytest.MonkeyPatch()
        self._busy = False

    def __enter__(self) -> Self:
        for name in ("fsync", "rename", "replace"):
            self._patch.setattr(os, name, self._then_look(name, getattr(os, name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patch.undo()
        for descriptor in self._held:
            os.close(descriptor)

    def _then_look(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            real(*arguments)
            if name == "fsync":
                self._take_picture(os.dup(arguments[0]))  # type: ignore[call-overload]
            if self.look and not self._busy:
                self._busy = True
                try:
                    self.look(name)
                finally:
                    self._busy = False

        return call

    def _take_picture(self, descriptor: int) -> None:
        self._held.append(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_dir():
            self._names[_inode(path)] = {each.name: _inode(each) for each in path.iterdir()}
        else:
            self._bytes[_inode(path)] = path.read_bytes()

    def left(self, folder: Path, names: Literal["synced", "now"]) -> dict[str, bytes]:
        """The files below `folder` after a cut, by relative path; '' for all if the folder itself is lost."""
        return self._left(_inode(folder), folder, names, "") if folder.is_dir() else {}

    def _left(
        self, inode: tuple[int, int], place: Path | None, names: str, prefix: str
    ) -> dict[str, bytes]:
        entries = self._names.get(inode, {})
        if names == "now" and place is not None and place.is_dir():
            entries = {each.name: _inode(each) for each in place.iterdir()}
        found: dict[str, bytes] = {}
        for name, child in entries.items():
            path = place / name if place is not None else None
            is_now = path is not None and os.path.lexists(path) and _inode(path) == child
            is_folder = child in self._names or (is_now and path is not None and path.is_dir())
            if is_folder:
                found |= self._left(child, path if is_now else None, names, f"{prefix}{name}/")
            else:
                found[prefix + name] = self._bytes.get(child, b"")
        return found

    def restore(self, folder: Path, into: Path, names: Literal["synced", "now"]) -> Path:
        """Writes what is left of `folder` after a cut into the folder `into`."""
        for name, data in self.left(folder, names).items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return into


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
