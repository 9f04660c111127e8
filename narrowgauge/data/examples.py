"""Encodes the rows of a table as examples, cached on disk.

    examples = prepare_examples("train.jsonl", Completion(), tokenizer, cache="cache")
    examples[0]           {"input_ids": int64 array, "labels": int64 array}, -100 where no loss is computed
    examples.lengths      tokens of each, for `plan` and `LengthBatchSampler`

The cache key holds everything that determines the ids: the files' bytes, the tokenizer, the task with its columns, the chat
template and the options. Rows that are too long or have no target raise an error that counts them, unless `Limits` sets a policy; a
note then counts them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from narrowgauge.data.batches import IGNORED
from narrowgauge.data.cache import Append, Entry, cached, key_of
from narrowgauge.data.encoder import BATCH_ROWS, Encoder
from narrowgauge.data.order import Indices
from narrowgauge.data.records import Record, records
from narrowgauge.data.sources import files_of
from narrowgauge.data.tasks import Classification, Encoded, Kind, Notes, Seq2Seq, Task
from narrowgauge.data.text import shown
from narrowgauge.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # of the files; part of the key
LENGTH = np.dtype("<u4")
Item = dict[str, Any]


class Examples:
    """Encoded examples as a map-style dataset for torch's DataLoader or transformers' Trainer; memory-mapped.

    examples[i]             causal-lm: input_ids, labels (same length, unshifted, -100 where no loss is computed)
                            classification: input_ids, labels (one int), token_type_ids if the tokenizer has them
                            seq2seq: input_ids, labels (of their own length)
    examples[3, 1, 4]       the list of these examples, for a packed row
    examples.select(rows)   a subset
    """

    def __init__(self, kind: Kind, entry: Entry, fields: Sequence[str], summary: dict[str, Any]):
        self.kind, self.entry, self.summary = kind, entry, summary
        self._lengths = {name: entry.arrays[f"{name}.lengths"].astype(np.int64) for name in fields}
        self._ends = {name: np.cumsum(lengths) for name, lengths in self._lengths.items()}

    def __len__(self) -> int:
        return len(self._lengths["input_ids"])

    def select(self, rows: Indices) -> Examples:
        """A subset in the given order. The summary stays that of all examples."""
        part = copy(self)
        part._lengths = {name: lengths[rows] for name, lengths in self._lengths.items()}
        part._ends = {name: ends[rows] for name, ends in self._ends.items()}
        return part

    @property
    def lengths(self) -> Indices:
        """Tokens of each example, int64; the longer side of a seq2seq pair."""
        lengths = self._lengths["input_ids"]
        return np.maximum(lengths, self._lengths["labels"]) if self.kind == "seq2seq" else lengths

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about the data."""
        return list(self.summary["notes"])

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, Sequence):
            return [self[one] for one in index]
        found: Item = {}
        for name, ends in self._ends.items():
            end = int(ends[index])
            found[name] = self.entry.arrays[name][end - int(self._lengths[name][index]) : end].astype(np.int64)
        if self.kind == "causal-lm":
            found["labels"] = np.where(found.pop("targets") != 0, found["input_ids"], IGNORED)
        elif self.kind == "classification":
            found["labels"] = int(found["labels"][0])
        return found

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The policy for rows of more than max_length tokens, or without a target.

    too_long   "error" counts them, "truncate" cuts the end (of a pair, of the longer one), "skip" leaves the row out
    no_target  "error" counts them, "skip" leaves the row out
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
    """The rows of `source` (a file or glob of tables) as examples of `task`, cached in the folder `cache`.

    header      column names of CSV and TSV files without a header row
    allow_slow  allows a slow tokenizer for more than SLOW_ROWS texts

    Reads the files once for the key, and again if they are not cached. Memory: one batch of rows and the lengths. A damaged entry
    is made again, and a note says so. Raises DataError for faulty data (file and line) or tokenizers, ConfigError for
    wrong options, StorageError if the cache cannot be written.
    """
    job = _Job(source, task, Encoder(tokenizer, allow_slow=allow_slow), limits or Limits(), header)
    fields = task.fields(job.encoder)
    arrays = fields | {f"{name}.lengths": LENGTH for name in fields}
    entry, notes = cached(Path(cache) / f"examples-{job.key}", arrays, job.fill)
    if "token_type_ids" not in getattr(tokenizer, "model_input_names", ()):
        fields.pop("token_type_ids", None)
    notes = [*entry.facts["notes"], *notes]
    return Examples(task.kind, entry, list(fields), {**entry.facts, "source": shown(source), "notes": notes})


