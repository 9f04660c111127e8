"""One parameter's step: the arguments of a backend, and the plain torch backend (the definition).

    for a few rows at a time:
        decode -> the rule's update in float32 -> encode -> correct the weight for rounding m

A rule on whole matrices gets all rows at once. The torch backend keeps float32 copies of only one
chunk of rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.optim import masters, moments, noise, shards
from narrowgauge.optim.moments import Encoded, Moment, States

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight
    from narrowgauge.optim.rules import Rule
    from narrowgauge.optim.shards import Part
    from narrowgauge.optim.skipped_steps import SkippedSteps

# Of weights and gradients, with their numbers in the kernels.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The float32 copies of 2^16 elements fit in a core's second-level cache.
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}


@dataclass(frozen=True, kw_only=True)
class MomentState:
    """Tensors of one moment of a whole parameter, with one line per row.

    format     Moment
    codes      [rows, columns]; 4-bit codes [rows, ceil(columns / 2)]
    scale      [rows, tiles]
    expansion  [rows, tiles]
    """

    format: Moment
    codes: Tensor | None = None
    scale: Tensor | None = None
    expansion: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class ParamStep:
    """One parameter's step. Tensors are contiguous, on one device, and changed in place.

    rule               see `rules`
    source             the parameter, or the local part of a DTensor
    state              tensors of its state; compared by identity to detect a replaced state
    part               block of the whole parameter, by which random numbers count elements
    is_shard           True for a DTensor
    weight             [rows, columns]; a copy if the parameter is not contiguous
    master             [rows, columns] or None
    master_scale       [rows, tiles] with fp16-scaled, else None
    gradient           of the current step; contiguous, of the parameter's shape
    constants          scalars of the current step
    step_key           noise key of the current step
    if_skipped        (constants, step_key) for one, two, ... skipped earlier steps, see
                       `skipped_steps`
    number             noise number of the parameter, from its name or its position in the
                       groups; see `noise.of_name`
    native             data that a compiled backend caches here
    backend            (key of gradient dtype and alignment, chosen backend), or None
    asked              options of the group that decided the state's format, see
                       `param_groups.asked`
    stepped            buffers for the cast of the new weight, or None
    address            identity of the source's memory
    """

    rule: Rule
    source: Tensor
    state: Mapping[str, Tensor]
    tile: int
    part: Part
    is_shard: bool
    weight: Tensor
    first: MomentState
    second: MomentState
    master_kind: masters.Master = None
    master: Tensor | None = None
    master_scale: Tensor | None = None
    gradient: Tensor | None = None
    constants: Any = None
    step_key: int = 0
    if_skipped: tuple[tuple[Any, int], ...] = ()
    number: int = 0
    native: Any = None
    backend: tuple[Any, Any] | None = None
    asked: tuple[Any, ...] = ()
    stepped: PrecastWeight | None = None
    address: int = field(init=False)
    elements: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = identity(self.source)
        self.elements = self.source.numel()

    @classmethod
    def of(
        cls, parameter: Tensor, rule: Rule, states: States, master: masters.Master, state: Mapping[str, Tensor], **more: Any
    ) -> ParamStep:  # fmt: skip
        """Build the step of a parameter from the tensors that `new_state` made for it."""
        source = shards.local(parameter)
        rows, columns = shape_of(source)
        tensors = {name: shards.local(x) for name, x in state.items()}
        kept = []
        for name, format in formats_of(rule, states):
            codes = (
                tensors[name].view(rows, -1)
                if rows * columns
                else tensors[name].view(rows, columns)
            )
            scale, expansion = tensors.get(f"{name}_scale"), tensors.get(f"{name}_expansion")
            kept.append(MomentState(format=format, codes=codes, scale=scale, expansion=expansion))
        kept += [MomentState(format=moments.NONE)] * (2 - len(kept))
        copy = tensors.get("master", tensors.get("remainder"))
        return cls(
            rule=rule, source=source, state=dict(state), tile=states.tile, part=shards.part_of(parameter),
            is_shard=source is not parameter, first=kept[0], second=kept[1],
            weight=source.detach().contiguous().view(rows, columns),
            master_kind=None if parameter.dtype == torch.float32 else master,
            master=None if copy is None else copy.view(rows, columns), master_scale=tensors.get("master_scale"), **more,
        )  # fmt: skip

    def holds(self, parameter: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Return True if parameter and state still use the memory of this step."""
        same = (
            self.address == identity(shards.local(parameter))
            and self.weight.dtype == parameter.dtype
        )
        return same and all(map(operator.is_, self.state.values(), state.values()))

    @property
    def first_index(self) -> int:
        """Index of the first element in the whole parameter, rows rounded up to whole tiles."""
        return self.part.first(self.tile)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that a kernel reads and writes, except the gradient."""
        kept = [
            getattr(moment, name)
            for moment in (self.first, self.second)
            for name in ("codes", "scale", "expansion")
        ]
        return [x for x in (self.weight, *kept, self.master, self.master_scale) if x is not None]

    @property
    def clamps_first(self) -> bool:
        """True if the first moment is clamped to the bound from the second, see `rules`.

        This applies if either moment is quantized.
        """
        first, second = self.first.format, self.second.format
        return second is not moments.NONE and (first.has_scale or second.has_scale)

    @property
    def noise_key(self) -> int:
        return noise.key(self.step_key, self.number)

    @property
    def weight_noise_key(self) -> int:
        return noise.mix(self.noise_key ^ noise.WEIGHTS)


def shape_of(parameter: Tensor) -> tuple[int, int]:
    """(rows, columns): the first axis, and the product of all others; a vector is one row."""
    if parameter.ndim < 2:
        return 1, parameter.numel()
    return parameter.shape[0], math.prod(parameter.shape[1:])


def formats_of(rule: Rule, states: States) -> list[tuple[str, Moment]]:
    """(name, format) of each moment of a rule."""
    return list(zip(rule.moments, (states.first, states.second), strict=False))


def new_state(
    parameter: Tensor,
    rule: Rule,
    states: States,
    master: masters.Master,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Allocate a parameter's state before its first step; "meta" gives sizes without memory.

    A float32 master starts as the weight. A scaled master starts as zeros: it differs from the
    weight, so the first step starts from the weight.
    """
    rows, columns = shape_of(parameter)
    tiles, shape = -(-columns // states.tile), parameter.shape
    state = {
        "step": torch.zeros((), dtype=torch.float32, device="meta" if device == "meta" else "cpu")
    }
    for name, format in formats_of(rule, states):
        four_bits = (rows, (columns + 1) // 2)
        state[name] = torch.zeros(
            four_bits if format.bits == 4 else shape, dtype=format.dtype, device=device
        )
        if format is moments.DYNAMIC4:
            # Two 4-bit codes 8, which decode to zero.
            state[name].fill_(0x88)
        if format.has_scale:
            state[f"{name}_scale"] = torch.full(
                (rows, tiles), 2.0**-94, dtype=torch.bfloat16, device=device
            )
        if format.expands:
            state[f"{name}_expansion"] = torch.zeros(rows, tiles, dtype=torch.int8, device=device)
    if parameter.dtype == torch.float32 or master in (None, "stochastic"):
        return state
    if master == "bf16-remainder":
        return state | {"remainder": torch.zeros(shape, dtype=torch.int16, device=device)}
    if master == "fp32":
        return state | {
            "master": torch.zeros(shape, dtype=torch.float32, device=device).copy_(
                parameter.detach()
            )
        }
    scale = torch.zeros(rows, tiles, dtype=torch.bfloat16, device=device)
    return state | {
        "master": torch.zeros(shape, dtype=torch.float16, device=device),
        "master_scale": scale,
    }


@torch.no_grad()
def step_in_torch(param_steps: Sequence[ParamStep], skipped: SkippedSteps | None = None) -> None:
    """Compute all steps in chunks of rows with torch operations, about 80 per chunk.

    skipped: skip flags on the device, or None; the step counters must be exact.
    """
    for each in param_steps:
        assert not each.if_skipped
        # The flag stays on the device: torch.where keeps old values without a host sync.
        stays = None if skipped is None else skipped.on(each.weight.device)[0] != 0
        rows, columns = each.weight.shape
        per_chunk = max(1, CHUNK.get(each.weight.device.type, 1 << 20) // max(columns, 1))
        if each.rule.granularity == "matrix":
            per_chunk = max(rows, 1)
        for first in range(0, rows, per_chunk):
            _step_rows(each, slice(first, min(first + per_chunk, rows)), stays)


def _step_rows(param_step: ParamStep, rows: slice, stays: Tensor | None) -> None:
    assert param_step.gradient is not None and param_step.constants is not None
    columns = param_step.weight.shape[1]
    tiles = -(-columns // param_step.tile)
    count = rows.stop - rows.start
    device = param_step.weight.device
    index = torch.arange(tiles * param_step.tile, device=device).view(1, tiles, param_step.tile)
    row_length = param_step.part.row_length(param_step.tile)
    starts = (
        torch.arange(rows.start, rows.stop, device=device) * row_length + param_step.first_index
    )
    index = index + starts.view(count, 1, 1)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else as_tiles(x[rows], tiles, param_step.tile)

    scale = None if param_step.master_scale is None else param_step.master_scale[rows]
    weight, master, gradient = map(
        cut,
        (param_step.weight, param_step.master, param_step.gradient.view(param_step.weight.shape)),
    )
    assert weight is not None and gradient is not None
    w, gradient = (
        masters.load(param_step.master_kind, weight, master, scale),
        gradient.to(torch.float32),
    )
    m, v = (
        decode_rows(kept, rows, columns, tiles, param_step.tile, w)
        for kept in (param_step.first, param_step.second)
    )
    clamps = param_step.clamps_first
    if param_step.rule.granularity == "matrix":
        # A rule on whole matrices must not see the padding of the last tile.
        w, gradient, m, v = (x.flatten(1)[:, :columns] for x in (w, gradient, m, v))
        whole = param_step.rule.update(w, gradient, m, v, param_step.constants, clamps)
        w, m, v, decays, *lag = (as_tiles(x, tiles, param_step.tile) for x in whole)
    else:
        w, m, v, decays, *lag = param_step.rule.update(
            w, gradient, m, v, param_step.constants, clamps
        )
        if columns % param_step.tile:
            # A rule may turn padding zeros into any number, even 0 / 0, which would spoil the
            # tile's scale.
            for x in (w, m, v):
                x[:, -1, columns % param_step.tile :] = 0.0
    # Both moments of an element share one random number; the weight draws another.
    bits = noise.bits(param_step.noise_key, index)
    format = param_step.first.format
    first = format.encode(m, bits, decays, param_step.rule.draws_first)
    if lag and format.has_scale:
        assert first.scale is not None
        # The step adds m - decode(encode(m)) times the lag (error feedback, see `rules`). A
        # non-finite tile adds 0, because it becomes visible in the next step.
        lost = torch.where(first.scale.isnan()[..., None], 0.0, m - format.decode(first))
        w = w + lost * lag[0]
        if columns % param_step.tile:
            w[:, -1, columns % param_step.tile :] = 0.0
    write_rows(param_step.first, first, rows, columns, stays)
    write_rows(param_step.second, param_step.second.format.encode(v, bits), rows, columns, stays)
    weight, master, master_scale = masters.store(
        param_step.master_kind, w, param_step.weight.dtype, param_step.weight_noise_key, index
    )  # fmt: skip
    for target, tile_values in ((param_step.weight, weight), (param_step.master, master)):
        if target is not None and tile_values is not None:
            _put(target, rows, tile_values.flatten(1)[:, :columns], stays)
    if param_step.master_scale is not None and master_scale is not None:
        _put(param_step.master_scale, rows, master_scale, stays)


def _put(target: Tensor, rows: slice, values: Tensor, stays: Tensor | None) -> None:
    """target[rows] = values, unless the device flag `stays` keeps the old values."""
    target[rows] = (
        values if stays is None else torch.where(stays, target[rows], values.to(target.dtype))
    )


def as_tiles(x: Tensor, tiles: int, tile: int) -> Tensor:
    fill = tiles * tile - x.shape[1]
    return (torch.nn.functional.pad(x, (0, fill)) if fill else x).view(x.shape[0], tiles, tile)


def decode_rows(
    kept: MomentState, rows: slice, columns: int, tiles: int, tile: int, like: Tensor
) -> Tensor:
    if kept.codes is None:
        return torch.zeros_like(like)
    codes = _bits_of(kept.codes)[rows]
    if kept.format.bits == 4:
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)[:, :columns]
    codes = as_tiles(codes, tiles, tile).view(kept.format.dtype)
    scale = None if kept.scale is None else kept.scale[rows]
    expansion = None if kept.expansion is None else kept.expansion[rows]
    x = kept.format.decode(Encoded(codes, scale, expansion))
    if columns % tile:
        # Padding of the last tile must not change its scale.
        x[:, -1, columns % tile :] = 0.0
    return x


def write_rows(
    kept: MomentState, found: Encoded, rows: slice, columns: int, stays: Tensor | None
) -> None:
    if kept.codes is None:
        return
    codes = _bits_of(found.codes).flatten(1)[:, :columns]
    if kept.format.bits == 4:
        codes = torch.nn.functional.pad(codes, (0, columns % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    _put(_bits_of(kept.codes), rows, codes, stays)
    for target, values in ((kept.scale, found.scale), (kept.expansion, found.expansion)):
        if target is not None and values is not None:
            _put(target, rows, values, stays)


def _bits_of(codes: Tensor) -> Tensor:
    """View float8 codes as bytes: torch cannot pad or index float8 on all devices."""
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
