"""Every file that narrowgauge reads and somebody else may have written, with anything in its place (search): no hang, no traceback."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import narrowgauge
from narrowgauge import export, manifest, storage
from narrowgauge.conversion import measure, pretrained_folder
from narrowgauge.data import cache as data_cache
from narrowgauge.data import documents, image_files, image_sizes, records, tokenizer
from narrowgauge.diagnose import lineage, study_file
from narrowgauge.diagnose.runs import encode, read_metrics, read_run
from narrowgauge.distributed import storage as distributed
from narrowgauge.errors import ConfigError, NarrowgaugeError, StorageError
from narrowgauge.export import writing as export_writing
from narrowgauge.lab.card import archive as card_archive
from narrowgauge.lab.ladder import Ladder, Rung
from narrowgauge.lab.ladder_of_run import RungsFile
from narrowgauge.lab.study import pool, progress
from narrowgauge.lab.study.plan import Job
from narrowgauge.ops.cpp import build
from narrowgauge.report import run_data
from narrowgauge.storage import reading
from narrowgauge.train import adapter, coded_base, model_files, run_folder, trackers
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.evaluation import command
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.planning import cache as plan_cache

PACKAGE = Path(narrowgauge.__file__).parent
HANG_S = 20
SPARSE_BYTES = 10 * 2**30


class Hung(Exception):
    """The alarm went off while a file was read."""


@contextmanager
def alarm(seconds: int = HANG_S) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- what may stand in the place of a file


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with (
        _inside(path.parent),
        socket.socket(socket.AF_UNIX) as made,
    ):  # its name has at most 107 bytes
        made.bind(path.name)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(SPARSE_BYTES)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a FIFO": _fifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": lambda path: (
        os.mkfifo(path.with_name(f"{path.name}-pipe")),
        path.symlink_to(f"{path.name}-pipe"),
    ),
    "a dangling link": lambda path: path.symlink_to("absent"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "a socket": _socket,
    "10 GiB of nothing": _sparse,
}
BYTES: dict[str, bytes] = {
    "nothing": b"",
    "0xff": b"\xff" * 4096,
    "zero bytes": bytes(4096),
    "100,000 lists": b"[" * 100_000 + b"]" * 100_000,
    "100,000 objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "500 lists": b"[" * 500 + b"]" * 500,
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "text": b'"x"',
    "NaN": b"NaN",
    "a number of 5,000 digits": b"9" * 5000,
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a newline": b"\n",
    "a list on a line": b"[]\n{}\nnull\n",
}
STRANGE = (None, [], {}, "", "x" * 5000, -1, 0, 2**70, 0.5, 1e300, True, "NaN", [[]], {"a": {}})


def strange_values(value: Any, dice: random.Random) -> Any:
    """A copy with one part of it replaced or removed."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key, each in (
            part.items()
            if isinstance(part, dict)
            else enumerate(part)
            if isinstance(part, list)
            else ()
        ):
            places.append((part, key))
            walk(each)

    walk(value)
    if not places:
        return dice.choice(STRANGE)
    part, key = dice.choice(places)
    if dice.random() < 0.3:
        del part[key]
    else:
        part[key] = dice.choice(STRANGE)
    return value


# --- the files and their readers


@dataclass
class Case:
    """A file of a folder that is whole, and what reads it. json: whether it holds JSON, and how often it is changed at random."""

    path: Path
    read: Callable[[], object]
    resign: Callable[[], None] = lambda: None
    is_json: bool = False


CASES: dict[str, Callable[[Path], Case]] = {}


def case(made: Callable[[Path], Case]) -> Callable[[Path], Case]:
    CASES[made.__name__.strip("_")] = made
    return made


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def a_run(folder: Path) -> Path:
    put(
        folder / "run.json",
        encode({"recipe": "bf16", "steps": 2, "model": {"layers": 2}, "command": ["a"]}),
    )
    lines = [{"event": "step", "step": step, "loss": 2.0} for step in (1, 2)]
    put(folder / "metrics.jsonl", "".join(encode(each) + "\n" for each in lines))
    put(folder / "config.toml", toml.dump(TrainConfig(output=str(folder))))
    return folder


