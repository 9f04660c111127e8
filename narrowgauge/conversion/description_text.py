"""Rows of `describe`, and their text in one screen: what layers have in common is said once.

    fp8-current: emulated exactly in float32 (native: cpu has no FP8 units)
      output       e4m3 tensor fp32 x e4m3 tensor fp32
      grad_input   e5m2 tensor fp32 x e4m3 tensor fp32
      grad_weight  e5m2 tensor fp32 x e4m3 tensor fp32, x kept as codes
        layers.*.attn.{q_proj,o_proj} (8 layers)  128 -> 128
        layers.*.attn.{k_proj,v_proj} (8 layers)  128 -> 64

A line stands for all layers that differ by block number alone, and by the last part of their name.
`*` stands for every block of the model; where only some have the line, it names them: "layers.0-2".
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from narrowgauge.fuse.forward import OWN_CODE

if TYPE_CHECKING:
    from narrowgauge.fuse import Fusion

WIDTH = 100  # columns
NOT_FUSED = "Not fused"
GEMMS = ("output", "grad_input", "grad_weight")
# A dotted name that begins with a letter: neither "0.5" nor "heads of 96" is one.
NAME = re.compile(r"\b[A-Za-z_]\w*(?:\.\w+)+\b")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Note(NamedTuple):
    """A remark, possibly with values that layers measured. Prints the smallest and largest value.

    words     text before the values
    after     text after the values
    readings  measured values of one or several layers
    code      cause of the remark, for programs and tests
    """

    words: str
    after: str = ""
    readings: tuple[float, ...] = ()
    code: str = ""

    @classmethod
    def of(cls, reason: str) -> Note:
        """A remark without values, with the reason's code if it has one."""
        return cls(str(reason), code=getattr(reason, "code", ""))

    def __str__(self) -> str:
        if not self.readings:
            return self.words
        low, high = f"{min(self.readings):.2g}", f"{max(self.readings):.2g}"
        return self.words + (low if low == high else f"{low} to {high}") + self.after

    def without_readings(self) -> Note:
        return self._replace(readings=())

    @staticmethod
    def spanning(notes: Sequence[Note]) -> Note:
        """Merge notes that are equal except for their readings."""
        return notes[0]._replace(
            readings=tuple(reading for note in notes for reading in note.readings)
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One Linear of a model, or a weight that is multiplied as one.

    shape                             "in -> out"; experts in one parameter: "count experts of rows
                                      x columns"
    output, grad_input, grad_weight   the casts of each GEMM, as text
    backend                           the kernel of each GEMM, and why no faster one is used
    sends                             data that ranks exchange for it (`distribute`): format, bytes,
                                      and why not fewer
    notes                             reasons for keeping its precision, and other remarks; `note`
                                      joins them
    emulated                          True if a GEMM with quantized operands multiplies in a wider
                                      dtype
    """

    name: str
    shape: str
    recipe: str
    output: str
    grad_input: str
    grad_weight: str
    backend: str
    notes: tuple[Note, ...]
    sends: str = ""
    emulated: bool = False

    @property
    def note(self) -> str:
        return ", ".join(map(str, self.notes))

    @property
    def weights(self) -> int:
        """Number of weights, from the shape; 0 if it is not known."""
        matrices = (re.findall(r"\d+", matrix) for matrix in self.shape.split(", "))
        return sum(math.prod(map(int, sizes)) for sizes in matrices if sizes)

    def columns(self) -> dict[str, str]:
        """All columns as text, as a run stores them (docs/architecture.md)."""
        words = {
            field.name: getattr(self, field.name) for field in fields(self) if field.type == "str"
        }
        return words | {"note": self.note}


def pattern_of(name: str) -> str:
    """Replace the block numbers of a module's name by `*`: "layers.3.mlp" -> "layers.*.mlp"."""
    return re.sub(r"\b\d+\b", "*", name)


def without_block_numbers(sentence: str) -> str:
    """Replace the block numbers of the names in a sentence by `*`; other numbers stay."""
    return NAME.sub(lambda found: pattern_of(found[0]), sentence)


def braced(names: Iterable[str]) -> str:
    """Join names, those with one parent as "parent.{a,b}"."""
    by_parent: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        parent, dot, last = name.rpartition(".")
        by_parent.setdefault(parent + dot, []).append(last)
    return ", ".join(
        parent + (lasts[0] if len(lasts) == 1 else f"{{{','.join(lasts)}}}")
        for parent, lasts in by_parent.items()
    )


def spelled(names: Sequence[str], everything: Collection[str]) -> str:
    """One pattern for names that differ by numbers alone.

    everything  all names that are described. `*` replaces the numbers if `names` are all that match the pattern;
                else they are spelled out, "layers.0-2,5.mlp", if they differ at one place
    """
    if len(names) == 1:
        return names[0]
    is_whole = {*names} == {each for each in everything if pattern_of(each) == pattern_of(names[0])}
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    varying = [place for place, parts in enumerate(columns) if len({*parts}) > 1]
    if is_whole or len(varying) != 1:
        return pattern_of(names[0])
    numbers = sorted({int(part) for part in columns[varying[0]]})
    parts = names[0].split(".")
    parts[varying[0]] = ",".join(ranges(numbers))
    return ".".join(parts)


def ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Spell sorted numbers: [0, 1, 2, 5] -> "0-2", "5"."""
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number


def grouped(items: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Key -> its values, in the order of the first of each."""
    found: dict[K, list[T]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found


def wrapped(line: str, indent: int) -> list[str]:
    """Break a line at WIDTH. indent: spaces before its first line; the others have four more."""
    return textwrap.wrap(
        line, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# --- Layers ---


def lines_of_layers(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a section for each recipe with its casts and kernels, then the layers without one."""
    sections = grouped((_section(row), row) for row in rows)
    for section, members in sorted(sections.items(), key=lambda item: not item[0]):
        shared = _shared_notes(members)
        if section:
            recipe, backend, *casts, sends = section
            yield from wrapped(f"{recipe}: {backend}", 0)
            said = zip((*GEMMS, "sends", "note"), (*casts, sends, "; ".join(shared)), strict=True)
            for title, words in said:
                yield from wrapped(f"{title:11}  {words}", 2) if words else ()
        else:
            because = f" ({'; '.join(shared)})" if shared else ""
            yield from wrapped(f"Without a recipe{because}:", 0)
        yield from _layers(members, [row.name for row in rows], shared, 4 if section else 2)


def _shared_notes(rows: Sequence[Row]) -> list[str]:
    """Return the notes that all rows have. A note with readings stays in its line."""
    if len({pattern_of(row.name) for row in rows}) < 2:
        return []
    notes = [note for note in rows[0].notes if not note.readings]
    return [str(note) for note in notes if all(note in row.notes for row in rows)]


def _section(row: Row) -> tuple[str, ...]:
    """Return the columns that the heading prints; () without a recipe."""
    if row.recipe == "none":
        return ()
    return row.recipe, row.backend, row.output, row.grad_input, row.grad_weight, row.sends


def _line(row: Row) -> tuple[Hashable, ...]:
    """Return the columns that a line prints beside the names."""
    return row.shape, tuple(note.without_readings() for note in row.notes)


def _layers(
    rows: Sequence[Row], everything: Collection[str], shared: Sequence[str], indent: int
) -> Iterator[str]:
    alike = grouped(
        ((pattern_of(row.name), _line(row)), row) for row in rows
    )  # rows that differ by block number and readings
    spellings = {
        key: spelled([row.name for row in members], everything) for key, members in alike.items()
    }
    siblings = grouped(
        ((spellings[key].rpartition(".")[0], key[1]), key) for key in alike
    )  # those with one parent
    for keys in siblings.values():
        members = [row for key in keys for row in alike[key]]
        names = braced(spellings[key] for key in keys)
        number = f" ({len(members)} layers)" if len(members) > 1 else ""
        several = [
            each[0].spanning(each) for each in zip(*(row.notes for row in members), strict=True)
        ]
        notes = ", ".join(words for words in map(str, several) if words not in shared)
        said = f"{names}{number}  {members[0].shape}" + (f"  ({notes})" if notes else "")
        yield from wrapped(said, indent)


def total(rows: Sequence[Row]) -> str:
    """Count the layers and their weights by recipe, in a sentence."""
    everything = sum(row.weights for row in rows)
    parts = []
    by_recipe = grouped((row.recipe, row) for row in rows)
    for recipe, members in sorted(by_recipe.items(), key=lambda item: item[0] == "none"):
        what = "without a recipe" if recipe == "none" else f"in {recipe}"
        weights = sum(row.weights for row in members)
        share = f" ({_percent(weights, everything)})" if everything else ""
        parts.append(f"{len(members)} {what}{share}")
    emulated = sum(row.emulated for row in rows)
    slow = f" {emulated} emulated, no faster than 16 bits." if emulated else ""
    unit = "layer" if len(rows) == 1 else "layers"
    return f"Total: {len(rows)} {unit}, {everything:,} weights: {', '.join(parts)}.{slow}"


def _percent(part: int, whole: int) -> str:
    """A share in percent; 100 % and 0 % are exact."""
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if 99.9 < percent < 100 else f"{percent:.3g} %"


# --- Fused functions ---


def lines_of_fusions(fused: Sequence[Fusion]) -> Iterator[str]:
    """Yield the fused functions by the kernel that computes them, and the others with the reason."""
    alike = grouped((_fusion_key(each), each) for each in fused)
    everything = [each.name for each in fused]
    headings = grouped((key[0], (key, members)) for key, members in alike.items())
    for heading, groups in sorted(headings.items(), key=lambda item: item[0] == NOT_FUSED):
        spellings = grouped(
            (key[2:], _named(members, everything)) for key, members in groups
        )  # functions with one reason share a line
        said = [
            f"{braced(names)}{readers}{reason}" for (readers, reason), names in spellings.items()
        ]
        joined = f"{heading}: {'; '.join(said)}"
        if len(joined) <= WIDTH:
            yield joined
            continue
        yield f"{heading}:"
        for words in said:
            yield from wrapped(words, 2)


def not_fused(fused: Sequence[Fusion]) -> list[str]:
    """Lines on the functions that were left as they are, and why; [] if there are none."""
    lines = [*lines_of_fusions(fused)]
    begins = [place for place, line in enumerate(lines) if line.startswith(f"{NOT_FUSED}:")]
    return lines[begins[0] :] if begins else []


def _title(fusion: Fusion) -> str:
    return f"{pattern_of(fusion.name)} {fusion.function}"


def _fusion_key(fusion: Fusion) -> tuple[str, str, str, str]:
    """(heading, name, readers, reason): functions with one key share a line."""
    heading, reason = NOT_FUSED, without_block_numbers(fusion.reason)
    if not reason and fusion.backend.startswith(OWN_CODE):
        reason = fusion.backend.removeprefix(f"{OWN_CODE} (").removesuffix(")")
    elif not reason:
        saved = f"; {fusion.saved}" if fusion.saved else ""
        heading = f"Fused by {fusion.backend}{saved}"
    readers = braced(_reader(fusion.name, each) for each in fusion.readers)
    to = f" -> {readers}" if readers and not reason else ""
    return heading, _title(fusion), to, f" ({reason})" if reason else ""


def _reader(name: str, reader: str) -> str:
    """Name of a reader from the block of `name` on, if it is in the same block."""
    owner = name.split(".")
    while owner:
        prefix = ".".join(owner) + "."
        if reader.startswith(prefix):
            return pattern_of(reader.removeprefix(prefix))
        if owner[-1].isdecimal():
            break
        owner.pop()
    return pattern_of(reader)


def _named(members: Sequence[Fusion], everything: Collection[str]) -> str:
    """Name and function of fusions with one key, and the share of their casts that nobody read."""
    names, function = spelled([each.name for each in members], everything), members[0].function
    unused = max(each.unused_cast_share or 0.0 for each in members)
    lost = f", {unused:.0%} of its casts read by nobody" if unused else ""
    return names + (f" ({function}{lost})" if function else "")
