"""Encodes the rows of a table as training examples, cached on disk.

    examples = prepare_examples("train.jsonl", Completion(), tokenizer, cache="cache")
    examples[0]           {"input_ids": int64 array, "labels": int64 array}, -100 without loss
    examples.lengths      tokens of each example, for `plan` and `LengthBatchSampler`
    examples.strata       groups of their labels, for the same
    coloured_sample(tokenizer, **examples[0])   its tokens with a loss, for the console

The cache key covers everything that determines the ids: the files' bytes, the tokenizer, the task
with its columns, the chat template and the options. Rows that are too long or have no target raise
an error with their number. If `Limits` sets a policy, a note reports the number instead.
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

from narrowgauge.data.batches import IGNORED, Indices
from narrowgauge.data.cache import Append, CacheEntry, Values, cached, key_of
from narrowgauge.data.encoder import BATCH_ROWS, Encoder
from narrowgauge.data.example_arrays import ExampleArrays
from narrowgauge.data.sources import files_of, records
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.data.text import USERS, shown
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from narrowgauge.data.tables import Record

FORMAT = 1  # version of the arrays' layout; part of the key
LENGTH = np.dtype("<u4")
NO_CUT = "'skip' (windows cut no context; too long is what leaves no room for it beside `stride`)"


class Examples(ExampleArrays):
    """Encoded examples as a memory-mapped dataset, for DataLoader or transformers' Trainer.

    examples[i]             a dict, see below
    examples[3, 1, 4]       list of the three examples, for a packed row
    examples.select(rows)   a subset, with the summary of the whole

    causal-lm       input_ids, labels (same length, unshifted, -100 without loss)
    classification  input_ids, labels (one int), token_type_ids if the tokenizer has them
    seq2seq         input_ids, labels (with a length of their own)
    regression      as classification, with labels [columns] float64
    sentence-similarity  lists of input_ids and token_type_ids, one for each text; labels [1] float64
    """

    def __init__(
        self, task: type[Task], entry: CacheEntry, fields: Sequence[str], summary: dict[str, Any]
    ):
        super().__init__(entry, fields)
        self.task, self.summary = task, summary

    @property
    def kind(self) -> str:
        """Name of the task."""
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
        """Label group of each example (see `strata`), or None if the task has no groups."""
        return self.task.strata(self)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about the data."""
        return list(self.summary["notes"])

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, Sequence):
            return [self[one] for one in index]
        found = {
            name: _wide(self.array(name, index))
            for name in self._ends
            if name not in self.task.evaluation_arrays
        }
        return self.task.item(found)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))


