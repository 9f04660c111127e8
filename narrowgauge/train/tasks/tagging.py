"""Token tagging, such as named entities and parts of speech: one class for each word.

A word's label is at its first token; other tokens have -100. Rows have two lists, words and tags,
or a text and spans of characters, {"start", "end", "label"}, from which words and tags are derived.
In CSV a list is JSON, or words separated by spaces.

Span tags are in IOB2: B-X starts a span of type X, I-X continues it, O is outside. I-X after
anything but B-X or I-X is an error that names row and word. Tags without B- and I- (parts of
speech) define no spans and are not checked so.

Metrics of an evaluation:

    precision   correct predicted spans / predicted spans
    recall      correct predicted spans / labelled spans
    f1          2 precision recall / (precision + recall)
    accuracy    words with the right tag / words

Spans are counted as in conlleval: a span is correct if
its first word, last word and type are. Counts are summed over all types and sentences (micro
average). A ratio over zero is 0. Tags without B- and I- prefixes define no spans, so only accuracy
is measured.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from torch import Tensor
from transformers import AutoModelForTokenClassification

from narrowgauge import data
from narrowgauge.data.batches import IGNORED
from narrowgauge.data.cache import Values, token_dtype
from narrowgauge.data.tables import Record, refuse_half_a_pair
from narrowgauge.data.task import Encoded, Notes, Task
from narrowgauge.errors import ConfigError, DataError, closest
from narrowgauge.train.pretrained import ModelClass, own_configuration
from narrowgauge.train.tasks.classes import MOST_CLASSES, SHOWN_CLASSES, with_labels
from narrowgauge.train.tasks.reading import header
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.task import Readings, total_of
from narrowgauge.train.tasks.trivial import counts_of, entropy

if TYPE_CHECKING:
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch

OUTSIDE = "O"
MARKED = re.compile(r"([BI])-(.+)", re.DOTALL)
OTHER_MARKS = re.compile(r"[ESLU]-.+", re.DOTALL)  # prefixes of IOBES and BILOU
WORD = re.compile(r"\w+|[^\w\s]")
DROPPED = (
    "{count} words are nothing but characters that the tokenizer drops: they have no token, so nothing is learnt of their tags, and "
    "metrics leave them out."
)
Words = tuple[list[str], list[str]]  # (words of a row, their tags)


@dataclass(frozen=True, kw_only=True)
class Tagging(Task):
    """Columns with words and their tags, or with a text and its spans.

    tags   tag names in the order of their ids
    words  column with a list of words
    marks  column with a list of tags, one per word
    text   column with a text, instead of words and marks
    spans  column with the text's labelled spans
    """

    tags: tuple[str, ...]
    words: str = "tokens"
    marks: str = "tags"
    text: str | None = None
    spans: str = "spans"
    kind: ClassVar[str] = "tagging"
    can_truncate: ClassVar[bool] = True
    target_noun: ClassVar[str] = "word"

    def __post_init__(self) -> None:
        if len(self.tags) < 2 or len(set(self.tags)) != len(self.tags):
            raise ConfigError(
                f"Tagging: tags {self.tags!r}. Name at least two, each once.", code="tagging.tags"
            )
        in_spans(self.tags)

    @property
    def columns(self) -> list[str]:
        return [self.words, self.marks] if self.text is None else [self.text, self.spans]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "token_type_ids": np.dtype("u1"), "labels": np.dtype("<i4")}

    def targets(self, example: Encoded) -> int:
        return int((example["labels"] != IGNORED).sum())

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        found = [self.words_of(row) for row in rows]
        encoded = encoder.words([words for words, _ in found], max_length=max_length)
        known = {tag: place for place, tag in enumerate(self.tags)}
        for row, (words, tags), example in zip(rows, found, encoded, strict=True):
            places = example.pop("words")
            # True at the first token of each word; special tokens have word number -1.
            first = (places >= 0) & (np.diff(places, prepend=-1) != 0)
            labels = np.full(len(places), IGNORED)
            labels[first] = np.array(
                [self._id(row, place, words, tags, known) for place in range(len(words))], np.int64
            )[places[first]]
            # With truncation, words are missing because they were cut, not because they were
            # dropped.
            if max_length is None:
                notes[DROPPED] += len(words) - int(first.sum())
            yield {**example, "labels": labels}

    def _id(
        self, row: Record, place: int, words: list[str], tags: list[str], known: dict[str, int]
    ) -> int:
        if tags[place] in known:
            return known[tags[place]]
        near = closest(tags[place], self.tags)
        listing = f"Closest: {near}." if near else f"Tags: {', '.join(map(repr, self.tags[:20]))}."
        raise DataError(
            f"{row.origin}: word {place + 1} ({words[place]!r}) has the tag {tags[place]!r}, which is none of the {len(self.tags)} tags. "
            f"{listing} Correct the row, or name all tags as classes.",
            code="tagging.tag",
        )

    def words_of(self, row: Record) -> Words:
        """Words and tags of a row. Raises DataError with row and word for malformed ones."""
        if self.text is not None:
            return _of_spans(row, self.text, self.spans)
        words, tags = (_listed(row, column) for column in (self.words, self.marks))
        if len(words) != len(tags):
            raise DataError(
                f"{row.origin}: {len(words)} words in column {self.words!r} and {len(tags)} tags in "
                f"{self.marks!r}. Give each word one tag.",
                code="tagging.count",
            )
        check_marks(row, words, tags)
        return words, tags


def in_spans(tags: Sequence[str]) -> bool:
    """True if the tags mark spans in IOB2. Raises ConfigError for a mixture or another scheme."""
    marked = [tag for tag in tags if MARKED.fullmatch(tag)]
    if not marked:
        return False
    other = next((tag for tag in tags if tag != OUTSIDE and not MARKED.fullmatch(tag)), "")
    if other:
        scheme = (
            "Convert IOBES or BILOU to IOB2"
            if OTHER_MARKS.fullmatch(other)
            else "Write all of them in IOB2"
        )
        raise ConfigError(
            f"tags: {other!r} is neither 'O' nor begins with 'B-' or 'I-', as {marked[0]!r} does. {scheme}, or none with such marks.",
            code="tagging.scheme",
        )
    return True


def check_marks(row: Record, words: list[str], tags: list[str]) -> None:
    """Raises DataError for an empty word or tag, and for I-X without a span to continue."""
    before = OUTSIDE
    for place, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
        where = f"{row.origin}: word {place} ({word!r})"
        if not word.strip() or not tag.strip():
            raise DataError(
                f"{where}: {'the word' if not word.strip() else 'its tag'} is empty. Correct the row.",
                code="tagging.empty-word",
            )
        mark = MARKED.fullmatch(tag)
        if mark and mark[1] == "I" and before not in (f"B-{mark[2]}", tag):
            raise DataError(
                f"{where} has the tag {tag!r} behind {before!r}: in IOB2 a span begins with 'B-{mark[2]}'. Correct the row, or convert the "
                "tags to IOB2.",
                code="tagging.iob2",
            )
        before = tag


def _listed(row: Record, column: str) -> list[str]:
    """List of strings in a column; a text is parsed as JSON, else split at spaces."""
    value = row.values[column]
    if isinstance(value, str):
        text = row.text(column)
        if not text.lstrip().startswith("["):
            return text.split()
        try:
            value = json.loads(text)
        except ValueError:
            return text.split()
    if not isinstance(value, list):
        raise DataError(
            f"{row.origin}: column {column!r} holds {value!r:.60}, not a list. Write a list of strings.",
            code="tagging.no-list",
        )
    for place, each in enumerate(value, 1):
        if not isinstance(each, str):
            hint = (
                " Write the names of tags instead of their numbers."
                if isinstance(each, int)
                else " Write strings."
            )
            raise DataError(
                f"{row.origin}: entry {place} of column {column!r} is {each!r:.60}, not a string.{hint}",
                code="tagging.entry",
            )
        refuse_half_a_pair(each, f"{row.origin}: entry {place} of column {column!r}")
    return value


def _of_spans(row: Record, column: str, spans: str) -> Words:
    """Words and punctuation of a text, with the tags of its spans.

    Spans must start and end at word borders.
    """
    text, marked = row.text(column), row.values[spans]
    if isinstance(marked, str):
        try:
            marked = json.loads(marked)
        except ValueError:
            marked = None
    if not isinstance(marked, list):
        raise DataError(
            f"{row.origin}: column {spans!r} holds no list. Write a list of objects with start, end and label.",
            code="tagging.no-span-list",
        )
    places = [found.span() for found in WORD.finditer(text)]
    words, tags = [text[first:end] for first, end in places], [OUTSIDE] * len(places)
    starts, ends = ({place[side]: number for number, place in enumerate(places)} for side in (0, 1))
    for each in marked:
        try:
            first, end, label = int(each["start"]), int(each["end"]), str(each["label"])
        except (TypeError, KeyError, ValueError):
            raise DataError(
                f"{row.origin}: the span {each!r:.60} has no start, end and label. Write all three.",
                code="tagging.span",
            ) from None
        where = (
            f"{row.origin}: the span {first} to {end} ({text[max(0, first) : max(0, end)]!r:.60})"
        )
        # A span inside of a word would have no word to tag.
        if first not in starts or end not in ends or not label:
            raise DataError(
                f"{where} does not begin and end with a word, or has no label. Correct the row; `end` is behind the last character.",
                code="tagging.span-ends",
            )
        covered = range(starts[first], ends[end] + 1)
        if not covered or any(tags[place] != OUTSIDE for place in covered):
            raise DataError(
                f"{where} overlaps another span. A word has one tag: keep one of them.",
                code="tagging.overlap",
            )
        for place in covered:
            tags[place] = f"{'B' if place == covered[0] else 'I'}-{label}"
    return words, tags


def tags_of(rows: Iterator[Record], task: Tagging, most: int) -> dict[str, str]:
    """{tag: row of its first occurrence} of a table. Raises DataError for more than `most` tags."""
    found: dict[str, str] = {}
    for row in rows:
        for tag in task.words_of(row)[1]:
            found.setdefault(tag, row.origin)
        if len(found) > most:
            raise DataError(
                f"{row.origin}: up to here there are more than {most:,} different tags. Name another data.columns.tags, or list the "
                "classes.",
                code="tagging.too-many",
            )
    return found


def spans_in(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """{(first, end, type)} of the spans in any tag sequence, as conlleval reads it; end exclusive.

    I-X after O, at the start, or after another type starts a span, too. Tags must be O, B-X or I-X.
    """
    found, begun, kind = set(), 0, ""
    # A trailing O closes a span at the end.
    for place, tag in enumerate((*tags, OUTSIDE)):
        mark = MARKED.fullmatch(tag)
        goes_on = mark is not None and mark[1] == "I" and mark[2] == kind
        if goes_on:
            continue
        if kind:
            found.add((begun, place, kind))
        begun, kind = place, mark[2] if mark else ""
    return found


def of_first_tokens(labels: Values) -> Values:
    """Labels of words, without ignored tokens."""
    return labels[labels != IGNORED]


TAGGER = ModelClass(AutoModelForTokenClassification, "model that tags words", new=True)
Tags = list[int]  # tag ids of the words of one sentence


@dataclass
class TaggingTask(TableTask):
    """Task "tagging"; `labels` holds the tag id at a word's first token, else IGNORED."""

    name: ClassVar[str] = "tagging"
    options: ClassVar[Mapping[str, Any]] = {}
    loss_words: ClassVar[str] = "of one tag for each word"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        tags = chosen_tags(config)
        return _columns(config, tags), with_labels(TAGGER, tags)

    @classmethod
    def config_without_data(cls, config: TrainConfig) -> TrainConfig:
        if config.classes:
            return config
        # A plan has no tags to read: take their number from the model's configuration, two at
        # least.
        known = getattr(own_configuration(config, TAGGER), "num_labels", None) or 2
        return replace(config, classes=",".join(f"tag {place}" for place in range(max(2, known))))

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        task.data_facts["classes"] = task.tags
        task.notes += task._words()
        return task

    @property
    def tags(self) -> list[str]:
        """Tag names, in the order of the logits."""
        return list(self.model_class.options["id2label"].values())

    @property
    def best(self) -> str:
        return super().best if self.config.best or in_spans(self.tags) else "accuracy"

    def _words(self) -> list[str]:
        """Notes on the number of words of each tag, and on tags that define no spans."""
        counts = [
            Counter(label for each in part for label in words_of(each["labels"]))
            for part in (self.train, self.validation)
        ]
        shown = ", ".join(
            f"{tag} {counts[0][place]} and {counts[1][place]}"
            for place, tag in enumerate(self.tags[:SHOWN_CLASSES])
        )
        more = (
            f", and {len(self.tags) - SHOWN_CLASSES} more tags"
            if len(self.tags) > SHOWN_CLASSES
            else ""
        )
        notes = [f"Tags, with words to train on and held out: {shown}{more}."]
        if not in_spans(self.tags):
            notes.append(
                "No tag begins with B- or I-, so there are no spans: accuracy alone is measured."
            )
        return notes

    def collator(self, **options: Any) -> data.Collator:
        # Tags belong to their own token: labels are not shifted by one as for language models.
        return super().collator(causal=False, shifted=False, **options)

    def trivial(self) -> dict[str, Any]:
        return of_tags(example["labels"] for example in self.evaluation_set)

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = readings(self.evaluation(model), read)
        pairs = [pair for _, rows in found for pair in rows]
        words = sum(len(known) for _, known in pairs)
        return {"loss": total_of(found) / words, "tokens": words, **metrics(pairs, self.tags)}


