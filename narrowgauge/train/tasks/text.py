"""Language modelling on running text, and samples of a decoder.

Batches are windows of a token stream, a pure function of (seed, step).

Samples use their own random generator, so sampling never changes the run. They are generated
without a KV cache: the whole context is recomputed for each token, which takes a few seconds for a
small model. The model is in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from narrowgauge import data
from narrowgauge.diagnose.format_text import plural
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.pretrained import CAUSAL_LM, ModelClass, language_model, tokenizer_of
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.task import SPLIT_SEED, Feed, Shape, StepBatch, TrainTask

if TYPE_CHECKING:
    from narrowgauge.train.loss import Batch

TEMPERATURE = 0.8
TOP_K = 40
NOT_FINITE = " [ended here: the next logits were not finite]"


@dataclass
class TextFeed(Feed):
    """Windows of the token stream. The step number alone is the position."""

    batches: data.CausalBatches
    parts: int

    def draw(self, step: int) -> StepBatch:
        batches = [
            self.batches.batch(step, part, self.parts) for part in self.own_parts(self.parts)
        ]
        inputs = self.batches.batch_size * self.batches.sequence_length
        return StepBatch(batches, inputs, examples=self.batches.windows_of(step))

    def probe(self) -> Batch:
        return self.batches.batch(0, 0, self.parts)


@dataclass
class TextTask(TrainTask):
    """Task "text": next-token prediction on running text."""

    corpus: data.Corpus

    name: ClassVar[str] = "text"

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        """Loads or trains the tokenizer, and tokenizes the corpus; both are cached by content."""
        cache, column, notes = Path(resolved(config).cache), config.column or None, list[str]()
        if config.tokenizer or config.model:
            tokenizer = tokenizer_of(config)
        else:
            texts = (document.text for document in data.documents(config.data, column=column))
            trained = data.train_bpe(texts, config.vocab_size, cache)
            tokenizer, notes = trained.tokenizer, trained.notes
        fraction = config.validation_fraction
        corpus = data.prepare(
            config.data,
            tokenizer,
            cache=cache,
            validation_fraction=fraction,
            seed=SPLIT_SEED,
            column=column,
        )
        notes = [*data.understood(config.data), *notes, *corpus.summary["notes"]]
        return cls(config, tokenizer, notes, corpus)

    @classmethod
    def without_data(cls, config: TrainConfig, tokenizer: Any) -> tuple[Self, ModelClass]:
        nothing: Any = None
        return cls(config, tokenizer, [], nothing), CAUSAL_LM

    def largest_micro_batch(self, parts: int) -> Shape:
        return Shape(-(-self.config.batch_size // parts), self.config.sequence_length)

    def dummy_batch(self, shape: Shape) -> Batch:
        ids = torch.ones(shape.rows, shape.width, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    def _batches(self) -> data.CausalBatches:
        config = self.config
        return data.CausalBatches(
            self.corpus.train, config.sequence_length, config.batch_size, config.seed
        )

    def steps(self, epochs: int) -> int:
        return math.ceil(epochs * self._batches().windows / self.config.batch_size)

    def tokens_per_forward(self) -> int:
        return self.config.batch_size * self.config.sequence_length // self.config.micro_batches

    def summary(self) -> str:
        known = self.corpus.summary
        return (
            f"{known['train_tokens']:,} training tokens, {known['validation_tokens']:,} held out of "
            f"{plural(known['documents'], 'document')}"
        )

    def model(self) -> Any:
        return language_model(self.config, self.tokenizer)

    def feed(self, model: Any) -> TextFeed:
        data.check_vocabulary(self.corpus, model.get_input_embeddings().weight.shape[0])
        return TextFeed(self._batches(), self.config.micro_batches)

    def evaluation(self, model: Any) -> Iterator[Batch]:
        config, stream = self.config, self.corpus.validation
        # A small validation split may be shorter than one window; labels need one more token than
        # inputs.
        length = min(config.sequence_length, len(stream) - 1)
        return data.CausalBatches(stream, length, config.batch_size, config.seed).evaluation(
            config.eval_tokens
        )

    def trivial(self) -> dict[str, Any]:
        return trivial.of_tokens(batch["labels"].numpy() for batch in self.evaluation(None))

    def sample(self, model: Any) -> dict[str, str]:
        config = self.config
        first_tokens = self.corpus.validation.tokens[:12].tolist()
        # The demo corpus "stdlib" is Python source.
        default = (
            "def "
            if config.data == "stdlib"
            else self.tokenizer.decode(first_tokens, skip_special_tokens=True)
        )
        prompt, longest = config.prompt or str(default), config.sequence_length
        text = sample(
            model, self.tokenizer, prompt, config.sample_tokens, longest=longest, seed=config.seed
        )
        return {"prompt": prompt, "text": text}

    def facts(self) -> dict[str, Any]:
        config = self.config
        return {
            "model": {"sequence_length": config.sequence_length},
            "data": self.corpus.summary,
            "tokens_per_step": config.batch_size * config.sequence_length,
        }


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, start: str | list[int], tokens: int, *, longest: int, seed: int
) -> str:
    """Samples up to `tokens` tokens after `start`, and returns their text without `start`.

    start    a text, or token ids
    longest  most tokens of the context; older tokens are dropped
    seed     seed of a private generator

    Temperature 0.8, top-k 40. Generation ends at the end-of-text token or at non-finite logits.
    """
    if isinstance(start, str):
        start = tokenizer(start, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    device = next(model.parameters()).device
    # A private CPU generator: the run's own generators must not advance, and a GPU draws other
    # numbers.
    generator = torch.Generator().manual_seed(seed)
    ids, ending = list(start), ""
    for _ in range(tokens):
        context = torch.tensor([ids[-longest:]], device=device)
        # Cut to the tokenizer's size: embeddings may be padded with rows that no token has.
        logits = (
            model(input_ids=context, use_cache=False).logits[0, -1, : len(tokenizer)].float().cpu()
        )
        if not logits.isfinite().all():
            ending = NOT_FINITE
            break
        best = torch.topk(logits / TEMPERATURE, min(TOP_K, len(logits)))
        choice = torch.multinomial(torch.softmax(best.values, 0), 1, generator=generator)
        ids.append(int(best.indices[choice]))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[len(start) :], skip_special_tokens=True)) + ending
