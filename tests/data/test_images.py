"""Pictures: what is read, what is refused, and that pixels are those of transformers' processors (exact; values to a rounding)."""

from __future__ import annotations

import io
import json
import warnings

import numpy as np
import pytest
import torch

from narrowgauge.data import Classification
from narrowgauge.data.image_files import decoded, pictures
from narrowgauge.data.image_sizes import Preprocessing
from narrowgauge.errors import ConfigError, DataError, StorageError
from narrowgauge.train.tasks.image_classification import ImageBatches, prepare_images
from tests.raising import coded, raises

Image = pytest.importorskip("PIL.Image")

CLASSES = Classification(classes=("cat", "dog"))


def noise(seed: int, size: tuple[int, int] = (20, 14), mode: str = "RGB"):
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), mode=None
    )


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Three cats and two dogs."""
    place = tmp_path / "pets"
    for seed, name in enumerate(
        ["cat/a.png", "cat/b.png", "cat/deep/c.png", "dog/a.png", "dog/b.png"]
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        noise(seed).save(place / name)
    return place


def read(source, tmp_path, size=None, columns=CLASSES, **given):
    return prepare_images(
        source,
        columns,
        "image",
        size or Preprocessing.plain(8, 3),
        cache=tmp_path / "cache",
        **given,
    )


def test_a_folder_and_tables_of_the_same_pictures_are_the_same(folder, tmp_path):
    """Paths in JSONL and CSV, bytes and the Hub's dictionaries in Parquet."""
    import pyarrow
    import pyarrow.parquet

    found = [read(folder, tmp_path)]
    rows = [(str(path.relative_to(folder)), path.relative_to(folder).parts[0]) for path in
            (picture.source for picture in pictures(folder, "image", "label"))]  # fmt: skip
    jsonl, csv = folder / "rows.jsonl", folder / "rows.csv"
    jsonl.write_text(
        "".join(json.dumps({"image": path, "label": label}) + "\n" for path, label in rows), "utf-8"
    )
    csv.write_text("image,label\n" + "".join(f"{path},{label}\n" for path, label in rows), "utf-8")
    raw = [(folder / path).read_bytes() for path, _ in rows]
    labels = [label for _, label in rows]
    plain, hub = folder / "plain.parquet", folder / "hub.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": raw, "label": labels}), plain)
    both = [{"bytes": each, "path": None} for each in raw]
    pyarrow.parquet.write_table(pyarrow.table({"image": both, "label": labels}), hub)
    found += [read(source, tmp_path) for source in (jsonl, csv, plain, hub)]
    assert [path for path, _ in rows] == [
        "cat/a.png",
        "cat/b.png",
        "cat/deep/c.png",
        "dog/a.png",
        "dog/b.png",
    ]
    for other in found:
        assert other.labels.tolist() == [0, 0, 0, 1, 1]
        assert other.summary["content_hash"] == found[0].summary["content_hash"]
        assert all(
            np.array_equal(other.pixels(place), found[0].pixels(place)) for place in range(5)
        )


SETTINGS = [
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 9, "width": 12}, "resample": 3},
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "do_rescale": False, "do_normalize": False},
    {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 10}, "crop_size": {"height": 9, "width": 8},
     "do_center_crop": True, "resample": 3},
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 10}, "crop_pct": 0.875, "resample": 2},
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 2},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each["image_processor_type"])
def test_pixels_are_those_of_transformers(settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    known = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], **settings}
    name = settings["image_processor_type"]
    processor = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    theirs = processor(
        **{key: value for key, value in known.items() if key != "image_processor_type"}
    )
    ours = Preprocessing.of(known, 3)
    for seed, shape in enumerate([(20, 14), (13, 31), (12, 12)]):
        image = noise(seed, shape)
        expected = theirs(image, return_tensors="pt")["pixel_values"]
        found = ours.values(ours.apply(image, "here")[None])
        assert found.shape == expected.shape
        assert torch.allclose(
            found, expected.float(), rtol=1e-5, atol=1e-5
        )  # float32 in another order of two operations
    ours.save_pretrained(tmp_path)
    assert Preprocessing.of_file(tmp_path / "preprocessor_config.json", 3) == ours


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"do_pad": True}, coded("image-processor.unknown", "do_pad")),
        ({"size": {"shortest_edge": 10}}, coded("image-processor.unequal", "10")),
        ({"size": {"longest_edge": 10}}, coded("image-processor.settings", "KeyError")),
        ({"size": {"height": 0, "width": 8}}, coded("image-processor.size", "0", "8")),
        ({"image_mean": [0.5]}, coded("image-processor.channels", "1 channels", "3")),
        ({"image_std": [0, 1, 1]}, coded("image-processor.numbers", [0.0, 1.0, 1.0])),
        (
            {"do_center_crop": True, "crop_size": 12},
            coded("image-processor.crop", (12, 12), (8, 8)),
        ),
    ],
)
def test_settings_that_are_not_known_are_refused(changes, expected, tmp_path):
    known = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(known | changes), "utf-8")
    with raises(ConfigError, coded(expected.code, *expected.values, path, "image_size")):
        Preprocessing.of_file(path, 3)