@case
def run_json(folder: Path) -> Case:
    path = a_run(folder) / "run.json"
    return Case(
        path, lambda: (read_run(path), lineage.read(folder), run_data.read(folder)), is_json=True
    )


@case
def metrics_jsonl(folder: Path) -> Case:
    path = a_run(folder) / "metrics.jsonl"
    return Case(path, lambda: (read_metrics(path), run_data.read(folder)))


@case
def metrics_of_one_event(folder: Path) -> Case:
    """Of each kind of event in turn, changed at random."""
    path = put(
        folder / "metrics.jsonl",
        encode({"event": "eval", "step": 1, "loss": 1.0, "wide": {"loss": 1.0}}) + "\n",
    )
    return Case(
        path, lambda: (read_metrics(path), progress.reached(Job("bf16", 0, folder))), is_json=True
    )


@case
def metrics_that_are_appended(folder: Path) -> Case:
    path = a_run(folder) / "metrics.jsonl"

    def append() -> None:
        with MetricsLog(path) as log:
            log.write("step", 3, loss=1.0)

    return Case(path, append)


@case
def config_toml(folder: Path) -> Case:
    path = a_run(folder) / "config.toml"
    return Case(path, lambda: (toml.load_stored(path), run_data.read(folder)))


@case
def reference_of_a_run(folder: Path) -> Case:
    a_run(folder)
    path = a_run(folder / "compare-bf16") / "run.json"
    return Case(path, lambda: run_data.read(folder), is_json=True)


@case
def lock(folder: Path) -> Case:
    path = put(a_run(folder) / "lock", "")

    def use() -> None:
        with run_folder.RunFolder.reading(folder):
            pass
        with run_folder.RunFolder.claim(folder, resume=True):
            pass

    return Case(path, use)


@case
def lock_that_is_held(folder: Path) -> Case:
    """What another process says of itself."""
    path = put(folder / "lock", '{"pid": 1, "host": "a"}')

    def read() -> None:
        with suppress(StorageError), reading.opened(path, run_folder.LOCK) as held:
            assert "process" in run_folder._holder(held)

    return Case(path, read, is_json=True)


@case
def study_json(folder: Path) -> Case:
    facts = {
        "recipes": ["bf16", "int8"],
        "seeds": [0, 1],
        "metric": "loss",
        "margin": "0.25%",
        "threads": 1,
        "identity": {},
    }
    path = put(folder / "study.json", json.dumps(facts))
    return Case(path, lambda: study_file.read(folder), is_json=True)


@case
def console_txt(folder: Path) -> Case:
    path = put(folder / "console.txt", "narrowgauge: it failed\n")

    def use() -> None:
        job = Job("bf16", 0, folder)
        pool.last_line(job)
        with reading.opened_to_append(path, pool.SAID):
            pass

    return Case(path, use)


@case
def evaluation_json(folder: Path) -> Case:
    result = {
        "tasks": ["a"],
        "dtype": "",
        "limit": 0,
        "checkpoints": [{"checkpoint": "step-00000001"}],
    }
    path = put(folder / "evaluation.json", json.dumps({"results": [result]}))
    return Case(path, lambda: command._keep(path, {**result, "limit": 3}), is_json=True)


@case
def rungs_of_debug(folder: Path) -> Case:
    ladder = Ladder(
        recipe="int8", begun=0, steps=4, asked=2, rungs={"run": Rung(name="run", losses=[1.0, 2.0])}
    )
    path = put(folder / "debug-2.json", encode({"begun": 0, **ladder.facts()}))

    def use() -> None:
        known = Ladder(recipe="int8", begun=0, steps=4, asked=2)
        RungsFile(path, {"begun": 0}).reuse(known)
        for each in known.rungs.values():
            assert all(isinstance(loss, float | int) for loss in each.curve)

    return Case(path, use, is_json=True)


@case
def plan_entry(folder: Path) -> Case:
    plan_cache.store({"q": 1}, {"answer": [1.5]})
    [path] = plan_cache.folder().glob("*.json")  # type: ignore[union-attr]
    return Case(path, lambda: plan_cache.load({"q": 1}), is_json=True)


