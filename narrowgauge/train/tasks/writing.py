"""Tasks on a table whose models write: causal language models on chats or completions, encoder-decoders on pairs of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from narrowgauge import data
from narrowgauge.conversion import suspended
from narrowgauge.data.targets import shifted_labels
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.generate import greedy, sample
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import CAUSAL_LM, SEQ2SEQ, ModelClass
from narrowgauge.train.tasks.tables import TableFeed, TableTask
from narrowgauge.train.tasks.task import Feed


@dataclass
class CausalTask(TableTask):
    """The loss is on what the model is to write: the answers of a chat, or the completion of a prompt."""

    name: ClassVar[str] = "causal-lm"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        if config.messages_column:
            return data.Chat(messages=config.messages_column, train_on=config.train_on), CAUSAL_LM  # type: ignore[arg-type]
        return data.Completion(prompt=config.prompt_column, completion=config.completion_column), CAUSAL_LM

    def align(self, batch: Batch, model: Any) -> Batch:
        return batch | {"labels": shifted_labels(batch["labels"], "causal-lm")}

    def feed(self, model: Any) -> Feed:
        feed = super().feed(model)
        if self.config.packing:
            assert isinstance(feed, TableFeed)
            with suspended(model):  # one scale for a whole tensor ties documents together, by rounding alone
                data.check_packing(model, feed.collate)
        return feed

    def sample(self, model: Any) -> dict[str, str]:
        """What the model answers to the first prompt of the validation data, or to the one that was given."""
        config, tokens = self.config, self.config.sample_tokens
        longest = self.longest or max(tokens, self.known["longest"])
        example = self.validation[0]
        first = int(np.argmax(example["labels"] != data.IGNORED))
        prompt = config.prompt or example["input_ids"][: max(1, first)].tolist()
        text = sample(model, self.tokenizer, prompt, tokens, longest=longest, seed=config.seed)
        return {"prompt": config.prompt or self.tokenizer.decode(prompt), "text": text}


@dataclass
class Seq2SeqTask(TableTask):
    """One text is read, the other written."""

    name: ClassVar[str] = "seq2seq"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        return data.Seq2Seq(source=config.source_column, target=config.target_column), SEQ2SEQ

    def model(self) -> Any:
        model = super().model()
        if model.config.decoder_start_token_id is None or model.config.pad_token_id is None:
            raise ConfigError(
                f"model = {self.config.model!r}: its configuration has no decoder_start_token_id or no pad_token_id, with which "
                "the decoder begins. Set them in its config.json."
            )
        return model

    def align(self, batch: Batch, model: Any) -> Batch:
        """The decoder reads the labels one place to the right."""
        return batch | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
        return [
            data.coloured_sample(self.tokenizer, example["input_ids"], None),
            data.coloured_sample(self.tokenizer, example["labels"], example["labels"]),
        ]

    def sample(self, model: Any) -> dict[str, str]:
        """What the model writes, greedily, for the first source of the validation data, or for the one that was given."""
        prompt = self.config.prompt
        ids = self.tokenizer(prompt)["input_ids"] if prompt else self.validation[0]["input_ids"].tolist()
        written = greedy(model, ids, self.config.sample_tokens)
        shown = prompt or self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"prompt": shown, "text": self.tokenizer.decode(written, skip_special_tokens=True)}
