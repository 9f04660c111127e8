"""Encodes the rows of a table as examples, cached on disk.

    examples = prepare_examples("train.jsonl", Completion(), tokenizer, cache="cache")
    examples[0]           {"input_ids": int64 array, "labels": int64 array}, -100 where no loss is computed
    examples.lengths      tokens of each, for `plan` and `LengthBatchSampler`; examples.strata groups of their labels

The cache key holds everything that determines the ids: the files' bytes, the tokenizer, the task with its columns, the chat
template and the options. Rows that are too long or have no target raise an error that counts them, unless `Limits` sets a policy; a
note then counts them.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import Append, Entry, Values, cached, key_of
from narrowgauge.data.encoder import BATCH_ROWS, Encoder
from narrowgauge.data.sources import files_of, records
from narrowgauge.data.stored import Stored
from narrowgauge.data.tables import Record
from narrowgauge.data.task import Encoded, Item, Kind, Notes, Task
from narrowgauge.data.text import USERS, shown
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # of the files; part of the key
LENGTH = np.dtype("<u4")
NO_CUT = "'skip' (windows cut no context; too long is what leaves no room for it beside `stride`)"


class Examples(Stored):
    """Encoded examples as a map-style dataset for torch's DataLoader or transformers' Trainer; memory-mapped.

    examples[i]             causal-lm: input_ids, labels (same length, unshifted, -100 where no loss is computed)
                            classification: input_ids, labels (one int), token_type_ids if the tokenizer has them
                            seq2seq: input_ids, labels (of their own length)
                            regression: as classification, with labels [columns] float64
    examples[3, 1, 4]       the list of these examples, for a packed row
    examples.select(rows)   a subset, whose summary stays that of all
    """

    def __init__(self, task: type[Task], entry: Entry, fields: Sequence[str], summary: dict[str, Any]):
        super().__init__(entry, fields)
        self.task, self.summary = task, summary

    @property
    def kind(self) -> Kind:
        return self.task.kind

    @property
    def lengths(self) -> Indices:
        """Tokens of each example, int64; the longer side of a seq2seq pair."""
        return self.task.lengths(self)

    @property
    def tokens(self) -> Indices:
        """Tokens that a model reads of each example, int64."""
        return self.task.tokens(self)

    @property
    def strata(self) -> Indices | None:
        """Of each example the group of its label, for `plan` and `LengthBatchSampler`: see `strata`; None where a task has none."""
        return self.task.strata(self)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about the data."""
        return list(self.summary["notes"])

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, Sequence):
            return [self[one] for one in index]
        found = {name: _wide(self.array(name, index)) for name in self._ends if name not in self.task.aside}
        return self.task.item(found)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))


