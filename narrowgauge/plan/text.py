"""Render an answer of the planner as text.

The text has sizes, parts, the verdict, and changes that make the step fit. An answer is the
dictionary that `narrowgauge plan --json` prints, in JSON types, with sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

GIB = 2**30
MOST_KINDS = 8
PART_WORDS = {
    "weights": "weights",
    "codes": "codes of weights",
    "gradients": "gradients",
    "states": "optimizer's states",
    "saved": "saved for backward",
    "head": "logits and loss",
    "batch": "batch",
    "transient": "at work",
}
PHASE_WORDS = {"head": "logits and loss", "step": "optimizer's step"}


def rendered(answer: Mapping[str, Any]) -> str:
    lines = [*_heading(answer), "", *_sizes(answer), "", *_parts(answer)]
    for section in (
        _time(answer),
        _fitting(answer),
        _changes(answer),
        _table(answer),
        _measured(answer),
    ):
        found = list(section)
        lines += ["", *found] if found else []
    notes = [f"Note: {note}." for note in answer["notes"]]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def gib(nbytes: float) -> str:
    """Return "73.14 GiB", or MiB below one GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Yield rows with columns two spaces apart; the first `left` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _heading(answer: Mapping[str, Any]) -> Iterator[str]:
    batch, card = answer.get("batch"), answer["card"]
    shape = f", micro-batches of {batch['rows']} x {batch['width']:,} tokens" if batch else ""
    yield f"{answer['run']}{shape}"
    if card["usable_bytes"]:
        yield f"on {card['name']}: {gib(card['usable_bytes'])} of {gib(card['memory_bytes'])} can be used"
    else:
        yield f"on {card['name']}; name a card or its memory (--card h100, --memory 24GiB) to learn whether it fits"


def _sizes(answer: Mapping[str, Any]) -> Iterator[str]:
    peak = answer["peak"]
    at = f", in {peak['module']}" if peak["module"] else ""
    yield from aligned(
        [
            [
                "peak allocated",
                gib(answer["allocated_bytes"]),
                f"± {100 * answer['allocated_error']:.1f} %",
            ],
            [
                "peak reserved",
                gib(answer["reserved_bytes"]),
                f"± {100 * answer['reserved_error']:.0f} %",
            ],
        ]
    )
    yield f"The peak stands in step {peak['step']}, {_phase(peak['phase'])}{at}. Counted: {answer['counted']}."
    yield answer["verdict"]


def _phase(name: str) -> str:
    """Describe a phase such as "backward 0" in words."""
    phase, _, block = name.removesuffix(" end").partition(" ")
    return PHASE_WORDS.get(phase, phase) + (f" of block {block}" if block else "")


def _parts(answer: Mapping[str, Any]) -> Iterator[str]:
    total = sum(answer["parts"].values()) or 1
    rows = [["at the peak", "size", "share"]]
    rows += [
        [PART_WORDS[part], gib(size), f"{100 * size / total:.1f} %"]
        for part, size in answer["parts"].items()
        if size
    ]
    yield from aligned(rows)
    kinds = list(answer["saved"].items())
    if kinds:
        shown, rest = kinds[:MOST_KINDS], kinds[MOST_KINDS:]
        rows = [
            ["saved by a forward pass, by module", "size"],
            *([kind, gib(size)] for kind, size in shown),
        ]
        if rest:
            rows.append([f"{len(rest)} others", gib(sum(size for _, size in rest))])
        yield ""
        yield from aligned(rows)


def _time(answer: Mapping[str, Any]) -> Iterator[str]:
    yield from answer.get("time", {}).get("lines", ())
    if wide := answer.get("wide"):
        low, high = wide["times_as_fast"]
        yield (
            f"Without low precision ({wide['precision']}): {wide['seconds']:.3g} s and {gib(wide['allocated_bytes'])}. "
            f"This recipe's step is likely {low:.2f} to {high:.2f} times as fast."
        )


def _fitting(answer: Mapping[str, Any]) -> Iterator[str]:
    if (found := answer.get("largest")) is not None:
        if found["rows"]:
            yield f"Largest micro-batch that fits: {found['rows']} x {found['width']:,} = {found['tokens']:,} tokens."
        else:
            yield f"Not even one row of {found['width']:,} tokens fits."


def _changes(answer: Mapping[str, Any]) -> Iterator[str]:
    changes = answer.get("changes", [])
    if not changes:
        return
    yield "What makes it fit, the cheapest first, with lines for the settings file in place of what it says of their keys:"
    for number, each in enumerate(changes, 1):
        yield f"{number}. {gib(each['allocated_bytes'])}: {each['words']}"
        yield from (f"     {line}" for line in each["lines"])


def _table(answer: Mapping[str, Any]) -> Iterator[str]:
    rows = answer.get("table", [])
    if not rows:
        return
    yield "Each row has what the rows above it have, and:"
    cells = [
        [row["name"], gib(row["allocated_bytes"]), row["settings"], row["words"]] for row in rows
    ]
    yield from _left([["step", "peak", "setting", "what it costs and changes"], *cells])


def _left(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    return aligned(rows, left=len(rows[0]))


def _measured(answer: Mapping[str, Any]) -> Iterator[str]:
    found = answer.get("measured")
    if found:
        yield (
            f"Measured, two steps on {found['device']}: {gib(found['allocated_bytes'])} allocated; planned for it "
            f"{gib(found['planned_bytes'])}, {100 * found['error']:+.2f} %."
        )
