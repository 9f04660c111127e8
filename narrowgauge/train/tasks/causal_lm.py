"""Language models on chats, or on prompts and completions: the loss is on what the model is to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from narrowgauge import data
from narrowgauge.conversion import suspended
from narrowgauge.data import IGNORED
from narrowgauge.data.targets import shifted_labels
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.generate import continued, sample
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import CAUSAL_LM
from narrowgauge.train.tasks import tables
from narrowgauge.train.tasks.table_task import TableTask, tokenizer_of
from narrowgauge.train.tasks.task import Feed


@dataclass
class CausalTask(TableTask):
    name: ClassVar[str] = "causal-lm"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        tokenizer = tokenizer_of(config)
        table, notes = tables.read(config, _columns(config), tokenizer, CAUSAL_LM)
        return cls(config, tokenizer, notes, CAUSAL_LM, table)

    def align(self, batch: Batch, model: Any) -> Batch:
        return batch | {"labels": shifted_labels(batch["labels"], "causal-lm")}

    def feed(self, model: Any) -> Feed:
        feed = super().feed(model)
        if self.config.packing:
            assert isinstance(feed, tables.TableFeed)
            with suspended(model):  # one scale for a whole tensor ties documents together, by rounding alone
                data.check_packing(model, feed.collate)
        return feed

    def sample(self, model: Any) -> dict[str, str]:
        """What the model answers to the first prompt of the validation data, or to the one that was given."""
        config, tokens = self.config, self.config.sample_tokens
        longest = self.table.longest or max(tokens, self.table.summary["longest"])
        if config.prompt:
            text = sample(model, self.tokenizer, config.prompt, tokens, longest=longest, seed=config.seed)
            return {"prompt": config.prompt, "text": text}
        example = self.table.validation[0]
        first = int(np.argmax(example["labels"] != IGNORED))
        ids = example["input_ids"][: max(1, first)].tolist()
        text = continued(model, self.tokenizer, ids, tokens, longest=longest, seed=config.seed)
        return {"prompt": self.tokenizer.decode(ids), "text": text}


def _columns(config: TrainConfig) -> data.Task:
    if config.messages_column:
        return data.Chat(messages=config.messages_column, train_on=config.train_on)  # type: ignore[arg-type]
    return data.Completion(prompt=config.prompt_column, completion=config.completion_column)
