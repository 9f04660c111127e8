"""Generation tasks (language modelling, causal-lm, seq2seq) and their samples.

The language modelling task reads windows of a token stream, as a pure function of (seed, step). On
a table, causal language models learn chats or completions, and encoder-decoders learn text pairs.

Samples use their own random generator, so sampling never changes the run. They are generated
without a KV cache: the whole context is recomputed for each token, which takes a few seconds for a
small model. The model is in evaluation mode.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from narrowgauge import data
from narrowgauge.conversion import suspended
from narrowgauge.data.targets import shifted_labels
from narrowgauge.diagnose.format_text import plural
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.loss import Batch
from narrowgauge.train.model import CAUSAL_LM, SEQ2SEQ, ModelClass, language_model
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.feed import TableFeed
from narrowgauge.train.tasks.tables import TableTask
from narrowgauge.train.tasks.task import SPLIT_SEED, Feed, Readings, StepBatch, TrainTask
from narrowgauge.train.tasks.translation import Translation

TEMPERATURE = 0.8
TOP_K = 40
NOT_FINITE = " [ended here: the next logits were not finite]"


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


@dataclass
class CausalTask(TableTask):
    """Task "causal-lm": the loss covers the answers of a chat, or the completion of a prompt."""

    name: ClassVar[str] = "causal-lm"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        if config.messages_column:
            return data.Chat(messages=config.messages_column, train_on=config.train_on), CAUSAL_LM  # type: ignore[arg-type]
        return data.Completion(
            prompt=config.prompt_column, completion=config.completion_column
        ), CAUSAL_LM

    def align(self, batch: Batch, model: Any) -> Batch:
        return batch | {"labels": shifted_labels(batch["labels"], "causal-lm")}

    def feed(self, model: Any) -> TableFeed:
        feed = super().feed(model)
        if self.config.packing:
            # Per-tensor scales couple packed documents through rounding. Without the recipe the
            # check sees leaks of the attention mask alone.
            with suspended(model):
                data.check_packing(model, feed.collate)
        return feed

    def trivial(self) -> dict[str, Any]:
        """Label distribution.

        The first token of an example is no target, because no token precedes it.
        """
        return trivial.of_tokens(example["labels"][1:] for example in self._evaluated)

    def sample(self, model: Any) -> dict[str, str]:
        """Model's answer to the configured prompt, else to the first validation prompt."""
        config, tokens = self.config, self.config.sample_tokens
        longest = self.longest or max(tokens, self.known["longest"])
        example = self.validation[0]
        # Index of the first learnt token: everything before it is the prompt.
        first = int(np.argmax(example["labels"] != data.IGNORED))
        prompt = config.prompt or example["input_ids"][: max(1, first)].tolist()
        text = sample(model, self.tokenizer, prompt, tokens, longest=longest, seed=config.seed)
        return {"prompt": config.prompt or self.tokenizer.decode(prompt), "text": text}


@dataclass
class Seq2SeqTask(TableTask):
    """Task "seq2seq": an encoder reads the source text, a decoder generates the target text."""

    name: ClassVar[str] = "seq2seq"

    @classmethod
    def roles(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        columns = data.Seq2Seq(
            source=config.source_column,
            target=config.target_column,
            keeps_text=config.translate > 0,
        )
        return columns, SEQ2SEQ

    @classmethod
    def prepare(cls, config: TrainConfig) -> Self:
        task = super().prepare(config)
        if task.translation is not None:
            task.notes.append(task.translation.note(config.eval_wide))
            task.known["translation"] = task.translation.facts()
        return task

    def trivial(self) -> dict[str, Any]:
        return trivial.of_tokens(example["labels"] for example in self._evaluated)

    @cached_property
    def translation(self) -> Translation | None:
        """Translations of each evaluation, or None if `translate` is 0."""
        if not self.config.translate:
            return None
        rows = max(map(len, self.evaluated_places))
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

    def align(self, batch: Batch, model: Any) -> Batch:
        """Adds decoder_input_ids, the labels shifted right by one position."""
        return batch | {
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        }

    def coloured(self, example: Mapping[str, Any]) -> list[Any]:
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


# Samples


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
