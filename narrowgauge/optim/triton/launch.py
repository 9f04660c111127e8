"""Launch of the Triton optimizer step: many tensors in one launch, without a host sync.

Tensors with the same Form (states, master, dtypes, rule), group and step count form a Batch and
need one launch. A model with decayed matrices, undecayed vectors and float32 embeddings needs
three. A launch per tensor would cost more than the work on a million elements, and kernel arguments
end at a few kilobytes. So addresses and sizes are stored in a table on the GPU, written when a
tensor is new. Step-dependent numbers (addresses of gradients, constants, noise key) are stored in
`step_args`: a few kilobytes, sent from pinned memory in one copy per step, in stream order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import address, dry_run_on, identity
from narrowgauge.errors import ConfigError
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.cast_constants import CastConstants, constants_of
from narrowgauge.ops.triton.launch import Kernels, launch
from narrowgauge.optim import masters, moments, noise, rules
from narrowgauge.optim.selfcheck import StepKind
from narrowgauge.optim.step import DTYPES, ParamStep
from narrowgauge.recipe import DelayedScaling

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.precast_weight import PrecastWeight
    from narrowgauge.optim.moments import Moment
    from narrowgauge.optim.skipped_steps import SkippedSteps

kernel = Kernels("narrowgauge.optim.triton.kernel")

# 16 elements per thread: weight, gradient and two moments then take 64 registers.
ELEMENTS, WARPS = 2048, 4
# 8 elements per thread. Expanded E4M3 with 16 needs 254 of the 255 registers. Two other cases take
# 8 as well. Quantized first moments in unaligned rows keep rounding errors in registers until the
# weight is written. So do weight casts in unaligned rows, in float32, or beside noise or a scaled
# master. Casting programs of 8 rows x 256 elements write 8-byte runs of w.T. 16 rows in 8 warps
# would write 16 bytes, but at 160 to 200 registers a thread only one such program fits on a
# multiprocessor. Not measured on a GPU yet.
EXPANDING_ELEMENTS = 1024
# Integers of step arguments before the addresses; the kernel declares the same number.
HEAD = 16
# Bytes of an address, and elements of a row, that allow 16-byte loads.
ALIGNMENT = 16
# Parts of the weight's cast that the step writes.
NOTHING, AMAX, CODES = range(3)
# Rows that programs of CODES step together, see the kernel.
BAND = 32
# Launch sizes of the kernel `foresee`.
HISTORY_BLOCK, HISTORY_WARPS = 1024, 4


@dataclass(frozen=True)
class Form:
    """Compile-time constants of the kernel; sizes and step-dependent numbers are excluded.

    rule, nesterov, draws_first, lags     see `rules`
    weight, gradient        dtype numbers: 0 float32, 1 bfloat16, 2 float16
    master                  number of the master, see `masters.KINDS`
    tile, tiles             elements that share a scale; tiles of a program
    shift                   elements of a shard's first random block (16 elements) on another
                            rank; 0 unless the weight is rounded stochastically
    aligned, width          True if 16-byte loads are possible; consecutive elements per thread
    casts, cast             NOTHING, AMAX or CODES; constants of the codes
    turns_aligned           True if codes of the transposed weight can be stored 16 bytes at a
                            time
    """

    rule: int
    nesterov: bool
    draws_first: bool
    lags: bool
    first: Moment
    second: Moment
    weight: int
    gradient: int
    master: int
    tile: int
    tiles: int
    aligned: bool
    width: int
    shift: int = 0
    casts: int = NOTHING
    cast: CastConstants | None = None
    turns_aligned: bool = False


@cache
def form_of(kind: StepKind, capability: tuple[int, int] = (0, 0)) -> Form:
    """Return the Form of a kind of step; the same object for the same kind.

    capability: compute capability of the GPU, which decides how codes are computed.
    """
    wide = torch.float32 in (kind.weight, kind.gradient) or moments.WIDE in (
        kind.first,
        kind.second,
    )
    casts = NOTHING
    if kind.cast is not None:
        casts = CODES if isinstance(kind.cast.calibrate, DelayedScaling) else AMAX
    wide_weight = kind.weight == torch.float32 and kind.master is None
    crowded = casts == CODES and (
        not kind.aligned or wide_weight or kind.master in ("stochastic", "fp16-scaled")
    )
    crowded |= not kind.aligned and kind.first.has_scale
    elements = (
        EXPANDING_ELEMENTS if kind.first.expands or kind.second.expands or crowded else ELEMENTS
    )
    return Form(
        rule=rules.number(kind.rule), nesterov=kind.nesterov, draws_first=kind.rule.draws_first,
        lags=kind.rule.lags, first=kind.first, second=kind.second,
        weight=DTYPES[kind.weight], gradient=DTYPES[kind.gradient], master=masters.KINDS[kind.master],
        tile=kind.tile, tiles=elements // kind.tile, aligned=kind.aligned, shift=kind.shift,
        # A larger hint would give a thread 16 adjacent 8-bit codes, and so 16 adjacent float32
        # weights: four loads 64 bytes apart.
        width=4 if wide or kind.master == "fp32" else 8, casts=casts,
        cast=constants_of(kind.cast, capability) if kind.cast is not None and casts == CODES else None,
        turns_aligned=kind.turns_aligned and casts == CODES,
    )  # fmt: skip


def form_of_step(param_step: ParamStep) -> Form:
    """Return the Form of a step, cached in `param_step.native`.

    Computing it takes longer than all other work for a tensor in a step.
    """
    c, gradient = param_step.constants, param_step.gradient
    assert c is not None and gradient is not None
    if param_step.native is None:
        param_step.native = {}
    key = (gradient.dtype, identity(gradient) % ALIGNMENT == 0, c.nesterov)
    if key not in param_step.native:
        kind, device = kind_of(param_step), param_step.weight.device
        capability = (
            (0, 0) if kind.cast is None else device_facts(device.type, device.index).capability
        )
        param_step.native[key] = form_of(kind, capability)
    form: Form = param_step.native[key]
    return form


def kind_of(param_step: ParamStep) -> StepKind:
    """Return the Kind of a step whose gradient and constants are set.

    The kernel is compiled for a kind and checked with it.
    """
    first, second, stepped = param_step.first, param_step.second, param_step.stepped
    weight, gradient, c = param_step.weight, param_step.gradient, param_step.constants
    assert gradient is not None and c is not None
    tensors = (weight, gradient, param_step.master, first.codes, second.codes)
    rows, columns = weight.shape
    aligned = columns % ALIGNMENT == 0 and all(
        x is None or identity(x) % ALIGNMENT == 0 for x in tensors
    )
    turns = stepped is not None and stepped.turned is not None and rows % ALIGNMENT == 0
    draws = param_step.master_kind in ("stochastic", "fp16-scaled")
    shift = param_step.first_index % noise.BLOCK if draws else 0
    return StepKind(
        param_step.rule, c.nesterov, first.format, second.format, weight.dtype, gradient.dtype, param_step.master_kind,
        param_step.tile, aligned, None if stepped is None else stepped.cast, turns, shift,
    )  # fmt: skip


class Batch:
    """Tensors of one launch and their table on the GPU.

        which  int32 [programs]          line of each program
        table  int64 [tensors, 24]       one line per tensor:

        0            first program
        1            columns
        2            tiles of a row
        3            tiles
        4            weight
        5, 6         master and its scale
        7, 8, 9      codes, scale and expansion of the first moment
        10, 11, 12   codes, scale and expansion of the second moment
        13           contribution of its noise number to the key

    With a cast of the weight, else zeros:

        14, 15       codes of w and of w.T
        16           amax, in parts
        17           expected amax
        18, 19       live and history of the amax history
        20           number of history entries in use
        21           factor of the amax (margin), float32 as bits

    For random numbers, which count elements of the whole parameter:

        22           half the index of the first block of 16 elements
        23           tiles of a row of the whole parameter
    """

    def __init__(self, form: Form, param_steps: Sequence[ParamStep]) -> None:
        self.form, self.param_steps = form, tuple(param_steps)
        lines: list[list[int]] = []
        counts: list[int] = []
        device = param_steps[0].weight.device
        for each in param_steps:
            rows, columns = each.weight.shape
            per_row = -(-columns // each.tile)
            tensors = [each.weight, each.master, each.master_scale]
            for kept in (each.first, each.second):
                tensors += [kept.codes, kept.scale, kept.expansion]
            sizes = [sum(counts), columns, per_row, rows * per_row]
            lines.append(
                [
                    *sizes,
                    *map(address, tensors),
                    noise.of_parameter(each.number),
                    *_of_cast(each.stepped),
                ]
            )
            lines[-1] += [
                each.first_index // noise.BLOCK * (noise.BLOCK // 2),
                each.part.row_length(each.tile) // each.tile,
            ]
            # Whole bands, for codes of w.T; programs beyond the last row are masked.
            bands = -(-rows // BAND) * (BAND // form.tiles) * per_row
            counts.append(bands if form.casts == CODES else -(-rows * per_row // form.tiles))
        self.programs = sum(counts)
        self.table = _sent(torch.tensor(lines, dtype=torch.int64, device="cpu"), device)
        which = torch.arange(len(param_steps), dtype=torch.int32, device="cpu")
        repeats = torch.tensor(counts, device="cpu")
        self.which = _sent(which.repeat_interleave(repeats, output_size=self.programs), device)

    def step_args(self) -> list[int]:
        """Step-dependent numbers: an even count, so that the next batch stays aligned.

        The constants for skipped earlier steps come first, the largest number of skips first.
        """
        first = self.param_steps[0]
        heads = [
            _head(*each)
            for each in (*reversed(first.if_skipped), (first.constants, first.step_key))
        ]
        # Addresses change at every step, because autograd allocates new gradients.
        gradients = [address(each.gradient) for each in self.param_steps]
        return list(chain(*heads, gradients, [0] * (len(gradients) % 2)))

    @property
    def heads(self) -> int:
        """Number of heads in `step_args`; the last head is for no skipped step."""
        return 1 + len(self.param_steps[0].if_skipped)

    def _reached(self) -> Iterator[Tensor]:
        """Tensors that a step accesses; a tensor that it both reads and writes appears twice."""
        for each in self.param_steps:
            kept = [each.weight, each.master, each.master_scale]
            for moment in (each.first, each.second):
                kept += [moment.codes, moment.scale, moment.expansion]
            cast = [] if each.stepped is None else [each.stepped.plain, each.stepped.turned]
            yield from (x for x in (each.gradient, *kept, *kept, *cast) if x is not None)

    def launch(self, step_args: Tensor, skipped: Tensor | None = None) -> None:
        """Launch the step.

        step_args  int64 on the device, `step_args()` from its last head on
        skipped   see the kernel
        """
        form, count = self.form, len(self.param_steps)
        if form.casts:
            launch(kernel.foresee, count, self.table, BLOCK=HISTORY_BLOCK, warps=HISTORY_WARPS)
        tables = _tables(step_args.device)
        launch(
            kernel.step, self.programs, self.which, self.table, step_args, tables, skipped, F=form, warps=WARPS, reached=self._reached
        )  # fmt: skip
        for each in self.param_steps:
            if each.stepped is not None:
                each.stepped.mark_written()


def step(
    param_steps: Sequence[ParamStep], kept: dict[Any, Batch], skipped: SkippedSteps | None = None
) -> None:
    """Compute all steps.

    kept: batches of earlier calls, by their members. The caller clears it if tensors change.
    """
    for device, batches in batches_of(param_steps, kept).items():
        step_args = _sent(
            torch.tensor(step_args_of(batches), dtype=torch.int64, device="cpu"), device
        )
        run(batches, step_args, None if skipped is None else skipped.on(device))


def batches_of(
    param_steps: Sequence[ParamStep], kept: dict[Any, Batch], makes: bool = True
) -> dict[torch.device, list[Batch]]:
    """Return the batches of each device, with as few launches as possible.

    makes  True builds missing batches, which writes to the device; False raises ConfigError for
           them
    """
    groups: dict[tuple[torch.device, int, int], list[ParamStep]] = {}
    for each in param_steps:
        if each.elements:
            groups.setdefault(
                (each.weight.device, id(form_of_step(each)), id(each.constants)), []
            ).append(each)
    found: dict[torch.device, list[Batch]] = {}
    for (device, form, _), members in groups.items():
        # ids are safe keys: a batch keeps its members alive, and Forms are cached for the life of
        # the process.
        key = (form, *map(id, members))
        if key not in kept:
            if not makes:
                raise ConfigError(
                    "optim: a CUDA graph is captured of other parameters than those that stepped before. Run one step of the same "
                    "parameters before the capture.",
                    code="optim.other-parameters",
                )
            kept[key] = Batch(form_of_step(members[0]), members)
        found.setdefault(device, []).append(kept[key])
    return found


def step_args_of(batches: Sequence[Batch]) -> list[int]:
    """Concatenated step arguments of all batches."""
    return [number for batch in batches for number in batch.step_args()]


def run(batches: Sequence[Batch], step_args: Tensor, skipped: Tensor | None = None) -> None:
    """Launch all batches.

    step_args  `step_args_of(batches)`, on the device
    skipped   see the kernel
    """
    start = 0
    for batch in batches:
        start += HEAD * (batch.heads - 1)
        length = HEAD + len(batch.param_steps) + len(batch.param_steps) % 2
        batch.launch(step_args[start : start + length], skipped)
        start += length


def _head(c: Any, step_key: int) -> list[int]:
    """HEAD integers: noise key of the step, and its constants as float32 bits."""
    numbers = (
        c.decay, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.eps, c.step_size, c.correction, c.beta1, c.bound,
        c.lag, c.lag_of_decay,
    )  # fmt: skip
    found = [step_key, *struct.unpack("<11i", struct.pack("<11f", *numbers))]
    return found + [0] * (HEAD - len(found))


def _of_cast(stepped: PrecastWeight | None) -> list[int]:
    """Entries 14 to 21 of a tensor's line."""
    if stepped is None:
        return [0] * 8
    line = [*map(address, (stepped.plain, stepped.turned, stepped.maxima, stepped.expected))]
    buffers = stepped.buffers
    if buffers is None:
        return line + [0] * 4
    how = buffers.settings
    (factor,) = struct.unpack("<i", struct.pack("<f", 2.0**how.margin))
    counts = how.length - 1 if how.algorithm == "max" else 0
    return [*line, address(buffers.live), address(buffers.history), counts, factor]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to the device without a sync.

    Pinned memory is released only after the copy has finished.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _tables(device: torch.device) -> Tensor:
    return (
        _kept_tables(device) if dry_run_on() is None else _kept_tables.__wrapped__(device)
        # Fake tensors have no values.
    )


@cache
def _kept_tables(device: torch.device) -> Tensor:
    tables = moments.expansion_tables(torch.device("cpu"))
    return _sent(torch.cat([table.flatten() for table in tables]), device)