@case
def model_folder_of_a_plan(folder: Path) -> Case:
    path = put(folder / "config.json", "{}")
    return Case(path, lambda: plan_cache._of_folder(str(folder)), is_json=True)


@case
def measurements_of_auto(folder: Path) -> Case:
    folder.mkdir()
    path = folder / "auto.json"
    measure.keep(path, "key", {"bf16": 1.0})
    return Case(path, lambda: measure.cached(path), is_json=True)


@case
def built_library(folder: Path) -> Case:
    path = put(folder / f"optim-0-{build.digest(b'code')}.so", b"code")
    path.chmod(0o600)
    assert build.is_whole(path)
    return Case(path, lambda: build.is_whole(path))


@case
def library_of_a_wheel(folder: Path) -> Case:
    path = put(folder / f"cast-x86-64-0-{build.digest(b'code')}.so", b"code")
    assert build.is_whole(path, build.CARRIED)
    return Case(path, lambda: build.is_whole(path, build.CARRIED))


A_LINE = {"job": "mm", "part": "checks", "status": "pass"}


@case
def archive_of_a_card_report(folder: Path) -> Case:
    folder.mkdir()
    path = folder / "card-report.zip"
    card_archive.write(path, {"ended": "finished"}, [A_LINE])
    assert card_archive.read(path).lines == [A_LINE]
    return Case(path, lambda: card_archive.read(path))


@case
def facts_of_a_card_report_that_was_cut_off(folder: Path) -> Case:
    folder.mkdir()
    card_archive.store(folder, {"format": card_archive.FORMAT})
    return Case(folder / card_archive.REPORT, lambda: card_archive.read(folder), is_json=True)


def _entry(folder: Path) -> Path:
    def fill(append: data_cache.Append) -> dict[str, Any]:
        append("train", np.arange(9))
        return {"facts": 1}

    entry, _ = data_cache.cached(folder / "tokens-0", {"train": np.dtype("<u2")}, fill)
    return entry.path


@case
def index_of_a_data_cache(folder: Path) -> Case:
    path = _entry(folder)
    return Case(path / "index.json", lambda: _of_damaged(path), is_json=True)


@case
def array_of_a_data_cache(folder: Path) -> Case:
    path = _entry(folder)
    return Case(path / "train.bin", lambda: _of_damaged(path))


def _of_damaged(path: Path) -> None:
    with suppress(data_cache.Damaged):
        data_cache.open_entry(path)


@case
def draft_in_a_data_cache(folder: Path) -> Case:
    path = put(folder / f".tokens-{'0' * 32}.1-2.tmp", b"")
    os.utime(path, (0, 0))
    return Case(path, lambda: storage.sweep(folder))


@case
def seal_of_a_tokenizer(folder: Path) -> Case:
    path = put(folder / tokenizer.SEAL, '{"fingerprint": "0"}')
    return Case(path, lambda: tokenizer._sealed(folder), is_json=True)


@case
def tokenizer_json(folder: Path) -> Case:
    path = put(folder / "tokenizer.json", "{}")

    def read() -> None:
        if (
            path.is_file() and path.stat().st_size < 2**20
        ):  # what transformers makes of the rest is tests/data's business
            reading.refuse_special_files(folder, tokenizer.OF_TOKENIZERS)
        else:
            tokenizer.load(folder)

    return Case(path, read)


@case
def report_of_an_export(folder: Path) -> Case:
    path = an_export(folder) / export.REPORT
    return Case(path, lambda: export.verify(folder), is_json=True)


@case
def file_of_an_export(folder: Path) -> Case:
    return Case(an_export(folder) / "weights", lambda: export.verify(folder))


def an_export(folder: Path) -> Path:
    put(folder / "weights", b"0" * 64)
    files = {"weights": export_writing.hashed(folder / "weights")}
    put(folder / export.REPORT, json.dumps({"kind": export.KIND, "files": files}))
    return folder


@case
def tokenizer_of_an_export(folder: Path) -> Case:
    path = put(folder / "tokenizer.json", "{}")
    return Case(path, lambda: reading.refuse_special_files(folder, export_writing.OF_TOKENIZERS))


