"""Reads images with class labels, strictly and in order, from a folder or a table.

    photos/tabby/1.jpg, photos/tiger/7.png    the folder's name is the class; subfolders included
    train.parquet, train.jsonl, train.csv     a column with bytes or with paths relative to the
                                              table's folder, and a column with the class

An image that cannot be decoded raises an error with its path or row. Formats that need another
program (EPS) are not read. Of animated images the first frame counts. Images are rotated by their
EXIF orientation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowgauge.data.sources import below, files_of, records
from narrowgauge.data.tables import JSON_TYPES, Record
from narrowgauge.data.text import readable, reason, shown
from narrowgauge.errors import ConfigError, DataError, StorageError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE = reading.Kind(
    most_bytes=reading.GIB,
    error=DataError,
    refused=StorageError,
    follow_links=True,
    step="Make the picture smaller, or remove it.",
)
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
# Prefixes of Pillow's modes with more than 8 bits. Pillow converts those to 8 bits by clipping.
WIDE_MODES = ("I", "F")


class Picture(NamedTuple):
    """An image that is not read yet.

    source  path, or the bytes of the file
    row     table row with its class
    """

    source: Path | bytes
    row: Record

    def raw(self) -> bytes:
        """Bytes of the image file."""
        if isinstance(self.source, bytes):
            return self.source
        if not self.source.is_file():
            raise DataError(
                f"{self.row.origin}: there is no picture {shown(self.source)}. Correct the path.",
                code="image.missing",
            )
        return reading.bytes_of(self.source, PICTURE)


def pictures(
    source: str | os.PathLike[str], image: str, label: str, *, header: Sequence[str] | None = None
) -> Iterator[Picture]:
    """Yields the images of a folder, or of a table with these columns, in a fixed order, unread.

    Raises DataError for files that are not images, classes without images, and rows without one.
    """
    name = os.fspath(source)
    if Path(name).is_dir():
        if header is not None:
            raise ConfigError(
                f"{shown(name)}: header is for CSV and TSV files alone. Leave it out.",
                code="table.header",
            )
        yield from _of_folder(Path(name), image, label)
        return
    for path in files_of(name):
        for row in records(path, [image, label], header=header):
            yield Picture(_source_of(row, image, path.parent), row)


def _of_folder(folder: Path, image: str, label: str) -> Iterator[Picture]:
    files = below(folder, lambda name: name.startswith("."))
    found = set[str]()
    for path in files:
        first, *rest = path.relative_to(folder).parts
        if path.suffix.lower() not in SUFFIXES:
            if rest:
                raise DataError(
                    f"{shown(path)}: no picture by its name. Remove it; pictures end in {', '.join(sorted(SUFFIXES))}.",
                    code="image.suffix",
                )
            continue
        if not rest:
            raise DataError(
                f"{shown(path)}: a picture beside the folders of classes is of no class. Move it into one of them.",
                code="image.no-class",
            )
        found.add(first)
        yield Picture(path, Record({image: path, label: first}, shown(path)))
    # Otherwise an empty class would silently be missing from the classes.
    with readable(folder, "listed"):
        classes = {
            each.name
            for each in folder.iterdir()
            if each.is_dir() and not each.name.startswith(".")
        }
    if empty := sorted(classes - found):
        raise DataError(
            f"{shown(folder / empty[0])}: this class has no picture. Add some, or remove the folder.",
            code="image.empty-class",
        )


def _source_of(row: Record, column: str, folder: Path) -> Path | bytes:
    """Bytes, or a path relative to the table's folder.

    Data sets of the Hub hold a dict with both; its bytes have priority.
    """
    value: Any = row.values[column]
    # datasets stores an image as {"bytes": ..., "path": ...}.
    if isinstance(value, dict) and {"bytes", "path"} & set(value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value:
        return folder / value
    held = f"{'' if value else 'empty '}{JSON_TYPES.get(type(value), type(value).__name__)}"
    raise DataError(
        f"{row.origin}: column {column!r} holds {held}, neither the path nor the bytes of a picture. Correct the row, or name another "
        "data.columns.image.",
        code="image.cell",
    )


def decoded(raw: bytes, origin: str, channels: int) -> tuple[Image, bool]:
    """Returns (8-bit image, True if it had transparency, which is dropped).

    channels  3 for RGB, 1 for grey
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged EXIF data, which change no pixel
            # Pillow only warns up to twice its pixel limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Any = Image.open(BytesIO(raw), formats=FORMATS)
            image.load()
            mode = image.mode
            turned = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"{origin}: {reason(error)} Make the picture smaller, or remove it.",
            code="image.too-large",
        ) from None
    except Exception as error:  # Pillow's decoders raise arbitrary exceptions on damaged files
        raise DataError(
            f"{origin}: cannot be decoded as a picture ({', '.join(FORMATS)}): {reason(error)}. Write it again, or remove it.",
            code="image.undecodable",
        ) from None
    if mode.startswith(WIDE_MODES):
        raise DataError(
            f"{origin}: its pixels have more than 8 bits (mode {mode}), which a conversion would clip. Save it in 8 bits.",
            code="image.depth",
        )
    # A palette image stores its transparent colour in `info`.
    is_transparent = mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    return turned.convert("RGB" if channels == 3 else "L"), is_transparent
