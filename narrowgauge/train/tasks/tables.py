"""Tasks on a table: reading, the split into training and validation, batches by length, evaluation batches.

What a kind of model makes different is in `writing` and `classification`. A run trains on `data` and validates on `validation_data`,
or on a share of the rows of `data`. The hash of a row's ids decides which: adding or reordering rows moves no other row, and copies of
a row land on the same side.

Micro-batches are parts of the step's batch, so their number changes memory and nothing else.
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch

from narrowgauge import data
from narrowgauge.diagnose.format_text import plural
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import ModelClass, check_sizes, own_configuration, pretrained
from narrowgauge.train.tasks.task import SPLIT_SEED, Feed, Readings, StepBatch, TrainTask

FEW = 20  # examples to validate on; below, a note
EVAL_ORDER = b"evaluation"
ALIGNED = 16  # tokens: so that runs on nearly the same data share what recipe "auto" measured
# Their first position has the number of the padding token plus one, so as many fewer tokens fit.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"})


@dataclass
class TableTask(TrainTask):
    """Encoded examples of both sides, and the class of models that learns them."""

    model_class: ModelClass
    train: data.Examples
    validation: data.Examples
    longest: int | None  # most tokens that an example may have; None: no limit is known
    known: dict[str, Any]  # what run.json says of the data

    default_metric: ClassVar[str] = "loss"

    @classmethod
    @abstractmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        """What the columns of the table mean, and the class of models that learns them."""

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        tokenizer = data.load(config.tokenizer or config.model)
        columns, model_class = cls.roles(config, tokenizer)
        longest = longest_example(config, model_class, tokenizer)
        train, validation, known = read(config, columns, tokenizer, longest)
        notes = list(known["notes"])
        if tokenizer.pad_token_id is None:
            notes.append(
                "The tokenizer has no padding token: rows are filled with another, and masked by their lengths."
            )
        elif tokenizer.pad_token_id == tokenizer.eos_token_id:
            notes.append(
                "Padding is the end-of-text token. Rows are masked by their lengths, so the one behind a text still counts."
            )
        return cls(config, tokenizer, notes, model_class, train, validation, longest, known)

    @cached_property
    def _batching(self) -> data.Batching:
        config = self.config
        return data.Batching(
            batch_size=None if config.token_budget else config.batch_size,
            token_budget=config.token_budget or None,
            row_length=config.packing or None,
            seed=config.seed,
            multiple=config.pad_multiple,
            classes=config.length_buckets,
            too_long="skip" if config.too_long == "skip" else "error",
        )

    @cached_property
    def _plan(self) -> data.Plan:
        """Of the first epoch."""
        return data.plan(self.train.lengths, self._batching)

    @cached_property
    def _evaluated(self) -> data.Examples:
        """The examples that an evaluation sees: all, or in a hashed order as many as eval_tokens hold. Always the same."""
        part, most_tokens = self.validation, self.config.eval_tokens
        if int(part.lengths.sum()) <= most_tokens:
            return part
        keys = [hashlib.sha256(EVAL_ORDER + b":%d" % place).digest() for place in range(len(part))]
        order = np.array(sorted(range(len(part)), key=keys.__getitem__))
        count = max(1, int(np.searchsorted(np.cumsum(part.lengths[order]), most_tokens, side="right")))
        return part.select(np.sort(order[:count]))

    def steps(self, epochs: int) -> int:
        """Under a token budget epochs differ a little."""
        later = (data.plan(self.train.lengths, self._batching, epoch) for epoch in range(1, epochs))
        return len(self._plan) + sum(map(len, later))

    def tokens_at_once(self) -> int:
        batches = max(1, len(self._plan)) * self.config.micro_batches
        return max(ALIGNED, round(self._plan.padding.planned.positions / batches / ALIGNED) * ALIGNED)

    def summary(self) -> str:
        known, looked_at = self.known, len(self._evaluated)
        held_out = known["validation_examples"]
        part = "" if looked_at == held_out else f", of which evaluations see {looked_at:,} (eval_tokens)"
        return (
            f"{known['train_examples']:,} examples with {known['train_tokens']:,} tokens, {held_out:,} held out{part}"
        )

    def preview(self) -> list[Any]:
        return [*self.coloured(self.train[0]), f"First epoch, {self._plan.padding}", *self._plan.notes]

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        """What is learnt of an example, and what is only seen."""
        return [data.coloured_sample(self.tokenizer, example["input_ids"], example["labels"])]

    def model(self) -> Any:
        model = pretrained(self.config, self.model_class)
        check_sizes(model, self.tokenizer, "max_length", self.config.max_length)
        return model

    def align(self, batch: Batch, model: Any) -> Batch:
        """The collator's batch with labels where the logits are that they are compared with."""
        return batch

    def feed(self, model: Any) -> "TableFeed":
        train = self.train
        sampler = data.LengthBatchSampler(train.lengths, self._batching)
        collate = data.Collator(pad_id=data.pad_id_of(self.tokenizer), widths=sampler.widths)
        return TableFeed(
            train, sampler, collate, self.config.micro_batches, align=lambda batch: self.align(batch, model)
        )

    def evaluation(self, model: Any) -> Iterator[Batch]:
        """Sorted by length: the least padding. Batches hold what a micro-batch of training holds."""
        config, part = self.config, self._evaluated
        rows = None if config.token_budget else max(1, config.batch_size // config.micro_batches)
        budget = max(1, config.token_budget // config.micro_batches) if config.token_budget else None
        multiple = config.pad_multiple
        collate = data.Collator(pad_id=data.pad_id_of(self.tokenizer), multiple=multiple)
        for places in data.sorted_batches(part.lengths, batch_size=rows, token_budget=budget, multiple=multiple):
            yield self.align(collate([part[place] for place in places]), model)

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = super().evaluate(model, readings)
        return found | {"perplexity": perplexity(found["loss"])}

    def facts(self) -> dict[str, Any]:
        padding = self._plan.padding
        return {
            "model": {"max_length": self.longest},
            "data": self.known | {"padding": padding.as_dict(), "evaluated": len(self._evaluated)},
            "tokens_per_step": round(padding.planned.tokens / max(1, len(self._plan))),
        }


def perplexity(loss: float) -> float:
    """exp(loss); infinity where it overflows, NaN of NaN."""
    return math.exp(loss) if not loss > 700 else math.inf


# Reading


def longest_example(config: TrainConfig, model_class: ModelClass, tokenizer: Any) -> int | None:
    """max_length of the configuration, or the tokens that model and tokenizer know positions for; None: no limit is known."""
    sizes = own_configuration(config, model_class)
    positions = getattr(sizes, "max_position_embeddings", None)
    if positions is not None and sizes.model_type in OFFSET_POSITIONS:
        positions -= (sizes.pad_token_id or 0) + 1
    if not config.max_length:
        known = [number for number in (positions, tokenizer.model_max_length) if number is not None and number < 10**9]
        return min(known, default=None)
    if positions is not None and config.max_length > positions:
        raise ConfigError(
            f"max_length = {config.max_length}: the model knows positions up to {positions}. Set max_length to {positions} or less."
        )
    return config.max_length


def read(
    config: TrainConfig, task: data.Task, tokenizer: Any, longest: int | None
) -> tuple[data.Examples, data.Examples, dict[str, Any]]:
    """The examples of both sides, encoded or from the cache, and what is known of them."""
    limits = data.Limits(max_length=longest, too_long=config.too_long, no_target=config.no_target)  # type: ignore[arg-type]

    def prepared(source: str) -> data.Examples:
        cache = resolved(config).cache
        return data.prepare_examples(source, task, tokenizer, cache=cache, limits=limits, header=header(config))

    examples = held_out = prepared(config.data)
    notes = list(examples.notes)
    if config.validation_data:
        held_out = prepared(config.validation_data)
        train, validation = examples, held_out
        split = f"all of {config.validation_data}"
        notes += [f"Validation: {note}" for note in held_out.notes]
    else:
        train, validation = split_rows(examples, config.validation_fraction)
        split = f"{config.validation_fraction:.4g} of the rows, by their hash"
    if len(validation) < FEW:
        notes.append(
            f"The validation loss is of {plural(len(validation), 'example')} alone, too few to tell runs apart or to choose weights by. "
            "Raise validation_fraction, or pass validation_data."
        )
    content = [examples.summary["content_hash"], held_out.summary["content_hash"], repr(task), asdict(limits)]
    summary = {
        "source": examples.summary["source"],
        "content_hash": hashlib.sha256(repr(content).encode()).hexdigest(),
        "rows": examples.summary["rows"],
        "train_examples": len(train),
        "validation_examples": len(validation),
        "train_tokens": int(train.lengths.sum()),
        "validation_tokens": int(validation.lengths.sum()),
        "longest": int(train.lengths.max()),
        "max_length": longest,
        "split": split,
        "notes": notes,
    }
    return train, validation, summary


def header(config: TrainConfig) -> list[str] | None:
    return [name.strip() for name in config.columns.split(",")] if config.columns else None


def split_rows(examples: data.Examples, fraction: float) -> tuple[data.Examples, data.Examples]:
    """(training, validation): a row validates if the hash of its ids, as a share of all hashes, is below `fraction`.

    Of few rows, where that leaves a side empty, the rows with the smallest hashes validate. Raises DataError for one row.
    """
    texts = (example["input_ids"].astype("<i8").tobytes() for example in examples)
    digests = (hashlib.sha256(b"%d:" % SPLIT_SEED + text).digest() for text in texts)
    draws = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])
    held_out = draws < fraction
    if held_out.all() or not held_out.any():
        held_out = draws <= np.sort(draws)[max(0, round(fraction * len(draws)) - 1)]
    if held_out.all():
        raise DataError(
            f"{examples.summary['source']}: {len(examples)} rows with one text cannot be split. Pass validation_data, or more rows."
        )
    return examples.select(np.flatnonzero(~held_out)), examples.select(np.flatnonzero(held_out))