@case
def base_of_an_adapter(folder: Path) -> Case:
    path = put(folder / adapter.BASE, json.dumps({"model": "m", "sha256": "0", "codes": ""}))
    return Case(path, lambda: adapter.read_base(folder), is_json=True)


@case
def runs_in_trackers(folder: Path) -> Case:
    path = put(folder / trackers.FILE, json.dumps({"wandb": "abc"}))
    return Case(path, lambda: reading.json_of(path, trackers.STATE), is_json=True)


@case
def weights_of_an_adapter(folder: Path) -> Case:
    path = put(folder / adapter.WEIGHTS, safetensors.torch.save({"a": torch.ones(2)}))

    def read() -> None:
        with reading.opened_tensors(path, adapter.OF_ADAPTERS) as found:
            found.get_tensor("a")

    return Case(path, read)


@case
def weights_of_a_coded_base(folder: Path) -> Case:
    path = put(folder / coded_base.SINGLE, safetensors.torch.save({"a": torch.ones(2)}))
    return Case(path, lambda: (list(coded_base._lines(path)), coded_base._scales([path])))


@case
def state_of_recipes(folder: Path) -> Case:
    facts = {"format": pretrained_folder.FORMAT, "recipes": "{}", "samples": "{}"}
    path = put(folder / pretrained_folder.FILE, safetensors.torch.save({"a": torch.ones(2)}, facts))
    return Case(path, lambda: pretrained_folder._read(path))


@case
def index_of_weights(folder: Path) -> Case:
    path = put(folder / model_files.INDEX, '{"weight_map": {"a": "a.safetensors"}}')
    return Case(
        path, lambda: model_files.refuse_foreign_code(str(folder), SimpleNamespace()), is_json=True
    )


@case
def preprocessor_config(folder: Path) -> Case:
    known = {
        "size": {"height": 2, "width": 2},
        "image_mean": [0.5],
        "image_std": [0.5],
        "do_resize": True,
    }
    path = put(folder / "preprocessor_config.json", json.dumps(known))
    return Case(path, lambda: image_sizes.Preprocessing.of_file(path, 1), is_json=True)


@case
def squad(folder: Path) -> Case:
    answers = {"text": ["a"], "answer_start": [0]}
    body = {
        "data": [
            {
                "paragraphs": [
                    {"context": "a", "qas": [{"id": "1", "question": "b", "answers": answers}]}
                ]
            }
        ]
    }
    path = put(folder / "dev.json", json.dumps(body))
    return Case(path, lambda: list(records(path, ["question", "context", "answers"])), is_json=True)


def _of_table(name: str, content: bytes) -> Callable[[Path], Case]:
    def made(folder: Path) -> Case:
        path = put(folder / name, content)
        return Case(path, lambda: list(records(path, ["a"], limit_bytes=2**20)))

    return made


CASES["jsonl"] = _of_table("a.jsonl", b'{"a": "b"}\n')
CASES["csv"] = _of_table("a.csv", b"a\nb\n")


@case
def plain_text(folder: Path) -> Case:
    path = put(folder / "a.txt", "some words")
    return Case(path, lambda: list(documents(path, limit_bytes=2**20)))


@case
def parquet(folder: Path) -> Case:
    pyarrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    path = folder / "a.parquet"
    tables.write_table(pyarrow.table({"a": ["b"]}), path)
    return Case(path, lambda: list(records(path, ["a"])))


@case
def picture(folder: Path) -> Case:
    path = put(folder / "a.png", b"png")
    row = image_files.Record({"image": "a.png"}, "row 1")
    return Case(path, lambda: image_files.Picture(path, row).raw())


def _a_checkpoint(folder: Path) -> Path:
    tensors = {"weights": {"w": torch.ones(4, 2)}, "optimizer": {"m": torch.ones(3)}}
    return store.save(folder, 1, tensors, {"step": 1, "nested": {"list": [1, 2.5, None]}})


