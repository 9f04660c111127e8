"""describe: say of each Linear of a model what it became and why.

print(describe(model))       equal layers share a line; `describe(model)` itself is a list of rows
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import nn

from narrowgauge.addresses import holds_numbers
from narrowgauge.conversion import is_read_by_owner, output_head, reason_to_keep
from narrowgauge.fuse import Fusion, fusions
from narrowgauge.nn.leverage_score import UNREAD
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.hadamard import rotated_length
from narrowgauge.ops.mm import plan, why_emulated
from narrowgauge.ops.mm.cublas import ALIGNMENT
from narrowgauge.recipe import GEMMS, Gemm, Recipe
from narrowgauge.structure import other_weights


class Note(NamedTuple):
    """Words, or words around a reading: what a layer measured, not what it is, from the lowest to the highest of several layers."""

    words: str
    low: float | None = None
    high: float | None = None
    after: str = ""

    def __str__(self) -> str:
        if self.low is None:
            return self.words
        low, high = f"{self.low:.2g}", f"{self.high:.2g}"
        return self.words + (low if low == high else f"{low} to {high}") + self.after

    def without_reading(self) -> Note:
        return self._replace(low=None, high=None)

    @staticmethod
    def spanning(notes: Sequence[Note]) -> Note:
        """One for notes that are equal but for their readings."""
        lows, highs = [
            [x for x in column if x is not None] for column in zip(*((n.low, n.high) for n in notes), strict=True)
        ]
        return notes[0]._replace(low=min(lows), high=max(highs)) if lows else notes[0]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One Linear of a model, or a weight that is multiplied as one: what it became.

    shape                             "in -> out"; of experts in one parameter "count experts of rows x columns"
    output, grad_input, grad_weight   the casts of each product, in words
    backend                           which kernel computes each product, and why not a faster one
    notes                             why it was kept, and what else a user should know; `note`: all of them in words
    emulated                          whether narrow operands of a product are multiplied in a wider type
    """

    name: str
    shape: str
    recipe: str
    output: str
    grad_input: str
    grad_weight: str
    backend: str
    notes: tuple[Note, ...]
    emulated: bool = False

    @property
    def note(self) -> str:
        return ", ".join(map(str, self.notes))

    def columns(self) -> dict[str, str]:
        """What a run keeps of it (docs/architecture.md), all in words."""
        words = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "str"}
        return words | {"note": self.note}


class Description(list[Row]):
    """The rows of `describe`; prints as a table in which equal layers share a line. `fused`: what `convert(fuse=True)` did."""

    fused: tuple[Fusion, ...] = ()

    def __str__(self) -> str:
        groups: dict[Row, list[Row]] = {}
        for row in self:  # layers whose names differ in numbers only
            alike = replace(
                row, name=re.sub(r"\b\d+\b", "*", row.name), notes=tuple(note.without_reading() for note in row.notes)
            )
            groups.setdefault(alike, []).append(row)
        lines = [line for alike, rows in groups.items() for line in _lines(alike, rows)]
        fused = dict.fromkeys(re.sub(r"\b\d+\b", "*", str(each)) for each in self.fused)
        return "\n".join([*lines, *(["Casts in the pass that computes the input:"] * bool(fused)), *fused])


def _lines(row: Row, rows: list[Row]) -> list[str]:
    """The lines of one group of rows, which are equal but for the numbers in their names and their readings."""
    title = rows[0].name if len(rows) == 1 else f"{row.name} ({len(rows)} layers)"
    note = ", ".join(str(Note.spanning(each)) for each in zip(*(row.notes for row in rows), strict=True))
    head = f"{title}  {row.shape}  {row.recipe}" + (f"  ({note})" if note else "")
    if row.recipe == "none":
        return [head]
    return [
        head,
        f"    output       {row.output}",
        f"    grad_input   {row.grad_input}",
        f"    grad_weight  {row.grad_weight}",
        f"    backend      {row.backend}",
    ]


