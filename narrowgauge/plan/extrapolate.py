"""Extrapolate the moments of a deep model from two shallow models with the same blocks.

Between the first two and the last two blocks, the memory of a phase grows by the same amount with
each block:

    phase(n) = phase(3) + (n - 3) (phase(4) - phase(3))

The phases are forward, head, backward and step, the first two blocks and the last two.

The peak of the deep model is the largest phase. Extrapolating the peak itself fails: it moves from
the head to the optimizer's step as a model gets deeper (-27 % in one case). With 2 and 3 layers the
first and the last block would be neighbours (-2.7 %).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from narrowgauge.plan.moments import MemoryMoment, in_order

FEW, MORE = 3, 4  # layers of the traced models
_OF_BLOCK = re.compile(r"(forward|backward) (\d+)( end)?")
# (phase with # in place of the block number; stack; position of the block in it: from the start 0,
# 1, from the end -1, -2).
Place = tuple[str, int, int]


def extrapolated(
    few: list[MemoryMoment], more: list[MemoryMoment], layers: int
) -> list[MemoryMoment]:
    """Return the moments of a model with `layers` blocks in each stack.

    few   moments of a model with FEW blocks
    more  moments of a model with MORE blocks

    Blocks in the middle are interpolated between their neighbours. Raises ValueError if the two
    models have different phases.
    """
    found = []
    for (_, first), (_, second) in zip(in_order(few), in_order(more), strict=True):
        before, after = by_place(first, FEW), by_place(second, MORE)
        if before.keys() != after.keys():
            raise ValueError(
                f"phases of {FEW} and {MORE} layers differ: {sorted(before.keys() ^ after.keys())}"
            )
        at = {place: _on_line(each, after[place], layers) for place, each in before.items()}
        found += [_at(at, name, block, layers) for name, block in _order(second, layers)]
    return found


def by_place(found: Iterable[MemoryMoment], layers: int) -> dict[Place, MemoryMoment]:
    """Return the moments of one micro-batch by place.

    A block may have two places: block 1 of 3 is the second from both ends.
    """
    placed: dict[Place, MemoryMoment] = {}
    for each in found:
        name, number = _split(each.phase)
        if number is None:
            placed[name, 0, 0] = each
            continue
        stack, block = divmod(number, layers)
        placed |= {
            (name, stack, place): each
            for place in (block, block - layers)
            if place in (0, 1, -1, -2)
        }
    return placed


def _split(phase: str) -> tuple[str, int | None]:
    """Return (phase with # in place of the block number, block number)."""
    match = _OF_BLOCK.fullmatch(phase)
    return (phase, None) if match is None else (f"{match[1]} #{match[3] or ''}", int(match[2]))


def _on_line(few: MemoryMoment, more: MemoryMoment, layers: int) -> MemoryMoment:
    return _mixed(few, more, layers - FEW)


def _mixed(first: MemoryMoment, second: MemoryMoment, share: float) -> MemoryMoment:
    """Return first + share (second - first), where share may be outside of 0 to 1."""

    def line(a: int, b: int) -> int:
        return max(0, round(a + share * (b - a)))

    alive = line(first.alive, second.alive)
    parts = {
        kind: line(first.parts.get(kind, 0), second.parts.get(kind, 0))
        for kind in first.parts | second.parts
    }
    # If the two models peak in different operations, a part may become negative and be clipped to
    # zero. The largest part is then adjusted, so that the parts still sum to `alive`.
    if parts:
        largest = max(parts, key=parts.__getitem__)
        parts[largest] += alive - sum(parts.values())
    return replace(
        second,
        alive=alive,
        end=line(first.end, second.end),
        allocated=line(first.allocated, second.allocated),
        parts=parts,
    )


def _order(found: list[MemoryMoment], layers: int) -> Iterator[tuple[str, int | None]]:
    """Yield (phase with # in place of the block number, block) of a deep model.

    The order is the one in a shallow model. Each run of blocks is extended to `layers` blocks.
    """
    last = ("", -1, 0)  # of the current run: direction, stack, block
    names: dict[str, None] = {}

    def run() -> Iterator[tuple[str, int]]:
        way, stack, _ = last
        numbers = range(stack * layers, (stack + 1) * layers)
        for number in numbers if way == "forward" else reversed(numbers):
            yield from ((name, number) for name in names if (name, number) not in skipped)

    # The last block of the model has no "end" phase, because the head follows it.
    stacks = (
        max(
            (number // MORE for each in found if (number := _split(each.phase)[1]) is not None),
            default=0,
        )
        + 1
    )
    skipped = {("forward # end", stacks * layers - 1)}
    for each in found:
        name, number = _split(each.phase)
        here = ("", -1, 0) if number is None else (name.split()[0], number // MORE, number)
        if here[:2] != last[:2]:
            yield from run() if last[0] else ()
            names = {}
        if number is None:
            yield name, None
        names[name] = None
        last = here
    yield from run() if last[0] else ()


def _at(at: dict[Place, MemoryMoment], name: str, number: int | None, layers: int) -> MemoryMoment:
    if number is None:
        return at[name, 0, 0]
    stack, block = divmod(number, layers)
    if block < 2:
        found = at[name, stack, block]
    elif (name, stack, block - layers) in at:
        found = at[name, stack, block - layers]
    else:
        last = at[name, stack, -2]
        found = _mixed(at[name, stack, 1], last, (block - 1) / (layers - 3))
    module = re.sub(r"\.\d+(?=\.|$)", f".{block}", found.module, count=1)
    return replace(found, phase=name.replace("#", str(number)), module=module)
