"""What an encoder-decoder writes for the validation data, and how near it is to the targets: corpus BLEU and chrF by sacrebleu.

    each batch      sources of like lengths; the likeliest tokens one after the other, or the best of `beams` beams, with transformers'
                    generate and its cache of keys and values, under the run's precision and recipe; nothing is drawn
    references      the targets as they stand in the table, not decoded again
    scores          from 0 to 100, with sacrebleu's signature in run.json, without which a figure says little

Cost: as many forward passes of one token per row as the longest text of a batch has tokens, and for each of several beams; memory: the
texts of all rows, which are few. Ranks share the batches; of a model in shards they take as many passes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge import data
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, inputs_of
from narrowgauge.train.model_files import quiet
from narrowgauge.train.tasks.task import Compute, Readings

LONGER = 1.5  # than the longest reference: what is longer is wrong in any case


@dataclass(frozen=True)
class Translation:
    """The rows to translate, and how.

    rows      of a batch
    most      tokens of a text, at most
    tokenize  how sacrebleu cuts words
    """

    examples: data.Examples
    tokenizer: Any
    rows: int
    beams: int
    most: int
    tokenize: str

    @classmethod
    def of(cls, config: TrainConfig, validation: data.Examples, tokenizer: Any, rows: int, longest: int | None) -> Self:
        """Of the first rows of the validation data. Texts may have half as many tokens again as the longest target of them.

        rows     of a micro-batch of training
        longest  tokens that the model knows positions for
        """
        examples = validation.select(np.arange(min(config.translate, len(validation))))
        most = math.ceil(LONGER * int(examples.sizes("labels").max()))
        most = most if longest is None else min(most, longest)
        return cls(examples, tokenizer, max(1, rows // config.beams), config.beams, most, config.bleu_words)

    @cached_property
    def references(self) -> list[str]:
        return [self.examples.array("text", place).tobytes().decode() for place in range(len(self.examples))]

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        from sacrebleu.metrics import BLEU, CHRF

        return {"bleu": BLEU(tokenize=self.tokenize, force=self.tokenize == "none"), "chrf": CHRF()}

    def note(self, twice: bool) -> str:
        """What it costs. twice: narrow, and again in 16 bits."""
        how = f"by {self.beams} beams" if self.beams > 1 else "greedily"
        again = ", and again with the products in 16 bits (eval_wide)" if twice else ""
        return (
            f"Each evaluation translates {len(self.examples):,} rows {how}{again}: up to {self.most} passes of one token each for every "
            f"{self.rows} rows."
        )

    def facts(self) -> dict[str, Any]:
        """What a score means: sacrebleu's signatures, which need no texts, and how texts were written."""
        signatures = {}
        for name, metric in self._metrics.items():
            metric.corpus_score([""], [["."]])  # a signature tells the number of references
            signatures[name] = str(metric.get_signature())
        return {
            "translated": len(self.examples),
            "beams": self.beams,
            "most_tokens": self.most,
            "signatures": signatures,
        }

    def batches(self, pad_id: int, multiple: int) -> Iterator[Batch]:
        """Sources of like lengths; `labels` are the places of the rows."""
        collate = data.Collator(pad_id=pad_id, multiple=multiple)
        lengths = self.examples.sizes("input_ids")
        for places in data.sorted_batches(lengths, batch_size=self.rows, multiple=multiple):
            sources = [{"input_ids": self.examples.array("input_ids", place)} for place in places]
            yield collate(sources) | {"labels": torch.tensor(places)}

    def scores(self, model: Any, readings: Readings, pad_id: int, multiple: int) -> dict[str, float]:
        """bleu and chrf, from 0 to 100."""
        found = readings(self.batches(pad_id, multiple), self._texts, compute=self._writer(model))
        written = dict(pair for _, pairs in found for pair in pairs)
        texts = [written[place] for place in range(len(self.examples))]
        return self.score(texts)

    def score(self, texts: Sequence[str]) -> dict[str, float]:
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
            return torch.zeros((), device=device), ids

        return write


def generated(model: Any, inputs: Mapping[str, Tensor], beams: int, most: int) -> Tensor:
    """[rows, tokens] ids that an encoder-decoder writes, with its start token. What its generation settings force or forbid holds."""
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    with quiet(), torch.no_grad():
        found: Tensor = model.generate(
            **inputs, num_beams=beams, do_sample=False, max_new_tokens=most, synced_gpus=ranks, temperature=None, top_k=None, top_p=None,
        )  # fmt: skip
    return found