def describe(model: nn.Module) -> Description:
    """A row for every Linear of the model, subclasses that keep their own forward included; `print` it for a table.

    Weights that are no Linear's but are multiplied as one (see `unconverted`) have a row too, with the recipe "none".
    """
    description, head = Description(), output_head(model)
    description.fused = tuple(fusions(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            description.append(_row(model, name, module, head))
        else:
            for weight in other_weights(name, module):
                description.append(_wide_row(weight.name, weight.shape, "no nn.Linear", weight.reason))
    return description


def _row(model: nn.Module, name: str, layer: nn.Linear, head: nn.Module | None) -> Row:
    shape = f"{layer.in_features} -> {layer.out_features}"
    recipe = layer.recipe if isinstance(layer, QLinear) else None
    if not isinstance(layer, QLinear) or recipe is None:
        return _wide_row(
            name,
            shape,
            "ordinary Linear",
            _decided(layer) or reason_to_keep(name, layer, [], head) or "no pattern named it",
        )
    return Row(
        name=name,
        shape=shape,
        recipe=recipe.name,
        output=str(recipe.output),
        grad_input=str(recipe.grad_input),
        grad_weight=str(recipe.grad_weight) + _kept(recipe),
        backend=_backends(layer, recipe),
        notes=_notes(model, name, layer),
        emulated=any(why_emulated(gemm, layer.weight.device) for gemm in recipe.gemms().values()),
    )


def _decided(layer: nn.Linear) -> str:
    """What "auto" decided, in words, or ''."""
    decision = layer.decision if isinstance(layer, QLinear) else None
    return "" if decision is None else str(decision)


def _wide_row(name: str, shape: str, words: str, note: str) -> Row:
    return Row(
        name=name, shape=shape, recipe="none", output=words, grad_input=words, grad_weight=words,
        backend="torch", notes=(Note(note),),
    )  # fmt: skip


def _kept(recipe: Recipe) -> str:
    if recipe.save != "quantized":
        return ""
    return ", x kept as codes" + (" and what was clipped" if recipe.backward == "straight-through" else "")


def _backends(layer: QLinear, recipe: Recipe) -> str:
    """ "native" or "reference (native: why not)" for each product, one entry if all three agree."""
    entries = {name: _backend(gemm, layer) for name, gemm in recipe.gemms().items()}
    if len(set(entries.values())) == 1:
        return entries["output"]
    return "; ".join(f"{name}: {entries[name]}" for name in GEMMS)


def _backend(gemm: Gemm, layer: QLinear) -> str:
    how = plan(gemm, layer.weight.device)
    if gemm == Gemm() or gemm.lhs is None or gemm.rhs is None:
        in_float32 = how.expand == torch.float32
        return "torch" + (" (multiplied in float32: this CPU has no bfloat16 instructions)" if in_float32 else "")
    reasons = "; ".join(f"{name}: {refusal}" for name, refusal in how.choice.relevant)
    if how.expand is None:
        return f"{how.choice.kernel.name} ({reasons})" if reasons else how.choice.kernel.name
    dtype = str(how.expand).removeprefix("torch.")
    return f"emulated exactly in {dtype} ({reasons or why_emulated(gemm, layer.weight.device)})"


def _notes(model: nn.Module, name: str, layer: QLinear) -> tuple[Note, ...]:
    notes = [words for words in (layer.reason, _decided(layer)) if words]
    if layer.is_suspended:
        notes.append("suspended")
    if not layer.weight.requires_grad:
        notes.append("weight frozen: no grad_weight")
    if layer.in_features % ALIGNMENT or layer.out_features % ALIGNMENT:
        notes.append(f"filled up to multiples of {ALIGNMENT} inside native GEMMs")
    if is_read_by_owner(model, name):
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        notes.append(f"{owner}.forward multiplies by its weight without calling it: there the recipe takes no effect")
    return (*map(Note, notes), *_four_bit_notes(layer))


def _four_bit_notes(layer: QLinear) -> list[Note]:
    """What a rotation fills up, and what learned steps and sampling are doing."""
    notes = []
    rotation = layer.recipe.output.rotate if layer.recipe is not None else None
    if rotation is not None and layer.in_features % rotation.block:
        filled = rotated_length(layer.in_features, rotation)
        notes.append(Note(f"contracted axis filled up from {layer.in_features} to {filled} for the rotation"))
    if layer.steps is not None and layer.steps.is_cold:
        notes.append(Note("steps from the data, learned later"))
    if layer.sampling is not None and holds_numbers(layer.sampling.variance):
        for product, variance in zip(layer.sampling.PRODUCTS, layer.sampling.variance.tolist(), strict=True):
            if product in layer.sampling.settings:
                does = f"{product} {'samples its rows' if product in layer.sampling.active else 'keeps all rows'}"
                known = Note(f"{does} (sampling adds ", variance, variance, " relative variance)")
                notes.append(known if variance < UNREAD / 2**32 else Note(f"{does} so far"))
    return notes
