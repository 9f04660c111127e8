"""Token tagging, such as named entities: one class for each word, and span metrics.

    precision   correct predicted spans / predicted spans
    recall      correct predicted spans / labelled spans
    f1          2 precision recall / (precision + recall)
    accuracy    words with the right tag / words

The model tags a word at its first token. Spans are counted as in conlleval: a span is correct if
its first word, last word and type are. Counts are summed over all types and sentences (micro
average). A ratio over zero is 0. Tags without B- and I- prefixes define no spans, so only accuracy
is measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from narrowgauge import data
from narrowgauge.conversion import suspended
from narrowgauge.data.tagging import in_spans, spans_in, tags_of
from narrowgauge.errors import DataError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective
from narrowgauge.train.model import ModelClass, own_configuration
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.classes import MOST_CLASSES, SHOWN_CLASSES, labelled
from narrowgauge.train.tasks.feed import TableFeed
from narrowgauge.train.tasks.reading import header
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import Readings, total_of

TAGGER = ModelClass(AutoModelForTokenClassification, "model that tags words", new=True)
Tags = list[int]  # tag ids of the words of one sentence


@dataclass
class TaggingTask(TableTask):
    """Task "tagging"; `labels` holds the tag id at a word's first token, else IGNORED."""

    name: ClassVar[str] = "tagging"
    options: ClassVar[Mapping[str, Any]] = {}
    default_metric: ClassVar[str] = "f1"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        tags = chosen_tags(config)
        return _columns(config, tags), labelled(TAGGER, tags)

    @classmethod
    def planned(cls, config: TrainConfig) -> TrainConfig:
        if config.classes:
            return config
        # A plan has no tags to read: take their number from the model's configuration, two at
        # least.
        known = getattr(own_configuration(config, TAGGER), "num_labels", None) or 2
        return replace(config, classes=",".join(f"tag {place}" for place in range(max(2, known))))

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        task.known["classes"] = task.tags
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

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective(
            torch.compile(model) if self.config.compile else model, {}, "of one tag for each word"
        )

    def collator(self, **options: Any) -> data.Collator:
        # Tags belong to their own token: labels are not shifted by one as for language models.
        return super().collator(causal=False, shifted=False, **options)

    def feed(self, model: Any) -> TableFeed:
        feed = super().feed(model)
        if self.config.packing:
            # Per-tensor scales couple packed documents through rounding. Without the recipe the
            # check sees leaks of the attention mask alone.
            with suspended(model):
                data.check_packing(model, feed.collate)
        return feed

    def trivial(self) -> dict[str, Any]:
        return trivial.of_tags(example["labels"] for example in self._evaluated)

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


def _columns(config: TrainConfig, tags: tuple[str, ...]) -> data.Tagging:
    if config.spans_column:
        return data.Tagging(tags=tags, text=config.text_column, spans=config.spans_column)
    return data.Tagging(tags=tags, words=config.tokens_column, marks=config.tags_column)
