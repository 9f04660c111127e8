"""Encoder-decoders: an encoder reads a source text, and a decoder writes a target text.

With `translate`, an evaluation also generates translations (module `translation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from narrowgauge import data
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.task import Encoded, Notes, Task
from narrowgauge.errors import ConfigError
from narrowgauge.train.pretrained import SEQ2SEQ, ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.translation import Translation

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.example_arrays import ExampleArrays
    from narrowgauge.data.tables import Record
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.tasks.task import Readings


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Task):
    """Columns with the encoder's source and the decoder's target.

    keeps_text  also store the target's text, as UTF-8 in an array "text" that no batch contains
    """

    source: str = "source"
    target: str = "target"
    keeps_text: bool = False
    evaluation_arrays: ClassVar[frozenset[str]] = frozenset({"text"})
    kind: ClassVar[str] = "seq2seq"
    can_truncate: ClassVar[bool] = True

    @property
    def columns(self) -> list[str]:
        return [self.source, self.target]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "labels": ids} | (
            {"text": np.dtype("u1")} if self.keeps_text else {}
        )

    def length(self, example: Encoded) -> int:
        return max(len(example["input_ids"]), len(example["labels"]))

    @staticmethod
    def lengths(stored: ExampleArrays) -> Indices:
        return np.maximum(stored.sizes("input_ids"), stored.sizes("labels"))

    tokens = lengths

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        sources = encoder.ids([row.text(self.source) for row in rows], max_length=max_length)
        targets = encoder.ids(
            [row.text(self.target) for row in rows], target=True, max_length=max_length
        )
        for row, source, target in zip(rows, sources, targets, strict=True):
            encoder.check_start(source["input_ids"], row.origin)
            # The original text, for BLEU: decoding the ids would lose what the tokenizer
            # normalizes.
            text = (
                {"text": np.frombuffer(row.text(self.target).encode(), np.uint8)}
                if self.keeps_text
                else {}
            )
            yield {"input_ids": source["input_ids"], "labels": target["input_ids"], **text}


@dataclass
class Seq2SeqTask(TableTask):
    """Task "seq2seq": an encoder reads the source text, a decoder generates the target text."""

    name: ClassVar[str] = "seq2seq"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = Seq2Seq(
            source=config.column_of("source"),
            target=config.column_of("target"),
            keeps_text=config.translate > 0,
        )
        return columns, SEQ2SEQ

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        if task.translation is not None:
            task.notes.append(task.translation.note(config.eval_wide))
            task.data_facts["translation"] = task.translation.facts()
        return task

    def trivial(self) -> dict[str, Any]:
        return trivial.of_tokens(example["labels"] for example in self.evaluation_set)

    @cached_property
    def translation(self) -> Translation | None:
        """Translations of each evaluation, or None if `translate` is 0."""
        if not self.config.translate:
            return None
        rows = max(map(len, self.evaluation_indices))
        return Translation.of(self.config, self.validation, self.tokenizer, rows, self.longest)

    def evaluate(self, model: Any, readings: Readings) -> dict[str, Any]:
        found = super().evaluate(model, readings)
        if self.translation is None:
            return found
        pad_id, multiple = data.pad_id_of(self.tokenizer), self.config.pad_multiple
        return found | self.translation.scores(model, readings, pad_id, multiple)

    def model(self) -> Any:
        model = super().model()
        if model.config.decoder_start_token_id is None or model.config.pad_token_id is None:
            raise ConfigError(
                f"model = {self.config.model!r}: its configuration has no decoder_start_token_id or no pad_token_id, with which "
                "the decoder begins. Set them in its config.json.",
                code="translation.decoder-start",
            )
        return model

    @classmethod
    def align(cls, batch: Batch, model: Any) -> Batch:
        """Adds decoder_input_ids, the labels shifted right by one position."""
        return batch | {
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        }

    def show_example(self, example: Mapping[str, Any]) -> list[Any]:
        return [
            data.coloured_sample(self.tokenizer, example["input_ids"], None),
            data.coloured_sample(self.tokenizer, example["labels"], example["labels"]),
        ]

    def sample(self, model: Any) -> dict[str, str]:
        """Greedy output for the configured prompt, else for the first validation source."""
        prompt = self.config.prompt
        ids = (
            self.tokenizer(prompt)["input_ids"]
            if prompt
            else self.validation[0]["input_ids"].tolist()
        )
        written = greedy(model, ids, self.config.sample_tokens)
        shown = prompt or self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"prompt": shown, "text": self.tokenizer.decode(written, skip_special_tokens=True)}


@torch.no_grad()
def greedy(model: Any, source: list[int], tokens: int) -> list[int]:
    """Greedily generates at most `tokens` ids with an encoder-decoder; the encoder runs once."""
    ids = [model.config.decoder_start_token_id]
    inputs = torch.tensor([source], device=next(model.parameters()).device)
    states = model.get_encoder()(input_ids=inputs)
    mask = torch.ones_like(inputs)
    for _ in range(tokens):
        decoder = torch.tensor([ids], device=inputs.device)
        output = model(
            encoder_outputs=states, attention_mask=mask, decoder_input_ids=decoder, use_cache=False
        )
        ids.append(int(output.logits[0, -1].argmax()))
        if ids[-1] == model.config.eos_token_id:
            break
    return ids[1:]