@dataclass
class _Tally:
    """Counts over the rows.

    counts  rows, examples, tokens, targets, too_long, no_target
    first   origin of the first row that is too_long or has no_target
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    longest: int = 0
    largest_token: int = 0
    notes: Notes = field(default_factory=Counter)

    def refuse(self, fault: str, origin: str) -> None:
        self.counts[fault] += 1
        self.first.setdefault(fault, origin)


class _Job:
    """Everything that determines the bytes of a cache entry."""

    def __init__(self, source: Any, task: Task, encoder: Encoder, limits: Limits, header: Sequence[str] | None):
        self.source, self.task, self.encoder, self.limits, self.header = source, task, encoder, limits, header
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
        """SHA-256 over the bytes of the files in reading order."""
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

    def fill(self, append: Append) -> dict[str, Any]:
        """Encodes all rows into a new entry and returns its facts."""
        tally, rows = _Tally(), records(self.source, self.task.columns, header=self.header)
        while batch := list(islice(rows, BATCH_ROWS)):
            if kept := list(self._kept(batch, tally)):
                for name in self.task.fields(self.encoder):
                    values = [example[name] for example in kept]
                    append(name, np.concatenate(values))
                    append(f"{name}.lengths", np.array([len(each) for each in values]))
        self._check(tally)
        if self._content() != self.content:
            raise DataError(
                f"{shown(self.source)}: the data changed while it was read. Start again when nothing writes to it."
            )
        return {
            "source": shown(self.source),
            "content_hash": self.content,
            "task": type(self.task).__name__,
            **{name: tally.counts[name] for name in ("rows", "examples", "tokens", "targets")},
            "largest_token": tally.largest_token,
            "notes": self._notes(tally),
        }

    def _kept(self, rows: list[Record], tally: _Tally) -> Iterator[Encoded]:
        limit, kind = self.limits.max_length, self.task.kind
        tally.counts["rows"] += len(rows)
        for row, example in zip(rows, self.task.encode(rows, self.encoder, tally.notes), strict=True):
            length = max(len(example["input_ids"]), len(example["labels"]) if kind == "seq2seq" else 0)
            if limit is not None and length > limit:
                tally.refuse("too_long", row.origin)
                tally.longest = max(tally.longest, length)
                if self.limits.too_long != "truncate":
                    continue
                example = self._truncated(row, example, limit)
            ids, targets = example["input_ids"], _targets(example, kind)
            if not targets or not len(ids):
                tally.refuse("no_target", row.origin)
                continue
            tally.counts.update(examples=1, tokens=len(ids), targets=targets)
            tally.largest_token = max(tally.largest_token, int(ids.max()))
            yield example

    def _truncated(self, row: Record, example: Encoded, limit: int) -> Encoded:
        if isinstance(self.task, Classification | Seq2Seq):  # the tokenizer keeps its separators
            return self.task.encode([row], self.encoder, Counter(), max_length=limit)[0]
        return {name: values[:limit] for name, values in example.items()}

    def _check(self, tally: _Tally) -> None:
        limits, counts, source = self.limits, tally.counts, shown(self.source)
        if counts["too_long"] and limits.too_long == "error":
            raise DataError(
                f"{source}: {counts['too_long']} of {counts['rows']} rows are longer than max_length {limits.max_length}; the "
                f"longest has {tally.longest} tokens, the first is {tally.first['too_long']}. Set max_length higher, if the model "
                "has positions for it, or too_long to 'truncate' or 'skip'."
            )
        if counts["no_target"] and limits.no_target == "error":
            what = "no text" if self.task.kind == "classification" else "no target, all their labels are masked"
            raise DataError(
                f"{source}: {counts['no_target']} of {counts['rows']} rows have {what}; the first is {tally.first['no_target']}. "
                "Correct them, or set no_target to 'skip'."
            )
        if not counts["examples"]:
            raise DataError(f"{source}: no row is left of {counts['rows']}. Pass more data, or other limits.")

    def _notes(self, tally: _Tally) -> list[str]:
        notes, counts = [note.format(count=count) for note, count in tally.notes.items() if count], tally.counts
        if counts["too_long"]:
            done = "cut" if self.limits.too_long == "truncate" else "left out"
            notes.append(
                f"{counts['too_long']} of {counts['rows']} rows were longer than max_length {self.limits.max_length} (the longest "
                f"{tally.longest} tokens) and were {done}."
            )
        if counts["no_target"]:
            what = "text" if self.task.kind == "classification" else "target"
            notes.append(f"{counts['no_target']} of {counts['rows']} rows had no {what} and were left out.")
        return notes


def _targets(example: Encoded, kind: Kind) -> int:
    """Number of positions with a loss; the first token of a causal-lm example has no prediction, so its target is cleared."""
    if kind == "causal-lm":
        example["targets"][:1] = 0
        return int(example["targets"].sum())
    return len(example["labels"])