def read(batch: Batch, logits: Tensor | None) -> list[tuple[Tags, Tags]]:
    """(predicted, labelled) tags of the words of each sentence; the first of equal logits wins."""
    assert logits is not None
    predicted, known = logits.argmax(-1).cpu(), batch["labels"].cpu()
    counts = known != data.IGNORED
    return [
        (row[mask].tolist(), labels[mask].tolist())
        for row, labels, mask in zip(predicted, known, counts, strict=True)
    ]


def metrics(sentences: Iterable[tuple[Tags, Tags]], tags: Sequence[str]) -> dict[str, float]:
    """Computes f1, precision, recall and accuracy as defined in the module docstring.

    sentences  (predicted, labelled) tag ids
    tags       tag names
    """
    right = words = hits = found = there = 0
    has_spans = in_spans(tags)
    for predicted, known in sentences:
        words += len(known)
        right += sum(one == other for one, other in zip(predicted, known, strict=True))
        if has_spans:
            # Sets of (first word, last word, type): their intersection holds exactly the correct
            # spans.
            ours, theirs = (spans_in([tags[each] for each in side]) for side in (predicted, known))
            hits, found, there = hits + len(ours & theirs), found + len(ours), there + len(theirs)
    scores = {"accuracy": right / words if words else 0.0}
    if not has_spans:
        return scores
    precision, recall = hits / found if found else 0.0, hits / there if there else 0.0
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, **scores}


