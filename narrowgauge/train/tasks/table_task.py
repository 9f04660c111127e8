"""A task on a table, but for what its kind of model makes different: each of those is one short file beside this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from narrowgauge import data
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import ModelClass, check_sizes, pretrained
from narrowgauge.train.tasks import tables
from narrowgauge.train.tasks.scores import perplexity
from narrowgauge.train.tasks.task import Feed, Scorer, TrainTask

ALIGNED = 16  # tokens: so that runs on nearly the same data share what recipe "auto" measured


def tokenizer_of(config: TrainConfig) -> Any:
    """The one that is named, else the model's."""
    return data.load(config.tokenizer or config.model)


@dataclass
class TableTask(TrainTask):
    """model_class: the class of models that it trains."""

    model_class: ModelClass
    table: tables.Tables

    default_metric: ClassVar[str] = "loss"

    @cached_property
    def _sampler(self) -> data.LengthBatchSampler:
        """For the plan of the first epoch; a feed has one of its own."""
        return data.LengthBatchSampler(self.table.train.lengths, tables.batching(self.config))

    @cached_property
    def _evaluated(self) -> data.Examples:
        return tables.evaluated(self.table.validation, self.config.eval_tokens)

    def steps(self, epochs: int) -> int:
        """Under a token budget epochs differ a little."""
        lengths, batching = self.table.train.lengths, tables.batching(self.config)
        return sum(len(data.plan(lengths, batching, epoch)) for epoch in range(epochs))

    def tokens_at_once(self) -> int:
        plan = self._sampler.plan
        batches = max(1, len(plan)) * self.config.micro_batches
        return max(ALIGNED, round(plan.padding.planned.positions / batches / ALIGNED) * ALIGNED)

    def summary(self) -> str:
        known, looked_at = self.table.summary, len(self._evaluated)
        held_out = known["validation_examples"]
        part = "" if looked_at == held_out else f", of which evaluations see {looked_at:,} (eval_tokens)"
        return (
            f"{known['train_examples']:,} examples with {known['train_tokens']:,} tokens, {held_out:,} held out{part}"
        )

    def preview(self) -> list[Any]:
        plan = self._sampler.plan
        return [*self.coloured(self.table.train[0]), f"First epoch, {plan.padding}", *plan.notes]

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

    def feed(self, model: Any) -> Feed:
        train, config = self.table.train, self.config
        sampler = data.LengthBatchSampler(train.lengths, tables.batching(config))
        collate = data.Collator(pad_id=data.pad_id_of(self.tokenizer), widths=sampler.widths)
        return tables.TableFeed(train, sampler, collate, config.micro_batches, lambda batch: self.align(batch, model))

    def evaluation(self, model: Any) -> Iterator[Batch]:
        pad_id = data.pad_id_of(self.tokenizer)
        return (self.align(each, model) for each in tables.evaluation_batches(self._evaluated, self.config, pad_id))

    def evaluate(self, model: Any, scorer: Scorer) -> dict[str, Any]:
        found = super().evaluate(model, scorer)
        return found | {"perplexity": perplexity(found["loss"])}

    def facts(self) -> dict[str, Any]:
        plan = self._sampler.plan
        return {
            "model": {"max_length": self.table.longest},
            "data": self.table.summary | {"padding": plan.padding.as_dict(), "evaluated": len(self._evaluated)},
            "tokens_per_step": round(plan.padding.planned.tokens / max(1, len(plan))),
        }
