"""Encoder-decoder models on pairs of texts: one is read, the other written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from narrowgauge import data
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import SEQ2SEQ
from narrowgauge.train.tasks import tables
from narrowgauge.train.tasks.table_task import TableTask, tokenizer_of


@dataclass
class Seq2SeqTask(TableTask):
    name: ClassVar[str] = "seq2seq"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        tokenizer = tokenizer_of(config)
        columns = data.Seq2Seq(source=config.source_column, target=config.target_column)
        table, notes = tables.read(config, columns, tokenizer, SEQ2SEQ)
        return cls(config, tokenizer, notes, SEQ2SEQ, table)

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
        ids = self.tokenizer(prompt)["input_ids"] if prompt else self.table.validation[0]["input_ids"].tolist()
        source = torch.tensor([ids], device=next(model.parameters()).device)
        was_training = model.training
        model.eval()
        try:
            written = greedy(model, source, self.config.sample_tokens)
        finally:
            model.train(was_training)
        shown = prompt or self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"prompt": shown, "text": self.tokenizer.decode(written, skip_special_tokens=True)}


@torch.no_grad()
def greedy(model: Any, source: torch.Tensor, tokens: int) -> list[int]:
    """At most `tokens` ids, each the likeliest; the decoder is run anew for each of them, the encoder once."""
    ids = [model.config.decoder_start_token_id]
    states = model.get_encoder()(input_ids=source)
    mask = torch.ones_like(source)
    for _ in range(tokens):
        decoder = torch.tensor([ids], device=source.device)
        output = model(encoder_outputs=states, attention_mask=mask, decoder_input_ids=decoder, use_cache=False)
        ids.append(int(output.logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[1:]