def _of_ranks(folder: Path) -> Path:
    state = {"weights": {"w": torch.ones(4, 2)}, "facts": {"step": 1, "list": [1, 2.5, None]}}
    return distributed.save(state, folder / "step-00000001")


def _resign(path: Path) -> None:
    """Right hashes for whatever is there now."""
    body = json.loads((path / manifest.NAME).read_bytes())
    files = {name: manifest.listed((path / name).read_bytes()) for name in body["files"]}
    signed = (
        manifest.Manifest(body["step"], body["groups"], body["ties"], files, body.get("save", ""))
        if "groups" in body
        else None
    )
    if signed is not None:
        (path / manifest.NAME).write_bytes(signed.signed())


def _of_checkpoint(
    make: Callable[[Path], Path], name: str, is_json: bool
) -> Callable[[Path], Case]:
    def made(folder: Path) -> Case:
        path = make(folder)

        def read() -> None:
            for each in (
                lambda: store.load(path),
                lambda: store.newest_valid(folder),
                lambda: distributed.read(path),
                lambda: distributed.verify(path),
                lambda: distributed.opened(path),
                lambda: manifest.verify(path),
                lambda: manifest.fingerprint(path),
                lambda: manifest.prune(folder, 1),
            ):
                with suppress(NarrowgaugeError):
                    each()
            store.load(path)

        is_manifest = name == manifest.NAME
        return Case(
            path / name, read, (lambda: None) if is_manifest else lambda: _resign(path), is_json
        )

    return made


CASES |= {
    "manifest of one process": _of_checkpoint(_a_checkpoint, manifest.NAME, True),
    "facts.json": _of_checkpoint(_a_checkpoint, manifest.FACTS, True),
    "shard of one process": _of_checkpoint(_a_checkpoint, "weights-0.safetensors", False),
    "manifest of ranks": _of_checkpoint(_of_ranks, manifest.NAME, True),
    "index.json": _of_checkpoint(_of_ranks, manifest.INDEX, True),
    "shard of ranks": _of_checkpoint(_of_ranks, "rank-00000-0.safetensors", False),
}


# --- the search


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def attempt(found: Case, what: str) -> None:
    """Reads. A fault is a sentence that names the file or its folder and ends in the next step."""
    try:
        with alarm():
            found.read()
    except NarrowgaugeError as error:
        words = str(error)
        assert words.endswith("."), (what, words)
        assert str(found.path.parent) in words or found.path.parent.name in words, (what, words)
        assert len(words) < 3000, (what, words[:3000])
    except Hung:
        pytest.fail(f"{what}: hung")


