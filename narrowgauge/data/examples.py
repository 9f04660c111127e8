"""From rows of a table to encoded examples, kept on disk and checked whenever they are opened.

    examples = prepare_examples("train.jsonl", Completion(), tokenizer, cache="cache")
    examples[0]           {"input_ids": int64 array, "labels": int64 array}, -100 where nothing is to be learnt
    examples.lengths      tokens of each, for `plan` and `LengthBatchSampler`

The key of the cache is what decides the ids: the files' bytes, the tokenizer, the task with its columns, the chat template and
the options here. Nothing is dropped or cut silently: rows that are too long or have no target are an error that counts them,
or follow the policy that was asked for, and a note counts them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from narrowgauge.data.batches import IGNORED
from narrowgauge.data.cache import Damaged, gone, key_of
from narrowgauge.data.encoder import BATCH_ROWS, Encoder
from narrowgauge.data.example_cache import ExampleWriter, Ragged, Values, open_examples
from narrowgauge.data.order import Indices
from narrowgauge.data.records import Record, records
from narrowgauge.data.sources import files_of
from narrowgauge.data.tasks import Classification, Encoded, Kind, Notes, Seq2Seq, Task
from narrowgauge.data.text import shown
from narrowgauge.errors import ConfigError, DataError, StorageError
from narrowgauge.storage import storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # counts up when the meaning of the files changes
Item = dict[str, Any]


class Examples:
    """Encoded examples, as a data set for torch's DataLoader or transformers' Trainer; read from the disk as asked for.

    examples[i]             causal-lm: input_ids, labels (same length, unshifted, -100 where nothing is learnt)
                            classification: input_ids, labels (one int), token_type_ids if the tokenizer has them
                            seq2seq: input_ids, labels (of their own length)
    examples[3, 1, 4]       the list of these, for a packed row
    """

    def __init__(self, kind: Kind, fields: dict[str, Ragged], summary: dict[str, Any]):
        self.kind, self._fields, self.summary = kind, fields, summary

    def __len__(self) -> int:
        return len(self._fields["input_ids"])

    @property
    def lengths(self) -> Indices:
        """Tokens of each example, int64; of a seq2seq pair the longer side."""
        lengths = self._fields["input_ids"].lengths
        return np.maximum(lengths, self._fields["labels"].lengths) if self.kind == "seq2seq" else lengths

    @property
    def notes(self) -> list[str]:
        """What a user should know about the data, in sentences."""
        return list(self.summary["notes"])

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, Sequence):
            return [self._example(one) for one in index]
        return self._example(index)

    def __iter__(self) -> Iterator[Item]:
        return (self._example(index) for index in range(len(self)))

    def _example(self, index: int) -> Item:
        found: Item = {name: field[index].astype(np.int64) for name, field in self._fields.items()}
        if self.kind == "causal-lm":
            found["labels"] = np.where(found.pop("targets") != 0, found["input_ids"], IGNORED)
        elif self.kind == "classification":
            found["labels"] = int(found["labels"][0])
        return found


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What becomes of rows that are too long for max_length tokens, or have no target: an error that counts them, or a policy.

    too_long   "truncate" cuts the end (of a pair, of the longer one), "skip" leaves the row out
    no_target  "skip" leaves the row out; rows of a causal-lm task alone can have none
    """

    max_length: int | None = None
    too_long: Literal["error", "truncate", "skip"] = "error"
    no_target: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length: {self.max_length} leaves no token to predict. Pass at least 2, or None.")
        if self.too_long not in ("error", "truncate", "skip") or self.no_target not in ("error", "skip"):
            raise ConfigError(
                f"too_long {self.too_long!r}, no_target {self.no_target!r}. Pass 'error', 'truncate' or 'skip', and 'error' or "
                "'skip'."
            )


def prepare_examples(
    source: str | os.PathLike[str],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: str | os.PathLike[str],
    limits: Limits | None = None,
    header: Sequence[str] | None = None,
    allow_slow: bool = False,
) -> Examples:
    """The rows of `source` (a file or glob of tables) as examples of `task`, from the folder `cache` or made and put there.

    header      names of the columns of CSV and TSV files without a header row
    allow_slow  a tokenizer in Python may encode more than a few thousand texts

    Reads the files' bytes once for the key, and once more if they are not cached. Memory: one batch of rows and the lengths.
    Raises DataError for what is wrong with the data (file and line) or the tokenizer, ConfigError for options that do not fit,
    StorageError if the cache cannot be written. A damaged entry is made again, and a note says so.
    """
    job = _Job(source, task, Encoder(tokenizer, allow_slow=allow_slow), limits or Limits(), header)
    folder, notes = Path(cache), list[str]()
    try:
        with storage(folder):
            entry = open_examples(folder, job.key)
    except Damaged as damage:
        entry = None
        notes.append(f"The cache of examples was damaged and has been made again: {damage}.")
    if entry is None:
        job.write(folder)
        try:
            entry = open_examples(folder, job.key)
        except Damaged as damage:
            raise StorageError(
                f"{damage}, though it was just written. Check the disk, or pass another folder."
            ) from damage
        if entry is None:
            raise gone(folder)
    fields, facts = entry
    if not job.has_token_types:
        fields.pop("token_type_ids", None)
    return Examples(task.kind, fields, {**facts, "source": shown(source), "notes": [*facts["notes"], *notes]})


@dataclass
class _Fate:
    """Rows that were not taken as they are."""

    count: int = 0
    longest: int = 0
    first: str = ""

    def add(self, origin: str, length: int = 0) -> None:
        self.first = self.first or origin
        self.count += 1
        self.longest = max(self.longest, length)


