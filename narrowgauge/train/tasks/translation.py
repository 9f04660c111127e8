"""Translations of the validation data by an encoder-decoder, scored by corpus BLEU and chrF.

    decoding     greedy, or beam search with `beams` beams; transformers' generate with its KV
                 cache, under the run's precision and recipe; no sampling
    batches      sources of similar length
    references   target texts of the table itself, not decoded from token ids
    scores       sacrebleu's, 0 to 100; run.json holds its signature, which defines them

Cost: one forward pass for each generated token of a batch, up to the longest text, times the number
of beams. Memory: the texts of all translated rows.

Ranks share the batches. Sharded models run equally many passes on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge import data
from narrowgauge.train.loss import Batch, inputs_of
from narrowgauge.train.model_files import quiet

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.tasks.task import Compute, Readings

LONGER = 1.5  # generated tokens, at most, per token of the longest reference


@dataclass(frozen=True)
class Translation:
    """Rows to translate, and the decoding settings.

    examples  rows with `input_ids`, `labels` and the target `text`
    rows      rows of a batch
    beams     beams of the search; 1 is greedy
    most      most tokens of a generated text
    tokenize  sacrebleu's word tokenizer
    """

    examples: data.Examples
    tokenizer: Any
    rows: int
    beams: int
    most: int
    tokenize: str

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        validation: data.Examples,
        tokenizer: Any,
        rows: int,
        longest: int | None,
    ) -> Self:
        """Translates the first `config.translate` rows of the validation data.

        A text may have 1.5 times the tokens of the longest target among these rows.

        rows     rows of a training micro-batch
        longest  most tokens that the model has positions for; None: unlimited
        """
        examples = validation.select(np.arange(min(config.translate, len(validation))))
        most = math.ceil(LONGER * int(examples.sizes("labels").max()))
        most = most if longest is None else min(most, longest)
        # A beam is a row of the batch, so the batch shrinks to keep the memory of a training
        # micro-batch.
        return cls(
            examples, tokenizer, max(1, rows // config.beams), config.beams, most, config.bleu_words
        )

    @cached_property
    def references(self) -> list[str]:
        """Target texts as in the table.

        Texts decoded from token ids would lose whatever the tokenizer normalizes, and BLEU would
        change.
        """
        return [
            self.examples.array("text", place).tobytes().decode()
            for place in range(len(self.examples))
        ]

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        # force silences sacrebleu's warning about text that looks tokenized, which is intended
        # here.
        return {"bleu": BLEU(tokenize=self.tokenize, force=self.tokenize == "none"), "chrf": CHRF()}

    def note(self, twice: bool) -> str:
        """A sentence about the cost. twice: evaluate in low precision and again in 16 bits."""
        how = f"by {self.beams} beams" if self.beams > 1 else "greedily"
        again = ", and again with the products in 16 bits (evaluation.wide)" if twice else ""
        return (
            f"Each evaluation translates {len(self.examples):,} rows {how}{again}: up to {self.most} passes of one token each for every "
            f"{self.rows} rows."
        )

    def facts(self) -> dict[str, Any]:
        """Entries of run.json that define the scores: sacrebleu's signatures, decoding settings."""
        signatures = {}
        for name, metric in self._metrics.items():
            # The signature contains the number of references, known only after a first score.
            metric.corpus_score([""], [["."]])
            signatures[name] = str(metric.get_signature())
        return {
            "translated": len(self.examples),
            "beams": self.beams,
            "most_tokens": self.most,
            "signatures": signatures,
        }

    def batches(self, pad_id: int, multiple: int) -> Iterator[Batch]:
        """Source batches of similar lengths; `labels` holds the row numbers."""
        collate = data.Collator(pad_id=pad_id, multiple=multiple)
        lengths = self.examples.sizes("input_ids")
        for places in data.sorted_batches(lengths, batch_size=self.rows, multiple=multiple):
            sources = [{"input_ids": self.examples.array("input_ids", place)} for place in places]
            yield collate(sources) | {"labels": torch.tensor(places)}

    def scores(
        self, model: Any, readings: Readings, pad_id: int, multiple: int
    ) -> dict[str, float]:
        """Generates all translations and returns bleu and chrf, 0 to 100."""
        found = readings(self.batches(pad_id, multiple), self._texts, compute=self._writer(model))
        # Batches are sorted by length, and ranks return them in turn: texts go back to the order of
        # the rows.
        written = dict(pair for _, pairs in found for pair in pairs)
        texts = [written[place] for place in range(len(self.examples))]
        return self.score(texts)

    def score(self, texts: Sequence[str]) -> dict[str, float]:
        """Scores texts against the references, in the same order."""
        return {
            name: float(metric.corpus_score(list(texts), [self.references]).score)
            for name, metric in self._metrics.items()
        }

    def _texts(self, batch: Batch, ids: Tensor | None) -> list[tuple[int, str]]:
        assert ids is not None
        texts = self.tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True)
        return list(zip(batch["labels"].tolist(), texts, strict=True))

    def _writer(self, model: Any) -> Compute:
        def write(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
            ids = generated(model, inputs_of(batch, device, {}), self.beams, self.most)
            # `Compute` must return a loss; generation has none.
            return torch.zeros((), device=device), ids

        return write


def generated(model: Any, inputs: Mapping[str, Tensor], beams: int, most: int) -> Tensor:
    """Generates [rows, tokens] ids with an encoder-decoder, start token included.

    Forced and suppressed tokens of the model's generation settings apply.
    """
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    with quiet(), torch.no_grad():
        found: Tensor = model.generate(
            # temperature and top_k are reset: a folder's sampling defaults make generate() warn
            # when do_sample is False. synced_gpus keeps all ranks in the loop until the last one
            # ends, since sharded weights are gathered in every pass.
            **inputs, num_beams=beams, do_sample=False, max_new_tokens=most, synced_gpus=ranks, temperature=None, top_k=None, top_p=None,
        )  # fmt: skip
    return found
