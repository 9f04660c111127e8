"""One step of one parameter: the task that a backend is given, and the plain torch backend, which is the definition.

    for a few rows at a time:  decode -> the rule's update in float32 -> encode

A rule that works on whole matrices gets all rows at once.

The torch backend holds float32 copies of one chunk of rows only (CHUNK elements, which fit in a core's second-level cache).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.optim import masters, moments, noise
from narrowgauge.optim.moments import Encoded, Moment
from narrowgauge.optim.rules import Rule

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements


@dataclass(frozen=True, kw_only=True)
class MomentState:
    """A moment's tensors over the whole parameter, each with one line per row: codes, scale, expansion.

    codes are [rows, columns], 4-bit ones [rows, ceil(columns / 2)]; scale and expansion [rows, tiles].
    """

    format: Moment
    codes: Tensor | None = None
    scale: Tensor | None = None
    expansion: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class ParamStep:
    """One parameter's step. Tensors are contiguous, on one device, and changed in place.

    rule               see `rules`
    source, state      the parameter and its state's tensors, to see whether they are still the same
    step               the tensor among them that counts steps
    weight             [rows, columns]; a copy if the parameter is not contiguous
    master             [rows, columns] or None; master_scale [rows, tiles] with fp16-scaled
    gradient, constants, step_key    of the step at hand; the gradient contiguous, of the parameter's shape
    number             the parameter's place in the groups, which its noise depends on
    native             what the compiled backend keeps with it
    backend            who computes it, for gradients of a kind
    asked              what the group said of the state's form, see `options.asked`
    stepped            where a kernel that can leaves the cast of the new weight as well, or None
    """

    rule: Rule
    source: Tensor
    state: tuple[Tensor, ...]
    tile: int
    weight: Tensor
    first: MomentState
    second: MomentState
    master_kind: masters.Master = None
    master: Tensor | None = None
    master_scale: Tensor | None = None
    gradient: Tensor | None = None
    constants: Any = None
    step_key: int = 0
    number: int = 0
    native: Any = None
    backend: tuple[Any, Any] | None = None
    asked: tuple[Any, ...] = ()
    stepped: PrecastWeight | None = None
    step: Tensor
    address: int = field(init=False)
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = identity(self.source)
        self.elements = self.source.numel()

    def holds(self, parameter: Tensor, state: dict[str, Tensor]) -> bool:
        """Whether parameter and state are still the memory that the task was made for."""
        same = self.address == identity(parameter) and self.weight.dtype == parameter.dtype
        return same and all(map(operator.is_, self.state, state.values()))

    @property
    def noise_key(self) -> int:
        return noise.key(self.step_key, self.number)

    @property
    def weight_noise_key(self) -> int:
        return noise.mix(self.noise_key ^ noise.WEIGHTS)


@torch.no_grad()
def step_in_torch(task: ParamStep) -> None:
    """The task in chunks of rows, by torch's own operations. About 80 of them per chunk."""
    rows, columns = task.weight.shape
    if task.rule.granularity == "matrix":
        return _step_rows(task, slice(0, rows))
    per_chunk = max(1, CHUNK.get(task.weight.device.type, 1 << 20) // max(columns, 1))
    for first in range(0, rows, per_chunk):
        _step_rows(task, slice(first, min(first + per_chunk, rows)))
    return None


def _step_rows(task: ParamStep, rows: slice) -> None:
    assert task.gradient is not None and task.constants is not None
    columns = task.weight.shape[1]
    tiles = -(-columns // task.tile)
    count = rows.stop - rows.start
    device = task.weight.device
    index = torch.arange(tiles * task.tile, device=device).view(1, tiles, task.tile)
    index = index + (torch.arange(rows.start, rows.stop, device=device) * (tiles * task.tile)).view(count, 1, 1)

    def cut(x: Tensor) -> Tensor:
        return _as_tiles(x[rows], tiles, task.tile)

    w = masters.load(
        task.master_kind,
        cut(task.weight),
        None if task.master is None else cut(task.master),
        None if task.master_scale is None else task.master_scale[rows],
    )
    m, v = (_decode(kept, rows, columns, tiles, task.tile, w) for kept in (task.first, task.second))
    gradient = cut(task.gradient.view(task.weight.shape)).to(torch.float32)
    holds = task.second.format.has_scale
    if task.rule.granularity == "matrix":
        w, gradient, m, v = (x.flatten(1)[:, :columns] for x in (w, gradient, m, v))
        whole = task.rule.update(w, gradient, m, v, task.constants, holds)
        w, m, v, decays = (_as_tiles(x, tiles, task.tile) for x in whole)
    else:
        w, m, v, decays = task.rule.update(w, gradient, m, v, task.constants, holds)
    bits = noise.bits(task.noise_key, index)
    _write(task.first, task.first.format.encode(m, bits, decays), rows, columns)
    _write(task.second, task.second.format.encode(v, bits), rows, columns)
    weight, master, master_scale = masters.store(
        task.master_kind, w, task.weight.dtype, task.weight_noise_key, index
    )  # fmt: skip
    for target, tile_values in ((task.weight, weight), (task.master, master)):
        if target is not None and tile_values is not None:
            target[rows] = tile_values.flatten(1)[:, :columns]
    if task.master_scale is not None and master_scale is not None:
        task.master_scale[rows] = master_scale


def _as_tiles(x: Tensor, tiles: int, tile: int) -> Tensor:
    fill = tiles * tile - x.shape[1]
    return (torch.nn.functional.pad(x, (0, fill)) if fill else x).view(x.shape[0], tiles, tile)


def _decode(kept: MomentState, rows: slice, columns: int, tiles: int, tile: int, like: Tensor) -> Tensor:
    if kept.codes is None:
        return torch.zeros_like(like)
    codes = _bits_of(kept.codes)[rows]
    if kept.format.bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[:, :columns]
    codes = _as_tiles(codes, tiles, tile).view(kept.format.dtype)
    scale = None if kept.scale is None else kept.scale[rows]
    expansion = None if kept.expansion is None else kept.expansion[rows]
    x = kept.format.decode(Encoded(codes, scale, expansion))
    if columns % tile:
        x[:, -1, columns % tile :] = 0.0  # what fills the last tile counts for nothing
    return x


def _write(kept: MomentState, found: Encoded, rows: slice, columns: int) -> None:
    if kept.codes is None:
        return
    codes = _bits_of(found.codes).flatten(1)[:, :columns]
    if kept.format.bits == 4:
        codes = torch.nn.functional.pad(codes, (0, columns % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    _bits_of(kept.codes)[rows] = codes
    for target, values in ((kept.scale, found.scale), (kept.expansion, found.expansion)):
        if target is not None and values is not None:
            target[rows] = values


def _bits_of(codes: Tensor) -> Tensor:
    """8-bit floats as bytes: torch cannot pad or index them everywhere."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def allocate(format: Moment, rows: int, columns: int, tile: int, device: torch.device | str) -> MomentState:
    """An empty moment: all zero."""
    if format is moments.NONE:
        return MomentState(format=format)
    tiles = -(-columns // tile)
    width = (columns + 1) // 2 if format.bits == 4 else columns
    codes = torch.zeros(rows, width, dtype=format.dtype, device=device)
    if format is moments.DYNAMIC4:
        codes.fill_(0x88)  # two codes of zero
    scale = torch.full((rows, tiles), 2.0**-94, dtype=torch.bfloat16, device=device) if format.has_scale else None
    expanded = isinstance(format, moments.SmallFloat) and format.expansions is not None
    expansion = torch.zeros(rows, tiles, dtype=torch.int8, device=device) if expanded else None
    return MomentState(format=format, codes=codes, scale=scale, expansion=expansion)