def write(path, raw: bytes):
    path.write_bytes(raw)
    return path


def spoilt(name, folder):
    place = folder / "dog" / "b.png"
    if name == "truncated":
        write(place, place.read_bytes()[:300])
    elif name == "empty":
        write(place, b"")
    elif name == "text":
        write(place, b"no picture")
    elif name == "a flipped byte":
        raw = bytearray(place.read_bytes())
        raw[len(raw) // 2] ^= 255
        write(place, bytes(raw))
    elif name == "16 bits":
        Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(place)
    elif name == "a bomb":
        Image.new("1", (20000, 10000)).save(place)
    elif name == "half a bomb":
        Image.new("1", (10_000, 8_950)).save(place)
    elif name == "postscript":
        write(place, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    elif name == "another file":
        write(folder / "dog" / "notes.txt", b"")
    elif name == "beside":
        noise(9).save(folder / "lost.png")
    elif name == "no picture":
        (folder / "bird").mkdir()
    elif name == "another class":
        (folder / "dog").rename(folder / "dogs")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("truncated", coded("image.undecodable")),
        ("empty", coded("image.undecodable")),
        ("text", coded("image.undecodable")),
        ("a flipped byte", coded("image.undecodable")),
        ("16 bits", coded("image.depth", "8 bits")),
        ("a bomb", coded("image.too-large")),
        ("half a bomb", coded("image.too-large")),
        ("postscript", coded("image.undecodable")),
        ("another file", coded("image.suffix")),
        ("beside", coded("image.no-class")),
        ("no picture", coded("image.empty-class")),
        ("another class", coded("classification.label", "'dogs'", "'label'", "the 2", "2 classes")),
    ],
)
def test_faulty_pictures_are_errors_with_their_path(folder, tmp_path, fault, words):
    spoilt(fault, folder)
    with raises(DataError, words):
        read(folder, tmp_path)
    assert not list((tmp_path / "cache").glob("images-*"))


@pytest.mark.parametrize("height", [8_950, 17_900])
def test_a_picture_beyond_pillows_limit_is_refused_under_any_filter_of_warnings(height):
    """Pillow warns above 89,478,485 pixels and raises above twice as many.

    In a run nothing turns warnings into errors, as the filters of this suite do. The sizes are
    numbers: taken from Pillow's limit, they would follow whoever raises it.
    """
    packed = io.BytesIO()
    Image.new("1", (10_000, height)).save(packed, "PNG")
    with warnings.catch_warnings(), raises(DataError, coded("image.too-large", "a.png")):
        warnings.simplefilter("ignore")
        decoded(packed.getvalue(), "a.png", 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "cat/none.png", "label": "cat"}, coded("image.missing", "jsonl:1")),
        ({"image": 3, "label": "cat"}, coded("image.cell", "'image'", "a number", "jsonl:1")),
        ({"image": "", "label": "cat"}, coded("image.cell", "'image'", "empty str", "jsonl:1")),
        ({"picture": "cat/a.png", "label": "cat"}, coded("table.no-column", "'image'")),
    ],
)
def test_faulty_rows_are_errors_with_their_line(folder, tmp_path, row, words):
    path = write(folder / "rows.jsonl", json.dumps(row).encode())
    with raises(DataError, words):
        read(path, tmp_path)


