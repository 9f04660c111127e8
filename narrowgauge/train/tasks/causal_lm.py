"""Causal language models on a table: chats, or prompts and completions.

    Completion  prompt + completion; loss on the completion and its end-of-text token
    Chat        messages in the tokenizer's template; loss on the assistant's answers

Prompt and completion are tokenized as one text. A token that spans both counts as prompt, in chats
as well. A note reports such examples, because at inference the prompt is tokenized by itself and
ends in another token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from narrowgauge import data
from narrowgauge.data import row_forms
from narrowgauge.data.batches import IGNORED
from narrowgauge.data.cache import Values, token_dtype
from narrowgauge.data.chat import Span, answers, check_messages
from narrowgauge.data.task import Encoded, Item, Notes, Task
from narrowgauge.data.tokenizer import end_of_text
from narrowgauge.errors import ConfigError
from narrowgauge.train.first_look import form_of_data
from narrowgauge.train.pretrained import CAUSAL_LM, ModelClass
from narrowgauge.train.tasks import trivial
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.text import sample

if TYPE_CHECKING:
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.tables import Record
    from narrowgauge.train.config.settings import TrainConfig

STRADDLING = (
    "{count} examples have a token across the border of prompt and completion; it counts as prompt, and what it holds of the "
    "completion is not learnt. A prompt that ends without a space, and a completion that begins with one, often helps."
)
STRADDLING_CHAT = (
    "{count} chats have a token across the border of a prompt and its answer; it counts as prompt, and what it holds of the answer "
    "is not learnt. A template whose prompt ends in a special token or a line break has none."
)
UNFINISHED = "{count} chats end without the end-of-text token {token}: the template does not write it behind the last answer."


class _Causal(Task):
    """A token sequence with a loss on some of its tokens."""

    kind: ClassVar[str] = "causal-lm"

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        # Stored as one byte per token; labels are derived from ids and mask.
        return {"input_ids": token_dtype(encoder.vocabulary - 1), "targets": np.dtype("u1")}

    def targets(self, example: Encoded) -> int:
        example["targets"][:1] = 0  # no token precedes the first one, so none predicts it
        return int(example["targets"].sum())

    @staticmethod
    def item(arrays: Item) -> Item:
        learnt = arrays.pop("targets") != 0
        return arrays | {"labels": np.where(learnt, arrays["input_ids"], IGNORED)}


@dataclass(frozen=True, kw_only=True)
class Completion(_Causal):
    """Columns with a prompt, which may be empty, and its completion."""

    prompt: str = "prompt"
    completion: str = "completion"

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.completion]

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        prompts = [row.text(self.prompt) for row in rows]
        texts = [
            prompt + row.text(self.completion) for prompt, row in zip(prompts, rows, strict=True)
        ]
        learnt = _learnt(
            rows, texts, [[(len(prompt), sys.maxsize)] for prompt in prompts], encoder, special=True
        )
        end = end_of_text(encoder.tokenizer)
        for row, ids, targets, straddles in learnt:
            notes[STRADDLING] += straddles
            if not len(ids) or ids[-1] != end:
                ids, targets = np.append(ids, end), np.append(targets, False)
            # An empty completion teaches nothing, not even to stop.
            targets[-1] = bool(row.values[self.completion])
            yield {"input_ids": ids, "targets": targets}


@dataclass(frozen=True, kw_only=True)
class Chat(_Causal):
    """A column with a list of messages, each with a role and a content, or ShareGPT's from, value.

    system    column with a text before the chat, which a row may lack; '': none
    train_on  "answers": loss on all answers; "last": on the last one
    """

    messages: str = "messages"
    system: str = ""
    train_on: Literal["answers", "last"] = "answers"

    def __post_init__(self) -> None:
        if self.train_on not in ("answers", "last"):
            raise ConfigError(
                f"Chat: train_on {self.train_on!r}. Pass 'answers' or 'last'.", code="chat.train-on"
            )

    @property
    def columns(self) -> list[str]:
        return [self.messages]

    @property
    def optional_columns(self) -> tuple[str, ...]:
        return (self.system,) if self.system else ()

    def _turns(self, row: Mapping[str, Any], origin: str) -> Any:
        chat = row_forms.turns(row[self.messages], origin)
        system = row[self.system] if self.system else None
        if not system or not isinstance(chat, list):
            return chat
        return [{"role": "system", "content": str(system)}, *chat]

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        chats = [check_messages(self._turns(row.values, row.origin), row.origin) for row in rows]
        rendered = [
            answers(encoder.tokenizer, chat, row.origin, self.train_on)
            for chat, row in zip(chats, rows, strict=True)
        ]
        texts, spans = [text for text, _ in rendered], [found for _, found in rendered]
        end, token = encoder.tokenizer.eos_token_id, str(encoder.tokenizer.eos_token)
        # special=False: the template writes special tokens itself; adding them again would give two
        # beginning-of-text tokens.
        for _, ids, targets, straddles in _learnt(rows, texts, spans, encoder, special=False):
            notes[STRADDLING_CHAT] += straddles
            if end is not None and end not in ids[targets]:
                notes[UNFINISHED.replace("{token}", token)] += 1
            yield {"input_ids": ids, "targets": targets}


@dataclass(frozen=True, kw_only=True)
class Instructions(_Causal):
    """Columns instruction, output, and perhaps input, system and history: Alpaca's form.

    is_chat  rows are chats for the tokenizer's template; else Stanford's prompt, and the output
    """

    is_chat: bool
    train_on: Literal["answers", "last"] = "answers"

    @property
    def columns(self) -> list[str]:
        return ["instruction", "output"]

    @property
    def optional_columns(self) -> tuple[str, ...]:
        return "input", "system", "history"

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        if self.is_chat:
            chats = [
                row._replace(values={"messages": row_forms.alpaca_turns(row.values, row.origin)})
                for row in rows
            ]
            return Chat(train_on=self.train_on).encode(chats, encoder, notes, max_length)
        pairs = [
            row._replace(
                values={
                    "prompt": row_forms.alpaca_prompt(row.values, row.origin),
                    "completion": row.text("output"),
                }
            )
            for row in rows
        ]
        return Completion().encode(pairs, encoder, notes, max_length)


def _learnt(
    rows: Sequence[Record],
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    encoder: Encoder,
    *,
    special: bool,
) -> Iterator[tuple[Record, Values, Values, bool]]:
    """Yields (row, ids, targets, straddles) of each text.

    targets    bool per token: it starts inside a span of characters
    straddles  True if a token crosses the start of a span
    """
    for row, wanted, (ids, places) in zip(
        rows, spans, encoder.spans(texts, special=special), strict=True
    ):
        encoder.check_start(ids, row.origin)
        targets, straddles = np.zeros(len(ids), bool), False
        for first, last in wanted:
            targets |= (places[:, 0] >= first) & (places[:, 0] < last)
            straddles |= bool(((places[:, 0] < first) & (places[:, 1] > first)).any())
        yield row, ids, targets, straddles


@dataclass
class CausalTask(TableTask):
    """Task "causal-lm": the loss covers the answers of a chat, or the completion of a prompt."""

    name: ClassVar[str] = "causal-lm"

    @classmethod
    def columns_and_model(cls, config: TrainConfig, tokenizer: Any) -> tuple[data.Task, ModelClass]:
        if config.column_of("messages"):
            return Chat(messages=config.column_of("messages"), train_on=config.train_on), CAUSAL_LM  # type: ignore[arg-type]
        return Completion(
            prompt=config.column_of("prompt"), completion=config.column_of("completion")
        ), CAUSAL_LM

    @classmethod
    def columns_of_data(
        cls, config: TrainConfig, tokenizer: Any, columns: data.Task
    ) -> tuple[data.Task, list[str]]:
        """Another trainer's form of rows is recognized by its columns if none was named."""
        form = None if config.names_columns else form_of_data(config)
        if form is None:
            return columns, []
        is_chat, train_on = bool(getattr(tokenizer, "chat_template", None)), config.train_on
        said = f"{config.data}: its rows are read as {form.words}"
        if form.name == "Alpaca":
            said += ", by the tokenizer's chat template" if is_chat else ", by Stanford's prompt"
            columns = Instructions(is_chat=is_chat, train_on=train_on)  # type: ignore[arg-type]
        else:
            [messages], system = form.required, "".join(form.optional)
            columns = Chat(messages=messages, system=system, train_on=train_on)  # type: ignore[arg-type]
        return columns, [f"{said}."]

    @staticmethod
    def align_labels(labels: Tensor) -> Tensor:
        """Target of each position: the next label, -100 at the end."""
        return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)

    def trivial(self) -> dict[str, Any]:
        """Label distribution.

        The first token of an example is no target, because no token precedes it.
        """
        return trivial.of_tokens(example["labels"][1:] for example in self.evaluation_set)

    def sample(self, model: Any) -> dict[str, str]:
        """Model's answer to the configured prompt, else to the first validation prompt."""
        config, tokens = self.config, self.config.sample_tokens
        longest = self.longest or max(tokens, self.data_facts["longest"])
        example = self.validation[0]
        # Index of the first learnt token: everything before it is the prompt.
        first = int(np.argmax(example["labels"] != data.IGNORED))
        prompt = config.prompt or example["input_ids"][: max(1, first)].tolist()
        text = sample(model, self.tokenizer, prompt, tokens, longest=longest, seed=config.seed)
        return {"prompt": config.prompt or self.tokenizer.decode(prompt), "text": text}
