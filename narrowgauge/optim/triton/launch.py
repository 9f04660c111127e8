"""The optimizer step on NVIDIA GPUs: many tensors in one launch of the kernel in kernel.py, without waiting for the GPU.

Tensors of one Form (states, master, types, rule) whose group and step count are the same are a Batch and take one launch; a model with
decayed matrices, undecayed vectors and float32 embeddings takes three. A launch for each tensor would cost more than the work on a tensor
of a million elements, and a list of arguments ends at a few kilobytes; so addresses and sizes stand in a table on the GPU, written
when a tensor is new, and what changes at every step (addresses of gradients, constants, the key of the noise) in `step_args`: a few
kilobytes that travel from pinned memory in one copy per step, in the order of the stream.

Programs take ELEMENTS elements in WARPS warps, 16 in a thread: weight, gradient and two moments are then 64 registers. Expanded
E4M3 has 8 in a thread: with 16 it takes 254 of the 255 registers there are. So have narrow first moments in rows that cannot be loaded
16 bytes at a time, whose rounding errors wait in registers until the weight is written, and a weight whose cast is left as well
(`ops.quantize.precast_weight`) in such rows, in float32, or beside noise or a scaled master.
Its programs are 8 rows of 256 elements, so runs of w.T are 8 bytes. Of 16 rows in 8 warps they would be 16, but with 160 to 200
registers a thread such a program is alone on its multiprocessor. Not measured on a GPU yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import address, dry_run_on, identity
from narrowgauge.errors import ConfigError
from narrowgauge.ops.quantize.precast_weight import PrecastWeight
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.cast_constants import CastConstants, constants_of
from narrowgauge.ops.triton.launch import Kernels, launch
from narrowgauge.optim import masters, moments, noise, rules
from narrowgauge.optim.left_out import LeftOut
from narrowgauge.optim.moments import Moment
from narrowgauge.optim.selfcheck import Kind
from narrowgauge.optim.step import DTYPES, ParamStep
from narrowgauge.recipe import Window

kernel = Kernels("narrowgauge.optim.triton.kernel")

ELEMENTS, WARPS = 2048, 4
EXPANDING_ELEMENTS = 1024
HEAD = 16  # whole numbers of step arguments before the addresses
ALIGNMENT = 16  # bytes of an address, and elements of a row, for loads of 16 bytes
NOTHING, AMAX, CODES = range(3)  # what is left of the weight's cast
BAND = 32  # rows that programs of CODES take together, see the kernel
HISTORY_BLOCK, HISTORY_WARPS = 1024, 4  # of `foresee`


@dataclass(frozen=True)
class Form:
    """The constant of the kernel: everything about a tensor's step but its numbers and sizes.

    rule, nesterov          see `rules`
    weight, gradient        numbers of dtypes: 0 float32, 1 bfloat16, 2 float16
    master                  number of the master, see `masters.KINDS`
    tile, tiles             elements that share a scale; tiles of a program
    shift                   how many elements of a shard's first block of random numbers another rank holds; 0 unless the weight draws them
    aligned, width          whether loads of 16 bytes are possible, and how many elements of a row a thread then takes together
    casts, cast             what is left of the weight's cast, and how its codes are made
    turns_aligned           whether the codes of the transposed weight can be stored 16 bytes at a time
    """

    rule: int
    nesterov: bool
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
def form_of(kind: Kind, capability: tuple[int, int] = (0, 0)) -> Form:
    """The constants of a kind of step; the same object for the same kind. capability: of the GPU, which decides how codes are made."""
    wide = torch.float32 in (kind.weight, kind.gradient) or moments.WIDE in (kind.first, kind.second)
    casts = NOTHING
    if kind.cast is not None:
        casts = CODES if isinstance(kind.cast.calibrate, Window) else AMAX
    wide_weight = kind.weight == torch.float32 and kind.master is None
    crowded = casts == CODES and (not kind.aligned or wide_weight or kind.master in ("stochastic", "fp16-scaled"))
    crowded |= not kind.aligned and kind.first.has_scale
    elements = EXPANDING_ELEMENTS if kind.first.expands or kind.second.expands or crowded else ELEMENTS
    return Form(
        rule=rules.number(kind.rule), nesterov=kind.nesterov, first=kind.first, second=kind.second,
        weight=DTYPES[kind.weight], gradient=DTYPES[kind.gradient], master=masters.KINDS[kind.master],
        tile=kind.tile, tiles=elements // kind.tile, aligned=kind.aligned, shift=kind.shift,
        width=4 if wide or kind.master == "fp32" else 8, casts=casts,
        cast=constants_of(kind.cast, capability) if kind.cast is not None and casts == CODES else None,
        turns_aligned=kind.turns_aligned and casts == CODES,
    )  # fmt: skip


def form_of_step(param_step: ParamStep) -> Form:
    """Kept with the step: working it out takes longer than all else that is done for a tensor at a step."""
    c, gradient = param_step.constants, param_step.gradient
    assert c is not None and gradient is not None
    if param_step.native is None:
        param_step.native = {}
    key = (gradient.dtype, identity(gradient) % ALIGNMENT == 0, c.nesterov)
    if key not in param_step.native:
        kind, device = kind_of(param_step), param_step.weight.device
        capability = (0, 0) if kind.cast is None else device_facts(device.type, device.index).capability
        param_step.native[key] = form_of(kind, capability)
    form: Form = param_step.native[key]
    return form


def kind_of(param_step: ParamStep) -> Kind:
    """What the kernel is compiled for, and checked with; of a step whose gradient and constants are known."""
    first, second, stepped = param_step.first, param_step.second, param_step.stepped
    weight, gradient, c = param_step.weight, param_step.gradient, param_step.constants
    assert gradient is not None and c is not None
    tensors = (weight, gradient, param_step.master, first.codes, second.codes)
    rows, columns = weight.shape
    aligned = columns % ALIGNMENT == 0 and all(x is None or identity(x) % ALIGNMENT == 0 for x in tensors)
    turns = stepped is not None and stepped.turned is not None and rows % ALIGNMENT == 0
    draws = param_step.master_kind in ("stochastic", "fp16-scaled")
    shift = param_step.first_index % noise.BLOCK if draws else 0
    return Kind(
        param_step.rule, c.nesterov, first.format, second.format, weight.dtype, gradient.dtype, param_step.master_kind,
        param_step.tile, aligned, None if stepped is None else stepped.cast, turns, shift,
    )  # fmt: skip


class Batch:
    """Tensors that one launch steps, and what the GPU is told of them once.

    which  int32 [programs], table int64 [tensors, 24], each line

        0 first program   1 columns   2 tiles of a row   3 tiles   4 weight   5 master   6 its scale   7, 8, 9 codes, scale and
        expansion of the first moment   10, 11, 12 of the second   13 what its number adds to the noise

    and where the cast of the weight is left, else zeros: 14, 15 codes of w and of w.T   16 largest magnitudes   17 amax to expect
    18, 19 live and history of its window   20 entries of it that count   21 what is multiplied by, float32 as bits

    and of the whole parameter, whose elements random numbers count: 22 half the place of the first block of 16   23 tiles of a row
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
            lines.append([*sizes, *map(address, tensors), noise.of_parameter(each.number), *_of_cast(each.stepped)])
            lines[-1] += [
                each.first_index // noise.BLOCK * (noise.BLOCK // 2),
                each.part.row_length(each.tile) // each.tile,
            ]
            bands = -(-rows // BAND) * (BAND // form.tiles) * per_row  # whole ones where the codes of w.T are written
            counts.append(bands if form.casts == CODES else -(-rows * per_row // form.tiles))
        self.programs = sum(counts)
        self.table = _sent(torch.tensor(lines, dtype=torch.int64, device="cpu"), device)
        which = torch.arange(len(param_steps), dtype=torch.int32, device="cpu")
        repeats = torch.tensor(counts, device="cpu")
        self.which = _sent(which.repeat_interleave(repeats, output_size=self.programs), device)

    def step_args(self) -> list[int]:
        """What this step brings, an even number of whole numbers: the next ones are aligned too.

        First the numbers that it has if steps before it were left out, those of the most first.
        """
        first = self.param_steps[0]
        heads = [_head(*each) for each in (*reversed(first.if_left_out), (first.constants, first.step_key))]
        gradients = [address(each.gradient) for each in self.param_steps]
        return list(chain(*heads, gradients, [0] * (len(gradients) % 2)))

    @property
    def heads(self) -> int:
        """How many heads `step_args` begins with; the last is that of a run whose steps were all taken."""
        return 1 + len(self.param_steps[0].if_left_out)

    def _reached(self) -> Iterator[Tensor]:
        """What a step reads and writes, twice what it does both to."""
        for each in self.param_steps:
            kept = [each.weight, each.master, each.master_scale]
            for moment in (each.first, each.second):
                kept += [moment.codes, moment.scale, moment.expansion]
            cast = [] if each.stepped is None else [each.stepped.plain, each.stepped.turned]
            yield from (x for x in (each.gradient, *kept, *kept, *cast) if x is not None)

    def launch(self, step_args: Tensor, left_out: Tensor | None = None) -> None:
        """The step itself; step_args int64 on the device, the numbers of `step_args()` from the last head on. left_out: see the kernel."""
        form, count = self.form, len(self.param_steps)
        if form.casts:
            launch(kernel.foresee, count, self.table, BLOCK=HISTORY_BLOCK, warps=HISTORY_WARPS)
        tables = _tables(step_args.device)
        launch(
            kernel.step, self.programs, self.which, self.table, step_args, tables, left_out, F=form, warps=WARPS, reached=self._reached
        )  # fmt: skip
        for each in self.param_steps:
            if each.stepped is not None:
                each.stepped.mark_written()


def step(param_steps: Sequence[ParamStep], kept: dict[Any, Batch], left_out: LeftOut | None = None) -> None:
    """All steps. kept: the batches of earlier ones, by what they are made of; the caller empties it when tensors change."""
    for device, batches in batches_of(param_steps, kept).items():
        step_args = _sent(torch.tensor(step_args_of(batches), dtype=torch.int64, device="cpu"), device)
        run(batches, step_args, None if left_out is None else left_out.on(device))


def batches_of(
    param_steps: Sequence[ParamStep], kept: dict[Any, Batch], makes: bool = True
) -> dict[torch.device, list[Batch]]:
    """The steps of each device, as few launches.

    makes  whether batches that are not kept are made, which writes to the device; else ConfigError
    """
    groups: dict[tuple[torch.device, int, int], list[ParamStep]] = {}
    for each in param_steps:
        if each.elements:
            groups.setdefault((each.weight.device, id(form_of_step(each)), id(each.constants)), []).append(each)
    found: dict[torch.device, list[Batch]] = {}
    for (device, form, _), members in groups.items():
        key = (form, *map(id, members))  # what a batch keeps alive, and forms live as long as the process
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
    """The step arguments of all batches, one after the other."""
    return [number for batch in batches for number in batch.step_args()]


def run(batches: Sequence[Batch], step_args: Tensor, left_out: Tensor | None = None) -> None:
    """Launches all batches; step_args: `step_args_of` them, on the device. left_out: see the kernel."""
    start = 0
    for batch in batches:
        start += HEAD * (batch.heads - 1)
        length = HEAD + len(batch.param_steps) + len(batch.param_steps) % 2
        batch.launch(step_args[start : start + length], left_out)
        start += length


def _head(c: Any, step_key: int) -> list[int]:
    """HEAD whole numbers: the key of a step's noise, and its constants as bits of float32."""
    numbers = (
        c.decay, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.eps, c.step_size, c.correction, c.beta1, c.bound,
        c.lag, c.lag_of_decay,
    )  # fmt: skip
    found = [step_key, *struct.unpack("<11i", struct.pack("<11f", *numbers))]
    return found + [0] * (HEAD - len(found))


def _of_cast(stepped: PrecastWeight | None) -> list[int]:
    """The rest of a tensor's line."""
    if stepped is None:
        return [0] * 8
    line = [*map(address, (stepped.plain, stepped.turned, stepped.maxima, stepped.expected))]
    window = stepped.window
    if window is None:
        return line + [0] * 4
    how = window.window
    (factor,) = struct.unpack("<i", struct.pack("<f", 2.0**how.margin))
    counts = how.length - 1 if how.algorithm == "max" else 0
    return [*line, address(window.live), address(window.history), counts, factor]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, without waiting: pinned memory is given back when the copy has happened."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _tables(device: torch.device) -> Tensor:
    return (
        _kept_tables(device) if dry_run_on() is None else _kept_tables.__wrapped__(device)
    )  # which hold no numbers there


@cache
def _kept_tables(device: torch.device) -> Tensor:
    tables = moments.expansion_tables(torch.device("cpu"))
    return _sent(torch.cat([table.flatten() for table in tables]), device)
