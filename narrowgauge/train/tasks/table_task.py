"""A task on a table, but for what its kind of model makes different: each of those is one short file beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from narrowgauge import data
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import NO_CACHE, Batch, Objective
from narrowgauge.train.model import Kind, check_sizes, pretrained
from narrowgauge.train.tasks import tables
from narrowgauge.train.tasks.scores import perplexity
from narrowgauge.train.tasks.task import Feed, Scorer

ALIGNED = 16  # tokens: so that runs on nearly the same data share what recipe "auto" measured


@dataclass
class TableTask:
    """See `task.Task`. kind: the class of models that it trains."""

    config: TrainConfig
    tokenizer: Any
    kind: Kind
    table: tables.Tables

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = NO_CACHE
    default_metric: ClassVar[str] = "loss"

    @property
    def best(self) -> str:
        return {"": self.default_metric, "none": ""}.get(self.config.best, self.config.best)

    @property
    def notes(self) -> Sequence[str]:
        return self.table.notes

    @property
    def identity(self) -> dict[str, str]:
        return {
            "tokenizer": data.fingerprint(self.tokenizer),
            "content_hash": self.table.summary["content_hash"],
        }

    @cached_property
    def _sampler(self) -> data.LengthBatchSampler:
        """For the plan of the first epoch; a feed has one of its own."""
        return data.LengthBatchSampler(self.table.train.lengths, tables.batching(self.config))

    @cached_property
    def _evaluated(self) -> tables.Part:
        return tables.evaluated(self.table.validation, self.config.eval_tokens)

    def steps(self, epochs: int) -> int:
        return tables.epoch_steps(self.table.train.lengths, tables.batching(self.config), epochs)

    def tokens_at_once(self) -> int:
        plan = self._sampler.plan
        batches = max(1, len(plan)) * self.config.micro_batches
        return max(ALIGNED, round(plan.padding.planned.positions / batches / ALIGNED) * ALIGNED)

    def words(self) -> str:
        summary, looked_at = self.table.summary, len(self._evaluated)
        held_out = summary["validation_examples"]
        part = "" if looked_at == held_out else f", of which evaluations see {looked_at:,} (eval_tokens)"
        return f"{summary['train_examples']:,} examples with {summary['train_tokens']:,} tokens, {held_out:,} held out{part}"

    def preview(self) -> list[Any]:
        plan = self._sampler.plan
        return [*self.coloured(self.table.train[0]), f"First epoch, {plan.padding}", *plan.notes]

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        """What is learnt of an example, and what is only seen."""
        return [data.coloured_sample(self.tokenizer, example["input_ids"], example["labels"])]

    def model(self) -> Any:
        model = pretrained(self.config, self.kind)
        check_sizes(model, self.tokenizer, "max_length", self.config.max_length)
        return model

    def objective(self, model: Any, computes_in: torch.dtype) -> Objective:
        return Objective.of(model, computes_in, compiled=self.config.compile)

    def align(self, batch: Batch, model: Any) -> Batch:
        """The collator's batch with labels where the logits are that they are compared with."""
        raise NotImplementedError

    def feed(self, model: Any) -> Feed:
        train, config = self.table.train, self.config
        sampler = data.LengthBatchSampler(train.lengths, tables.batching(config))
        collate = data.Collator(pad_id=data.pad_id_of(self.tokenizer), widths=sampler.widths)
        return tables.TableFeed(train, sampler, collate, config.micro_batches, lambda batch: self.align(batch, model))

    def evaluation(self, model: Any) -> Any:
        pad_id = data.pad_id_of(self.tokenizer)
        return tables.evaluation_batches(self._evaluated, self.config, pad_id, lambda batch: self.align(batch, model))

    def evaluate(self, model: Any, scorer: Scorer) -> dict[str, Any]:
        total, tokens = 0.0, 0
        for batch in self.evaluation(model):
            with scorer.context():
                total += float(scorer.objective(batch, scorer.device))
            tokens += data.valid_targets(batch)
        loss = total / tokens
        return {"loss": loss, "tokens": tokens, "perplexity": perplexity(loss)}

    def facts(self) -> dict[str, Any]:
        plan = self._sampler.plan
        positions = plan.padding.planned.positions
        return {
            "model": {"max_length": self.table.longest},
            "data": self.table.summary | {"padding": plan.padding.as_dict(), "evaluated": len(self._evaluated)},
            "tokens_per_step": round(plan.padding.planned.tokens / max(1, len(plan))) if positions else 0,
        }