def _wide(values: Values) -> Values:
    """Integers as int64, which torch's indexing needs; other arrays as they are."""
    # np.array copies: a tensor over the read-only memory map would raise a warning in torch.
    return values.astype(np.int64) if values.dtype.kind in "iu" else np.array(values)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Policy for rows that are too long or have no target.

    max_length  most tokens of an example; None: unlimited
    too_long    "error", "skip", or "truncate", which cuts the end (of a pair, the longer
                text's)
    no_target   "error" or "skip"

    "error" raises with the number of such rows; the others report it in a note.
    """

    max_length: int | None = None
    too_long: Literal["error", "truncate", "skip"] = "error"
    no_target: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                f"max_length: {self.max_length} leaves no token to predict. Pass at least 2, or None.",
                code="examples.max-length",
            )
        if self.too_long not in ("error", "truncate", "skip") or self.no_target not in (
            "error",
            "skip",
        ):
            raise ConfigError(
                f"too_long {self.too_long!r}, no_target {self.no_target!r}. Pass 'error', 'skip', or 'truncate' for too_long.",
                code="examples.policy",
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
    """Encodes the rows of `source` (a file or glob of tables) as examples of `task`, with a cache.

    cache       folder of the cache
    limits      policy for long rows and rows without a target
    header      column names of CSV and TSV files without a header row
    allow_slow  allows a slow tokenizer for more than SLOW_ROWS texts

    Reads the files once for the key, and again if they are not cached. Memory: one batch of rows
    and the lengths. A damaged entry is rebuilt, and a note says so. Raises DataError for faulty
    data (with file and line) or tokenizers, ConfigError for invalid options, StorageError if the
    cache cannot be written.
    """
    job = _ExamplesJob(
        source, task, Encoder(tokenizer, allow_slow=allow_slow), limits or Limits(), header
    )
    arrays = job.fields | {f"{name}.lengths": LENGTH for name in job.fields}
    entry, notes = cached(Path(cache) / f"examples-{job.key}", arrays, job.fill)
    names = list(job.fields)
    if "token_type_ids" in names and "token_type_ids" not in tokenizer.model_input_names:
        # Stored anyway: the cache entry does not depend on which inputs the model takes.
        names.remove("token_type_ids")
    notes = [*entry.facts["notes"], *notes]
    return Examples(
        type(task), entry, names, {**entry.facts, "source": shown(source), "notes": notes}
    )


class _ExamplesJob:
    """Everything that determines the bytes of a cache entry, and counters for its notes."""

    def __init__(
        self,
        source: Any,
        task: Task,
        encoder: Encoder,
        limits: Limits,
        header: Sequence[str] | None,
    ):
        self.source, self.task, self.encoder, self.limits, self.header = (
            source,
            task,
            encoder,
            limits,
            header,
        )
        if task.splits_into_windows and limits.too_long == "truncate":
            raise ConfigError(
                "too_long 'truncate': windows cut no context. Pass 'error' or 'skip'.",
                code="examples.windows",
            )
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
        self.first: dict[str, str] = {}  # fault -> origin of the first row with this fault
        self.notes = Notes()
        self.longest = self.largest_token = 0

    def _content(self) -> str:
        """SHA-256 over the bytes of the files in reading order."""
        digest = hashlib.sha256()
        for path in files_of(os.fspath(self.source)):
            with reading.opened(path, USERS) as file:
                # The suffix decides how the bytes are parsed. The path does not count: a moved file
                # stays cached.
                digest.update(
                    path.suffix.lower().encode() + hashlib.file_digest(file, "sha256").digest()
                )
        return digest.hexdigest()

    def fill(self, append: Append) -> dict[str, Any]:
        """Encodes all rows into a new entry and returns its facts."""
        rows = records(
            self.source,
            self.task.columns,
            header=self.header,
            optional=self.task.optional_columns,
        )
        while batch := list(islice(rows, BATCH_ROWS)):
            if encoded := list(self._encoded(batch)):
                # Batch by batch: memory holds one batch of rows, whatever the table's size.
                for name in self.fields:
                    values = [example[name] for example in encoded]
                    append(name, np.concatenate(values))
                    append(f"{name}.lengths", np.array([len(each) for each in values]))
        notes = [
            note.replace("{count}", str(count)) for note, count in self.notes.items() if count
        ] + self._limit_notes()
        # The key was computed before; a file that changed since would be cached under the wrong
        # key.
        if self._content() != self.content:
            raise DataError(
                f"{shown(self.source)}: the data changed while it was read. Start again when nothing writes to it.",
                code="data.changed",
            )
        return {
            "source": shown(self.source),
            "content_hash": self.content,
            "task": type(self.task).__name__,
            **{name: self.counts[name] for name in ("rows", "examples", "tokens", "targets")},
            "largest_token": self.largest_token,
            "notes": notes,
        }

    def _encoded(self, rows: list[Record]) -> Iterator[Encoded]:
        task, limit = self.task, self.limits.max_length
        self.counts["rows"] += len(rows)
        # Only window tasks need the limit at once; other tasks report rows that exceed it.
        own_length = {"max_length": limit} if task.splits_into_windows else {}
        for row, found in zip(
            rows, task.encode(rows, self.encoder, self.notes, **own_length), strict=True
        ):
            for example in found if task.splits_into_windows else (found,):
                yield from self._within_limits(row, example)

    def _within_limits(self, row: Record, example: Encoded) -> Iterator[Encoded]:
        """Yields the example if it has a target, truncated if necessary and allowed."""
        limit, task = self.limits.max_length, self.task
        length = task.length(example)
        if limit is not None and length > limit:
            self._count_fault("too_long", row)
            self.longest = max(self.longest, length)
            if self.limits.too_long != "truncate":
                return
            # Encode again with truncation: cutting the ids would lose the final separator.
            if task.can_truncate:
                [example] = task.encode([row], self.encoder, Notes(), max_length=limit)
            else:
                example = {name: values[:limit] for name, values in example.items()}
        ids, targets = example["input_ids"], task.targets(example)
        if not targets or not len(ids):
            self._count_fault("no_target", row)
            return
        self.counts.update(examples=1, tokens=len(ids), targets=targets)
        self.largest_token = max(self.largest_token, int(ids.max()))
        yield example

    def _count_fault(self, fault: str, row: Record) -> None:
        self.counts[fault] += 1
        self.first.setdefault(fault, row.origin)

    def _limit_notes(self) -> list[str]:
        """Notes on rows that were cut or skipped.

        Raises DataError if the policy allows none, or if no row is left.
        """
        limits, rows, source, notes = (
            self.limits,
            self.counts["rows"],
            shown(self.source),
            list[str](),
        )
        if count := self.counts["too_long"]:
            if limits.too_long == "error":
                other = NO_CUT if self.task.splits_into_windows else "'truncate' or 'skip'"
                raise DataError(
                    f"{source}: {count} of {rows} rows are longer than max_length {limits.max_length}; the longest has {self.longest} "
                    f"tokens, the first is {self.first['too_long']}. Raise data.max_length, or set data.too_long to {other}.",
                    code="examples.too-long",
                )
            done = "cut" if limits.too_long == "truncate" else "left out"
            notes.append(
                f"{count} of {rows} rows were longer than max_length {limits.max_length} (the longest {self.longest} tokens) "
                f"and were {done}."
            )
        if count := self.counts["no_target"]:
            what = self.task.target_noun
            if limits.no_target == "error":
                masked = ", all their labels are masked" if what == "target" else ""
                raise DataError(
                    f"{source}: {count} of {rows} rows have no {what}{masked}; the first is {self.first['no_target']}. "
                    "Correct them, or set no_target to 'skip'.",
                    code="examples.no-target",
                )
            notes.append(f"{count} of {rows} rows had no {what} and were left out.")
        if not self.counts["examples"]:
            raise DataError(
                f"{source}: no row is left of {rows}. Pass more data, or other limits.",
                code="examples.none-left",
            )
        return notes


# Visible signs for control characters, which a terminal would execute. A line end is kept as well.
SIGNS = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {0x7F: "␡", ord("\t"): "→\t", ord("\n"): "↵\n"}
)


def coloured_sample(
    tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int] | None, *, tokens: int = 200
) -> Text:
    """The first `tokens` tokens as rich Text: green with a loss, dim without, reversed if special.

    labels  as in an `Examples` item; None: no token has a loss

    Bars separate tokens. Double brackets mark tokens with a loss in logs without colours. A
    byte-level token that is part of a character shows as U+FFFD. rich comes with
    narrowgauge[train].
    """
    from rich.text import Text

    special = set(tokenizer.all_special_ids)
    text, learning = Text(), False
    shown = list(input_ids[:tokens])
    for place, id in enumerate(shown):
        learnt = labels is not None and int(labels[place]) != IGNORED
        if learnt != learning:
            text.append("⟦" if learnt else "⟧", "bold")
        elif place:
            text.append("|", "dim")
        style = ("bold green" if learnt else "dim") + (" reverse" if int(id) in special else "")
        text.append(tokenizer.decode([int(id)]).translate(SIGNS), style)
        learning = learnt
    if text.plain.endswith("\n"):
        text.right_crop(1)  # the caller's print adds a line end
    if learning:
        text.append("⟧", "bold")
    if len(shown) < len(input_ids):
        text.append(f" ... {len(input_ids) - len(shown)} more", "dim")
    return text
