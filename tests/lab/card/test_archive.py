"""The archive: nothing private, at most 5 MB, and read as a stranger's (exact)."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import random
import zipfile
from pathlib import Path

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.lab import card
from narrowgauge.lab.card import archive
from tests.raising import raises

LINE = {"job": "a", "part": "checks", "status": "pass"}


def test_a_path_keeps_its_last_two_parts_and_names_are_gone(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(platform, "node", lambda: "lovelace.example.org")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada-work"))
    clean = archive.cleaner()
    text = 'File "/home/ada/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", line 3'
    assert clean(text) == 'File ".../cuda/__init__.py", line 3'
    assert clean("ada@lovelace: on lovelace.example.org, ada-work") == "...@...: on ..., ..."
    assert clean(r"C:\Users\ada\x.py failed") == ".../ada/x.py failed".replace("ada", "...")
    same = "canada 1/2, a / b, 4096 x 4096, torch/cuda, https://docs.example.org/a/b, cuda:0"
    assert clean(same) == same


def test_a_large_report_is_cut_until_it_fits(tmp_path, monkeypatch):
    """Outputs that no packing shortens, several times what is allowed; job, status and reason stay."""
    monkeypatch.setattr(archive, "MOST_BYTES", 200_000)
    noise = random.Random(0)
    lines = [
        LINE | {
            "job": str(number), "why": "because", "output": "".join(chr(noise.randrange(33, 0x2FFF)) for _ in range(4096)),
            "kernels": [{"name": f"{noise.random()}" * 5, "count": 1, "seconds": 0.5}] * 40,
        }
        for number in range(100)
    ]  # fmt: skip
    size = archive.write(tmp_path / "a.zip", {"ended": "finished"}, lines)
    assert size == (tmp_path / "a.zip").stat().st_size <= archive.MOST_BYTES
    found = archive.read(tmp_path / "a.zip")
    assert [(line["job"], line["why"]) for line in found.lines] == [
        (str(number), "because") for number in range(100)
    ]
    assert 0 < len(found.lines[0]["output"]) < 4096 and found.lines[0]["kernels"]


@pytest.mark.parametrize("length", [0, 1, 2047, 2049, 4095, 4096, 4097, 9000])
def test_an_output_keeps_its_end_at_every_length(length, tmp_path):
    """All of it up to the cut. One between half the cut and the cut once lost its beginning."""
    kept = archive.CUTS[0][0]
    output = "".join(chr(33 + number % 90) for number in range(length))
    archive.write(tmp_path / "a.zip", {}, [LINE | {"output": output}])
    (line,) = archive.read(tmp_path / "a.zip").lines
    assert line["output"] == output[max(length - kept, 0) :]


def test_an_archive_has_at_most_five_megabytes():
    assert archive.MOST_BYTES == 5_000_000 == archive.KIND.most_bytes


def test_numbers_that_are_not_finite_come_back(tmp_path):
    archive.write(tmp_path / "a.zip", {}, [LINE | {"worst": float("inf")}])
    assert archive.read(tmp_path / "a.zip").lines == [LINE | {"worst": float("inf")}]
    with zipfile.ZipFile(tmp_path / "a.zip") as packed:
        assert sorted(packed.namelist()) == ["card-report/lines.jsonl", "card-report/report.json"]


def test_the_folder_of_a_report_that_was_cut_off_is_read_to_its_last_whole_line(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"format": 1, "ended": "not yet"}))
    assert archive.read(tmp_path).lines == []
    (tmp_path / "lines.jsonl").write_text(json.dumps(LINE) + "\n" + json.dumps(LINE)[:20])
    assert archive.read(tmp_path).lines == [LINE]


def packed(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"card-report/{name.replace('_', '.')}", data)


@pytest.mark.parametrize(
    "members",
    [
        {"report_json": "{}"},
        {"report_json": "{}", "lines_jsonl": ""},
        {"report_json": '{"format": 1}', "lines_jsonl": '{"job": 1}\n'},
        {"report_json": '{"format": 1}', "lines_jsonl": "[1]\n"},
        {"report_json": '{"format": 1}', "lines_jsonl": " " * (65 << 20)},
        {"report_json": '{"format": NaN}', "lines_jsonl": ""},
    ],
    ids=["one member", "format", "line without a part", "list", "bomb", "NaN"],
)
def test_a_damaged_archive_is_refused(members, tmp_path):
    packed(tmp_path / "a.zip", **members)
    with pytest.raises(ConfigError) as caught:
        archive.read(tmp_path / "a.zip")
    assert caught.value.code == "card-report.damaged"


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    for path in (tmp_path / "a.zip", tmp_path):
        with pytest.raises(ConfigError) as caught:
            archive.read(path)
        assert caught.value.code == "card-report.damaged"
    with pytest.raises(ConfigError) as caught:
        archive.read(tmp_path / "b" / "a.zip")
    assert caught.value.code == "file.unreadable"


def test_bytes_that_were_changed_on_their_way_are_refused(tmp_path):
    """Three bytes of a packed archive at random: it is read, or refused in words."""
    path, draw = tmp_path / "a.zip", random.Random(0)
    archive.write(path, {"ended": "finished"}, [LINE] * 50)
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(3):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            archive.read(path)


@pytest.mark.parametrize(
    "rows", [[LINE] * 2001, [LINE | {"status": "zzz"}]], ids=["many", "status"]
)
def test_lines_that_no_report_has_are_refused(rows, tmp_path):
    archive.write(tmp_path / "a.zip", {}, rows)
    with raises(ConfigError, "card-report.damaged"):
        archive.read(tmp_path / "a.zip")


def test_a_page_replaces_no_file_that_is_none(tmp_path):
    archive.write(tmp_path / "a.zip", {}, [LINE])
    (tmp_path / "weights.safetensors").write_text("mine")
    with raises(ConfigError, "report.other-file", "weights.safetensors"):
        card.write_page(tmp_path / "a.zip", tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").read_text() == "mine"
