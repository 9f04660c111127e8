"""Rows of other trainers' forms become the same chats and prompts (exact)."""

import pytest

from narrowgauge.data import row_forms
from narrowgauge.errors import DataError
from tests.raising import raises

ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["id", "messages"], "messages"),
        (["conversations", "source"], "ShareGPT"),
        (["instruction", "input", "output"], "Alpaca"),
        (["instruction", "output"], "Alpaca"),
        (["instruction", "response"], None),
        ([], None),
    ],
)
def test_a_form_is_recognized_by_its_columns(columns, name):
    assert getattr(row_forms.form_of(columns), "name", None) == name


def test_turns_of_both_forms_are_the_same_messages():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "tool", "content": "3"},
    ]
    speakers = ("system", "human", "gpt", "observation")
    shared = [
        {"from": speaker, "value": turn["content"]}
        for speaker, turn in zip(speakers, messages, strict=True)
    ]
    assert row_forms.turns(shared, "a:1") == row_forms.turns(messages, "a:1") == messages
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, " you"]}]
    assert row_forms.turns(parts, "a:1") == [{"role": "user", "content": "Hi you"}]


@pytest.mark.parametrize("value", [None, "text", 3, ["text"], [None]])
def test_what_is_no_list_of_turns_is_left_to_the_check_of_messages(value):
    assert row_forms.turns(value, "a:1") is value


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        ({"from": "narrator", "value": "x"}, "chat.speaker"),
        ({"from": None, "value": "x"}, "chat.speaker"),
        ({"role": "assistant", "content": "x", "weight": 0}, "chat.weight"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "chat.part"),
        ({"role": "user", "content": [3]}, "chat.part"),
    ],
)
def test_a_turn_that_means_something_else_is_refused(turn, code):
    with raises(DataError, code, "a:1: message 1"):
        row_forms.turns([{"role": "user", "content": "x"}, turn], "a:1")


def test_an_instruction_is_a_chat_or_stanfords_prompt():
    assert row_forms.alpaca_turns(ALPACA, "a:1") == [
        {"role": "user", "content": "Add.\n2 and 2"},
        {"role": "assistant", "content": "4"},
    ]
    whole = ALPACA | {"input": None, "system": "Count.", "history": [["1 and 1", "2"]]}
    found = row_forms.alpaca_turns(whole, "a:1")
    assert [turn["content"] for turn in found] == ["Count.", "1 and 1", "2", "Add.", "4"]
    assert row_forms.alpaca_prompt(ALPACA, "a:1").endswith(
        "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n"
    )
    without = row_forms.alpaca_prompt(ALPACA | {"input": ""}, "a:1")
    assert "Input" not in without and "paired" not in without


def test_braces_of_an_instruction_stay():
    row = ALPACA | {"instruction": "Print {input}.", "input": "{x}"}
    assert "Print {input}." in row_forms.alpaca_prompt(row, "a:1")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"instruction": 3}, "table.cell"),
        ({"history": "x"}, "chat.history"),
        ({"history": [["a"]]}, "chat.history"),
        ({"history": [["a", 3]]}, "chat.history"),
    ],
)
def test_a_cell_of_another_kind_is_refused(changes, code):
    for read in (row_forms.alpaca_turns, row_forms.alpaca_prompt):
        with raises(DataError, code, "a:1"):
            read(ALPACA | changes, "a:1")


@pytest.mark.parametrize("changes", [{"system": "x"}, {"history": [["a", "b"]]}])
def test_stanfords_prompt_has_no_place_for_earlier_turns(changes):
    with raises(DataError, "chat.no-template", "a:1"):
        row_forms.alpaca_prompt(ALPACA | changes, "a:1")