# Batches of training


@dataclass
class TableFeed(Feed):
    """Batches by length, epoch after epoch, each in at most `parts` micro-batches. The position is the sampler's: (epoch, step)."""

    examples: data.Examples
    sampler: data.LengthBatchSampler
    collate: data.Collator
    parts: int
    align: Callable[[Batch], Batch]

    def __post_init__(self) -> None:
        self._epoch: Iterator[list[Any]] = iter(())
        if not len(self.sampler.plan):
            raise DataError(
                "no example is left to train on: all are above the token budget. Raise token_budget or packing."
            )

    def draw(self, step: int) -> StepBatch:
        while (items := next(self._epoch, None)) is None:
            self._epoch = iter(self.sampler)  # the sampler's next pass is the next epoch
        parts = pieces(items, self.parts)
        batches = [
            self._batch(parts[part]) if part < len(parts) else self._spare(parts[0]) for part in self.mine(len(parts))
        ]
        drawn = [index for item in items for index in (item if isinstance(item, tuple) else (item,))]
        inputs = int(self.examples.lengths[drawn].sum())
        facts = {
            "epoch": self.sampler.epoch + self.sampler.state_dict()["step"] / len(self.sampler),
            "examples": len(drawn),
            "inputs": inputs,
            "positions": sum(max(batch["input_ids"].numel(), batch["labels"].numel()) for batch in batches),
        }
        return StepBatch(batches, inputs, facts)

    def _batch(self, items: Sequence[Any]) -> Batch:
        return self.align(self.collate([self.examples[item] for item in items]))

    def _spare(self, items: Sequence[Any]) -> Batch:
        """For a rank without examples in its turn: those of another, and nothing to learn. It changes no sum and no largest amax."""
        batch = self._batch(items)
        return batch | {"labels": torch.full_like(batch["labels"], data.IGNORED)}

    def probe(self) -> Batch:
        return self._batch(pieces(self.sampler.plan.steps[0][0], self.parts)[0])

    def state(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._epoch = iter(())


def pieces(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """`items` in at most `parts` runs of nearly equal length, none empty."""
    parts = min(len(items), parts)
    bounds = [len(items) * place // parts for place in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]
