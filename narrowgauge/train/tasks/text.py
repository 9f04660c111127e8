"""Language modelling on running text: windows of a token stream, a pure function of (seed, step)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from narrowgauge import data
from narrowgauge.diagnose.format_text import plural
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import language_model
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.sampling import sample
from narrowgauge.train.tasks.task import SPLIT_SEED, Feed, StepBatch, TrainTask


@dataclass
class TextFeed(Feed):
    """Windows of the token stream. The step number alone is the position."""

    batches: data.CausalBatches
    parts: int

    def draw(self, step: int) -> StepBatch:
        batches = [self.batches.batch(step, part, self.parts) for part in self.mine(self.parts)]
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
            tokenizer = data.load(config.tokenizer or config.model)
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
        return cls(config, tokenizer, [*notes, *corpus.summary["notes"]], corpus)

    def _batches(self) -> data.CausalBatches:
        config = self.config
        return data.CausalBatches(
            self.corpus.train, config.sequence_length, config.batch_size, config.seed
        )

    def steps(self, epochs: int) -> int:
        return math.ceil(epochs * self._batches().windows / self.config.batch_size)

    def tokens_at_once(self) -> int:
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