def _wide(values: Values) -> Values:
    """Whole numbers as int64, others as they are."""
    return values.astype(np.int64) if values.dtype.kind in "iu" else np.array(values)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The policy for rows of more than max_length tokens, or without a target: "error" counts them, "skip" leaves them out."""

    max_length: int | None = None
    too_long: Literal["error", "truncate", "skip"] = "error"  # "truncate" cuts the end (of a pair, of the longer one)
    no_target: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"max_length: {self.max_length} leaves no token to predict. Pass at least 2, or None.")
        if self.too_long not in ("error", "truncate", "skip") or self.no_target not in ("error", "skip"):
            raise ConfigError(
                f"too_long {self.too_long!r}, no_target {self.no_target!r}. Pass 'error', 'skip', or 'truncate' for too_long."
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
    arrays = job.fields | {f"{name}.lengths": LENGTH for name in job.fields}
    entry, notes = cached(Path(cache) / f"examples-{job.key}", arrays, job.fill)
    names = list(job.fields)
    if "token_type_ids" in names and "token_type_ids" not in tokenizer.model_input_names:
        names.remove("token_type_ids")
    notes = [*entry.facts["notes"], *notes]
    return Examples(type(task), entry, names, {**entry.facts, "source": shown(source), "notes": notes})


class _Job:
    """Everything that determines the bytes of a cache entry, and what is counted while they are written."""

    def __init__(self, source: Any, task: Task, encoder: Encoder, limits: Limits, header: Sequence[str] | None):
        self.source, self.task, self.encoder, self.limits, self.header = source, task, encoder, limits, header
        if task.windows and limits.too_long == "truncate":
            raise ConfigError("too_long 'truncate': windows cut no context. Pass 'error' or 'skip'.")
        self.fields = task.arrays(encoder)
        self.content = self._content()
        facts = {
            "examples": FORMAT,
            "content": self.content,
            "task": [type(task).__name__, asdict(task)],
            "limits": asdict(limits),
            "header": list(header) if header is not None else None,
        }
        self.key = key_of({**facts, **encoder.facts()})
        self.counts = Counter[str]()  # rows, examples, tokens, targets, too_long, no_target
        self.first: dict[str, str] = {}  # origin of the first row that is too_long or has no_target
        self.notes = Notes()
        self.longest = self.largest_token = 0

    def _content(self) -> str:
        """SHA-256 over the bytes of the files in reading order."""
        digest = hashlib.sha256()
        for path in files_of(os.fspath(self.source)):
            with reading.opened(path, USERS) as file:
                digest.update(path.suffix.lower().encode() + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def fill(self, append: Append) -> dict[str, Any]:
        """Encodes all rows into a new entry and returns its facts."""
        rows = records(self.source, self.task.columns, header=self.header)
        while batch := list(islice(rows, BATCH_ROWS)):
            if kept := list(self._kept(batch)):
                for name in self.fields:
                    values = [example[name] for example in kept]
                    append(name, np.concatenate(values))
                    append(f"{name}.lengths", np.array([len(each) for each in values]))
        notes = [note.replace("{count}", str(count)) for note, count in self.notes.items() if count] + self._judged()
        if self._content() != self.content:
            raise DataError(
                f"{shown(self.source)}: the data changed while it was read. Start again when nothing writes to it."
            )
        return {
            "source": shown(self.source),
            "content_hash": self.content,
            "task": type(self.task).__name__,
            **{name: self.counts[name] for name in ("rows", "examples", "tokens", "targets")},
            "largest_token": self.largest_token,
            "notes": notes,
        }

    def _kept(self, rows: list[Record]) -> Iterator[Encoded]:
        task, limit = self.task, self.limits.max_length
        self.counts["rows"] += len(rows)
        own_length = {"max_length": limit} if task.windows else {}
        for row, found in zip(rows, task.encode(rows, self.encoder, self.notes, **own_length), strict=True):
            for example in found if task.windows else (found,):
                yield from self._fitting(row, example)

    def _fitting(self, row: Record, example: Encoded) -> Iterator[Encoded]:
        """The example if it has a target, cut if it is too long and the limits have it so; or nothing."""
        limit, task = self.limits.max_length, self.task
        length = task.length(example)
        if limit is not None and length > limit:
            self._refuse("too_long", row)
            self.longest = max(self.longest, length)
            if self.limits.too_long != "truncate":
                return
            if task.refits:  # the tokenizer keeps its separators
                [example] = task.encode([row], self.encoder, Notes(), max_length=limit)
            else:
                example = {name: values[:limit] for name, values in example.items()}
        ids, targets = example["input_ids"], task.targets(example)
        if not targets or not len(ids):
            self._refuse("no_target", row)
            return
        self.counts.update(examples=1, tokens=len(ids), targets=targets)
        self.largest_token = max(self.largest_token, int(ids.max()))
        yield example

    def _refuse(self, fault: str, row: Record) -> None:
        self.counts[fault] += 1
        self.first.setdefault(fault, row.origin)

    def _judged(self) -> list[str]:
        """Notes on rows that were cut or left out. Raises DataError where the limits allow none, or if no row is left."""
        limits, rows, source, notes = self.limits, self.counts["rows"], shown(self.source), list[str]()
        if count := self.counts["too_long"]:
            if limits.too_long == "error":
                other = NO_CUT if self.task.windows else "'truncate' or 'skip'"
                raise DataError(
                    f"{source}: {count} of {rows} rows are longer than max_length {limits.max_length}; the longest has {self.longest} "
                    f"tokens, the first is {self.first['too_long']}. Raise max_length, or set too_long to {other}."
                )
            done = "cut" if limits.too_long == "truncate" else "left out"
            notes.append(
                f"{count} of {rows} rows were longer than max_length {limits.max_length} (the longest {self.longest} tokens) "
                f"and were {done}."
            )
        if count := self.counts["no_target"]:
            what = self.task.learnt
            if limits.no_target == "error":
                masked = ", all their labels are masked" if what == "target" else ""
                raise DataError(
                    f"{source}: {count} of {rows} rows have no {what}{masked}; the first is {self.first['no_target']}. "
                    "Correct them, or set no_target to 'skip'."
                )
            notes.append(f"{count} of {rows} rows had no {what} and were left out.")
        if not self.counts["examples"]:
            raise DataError(f"{source}: no row is left of {rows}. Pass more data, or other limits.")
        return notes