def of_tags(labels: Iterable[Values]) -> dict[str, Any]:
    """Most frequent tag of words. A constant tag marks no correct span, so span scores are 0."""
    counts = counts_of(labels)
    spans = dict.fromkeys(("f1", "precision", "recall"), 0.0)
    return {
        "predictor": "tag frequencies",
        "loss": entropy(counts),
        "accuracy": float(counts.max() / counts.sum()),
        **spans,
    }


def words_of(labels: Any) -> list[int]:
    """Tag ids of a sentence's words, without ignored tokens."""
    return [int(each) for each in np.asarray(labels) if each != data.IGNORED]


def chosen_tags(config: TrainConfig) -> tuple[str, ...]:
    """Tags from the configuration, else from the training data.

    If a pretrained model has the same set of tags, its order is kept.
    """
    if config.classes.strip():
        return tuple(name.strip() for name in config.classes.split(","))
    # Placeholder tags: the reader is needed to find the real ones.
    reader = _columns(config, ("O", "-"))
    found = tags_of(
        data.records(config.data, reader.columns, header=header(config)), reader, MOST_CLASSES
    )
    if len(found) < 2:
        raise DataError(
            f"{config.data}: {len(found)} different tags, {list(found)}. Pass data with two at least.",
            code="tagging.one-tag",
        )
    own = getattr(own_configuration(config, TAGGER), "id2label", None) or {}
    names = tuple(str(own[place]) for place in sorted(own))
    return names if set(names) == set(found) else tuple(sorted(found))


def _columns(config: TrainConfig, tags: tuple[str, ...]) -> Tagging:
    if config.column_of("spans"):
        return Tagging(tags=tags, text=config.column_of("text"), spans=config.column_of("spans"))
    return Tagging(tags=tags, words=config.column_of("tokens"), marks=config.column_of("tags"))
