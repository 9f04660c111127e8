"""An example as the model sees it, for the console: which tokens, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.data.batches import IGNORED

if TYPE_CHECKING:
    from rich.text import Text

LEARNT, SEEN, SPECIAL = "bold green", "dim", "reverse"
BORDER = "|"


def coloured_sample(
    tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int] | None, *, tokens: int = 200
) -> Text:
    """The first `tokens` tokens, a border between them, as a rich Text: green is learnt, dim is only seen, special reversed.

    Learnt runs also stand in double brackets, so that a log without colours shows them. No line end stands at its end: whoever
    prints it adds the one. labels as in an `Examples` item; None
    colours none. A byte-level token that is half a character shows as U+FFFD. rich comes with narrowgauge[train].
    """
    from rich.text import Text

    special = set(tokenizer.all_special_ids)
    text, learning = Text(), False
    shown = list(input_ids[:tokens])
    for place, id in enumerate(shown):
        learnt = labels is not None and int(labels[place]) != IGNORED
        if learnt != learning:
            text.append("⟦" if learnt else "⟧", "bold")
        elif place:
            text.append(BORDER, "dim")
        style = f"{LEARNT if learnt else SEEN}{' ' + SPECIAL if int(id) in special else ''}"
        text.append(_visible(tokenizer.decode([int(id)])), style)
        learning = learnt
    if text.plain.endswith("\n"):
        text.right_crop(1)  # its sign stays
    if learning:
        text.append("⟧", "bold")
    if len(shown) < len(input_ids):
        text.append(f" ... {len(input_ids) - len(shown)} more", "dim")
    return text


# Line ends and tabs as signs, with the line end kept behind its sign; other control characters, which a terminal would obey
# (ESC begins its commands), as their pictures, and those above 127 as escapes.
SIGNS = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {0x7F: "␡", ord("\t"): "→\t", ord("\n"): "↵\n"}
)


def _visible(token: str) -> str:
    return token.translate(SIGNS)
