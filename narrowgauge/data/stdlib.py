"""The source `stdlib`: the Python sources of this interpreter's standard library.

About 11 MB of text that every machine has, so that a first run downloads nothing. One document per file, in the order of their paths.
Leaves out tests (numbers and broken files), installed packages, and `encodings`, whose 1.4 MB of repeated tables would flatter a
validation loss. The content depends on the Python version: compare runs by their content hash.
"""

from __future__ import annotations

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.data.text import Document, shown
from narrowgauge.errors import DataError

NAME = "stdlib"
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
REMEDY = "Pass a file, a folder or a glob instead of stdlib."


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """One document per source file, decoded as the file declares (PEP 263). Origin: stdlib/ and the path inside it."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        files.extend(Path(parent, name) for name in names if name.endswith(".py"))
    if not files:
        raise DataError(f"{NAME}: no Python sources in {shown(folder)}, the standard library's folder. {REMEDY}")
    files.sort(key=lambda path: path.relative_to(folder).parts)
    for path in files:
        origin = f"{NAME}/{path.relative_to(folder).as_posix()}"
        try:
            with tokenize.open(path) as file:
                yield Document(file.read(), origin)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise DataError(f"{origin}: cannot be read: {error}. {REMEDY}") from error
