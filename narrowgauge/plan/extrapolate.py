"""The moments of a deep model from those of two shallow ones that are alike in everything else.

What is alive in a phase grows by the same amount with each block between the first two and the last two:

    phase(n) = phase(3) + (n - 3) (phase(4) - phase(3))        forward, head, backward, step; the first two blocks; the last two

and the peak of the whole is the largest of them. The peak itself would not do: it moves from the head to the optimizer's step as a
model gets deeper (-27 % in one case). From 2 and 3 layers the first block and the last would be neighbours (-2.7 %).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from narrowgauge.plan.moments import Moment, in_order

FEW, MORE = 3, 4  # layers that are counted
_OF_BLOCK = re.compile(r"(forward|backward) (\d+)( end)?")
Place = tuple[
    str, int
]  # the phase with # for its block; the block from the start (0, 1) or, below 0, from the end (-1, -2)


def extrapolated(few: list[Moment], more: list[Moment], layers: int) -> list[Moment]:
    """The moments of a model of `layers` blocks; those of blocks in the middle lie on the line between their neighbours'."""
    found = []
    for (_, first), (_, second) in zip(in_order(few), in_order(more), strict=True):
        at = {
            place: _on_line(each, by_place(second, MORE)[place], layers) for place, each in by_place(first, FEW).items()
        }
        for place in _order(second, layers):
            found.append(_renamed(at, place, layers))
    return found


def by_place(found: Iterable[Moment], layers: int) -> dict[Place, Moment]:
    """The moments of one micro-batch; block 1 of 3 is the second from either side."""
    placed: dict[Place, Moment] = {}
    for each in found:
        match = _OF_BLOCK.fullmatch(each.phase)
        if match is None:
            placed[each.phase, 0] = each
            continue
        block, name = int(match[2]), f"{match[1]} #{match[3] or ''}"
        for place in (block, block - layers):
            if place in (0, 1, -1, -2):
                placed[name, place] = each
    return placed


def alike(more: list[Moment], few: list[Moment]) -> bool:
    """Whether both have the same phases, so that they can be compared place by place."""
    pairs = zip(in_order(few), in_order(more), strict=False)
    return all(by_place(first, FEW).keys() == by_place(second, MORE).keys() for (_, first), (_, second) in pairs)


def _on_line(few: Moment, more: Moment, layers: int) -> Moment:
    def line(first: int, second: int) -> int:
        return max(0, first + (layers - FEW) * (second - first))

    kinds = few.parts.keys() | more.parts.keys()
    return replace(
        more,
        alive=line(few.alive, more.alive),
        end=line(few.end, more.end),
        allocated=line(few.allocated, more.allocated),
        reserved=line(few.reserved, more.reserved),
        parts={kind: line(few.parts.get(kind, 0), more.parts.get(kind, 0)) for kind in kinds},
    )


def _order(found: list[Moment], layers: int) -> Iterable[tuple[str, int | None]]:
    """(the phase with # for its block, the block) of a deep model, in the order of the shallow one."""
    forward = [each for each in found if each.phase.startswith("forward ")]
    for each in found:
        match = _OF_BLOCK.fullmatch(each.phase)
        if match is None:
            yield each.phase, None
        elif each is forward[0]:
            names = dict.fromkeys(f"forward #{_OF_BLOCK.fullmatch(one.phase)[3] or ''}" for one in forward)  # type: ignore[index]
            for block in range(layers):
                for name in names:
                    if not (block == layers - 1 and name.endswith("end")):
                        yield name, block
        elif match[1] == "backward" and int(match[2]) == MORE - 1:
            for block in reversed(range(layers)):
                yield "backward #", block


def _renamed(at: dict[Place, Moment], place: tuple[str, int | None], layers: int) -> Moment:
    name, block = place
    if block is None:
        return at[name, 0]
    phase = name.replace("#", str(block))
    if block < 2:
        found = at[name, block]
    elif block >= layers - 2:
        found = at[name, block - layers]
    else:
        found = _between(at[name, 1], at[name, -2] if (name, -2) in at else at[name, 1], (block - 1) / (layers - 3))
    module = re.sub(r"\.\d+(?=\.|$)", f".{block}", found.module, count=1)
    return replace(found, phase=phase, module=module)


def _between(first: Moment, second: Moment, share: float) -> Moment:
    def mixed(a: int, b: int) -> int:
        return int(a + share * (b - a))

    kinds = first.parts.keys() | second.parts.keys()
    return replace(
        first,
        alive=mixed(first.alive, second.alive),
        end=mixed(first.end, second.end),
        allocated=mixed(first.allocated, second.allocated),
        reserved=mixed(first.reserved, second.reserved),
        parts={kind: mixed(first.parts.get(kind, 0), second.parts.get(kind, 0)) for kind in kinds},
    )
