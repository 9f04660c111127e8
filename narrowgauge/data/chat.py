"""Finds the character spans of a rendered chat that the assistant wrote.

The tokenizer's own template renders the text. There are two ways to find the answers:

    template with {% generation %} marks    the text between the marks
    any other template                      answer i lies between  render(messages[:i], with the
                                            generation prompt)  and  render(messages[:i + 1]), if
                                            both are prefixes of the whole text

The second way fails for templates that render an answer differently once more turns follow, such as
those that drop earlier reasoning. Such a turn is refused, and train_on="last" still works. An
answer includes the token that ends the turn, because the model must learn to write it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from narrowgauge.data.text import reason
from narrowgauge.errors import ConfigError, DataError

Span = tuple[int, int]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template. Raises ConfigError if it has none."""
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{tokenizer.name_or_path or type(tokenizer).__name__}: no chat template: {reason(error)} "
            "Use a chat model's tokenizer, set tokenizer.chat_template, or give prompts and completions.",
            code="chat.no-template",
        ) from None


def check_messages(messages: Any, origin: str) -> list[dict[str, Any]]:
    """Returns `messages` after checking them.

    Raises DataError unless it is a list of turns with roles and at least one answer of the
    assistant.
    """
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise DataError(
            f'{origin}: messages hold {type(messages).__name__}, not a list of {{"role": ..., "content": ...}}. Write JSONL or Parquet.',
            code="chat.messages",
        )
    for number, turn in enumerate(messages):
        # Templates index turns by role and would raise an obscure Jinja error.
        if not isinstance(turn.get("role"), str):
            raise DataError(
                f"{origin}: message {number} has no role. Give each message a role and a content.",
                code="chat.no-role",
            )
        if (
            turn["role"] == "assistant"
            and turn.get("content") is None
            and not turn.get("tool_calls")
        ):
            raise DataError(
                f"{origin}: message {number} is an answer without content, which teaches ending the turn at once. Add it, or "
                "remove the row.",
                code="chat.empty-answer",
            )
    if not any(turn["role"] == "assistant" for turn in messages):
        raise DataError(
            f"{origin}: no message has the role 'assistant', so there is nothing to learn. Remove the row.",
            code="chat.no-answer",
        )
    return messages


def answers(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    origin: str,
    train_on: Literal["answers", "last"] = "answers",
) -> tuple[str, list[Span]]:
    """Returns (text, character spans of the assistant's answers) of one chat.

    train_on  "answers" for all answers, "last" for the last one

    The template is rendered once, and twice more per answer if it has no marks. Raises DataError if
    the template rejects the messages, or renders an answer differently once more turns follow.
    """
    if _MARKS.search(chat_template(tokenizer)):
        text, spans = _rendered(tokenizer, messages, origin, marked=True)
        return text, spans[-1:] if train_on == "last" else spans
    text, spans = _rendered(tokenizer, messages, origin)
    turns = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
    for turn in turns[-1:] if train_on == "last" else turns:
        before, _ = _rendered(tokenizer, messages[:turn], origin, prompt=True)
        through = (
            text
            if turn == len(messages) - 1
            else _rendered(tokenizer, messages[: turn + 1], origin)[0]
        )
        # Both prefixes must match, or the span would cover other characters than the answer.
        if not (
            text.startswith(before) and text.startswith(through) and len(before) < len(through)
        ):
            raise DataError(
                f"{origin}: the chat template renders answer {turn} differently once more turns follow. Pass train_on='last', "
                "split the chat into one row per answer, or use a template with {% generation %} marks.",
                code="chat.unstable-template",
            )
        spans.append((len(before), len(through)))
    return text, spans


def prompt(tokenizer: Any, messages: Sequence[dict[str, Any]], origin: str) -> str:
    """Text of a chat up to where the assistant's next answer begins.

    origin  where the messages come from, for errors

    Raises ConfigError without a template, DataError if it rejects the messages.
    """
    chat_template(tokenizer)
    return _rendered(tokenizer, messages, origin, prompt=True)[0]


def _rendered(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    origin: str,
    *,
    prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[Span]]:
    """Returns (rendered text, spans between the template's marks).

    prompt  add the generation prompt
    marked  collect the spans of {% generation %} marks; else the list is empty
    """
    try:
        if not marked:
            return str(
                tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt
                )
            ), []
        # The public apply_chat_template returns token masks only, not character spans.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            # Parquet fills absent keys with None, and templates test for a key's presence.
            conversations=[
                [
                    {key: value for key, value in turn.items() if value is not None}
                    for turn in messages
                ]
            ],
            chat_template=chat_template(tokenizer),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template can raise anything
        raise DataError(
            f"{origin}: the chat template refuses the messages: {reason(error)} Correct the order and roles of the turns.",
            code="chat.template-refuses",
        ) from error
    return texts[0], [(start, stop) for start, stop in spans[0] if stop > start]
