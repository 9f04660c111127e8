"""Forms of rows that other trainers read, recognized by their columns.

    name      columns                               who reads it
    messages  messages: [{role, content}]           OpenAI, TRL, axolotl ("chat_template")
    ShareGPT  conversations: [{from, value}]        axolotl, LLaMA-Factory, Unsloth
    Alpaca    instruction, input, output            Stanford Alpaca, LLaMA-Factory, axolotl

`turns` converts the turns of the first two; `alpaca_turns` and `alpaca_prompt` those of the third.
Imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import DataError


@dataclass(frozen=True)
class RowForm:
    """A form of rows.

    required  columns that each row has
    optional  columns that a row may have
    words     what a row is read as, for a line on the console
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    words: str


FORMS = (
    RowForm("messages", ("messages",), (), "chats of role and content (OpenAI's form)"),
    RowForm("ShareGPT", ("conversations",), ("system",), "chats of from and value (ShareGPT's form)"),
    RowForm(
        "Alpaca",
        ("instruction", "output"),
        ("input", "system", "history"),
        "instructions, their inputs and answers (Alpaca's form)",
    ),
)  # fmt: skip
# Speakers of ShareGPT's form and its relatives -> roles of chat templates
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# github.com/tatsu-lab/stanford_alpaca, train.py, for models without a chat template.
_BEGIN = "Below is an instruction that describes a task"
_END = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    f"{_BEGIN}, paired with an input that provides further context. {_END}"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = f"{_BEGIN}. {_END}### Instruction:\n{{instruction}}\n\n### Response:\n"


def form_of(columns: Collection[str]) -> RowForm | None:
    """The form of a table with these columns, or None."""
    return next((each for each in FORMS if {*each.required} <= {*columns}), None)


def turns(chat: Any, origin: str) -> Any:
    """Messages of role and content, from those or from ShareGPT's; other values as they are.

    Parts of a content are joined if they are texts. Raises DataError for a speaker that is not
    known, a part that is no text, and weights of turns.
    """
    if not isinstance(chat, list) or not all(isinstance(turn, Mapping) for turn in chat):
        return chat
    return [_turn(turn, f"{origin}: message {number}") for number, turn in enumerate(chat)]


def _turn(turn: Mapping[str, Any], place: str) -> dict[str, Any]:
    found = dict(turn)
    if "from" in found and "role" not in found:
        speaker = str(found.pop("from"))
        if speaker.lower() not in ROLES:
            raise DataError(
                f"{place} is from {speaker!r}, which is none of {', '.join(ROLES)}. Rename the speaker, or remove the row.",
                code="chat.speaker",
            )
        found["role"] = ROLES[speaker.lower()]
        if "value" in found:
            found["content"] = found.pop("value")
    if found.get("weight", 1) not in (1, None):
        raise DataError(
            f"{place} has the weight {found['weight']}, and turns are learnt alike here. Remove the key, or split the chat so that its "
            "last answer is what is learnt (task.train_on = 'last').",
            code="chat.weight",
        )
    if isinstance(found.get("content"), list):
        found["content"] = "".join(_text_of(part, place) for part in found["content"])
    return found


def _text_of(part: Any, place: str) -> str:
    # A template would write the list itself, with its braces.
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(
        f"{place} has a part of the kind {kind!r}, and texts alone are learnt. Remove the row, or keep its texts.",
        code="chat.part",
    )


def alpaca_turns(row: Mapping[str, Any], origin: str) -> list[dict[str, Any]]:
    """A row of Alpaca's form as messages: the system's text, earlier turns, instruction, answer."""
    asked = "\n".join(
        filter(None, (_cell(row, "instruction", origin), _cell(row, "input", origin)))
    )
    system = _cell(row, "system", origin)
    found = [{"role": "system", "content": system}] if system else []
    for question, answer in _history(row, origin):
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    answer = _cell(row, "output", origin)
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def alpaca_prompt(row: Mapping[str, Any], origin: str) -> str:
    """A row of Alpaca's form as Stanford's prompt, for a tokenizer without a chat template.

    Raises DataError for a system's text or earlier turns, which that prompt has no place for.
    """
    if _cell(row, "system", origin) or _history(row, origin):
        raise DataError(
            f"{origin}: 'system' or 'history' needs a chat template, and the tokenizer has none. Use a chat model's tokenizer, or "
            "remove them.",
            code="chat.no-template",
        )
    instruction, context = _cell(row, "instruction", origin), _cell(row, "input", origin)
    if context:
        return WITH_INPUT.format(instruction=instruction, input=context)
    return WITHOUT_INPUT.format(instruction=instruction)


def _cell(row: Mapping[str, Any], column: str, origin: str) -> str:
    """Text of a column, '' where a row has none."""
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{origin}: column {column!r} holds {type(value).__name__}, not a string. Correct the row or remove it.",
            code="table.cell",
        )
    return value


def _history(row: Mapping[str, Any], origin: str) -> list[tuple[str, str]]:
    """Earlier pairs of instruction and answer, as LLaMA-Factory writes them."""
    found = row.get("history") or []
    if not isinstance(found, Sequence) or isinstance(found, str):
        found = [None]
    for pair in found:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise DataError(
                f"{origin}: 'history' holds something else than pairs of texts. Write [[instruction, answer], ...], or remove it.",
                code="chat.history",
            )
    return [(pair[0], pair[1]) for pair in found]