@pytest.mark.filterwarnings("ignore:.*is damaged.*was ignored")
@pytest.mark.parametrize("name", CASES)
def test_what_is_no_regular_file_is_a_sentence_and_no_hang(name: str, tmp_path: Path) -> None:
    """Pipes, links, folders, sockets, and a sparse file of 10 GiB."""
    with alarm():
        CASES[name](tmp_path / "whole").read()  # as it was written it is read
    for number, (what, spoil) in enumerate(SPECIAL.items()):
        _search(name, tmp_path / str(number), what, spoil, signs=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is damaged.*was ignored")
@pytest.mark.parametrize("name", CASES)
def test_any_content_is_read_or_refused_by_a_sentence(name: str, tmp_path: Path) -> None:
    """Empty, cut, deep, of another form; 40 random changes of each JSON file; of checkpoints also with right hashes."""
    dice = random.Random(name)
    hazards = dict(BYTES)
    content = CASES[name](tmp_path / "content")
    is_json, data = content.is_json, content.path.read_bytes()
    hazards |= {f"cut at {at}": data[:at] for at in (1, len(data) // 2, len(data) - 1)}
    if is_json:
        parsed, end = json.loads(data), b"\n" * data.endswith(b"\n")
        for number in range(40):
            hazards[f"change {number}"] = json.dumps(strange_values(parsed, dice)).encode() + end
    for number, (what, changed) in enumerate(hazards.items()):
        for signs in (False, True):
            folder = tmp_path / f"{number}-{signs}"
            words = f"{what}: {changed[:500]!r}"
            _search(
                name, folder, words, lambda path, changed=changed: path.write_bytes(changed), signs
            )


def _search(
    name: str, folder: Path, what: str, spoil: Callable[[Path], object], signs: bool
) -> None:
    found = CASES[name](folder)
    storage.remove(found.path)
    spoil(found.path)
    if signs:
        with suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
            found.resign()
    attempt(found, f"{name}, {what}")
    storage.remove(found.path)
    storage.remove(found.path.with_name(f"{found.path.name}-pipe"))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "refusal", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")], ids=str
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*is damaged.*was ignored")
def test_a_file_that_may_not_be_opened_is_a_sentence(
    name: str, refusal: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CASES[name](tmp_path / "c")
    opened = os.open

    def refuse(path: Any, *rest: Any, **options: Any) -> int:
        if path == found.path:
            raise refusal
        return opened(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    attempt(found, name)


# --- what the reader itself promises


KIND = reading.Kind(most_bytes=100, step="Mend it.")


def test_folders_above_a_file_may_be_links_and_the_file_not(tmp_path: Path) -> None:
    """A run folder on another disk is read; a link in the place of a record is refused, unless the kind follows links."""
    put(tmp_path / "disk" / "a", "1")
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "disk" / "link").symlink_to("a")
    assert reading.bytes_of(tmp_path / "runs" / "a", KIND) == b"1"
    with pytest.raises(
        ConfigError,
        match=r"runs/link: cannot be read: it is a symbolic link, not a regular file\. Mend it\.",
    ):
        reading.bytes_of(tmp_path / "runs" / "link", KIND)
    following = reading.Kind(most_bytes=100, step="Mend it.", follow_links=True)
    assert reading.bytes_of(tmp_path / "runs" / "link", following) == b"1"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_what_others_may_write_to_is_not_trusted(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path / "a", "1")
    own = reading.Kind(most_bytes=100, step="Mend it.", only_own=True)
    path.chmod(0o644)
    assert reading.bytes_of(path, own) == b"1"
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others may write to it .mode {mode:04o}"):
        reading.bytes_of(path, own)


def test_what_belongs_to_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "a", "1")
    own = reading.Kind(most_bytes=100, step="Mend it.", only_own=True)
    stored = os.fstat

    def of_another(descriptor: int) -> os.stat_result:
        found = list(stored(descriptor))
        found[4] = 12345
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", of_another)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        reading.bytes_of(path, own)


def test_an_append_does_not_follow_a_link(tmp_path: Path) -> None:
    """Else the lock of a run folder would empty the file that a link names."""
    precious = put(tmp_path / "precious", "years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(precious)
    with (
        pytest.raises(StorageError, match="symbolic link"),
        run_folder.RunFolder.claim(tmp_path / "run", resume=False),
    ):
        pass
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_caches_are_read_again_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        plan_cache.store({"q": 1}, "answer")
        measure.keep(tmp_path / "auto.json", "key", {"bf16": 1.0})
    finally:
        os.umask(before)
    assert plan_cache.load({"q": 1}) == "answer"
    assert measure.cached(tmp_path / "auto.json") == {"key": {"bf16": 1.0}}


# --- nobody goes round it

OPENS = {
    "open", "read_text", "read_bytes", "json.load", "json.loads", "tomllib.load", "tomllib.loads", "torch.load", "safe_open", "load_file",
    "np.load", "np.memmap", "np.fromfile", "numpy.load", "pickle.load", "pickle.loads", "yaml.load", "yaml.safe_load", "yaml.compose",
    "tokenize.open", "os.open", "io.open", "Image.open", "fromfile", "torch.from_file", "safetensors.torch.load", "ctypes.CDLL",
    "linecache.getlines", "mmap.mmap", "os.fdopen", "ParquetFile", "load_dataset", "json.JSONDecoder",
}  # fmt: skip
OWN_PROCESS = "what a process of this report writes, in a folder that the report has just made"
SAVED_RUN = "SavedRun.open, which reads by the one reader"
SOURCES, KERNEL, MEMORY, READ = (
    "a file of this package",
    "a file of the kernel, under /proc or /sys",
    "a value in memory",
    "bytes that `reading` gave",
)
ALLOWED: dict[tuple[str, str], str] = {
    ("storage/reading.py", "os.open"): "the reader itself",
    ("storage/reading.py", "open"): "the reader itself",
    ("storage/reading.py", "json.JSONDecoder"): "the reader itself",
    ("storage/reading.py", "safe_open"): "the reader itself",
    ("cli/__init__.py", "os.open"): "/dev/null",
    ("train/parallel/followers.py", "open"): "/dev/null",
    ("storage/__init__.py", "os.open"): "syncs and locks, does not read; not blocking",
    ("storage/__init__.py", "open"): "makes a new file",
    ("data/cache.py", "open"): "makes a new file",
    ("report/template.py", "open"): "a regular file's first 4096 bytes, searched for a mark",
    ("data/cache.py", "np.memmap"): "an open file that `reading` gave",
    ("snapshot/block_storage.py", "os.open"): "makes a new file in shared memory",
    ("ops/cpp/build.py", "read_text"): f"{SOURCES}; {KERNEL}",
    ("ops/cpp/build.py", "ctypes.CDLL"): "a library whose bytes `is_whole` compared, in a folder that nobody else may write to",
    ("export/gguf_file.py", "fromfile"): "tensors of the file that it has just written, one at a time",
    ("export/gguf_tokenizer.py", "json.loads"): "what a tokenizer that is loaded says of itself",
    ("ops/cpp/prebuilt.py", "read_text"): f"{SOURCES}; {KERNEL}",
    ("ops/cpp/prebuilt.py", "read_bytes"): "a library that it has just compiled",
    ("lab/card/archive.py", "open"): "a member of an archive whose bytes the reader gave",
    ("lab/card/process.py", "os.open"): OWN_PROCESS,
    ("lab/card/process.py", "open"): OWN_PROCESS,
    ("lab/card/process.py", "read_text"): OWN_PROCESS,
    ("lab/card/runner.py", "open"): OWN_PROCESS,
    ("ops/nvrtc.py", "read_text"): SOURCES,
    ("ops/nvrtc.py", "ctypes.CDLL"): "the driver's and the compiler's own libraries",
    ("conversion/measure.py", "read_bytes"): SOURCES,
    ("conversion/measure.py", "read_text"): KERNEL,
    ("ops/cpp/threads.py", "ctypes.CDLL"): "what this process has loaded",
    ("report/template.py", "read_text"): SOURCES,
    ("train/planning/policy.py", "read_text"): KERNEL,
    ("train/device.py", "read_text"): KERNEL,
    ("train/device.py", "ctypes.CDLL"): "the C library of this process",
    ("train/run_metadata.py", "read_text"): KERNEL,
    ("lab/study/room.py", "read_text"): KERNEL,
    ("snapshot/block_storage.py", "read_text"): KERNEL,
    ("train/config/toml.py", "open"): "the configuration that the user names, which may be a pipe",
    ("train/config/toml.py", "tomllib.loads"): READ,
    ("train/evaluation/task_code.py", "yaml.compose"): READ,
    ("train/evaluation/command.py", "open"): SAVED_RUN,
    ("train/evaluation/generation.py", "open"): SAVED_RUN,
    ("train/exporting.py", "open"): SAVED_RUN,
    ("snapshot/block_storage.py", "torch.from_file"): "a file that this process has just made",
    ("manifest.py", "json.loads"): MEMORY,
    ("distributed/index.py", "json.loads"): MEMORY,
    ("distributed/index.py", "safetensors.torch.load"): READ,
    ("train/checkpoint/store.py", "json.loads"): MEMORY,
    ("train/checkpoint/store.py", "safetensors.torch.load"): READ,
    ("train/liveness/__init__.py", "json.loads"): "what the sentinel of this process sends",
    ("train/liveness/sentinel.py", "json.loads"): "what the rank of this sentinel sends",
    ("train/liveness/sentinel.py", "open"): KERNEL,
    ("train/liveness/__init__.py", "mmap.mmap"): "anonymous memory, shared with the sentinel",
    ("train/liveness/processes.py", "read_bytes"): KERNEL,
    ("train/liveness/processes.py", "read_text"): KERNEL,
    ("train/parallel/ranks.py", "json.loads"): "a value of the ranks' store",
    ("data/tokenizer.py", "json.loads"): MEMORY,
    ("data/encoder.py", "json.loads"): MEMORY,
    ("data/encoder.py", "read_bytes"): "a folder that this process has just written",
    ("data/image_sizes.py", "json.loads"): MEMORY,
    ("train/tasks/multiple_choice.py", "json.loads"): "a cell of a table",
    ("train/tasks/question_answering.py", "json.loads"): "a cell of a table, and an array of a cache whose hashes were checked",
    ("train/tasks/tagging.py", "json.loads"): "a cell of a table",
    ("data/tables.py", "json.loads"): "a line of a table",
    ("data/tables.py", "ParquetFile"): "after `reading` has refused what is no regular file",
    ("data/image_files.py", "Image.open"): READ,
    ("data/sources.py", "tokenize.open"): "the standard library of this interpreter",
    ("data/sources.py", "load_dataset"): "the library `datasets`, by a name of the Hub",
}  # fmt: skip


def _name(call: ast.Call) -> str:
    """The name in OPENS that a call has, or ''."""
    words = ast.unparse(call.func)
    parts = words.split(".")
    for name in (words, ".".join(parts[-2:]), parts[-1]):
        if name in OPENS and not (name == "open" and words.startswith("webbrowser.")):
            return name
    return ""


@cache
def _modules() -> dict[str, ast.Module]:
    """The syntax trees of the package's modules that hold a name in OPENS, or make a `Kind`."""
    words = re.compile(
        "|".join(map(re.escape, {name.rpartition(".")[2] for name in OPENS} | {"most_bytes"}))
    )
    texts = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {name: ast.parse(text) for name, text in texts.items() if words.search(text)}


def test_every_file_is_read_by_the_one_reader() -> None:
    """By the syntax tree of every module: another way to read a file stands in ALLOWED with its reason, and none stands there in vain."""
    found = {
        (module, name): node.lineno
        for module, tree in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := _name(node))
    }
    assert {key: line for key, line in found.items() if key not in ALLOWED} == {}
    assert [key for key in ALLOWED if key not in found] == []


def test_every_kind_of_file_is_searched_above() -> None:
    """Each `Kind` of the package is read by some case: a new one needs a case."""
    kinds = {
        f"{module}:{target.id}"
        for module, tree in _modules().items()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("reading.Kind", "replace", "Kind") and "most_bytes" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip
    assert kinds == {
        "manifest.py:LISTING", "manifest.py:PART", "diagnose/runs.py:METRICS", "diagnose/runs.py:RECORD", "diagnose/study_file.py:KIND",
        "report/run_data.py:CONFIG", "conversion/measure.py:MEASURED", "ops/cpp/build.py:BUILT",
        "ops/cpp/build.py:CARRIED", "lab/card/archive.py:KIND", "lab/card/archive.py:MEMBER",
        "train/config/toml.py:STORED",
        "train/run_folder.py:LOCK", "train/metrics.py:LOG", "lab/study/pool.py:SAID", "train/planning/cache.py:ENTRY",
        "train/planning/cache.py:TELLS", "train/evaluation/command.py:SCORES", "train/evaluation/task_code.py:FILE",
        "lab/ladder_of_run.py:RUNGS",
        "train/model_files.py:OF_MODELS", "data/cache.py:ENTRY", "data/cache.py:ARRAY", "data/tokenizer.py:OF_TOKENIZERS",
        "export/__init__.py:OF_REPORTS", "export/writing.py:OF_FILES", "export/writing.py:OF_TOKENIZERS", "train/adapter.py:BASE_FILE",
        "train/trackers.py:STATE",
        "train/adapter.py:OF_ADAPTERS", "train/coded_base.py:OF_WEIGHTS", "conversion/pretrained_folder.py:OF_STATES",
        "data/text.py:USERS", "data/squad.py:WHOLE", "data/image_files.py:PICTURE", "data/image_sizes.py:SETTINGS",
    }  # fmt: skip
