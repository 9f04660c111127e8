"""Shows on the console which tokens of an example have a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from narrowgauge.data.batches import IGNORED

if TYPE_CHECKING:
    from rich.text import Text


# Visible signs for control characters, which a terminal would execute. A line end is kept as well.
SIGNS = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {0x7F: "␡", ord("\t"): "→\t", ord("\n"): "↵\n"}
)


def coloured_sample(
    tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int] | None, *, tokens: int = 200
) -> Text:
    """The first `tokens` tokens as rich Text: green with a loss, dim without, reversed if special.

    labels  as in an `Examples` item; None: no token has a loss

    Bars separate tokens. Double brackets mark tokens with a loss in logs without colours. A
    byte-level token that is part of a character shows as U+FFFD. rich comes with
    narrowgauge[train].
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
            text.append("|", "dim")
        style = ("bold green" if learnt else "dim") + (" reverse" if int(id) in special else "")
        text.append(tokenizer.decode([int(id)]).translate(SIGNS), style)
        learning = learnt
    if text.plain.endswith("\n"):
        text.right_crop(1)  # the caller's print adds a line end
    if learning:
        text.append("⟧", "bold")
    if len(shown) < len(input_ids):
        text.append(f" ... {len(input_ids) - len(shown)} more", "dim")
    return text