@dataclass
class _Tally:
    """What the rows had in them."""

    rows: int = 0
    tokens: int = 0
    targets: int = 0
    largest_token: int = 0
    too_long: _Fate = field(default_factory=_Fate)
    no_target: _Fate = field(default_factory=_Fate)
    notes: Notes = field(default_factory=Counter)


class _Job:
    """What decides every byte of a cache entry."""

    def __init__(self, source: Any, task: Task, encoder: Encoder, limits: Limits, header: Sequence[str] | None):
        self.source, self.task, self.encoder, self.limits, self.header = source, task, encoder, limits, header
        names = getattr(encoder.tokenizer, "model_input_names", ())
        self.has_token_types = "token_type_ids" in names
        self.content = self._content()
        self.key = key_of(
            {
                "examples": FORMAT,
                "content": self.content,
                "task": [type(task).__name__, asdict(task), task.options(encoder)],
                "limits": asdict(limits),
                "header": list(header) if header is not None else None,
                **encoder.facts(),
            }
        )

    def _content(self) -> str:
        """SHA-256 over the bytes of the files in the order in which they are read."""
        digest = hashlib.sha256()
        for path in files_of(os.fspath(self.source)):
            try:
                with path.open("rb") as file:
                    digest.update(path.suffix.lower().encode() + hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise StorageError(
                    f"{shown(path)}: cannot be read: {error.strerror}. Check its permissions."
                ) from error
        return digest.hexdigest()

    def write(self, folder: Path) -> None:
        """Encodes every row into a new entry."""
        tally = _Tally()
        with storage(folder):
            folder.mkdir(parents=True, exist_ok=True)
            writer = ExampleWriter(folder, self.key, self.task.fields(self.encoder))
        try:
            rows = records(self.source, self.task.columns, header=self.header)
            while batch := list(islice(rows, BATCH_ROWS)):
                examples = self._kept(batch, tally)
                with storage(folder):
                    writer.append(examples)
            self._check(tally, writer.count)
            if self._content() != self.content:
                raise DataError(
                    f"{shown(self.source)}: the data changed while it was read. Start again when nothing writes to it."
                )
            with storage(folder):
                writer.publish(self._facts(tally, writer.count))
        finally:
            writer.discard()

    def _kept(self, rows: list[Record], tally: _Tally) -> list[Encoded]:
        kept = []
        limit = self.limits.max_length
        for row, example in zip(rows, self.task.encode(rows, self.encoder, tally.notes), strict=True):
            tally.rows += 1
            length = _length(example, self.task.kind)
            if limit is not None and length > limit:
                tally.too_long.add(row.origin, length)
                if self.limits.too_long != "truncate":
                    continue
                example = self._truncated(row, example, limit)
            if not (targets := _targets(example, self.task.kind)) or not len(example["input_ids"]):
                tally.no_target.add(row.origin)
                continue
            tally.targets += targets
            tally.tokens += len(example["input_ids"])
            tally.largest_token = max(tally.largest_token, int(example["input_ids"].max()))
            kept.append(example)
        return kept

    def _truncated(self, row: Record, example: Encoded, limit: int) -> Encoded:
        if isinstance(self.task, Classification | Seq2Seq):  # the tokenizer keeps its separators
            return self.task.encode([row], self.encoder, Counter(), max_length=limit)[0]
        return {name: values[:limit] for name, values in example.items()}

    def _check(self, tally: _Tally, kept: int) -> None:
        limits, long, empty = self.limits, tally.too_long, tally.no_target
        if long.count and limits.too_long == "error":
            raise DataError(
                f"{shown(self.source)}: {long.count} of {tally.rows} rows are longer than max_length {limits.max_length}; the "
                f"longest has {long.longest} tokens, the first is {long.first}. Set max_length higher, if the model has positions for it, "
                "or too_long to 'truncate' or 'skip'."
            )
        if empty.count and limits.no_target == "error":
            what = "no text" if self.task.kind == "classification" else "no target, all their labels are masked"
            raise DataError(
                f"{shown(self.source)}: {empty.count} of {tally.rows} rows have {what}; the first is {empty.first}. Correct them, or "
                "set no_target to 'skip'."
            )
        if not kept:
            raise DataError(f"{shown(self.source)}: no row is left of {tally.rows}. Pass more data, or other limits.")

    def _facts(self, tally: _Tally, kept: int) -> dict[str, Any]:
        notes = [note.format(count=count) for note, count in tally.notes.items() if count]
        if tally.too_long.count:
            done = "cut" if self.limits.too_long == "truncate" else "left out"
            notes.append(
                f"{tally.too_long.count} of {tally.rows} rows were longer than max_length {self.limits.max_length} (the longest "
                f"{tally.too_long.longest} tokens) and were {done}."
            )
        if tally.no_target.count:
            what = "text" if self.task.kind == "classification" else "target"
            notes.append(f"{tally.no_target.count} of {tally.rows} rows had no {what} and were left out.")
        return {
            "source": shown(self.source),
            "content_hash": self.content,
            "task": type(self.task).__name__,
            "rows": tally.rows,
            "examples": kept,
            "tokens": tally.tokens,
            "targets": tally.targets,
            "largest_token": tally.largest_token,
            "notes": notes,
        }


def _length(example: Encoded, kind: Kind) -> int:
    return max(len(example["input_ids"]), len(example["labels"]) if kind == "seq2seq" else 0)


def _targets(example: dict[str, Values], kind: Kind) -> int:
    """Positions that a loss counts; nothing precedes the first token of a causal-lm example, so it is none."""
    if kind == "causal-lm":
        example["targets"][:1] = 0
        return int(example["targets"].sum())
    return len(example["labels"])
