"""Base of all tasks on a table: model, batches, evaluation and facts.

Module `reading` reads the rows, module `feed` draws training batches, and each task's module adds
its columns, loss and metrics.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from narrowgauge import data
from narrowgauge.data.rows import round_up
from narrowgauge.errors import Reason
from narrowgauge.nn.converted_model import suspended
from narrowgauge.train.pretrained import ModelClass, check_sizes, pretrained, tokenizer_of
from narrowgauge.train.tasks.feed import TableFeed
from narrowgauge.train.tasks.reading import header, longest_example, read
from narrowgauge.train.tasks.task import Readings, Shape, TrainTask

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch

EVAL_ORDER = b"evaluation"
# tokens_per_forward is rounded to this many tokens: runs on nearly the same data then share the
# measurements of recipe "auto".
ALIGNED = 16
SOMEWHERE = 2048  # tokens of an example if neither settings nor model define a limit
WORTH_A_WORD = 20.0  # percent of padding from which `preview` suggests other settings
# Factors of micro_batches that `preview` tries; it suggests the first that divides the batch and
# pads less.
MORE_PARTS = (4, 3, 2)


@dataclass
class TableTask(TrainTask):
    """Encoded examples of both splits, and the model class that is trained on them.

    model_class  model class with its options
    longest      most tokens of an example; None: unlimited
    data_facts   entries about the data in run.json
    """

    model_class: ModelClass
    train: data.Examples
    validation: data.Examples
    longest: int | None
    data_facts: dict[str, Any]

    @classmethod
    @abstractmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        """Returns the roles of the table's columns, and the model class."""

    @classmethod
    def columns_of_data(
        cls, config: TrainConfig, tokenizer: Any, columns: data.Task
    ) -> tuple[data.Task, list[str]]:
        """Returns the roles of the columns that the data have, and sentences on what they are.

        columns  roles by the settings alone
        """
        return columns, []

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        tokenizer = tokenizer_of(config)
        columns, model_class = cls.columns_and_model(config, tokenizer)
        longest = longest_example(config, model_class, tokenizer)
        columns, notes = cls.columns_of_data(config, tokenizer, columns)
        train, validation, known = read(config, columns, tokenizer, longest)
        notes += [*data.understood(config.data, header(config)), *known["notes"]]
        if tokenizer.pad_token_id is None:
            notes.append(
                "The tokenizer has no padding token: rows are filled with another, and masked by their lengths."
            )
        elif tokenizer.pad_token_id == tokenizer.eos_token_id:
            notes.append(
                Reason(
                    "tokenizer.padding-is-end",
                    "Padding is the end-of-text token. Rows are masked by their lengths, so the one behind a text still counts.",
                )
            )
        return cls(config, tokenizer, notes, model_class, train, validation, longest, known)

    @property
    def rows_per_example(self) -> int:
        """Most rows of a batch that one example fills."""
        return 1

    @classmethod
    def config_without_data(cls, config: TrainConfig) -> TrainConfig:
        """Configuration for a plan without data.

        Settings that `columns_and_model` would otherwise read from the data are filled in.
        """
        return config

    @classmethod
    def without_data(cls, config: TrainConfig, tokenizer: Any) -> tuple[Self, ModelClass]:
        config = cls.config_without_data(config)
        _, model_class = cls.columns_and_model(config, tokenizer)
        longest = longest_example(config, model_class, tokenizer)
        nothing: Any = None
        return cls(config, tokenizer, [], model_class, nothing, nothing, longest, {}), model_class

    def largest_micro_batch(self, parts: int) -> Shape:
        """As wide as the longest allowed example; batches of real tables are narrower.

        The width is max_length or the model's number of positions.
        """
        config, longest = self.config, self.longest
        note = f"as wide as an example may be, {longest or SOMEWHERE} tokens: set max_length to plan for shorter ones"
        if longest is None:
            note = f"the settings tell no longest example, {SOMEWHERE} tokens are taken: set max_length"
        if config.packing:
            rows = (
                config.token_budget // config.packing if config.token_budget else config.batch_size
            )
            return Shape(max(1, -(-rows // parts)), config.packing)
        width, several = round_up(longest or SOMEWHERE, config.pad_multiple), self.rows_per_example
        if not config.token_budget:
            return Shape(-(-config.batch_size // parts) * several, width, note)
        # An example wider than the budget is never batched.
        width = min(width, config.token_budget)
        # Multiple choice: whole questions only, each with `several` rows.
        return Shape(
            max(1, config.token_budget // width // parts // several) * several, width, note
        )

    def dummy_batch(self, shape: Shape) -> Batch:
        rows, width = shape.rows, shape.width
        example, collate = self.dummy_example(width), data.Collator(pad_id=0, widths=(width,))
        if self.config.packing:
            # Two documents in each row, so that the block-diagonal attention mask is built.
            halves = [
                {name: part[:size] for name, part in example.items()}
                for size in (width // 2, width - width // 2)
            ]
            return collate([halves] * rows)
        return collate([example] * max(1, rows // self.rows_per_example))

    def dummy_example(self, width: int) -> dict[str, Any]:
        """A meaningless example of `width` tokens, for a plan without data."""
        ids = np.ones(width, dtype=np.int64)
        return {"input_ids": ids, "labels": ids}

    @cached_property
    def _batching(self) -> data.Batching:
        config = self.config
        return data.Batching(
            batch_size=None if config.token_budget else config.batch_size,
            token_budget=max(1, config.token_budget // self.rows_per_example)
            if config.token_budget
            else None,
            row_length=config.packing or None,
            seed=config.seed,
            multiple=config.pad_multiple,
            classes=config.length_buckets,
            too_long="skip" if config.too_long == "skip" else "error",
            stratify=config.stratify,
            order=self._order,
        )

    @property
    def _order(self) -> Literal["length", "shuffled"]:
        """Order of batches: "length" or "shuffled".

        The default is shuffled for generation tasks, else by length. In generation tasks the length
        determines where the end token comes, so steps of one length learn it later. The loss was
        0.062 nats higher on Multi30k after 500 steps (decisions/training.md, "Steps of one length teach
        writing later").
        """
        asked = self.config.batch_order or ("shuffled" if self.entry.generates else "length")
        return "shuffled" if asked == "shuffled" else "length"

    @cached_property
    def _strata(self) -> Indices | None:
        return self.train.strata if self.config.stratify else None

    @cached_property
    def _plan(self) -> data.EpochPlan:
        """Plan of the first epoch."""
        return self.epoch(0)

    def epoch(self, number: int) -> data.EpochPlan:
        return self._planned(self._batching, number, self.config.micro_batches)

    def _planned(self, batching: data.Batching, number: int, micro_batches: int) -> data.EpochPlan:
        return data.plan(
            self.train.lengths, batching, number, strata=self._strata, micro_batches=micro_batches
        )

    @cached_property
    def evaluation_set(self) -> data.Examples:
        """Examples of an evaluation: all, or at most `eval_tokens` tokens in hash order.

        Never changes.
        """
        part, most_tokens = self.validation, self.config.eval_tokens
        if int(part.tokens.sum()) <= most_tokens:
            return part
        return part.select(subset_by_hash(part.tokens, self.groups(part), most_tokens))

    def groups(self, part: data.Examples) -> Indices:
        """Group number of each example; a group is evaluated as a whole or not at all."""
        return np.arange(len(part))

    def steps(self, epochs: int) -> int:
        """Optimizer steps of `epochs` epochs.

        Under a token budget the number of steps differs slightly between epochs, so each is
        planned.
        """
        later = (self.epoch(number) for number in range(1, epochs))
        return len(self._plan) + sum(map(len, later))

    def tokens_per_forward(self) -> int:
        # max() covers a plan without steps; the feed raises the error for that.
        batches = max(1, len(self._plan)) * self.config.micro_batches
        return max(
            ALIGNED, round(self._plan.padding.planned.positions / batches / ALIGNED) * ALIGNED
        )

    def summary(self) -> str:
        known, looked_at = self.data_facts, len(self.evaluation_set)
        held_out = known["validation_examples"]
        part = (
            ""
            if looked_at == held_out
            else f", of which evaluations see {looked_at:,} (eval_tokens)"
        )
        return f"{known['train_examples']:,} examples with {known['train_tokens']:,} tokens, {held_out:,} held out{part}"

    def preview(self) -> list[Any]:
        notes = [*self._plan.notes, *self._less_padding()]
        return [*self.show_example(self.train[0]), f"First epoch, {self._plan.padding}", *notes]

    def _less_padding(self) -> list[str]:
        """A note on settings that would reduce the padding of a shuffled epoch.

        The note appears from 20 % of padding on. Each suggestion is planned, not guessed.
        """
        config, now = self.config, self._plan.padding.planned.percent
        if self._order == "length" or now < WORTH_A_WORD:
            return []
        said = f"Steps are random samples of all lengths, {now:.0f} % padding."
        whole = 0 if config.token_budget else config.batch_size
        # Whole micro-batches only: batch_size must stay divisible by their number.
        for more in (times for times in MORE_PARTS if not whole % (times * config.micro_batches)):
            cut = self._planned(
                self._batching, 0, more * config.micro_batches
            ).padding.planned.percent
            if cut < now - 1:
                said += f" {more} times as many micro_batches would cut each into parts of like length, {cut:.0f} % padding."
                break
        by_length = replace(self._batching, order="length")
        sorted_ = self._planned(by_length, 0, config.micro_batches).padding.planned.percent
        later = (
            "; models that began at random learnt to write later so" if self.entry.generates else ""
        )
        return [f"{said} batch.order = 'length' would pad {sorted_:.0f} %{later}."]

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        """The example's text for the console, with learnt tokens highlighted."""
        return [data.coloured_sample(self.tokenizer, example["input_ids"], example["labels"])]

    def model(self) -> Any:
        model = pretrained(self.config, self.model_class)
        check_sizes(model, self.tokenizer, "data.max_length", self.config.max_length)
        return model

    def feed(self, model: Any) -> TableFeed:
        train = self.train
        sampler = data.LengthBatchSampler(train.lengths, self._batching, strata=self._strata)
        collate = self.collator(widths=sampler.widths)
        if self.config.packing:
            # Per-tensor scales couple packed documents through rounding. Without the recipe the
            # check sees leaks of the attention mask alone.
            with suspended(model):
                data.check_packing(model, collate)
        return TableFeed(
            sampler,
            self.config.micro_batches,
            train.tokens,
            train,
            collate,
            lambda batch: self.align(batch, model),
        )

    def collator(self, **options: Any) -> data.Collator:
        return data.Collator(pad_id=data.pad_id_of(self.tokenizer), **options)

    @cached_property
    def evaluation_indices(self) -> list[list[int]]:
        """Examples of each evaluation batch, as indices in `evaluation_set`.

        Examples are sorted by length for least padding. A batch is as large as a training
        micro-batch.
        """
        config, batching = self.config, self._batching
        parts, rows, budget = config.micro_batches, batching.batch_size, batching.token_budget
        found = data.sorted_batches(
            self.evaluation_set.lengths, batch_size=max(1, rows // parts) if rows else None,
            token_budget=max(1, budget // parts) if budget else None, multiple=config.pad_multiple,
        )  # fmt: skip
        return [list(map(int, places)) for places in found]

    def evaluation(self, model: Any) -> Iterator[Batch]:
        collate, part = self.collator(multiple=self.config.pad_multiple), self.evaluation_set
        for places in self.evaluation_indices:
            yield self.align(collate([part[place] for place in places]), model)

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = super().evaluate(model, readings)
        return found | {"perplexity": perplexity(found["loss"])}

    def facts(self) -> dict[str, Any]:
        padding = self._plan.padding
        return {
            "model": {"max_length": self.longest},
            "data": self.data_facts
            | {"padding": padding.as_dict(), "evaluated": len(self.evaluation_set)},
            "tokens_per_step": round(padding.planned.tokens / max(1, len(self._plan))),
        }


def subset_by_hash(tokens: Indices, together: Indices, most_tokens: int) -> Indices:
    """Ascending indices of examples with `most_tokens` tokens at most, in hash order of groups.

    tokens    [examples] tokens of each example
    together  [examples] group of each example

    Groups are taken whole. At least one group is returned, even if it exceeds the limit.
    """
    _, member = np.unique(together, return_inverse=True)
    sizes = np.bincount(member, weights=tokens).astype(np.int64)
    # A hash, not a random generator: the selection stays the same across numpy versions and seeds.
    keys = [hashlib.sha256(EVAL_ORDER + b":%d" % place).digest() for place in range(len(sizes))]
    order = np.array(sorted(range(len(sizes)), key=keys.__getitem__))
    count = max(1, int(np.searchsorted(np.cumsum(sizes[order]), most_tokens, side="right")))
    return np.flatnonzero(np.isin(member, order[:count]))


def perplexity(loss: float) -> float:
    """exp(loss); inf on overflow, NaN for NaN."""
    # `not loss > 700` is True for NaN, which math.exp returns as NaN; math.exp raises OverflowError
    # above 709.78.
    return math.exp(loss) if not loss > 700 else math.inf