def test_turned_pictures_stand_and_transparent_ones_are_counted(tmp_path):
    """EXIF's orientation 6: the camera was held upright."""
    image = noise(0, (8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "data" / "a").mkdir(parents=True)
    image.save(tmp_path / "data" / "a" / "turned.png", exif=exif)
    noise(1, (8, 4), "RGBA").save(tmp_path / "data" / "a" / "clear.png")
    size = Preprocessing(height=8, width=4, resize=None)
    with raises(ConfigError, "image.too-small", "8 that", "4 x", "the 4", "x 8"):
        read(tmp_path / "data", tmp_path, size, Classification(classes=("a", "b")))
    (tmp_path / "data" / "a" / "clear.png").unlink()
    found = read(tmp_path / "data", tmp_path, size, Classification(classes=("a", "b")))
    assert np.array_equal(found.pixels(0), np.rot90(np.asarray(image), -1))
    noise(1, (4, 8), "RGBA").save(tmp_path / "data" / "a" / "clear.png")
    found = read(tmp_path / "data", tmp_path, size, Classification(classes=("a", "b")))
    assert found.summary["notes"] == [
        "1 pictures are transparent in parts; what lies below is shown."
    ]


def test_the_cache_is_used_and_made_again_when_a_byte_of_it_changes(folder, tmp_path, monkeypatch):
    from narrowgauge.train.tasks import image_classification as images

    first = read(folder, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(images, "decoded", None)
        read(folder, tmp_path)
    path = next((tmp_path / "cache").glob("images-*")) / "pixels.bin"
    expected, raw = first.pixels(2).copy(), bytearray(path.read_bytes())
    raw[2 * 192 + 5] ^= 1
    path.write_bytes(bytes(raw))
    again = read(folder, tmp_path)
    assert np.array_equal(again.pixels(2), expected) and "damaged" in again.summary["notes"][0]


def test_a_disk_without_room_is_told_before_anything_is_decoded(folder, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with raises(StorageError, "image.cache-space", "5 pictures", "of 8", "x 8", "8 x"):
        read(folder, tmp_path)


def test_pictures_that_change_while_they_are_read(folder, tmp_path, monkeypatch):
    from narrowgauge.train.tasks import image_classification as images

    real, seen = images.decoded, []

    def decoded(*given):
        if not seen:
            noise(77).save(folder / "dog" / "b.png")
        seen.append(given)
        return real(*given)

    monkeypatch.setattr(images, "decoded", decoded)
    with raises(DataError, "data.changed"):
        read(folder, tmp_path)


def test_crops_and_flips_are_of_seed_epoch_and_row_alone(folder, tmp_path):
    """Exact. A part of the data draws what the whole draws, in any order."""
    images = read(folder, tmp_path)
    batches = ImageBatches(images, padding=2, flip=True, seed=5)
    whole = batches([0, 1, 2, 3, 4], epoch=3)
    assert whole["pixel_values"].shape == (5, 3, 8, 8) and whole["labels"].tolist() == [
        0,
        0,
        0,
        1,
        1,
    ]
    part = ImageBatches(images.select(np.array([4, 1])), padding=2, flip=True, seed=5)(
        [1, 0], epoch=3
    )
    assert torch.equal(part["pixel_values"], whole["pixel_values"][[1, 4]]) and part[
        "labels"
    ].tolist() == [0, 1]
    for other in (
        batches([0, 1, 2, 3, 4], epoch=4),
        ImageBatches(images, 2, True, 6)([0, 1, 2, 3, 4], epoch=3),
    ):
        assert not torch.equal(other["pixel_values"], whole["pixel_values"])
    plain = batches([0, 1, 2, 3, 4])
    assert torch.equal(
        plain["pixel_values"], ImageBatches(images)([0, 1, 2, 3, 4], epoch=3)["pixel_values"]
    )


def test_a_crop_is_a_part_of_the_padded_picture_and_every_place_is_drawn(folder, tmp_path):
    """Exact: each of 900 draws is one of 25 places, turned or not; each of the 50 occurs (missing one: 50 e^-18)."""
    images = read(folder, tmp_path)
    batches = ImageBatches(images, padding=2, flip=True)
    around = np.pad(images.pixels(0), ((2, 2), (2, 2), (0, 0)))
    places = {}
    for top in range(5):
        for left in range(5):
            cut = around[top : top + 8, left : left + 8]
            places[cut.tobytes()] = (top, left, False)
            places[cut[:, ::-1].tobytes()] = (top, left, True)
    found = {places[batches._changed(images.pixels(0), epoch, 0).tobytes()] for epoch in range(900)}
    assert len(found) == 50
