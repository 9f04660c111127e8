"""Shows an example on the console as the model sees it: its tokens, and which of them have a loss."""

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
    """The first `tokens` tokens as a rich Text: green with a loss, dim without, special tokens reversed, borders between.

    Double brackets around tokens with a loss show them in a log without colours. labels as in an `Examples` item; None means no
    loss. A byte-level token that is half a character shows as U+FFFD. rich comes with narrowgauge[train].
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
        text.append(tokenizer.decode([int(id)]).translate(SIGNS), style)
        learning = learnt
    if text.plain.endswith("\n"):
        text.right_crop(1)  # the caller's print adds a line end
    if learning:
        text.append("⟧", "bold")
    if len(shown) < len(input_ids):
        text.append(f" ... {len(input_ids) - len(shown)} more", "dim")
    return text


# Control characters as visible signs, because a terminal would obey them; a line end also stays as it is.
SIGNS = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {0x7F: "␡", ord("\t"): "→\t", ord("\n"): "↵\n"}
)
