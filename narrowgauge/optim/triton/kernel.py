"""One optimizer step of many tensors in one Triton launch; see `launch`.

A program steps T tiles of TILE elements of one tensor, in the order of its rows. Tile t begins in
row t // tiles, and a row's last tile may be short. It decodes, updates and encodes in registers.
Each number of a state is read once and written once. Quantized states never exist as float32 in
memory.

    which      int32 [programs]         line of `table` for each program
    table      int64 [lines, FIELDS]    addresses and sizes of a tensor, see `launch.Batch`
    step_args  int64 [HEAD + lines]     noise key of the step, eleven float32 as bits, addresses of
               gradients
    tables     float32 [84]             constants of the expanded E4M3, see
               `moments.expansion_tables`
    skipped   int64 [2] or None        1 if this step is skipped; number n of skipped earlier
               steps, see `optim.skipped_steps`. The constants for n skipped steps lie n HEAD entries
               before step_args

The order of operations is the order of `rules`, without contraction, with correctly rounded square
roots and quotients.

Casts of new weights (F.casts). If a Linear multiplies by the weight in 8 bits, the program also
writes the amax of the weight that it holds in registers. With delayed scaling it writes the codes
in both orientations too; see `ops.quantize.precast_weight`. `foresee` runs before. For the codes of
w.T a program steps T rows of one column of tiles instead of T tiles of a row, and writes T adjacent
bytes. The next programs down a band of BAND rows complete the memory sector while it is in the L2
cache.
"""

import torch
import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.noise import mix
from narrowgauge.ops.triton.scales import reciprocal_of, scale_of
from narrowgauge.optim import masters, noise, rules
from narrowgauge.optim.step import DTYPES
from narrowgauge.optim.triton import launch
from narrowgauge.optim.triton.moment_codes import (
    NONE,
    WIDE,
    bits_of,
    decode_master,
    decode_moment,
    encode_master,
    encode_moment,
    noise_bits,
    number_of,
    uniform,
)

HEAD = tl.constexpr(launch.HEAD)
FIELDS = tl.constexpr(24)
WEIGHTS = tl.constexpr(noise.WEIGHTS)

FLOAT32 = tl.constexpr(DTYPES[torch.float32])
BFLOAT16 = tl.constexpr(DTYPES[torch.bfloat16])
FLOAT16 = tl.constexpr(DTYPES[torch.float16])

MASTER_FP32 = tl.constexpr(masters.KINDS["fp32"])
MASTER_FP16 = tl.constexpr(masters.KINDS["fp16-scaled"])
REMAINDER = tl.constexpr(masters.KINDS["bf16-remainder"])
STOCHASTIC = tl.constexpr(masters.KINDS["stochastic"])

ADAMW = tl.constexpr(rules.ADAMW.kernel)
LION = tl.constexpr(rules.LION.kernel)
SGD = tl.constexpr(rules.SGD.kernel)

AMAX = tl.constexpr(launch.AMAX)
CODES = tl.constexpr(launch.CODES)
# Rows of a band: a column of w.T codes fills one 32-byte memory sector.
BAND = tl.constexpr(launch.BAND)
# Programs spread their amax over PARTS addresses, so that atomics rarely collide; see
# `ops.quantize.precast_weight`.
PARTS = tl.constexpr(64)


@triton.jit
def _pointer(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(address, offset, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load float32 values from a tensor of DTYPE."""
    if DTYPE == FLOAT32:
        x = tl.load(_pointer(address, tl.float32, ALIGNED) + offset, mask=mask, other=0.0)
    elif DTYPE == BFLOAT16:
        bits = tl.load(_pointer(address, tl.int16, ALIGNED) + offset, mask=mask, other=0)
        x = number_of(bits.to(tl.int32) << 16)
    else:
        x = tl.load(_pointer(address, tl.float16, ALIGNED) + offset, mask=mask, other=0.0).to(
            tl.float32
        )
    return x


@triton.jit
def _write(x, address, offset, mask, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store x float32, already rounded to DTYPE, into a tensor of DTYPE."""
    if DTYPE == FLOAT32:
        tl.store(_pointer(address, tl.float32, ALIGNED) + offset, x, mask=mask)
    elif DTYPE == BFLOAT16:
        tl.store(
            _pointer(address, tl.int16, ALIGNED) + offset,
            (bits_of(x) >> 16).to(tl.int16),
            mask=mask,
        )
    else:
        tl.store(_pointer(address, tl.float16, ALIGNED) + offset, x.to(tl.float16), mask=mask)


@triton.jit
def _away(x):
    """Round x to the nearest bfloat16, ties away from zero, as float32; NaN stays."""
    return tl.where(x == x, number_of((bits_of(x) + 0x8000) & -65536), float("nan"))


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Round a master to the model's weight dtype, as float32."""
    return _away(x) if DTYPE == BFLOAT16 else x.to(tl.float16).to(tl.float32)


@triton.jit
def _read_weight(line, offset, mask, tile, tiles_inside, F: tl.constexpr):
    """Load the float32 weight to update, as `masters.load` does."""
    seen = _read(tl.load(line + 4), offset, mask, F.weight, F.aligned)
    if F.master == MASTER_FP32 or F.master == MASTER_FP16:
        if F.master == MASTER_FP32:
            master = _read(tl.load(line + 5), offset, mask, FLOAT32, F.aligned)
        else:
            codes = tl.load(
                _pointer(tl.load(line + 5), tl.float16, F.aligned) + offset, mask=mask, other=0.0
            )
            scale = tl.load(
                _pointer(tl.load(line + 6), tl.int16, False) + tile, mask=tiles_inside, other=0
            )
            master = decode_master(codes, scale)
        weight = tl.where(_rounded(master, F.weight) == seen, master, seen)
    elif F.master == REMAINDER:
        rest = tl.load(
            _pointer(tl.load(line + 5), tl.int16, F.aligned) + offset, mask=mask, other=0
        )
        weight = number_of(bits_of(seen) + rest.to(tl.int32))
    else:
        weight = seen
    return weight


@triton.jit
def _write_weight(x, line, offset, mask, tile, tiles_inside, noise, F: tl.constexpr):
    """Store the weight and its master, as `masters.store` does.

    noise: int32, read by stochastic kinds.
    """
    if F.master == STOCHASTIC and F.weight == FLOAT16:
        size = tl.abs(x)
        normal = number_of((bits_of(size) + (noise >> 3)) & -8192)
        part = size * 16777216.0
        whole = tl.floor(part)
        subnormal = (
            tl.where(uniform(noise) < part - whole, whole + 1.0, whole) * 5.9604644775390625e-08
        )  # 2^-24
        size_bits = bits_of(tl.where(size < 6.103515625e-05, subnormal, normal))
        finite = (bits_of(x) & 0x7F800000) != 0x7F800000
        seen = tl.where(finite, number_of(size_bits | (bits_of(x) & -0x80000000)), x)
    elif F.master == STOCHASTIC:
        carried = number_of((bits_of(x) + noise) & -65536)
        finite = (bits_of(x) & 0x7F800000) != 0x7F800000
        seen = tl.where(finite, carried, tl.where(x == x, x, float("nan")))
    elif F.master == MASTER_FP16:
        codes, scale = encode_master(x, noise)
        tl.store(_pointer(tl.load(line + 5), tl.float16, F.aligned) + offset, codes, mask=mask)
        tl.store(_pointer(tl.load(line + 6), tl.int16, False) + tile, scale, mask=tiles_inside)
        seen = _rounded(decode_master(codes, scale), F.weight)
    elif F.master == MASTER_FP32:
        seen = _rounded(x, F.weight)
        _write(x, tl.load(line + 5), offset, mask, FLOAT32, F.aligned)
    elif F.master == REMAINDER:
        seen = _away(x)
        rest = (bits_of(x) - bits_of(seen)).to(tl.int16)
        tl.store(_pointer(tl.load(line + 5), tl.int16, F.aligned) + offset, rest, mask=mask)
    else:
        seen = x
    _write(seen, tl.load(line + 4), offset, mask, F.weight, F.aligned)
    return seen


@triton.jit
def _write_cast(seen, line, row, column, rows, offset, mask, columns, F: tl.constexpr):
    """Store the codes of w and of w.T with the scale of the next step, if it is known."""
    # A local constexpr: Triton before 3.9 does not accept the bare attribute as an argument.
    C: tl.constexpr = F.cast
    amax = tl.load(_pointer(tl.load(line + 17), tl.float32, False))
    if amax > 0:
        scale = scale_of(amax.to(tl.int32, bitcast=True), C)
        y = seen * reciprocal_of(scale, None, C)
        codes = encode(y, y, C)
        tl.store(_pointer(tl.load(line + 14), tl.uint8, F.aligned) + offset, codes, mask=mask)
        length = rows.to(tl.int64)
        if F.turns_aligned:
            length = tl.multiple_of(length, 16)
        place = column * length + row[None, :]
        # A bound that the compiler does not know to be a multiple of 16 turned 16-byte stores into
        # 16 single bytes.
        there = (column < columns) & (row < length)[None, :]
        tl.store(
            _pointer(tl.load(line + 15), tl.uint8, F.turns_aligned) + place,
            tl.trans(codes),
            mask=there,
        )


@triton.jit
def _updated(w, g, m, v, step_args, F: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Update rule: (weight, first moment, second moment, decays, lag); see `rules`."""
    decay, one_minus_beta1, one_minus_beta2 = (
        _constant(step_args, 0),
        _constant(step_args, 1),
        _constant(step_args, 3),
    )
    step_size = _constant(step_args, 5)
    tl.static_assert(F.rule == ADAMW or F.rule == LION or F.rule == SGD, "no branch for this rule")
    lag = m
    if F.rule == ADAMW:
        decays = tl.abs(g) * 4.0 <= tl.abs(m)
        m = m + (g - m) * one_minus_beta1
        v = v * _constant(step_args, 2) + g * one_minus_beta2 * g
        root = tl.sqrt_rn(v)
        bottom = root * _constant(step_args, 6) + _constant(step_args, 4)
        if FIRST.kind != WIDE or SECOND.kind != WIDE:
            # div_rn and sqrt_rn: Triton's plain operators compile to approximations on NVIDIA GPUs.
            rate = tl.div_rn(tl.zeros_like(root) + step_size, bottom)
            lag = rate * tl.where(decays, _constant(step_args, 10), _constant(step_args, 9))
            limit = root * _constant(step_args, 8)
            # A NaN compares as False, so it is not clamped and stays visible.
            held = tl.abs(m) > limit
            m = tl.where(held, number_of(bits_of(limit) | (bits_of(m) & -0x80000000)), m)
            decays = decays | held
            w = w * decay + m * rate
        else:
            w = w * decay + tl.div_rn(m * step_size, bottom)
    elif F.rule == LION:
        decays = tl.abs(g) * 4.0 <= tl.abs(m)
        direction = m + (g - m) * one_minus_beta1
        # NaN stays NaN, unlike in a sign function.
        sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction))
        w = w * decay + sign * step_size
        m = m + (g - m) * one_minus_beta2
    else:
        beta1 = _constant(step_args, 7)
        decays = tl.abs(g) * 4.0 <= tl.abs(m) * one_minus_beta1
        change = g + w * decay
        m = m * beta1 + change
        w = w + (change + m * beta1 if F.nesterov else m) * step_size
        lag = tl.zeros_like(w) + _constant(step_args, 9)
    return w, m, v, decays, lag


@triton.jit
def _constant(step_args, PLACE: tl.constexpr):
    return number_of(tl.load(step_args + 1 + PLACE).to(tl.int32))


@triton.jit
def _bytes(place, F: tl.constexpr):
    """Offsets of 4-bit code bytes, [T, TILE / 2] int64, and their mask."""
    row, begin, inside, columns = place[0], place[1], place[2], place[5]
    width = (columns + 1) // 2
    HALF: tl.constexpr = F.width // 2
    if F.aligned:
        width = tl.multiple_of(width, HALF)
    byte = (begin // 2)[:, None] + tl.arange(0, F.tile // 2)[None, :]
    return row[:, None] * width + byte, inside[:, None] & (byte < width)


@triton.jit
def _read_moment(line, FIELD: tl.constexpr, place, tables, F: tl.constexpr, M: tl.constexpr):
    """Load a moment [T, TILE] as float32, with zeros outside the tensor. place: see `step`."""
    TILES: tl.constexpr = F.tiles  # within a shape too
    TILE: tl.constexpr = F.tile
    inside, offset, mask, tile = place[2], place[3], place[4], place[6]
    address = tl.load(line + FIELD)
    if M.kind == NONE:
        codes = tl.zeros((TILES, TILE), tl.float32)
    elif M.kind == WIDE:
        codes = _read(address, offset, mask, FLOAT32, F.aligned)
    elif M.bits == 16:
        codes = (
            tl.load(_pointer(address, tl.int16, F.aligned) + offset, mask=mask, other=0).to(
                tl.int32
            )
            & 0xFFFF
        )
    elif M.bits == 8:
        codes = tl.load(_pointer(address, tl.uint8, F.aligned) + offset, mask=mask, other=0).to(
            tl.int32
        )
    else:
        at, there = _bytes(place, F)
        pairs = tl.load(_pointer(address, tl.uint8, F.aligned) + at, mask=there, other=0).to(
            tl.int32
        )
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), (F.tiles, F.tile))
    if M.has_scale:
        scale = tl.load(
            _pointer(tl.load(line + FIELD + 1), tl.int16, False) + tile, mask=inside, other=0
        )
        log_k = tl.zeros((TILES,), tl.int32)
        if M.expands:
            expansions = _pointer(tl.load(line + FIELD + 2), tl.int8, False)
            log_k = tl.load(expansions + tile, mask=inside, other=0).to(tl.int32)
        codes = tl.where(
            mask,
            decode_moment(codes, scale, log_k, tables, M),
            0.0,
            # Padding of the last tile must not change its scale.
        )
    return codes


@triton.jit
def _write_moment(
    x, noise, decays, line, FIELD: tl.constexpr, place, tables, F: tl.constexpr, M: tl.constexpr, DRAWS: tl.constexpr,
    LAGS: tl.constexpr
):  # fmt: skip
    """Encode and store a moment.

    With LAGS it returns the rounding error x - decode(encode(x)), 0 in a non-finite tile; else
    zeros.
    """
    lost = tl.zeros_like(x)
    inside, offset, mask, tile = place[2], place[3], place[4], place[6]
    address = tl.load(line + FIELD)
    if M.kind == WIDE:
        _write(x, address, offset, mask, FLOAT32, F.aligned)
    elif M.has_scale:
        codes, scale, log_k = encode_moment(tl.where(mask, x, 0.0), noise, decays, tables, M, DRAWS)
        if LAGS:
            kept = decode_moment(codes & ((1 << M.bits) - 1), scale, log_k.to(tl.int32), tables, M)
            # The decoded value is NaN in a non-finite tile.
            lost = tl.where(kept == kept, x - kept, 0.0)
        if M.bits == 16:
            tl.store(_pointer(address, tl.int16, F.aligned) + offset, codes.to(tl.int16), mask=mask)
        elif M.bits == 8:
            tl.store(_pointer(address, tl.int8, F.aligned) + offset, codes.to(tl.int8), mask=mask)
        else:
            # A row of odd length ends in a half byte of zero.
            codes = tl.where(mask, codes, 0)
            first, second = tl.split(tl.reshape(codes, (F.tiles, F.tile // 2, 2)))
            at, there = _bytes(place, F)
            tl.store(
                _pointer(address, tl.uint8, F.aligned) + at,
                (first | (second << 4)).to(tl.uint8),
                mask=there,
            )
        tl.store(_pointer(tl.load(line + FIELD + 1), tl.int16, False) + tile, scale, mask=inside)
        if M.expands:
            tl.store(_pointer(tl.load(line + FIELD + 2), tl.int8, False) + tile, log_k, mask=inside)
    return lost


@triton.jit
def _own_tiles(first, per_row, total, F: tl.constexpr):
    """(tile int32 [T], row int32 [T], column of tiles, mask) of this program.

    first: the tensor's first program.
    """
    program = tl.program_id(0) - first
    TILES: tl.constexpr = F.tiles  # within a shape too
    if F.casts == CODES:
        IN_BAND: tl.constexpr = BAND // F.tiles
        band = program // (IN_BAND * per_row)
        place = program - band * (IN_BAND * per_row)
        across = place // IN_BAND
        row = band * BAND + (place - across * IN_BAND) * F.tiles + tl.arange(0, F.tiles)
        across = tl.zeros((TILES,), tl.int32) + across
        tile = row * per_row + across
        inside = row < total // per_row
    else:
        tile = program * F.tiles + tl.arange(0, F.tiles)
        inside = tile < total
        row = tile // per_row
        across = tile - row * per_row
    return tile, row, across, inside


@triton.jit
def _taken(
    line,
    number,
    step_args,
    head,
    tables,
    place,
    across,
    F: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Step the tiles of this program; return the rounded weight as float32. place: see `step`."""
    row, inside, offset, mask, tile = place[0], place[2], place[3], place[4], place[6]

    # Keys of noise, by `noise.key` and `ParamStep.weight_noise_key`.
    key = mix(tl.load(head).to(tl.uint32) ^ tl.load(line + 13).to(tl.uint32))
    # Half of the index of each tile's first element in the whole parameter, modulo 2^32, as
    # `noise_bits` counts.
    # Only whole parameters get casts, so the shorter form is exact there. Registers are scarce.
    if F.casts != 0:
        first = tile.to(tl.uint32) * (F.tile // 2)
    else:
        first = (row * tl.load(line + 23) + across).to(tl.uint32) * (F.tile // 2) + tl.load(
            line + 22
        ).to(tl.uint32)
    within = tl.arange(0, F.tile)

    g = _read(tl.load(step_args + HEAD + number), offset, mask, F.gradient, F.aligned)
    w = _read_weight(line, offset, mask, tile, inside, F)
    m = _read_moment(line, 7, place, tables, F, FIRST)
    v = _read_moment(line, 10, place, tables, F, SECOND)
    w, m, v, decays, lag = _updated(w, g, m, v, head, F, FIRST, SECOND)
    # Both moments of an element share one random number, as in the definition.
    noise = noise_bits(key, first, within)
    LAGS: tl.constexpr = FIRST.has_scale and F.lags
    lost = _write_moment(m, noise, decays, line, 7, place, tables, F, FIRST, F.draws_first, LAGS)
    _write_moment(v, noise, decays, line, 10, place, tables, F, SECOND, True, False)
    if LAGS:
        w = w + lost * lag
    w = tl.where(mask, w, 0.0)
    if F.master == STOCHASTIC or F.master == MASTER_FP16:
        noise = noise_bits(mix(key ^ WEIGHTS), first, within + F.shift)
    seen = _write_weight(w, line, offset, mask, tile, inside, noise, F)
    return seen


@triton.jit
def step(which, table, step_args, tables, skipped, F: tl.constexpr):
    """Kernel of the step, see the module. F: a `launch.Form`."""
    number = tl.load(which + tl.program_id(0)).to(tl.int64)
    line = table + number * FIELDS
    columns, per_row, total = (
        tl.load(line + 1),
        tl.load(line + 2).to(tl.int32),
        tl.load(line + 3).to(tl.int32),
    )
    WIDTH: tl.constexpr = F.width
    # Local constexprs: bare attributes as arguments do not compile before Triton 3.9.
    FIRST: tl.constexpr = F.first
    SECOND: tl.constexpr = F.second
    # The divisor is the vector width that all dtypes can load at once: threads then hold the same
    # elements of every tensor.
    if F.aligned:
        columns = tl.multiple_of(columns, WIDTH)
    tile, row, across, inside = _own_tiles(tl.load(line).to(tl.int32), per_row, total, F)
    begin = across.to(tl.int64) * F.tile
    # int64: element offsets of a large embedding exceed int32.
    row = row.to(tl.int64)
    column = begin[:, None] + tl.arange(0, F.tile)[None, :]
    mask = inside[:, None] & (column < columns)
    offset = row[:, None] * columns + column

    # Positions: row, first column, mask of each tile [T]; offset, mask of each element [T, TILE];
    # row length; tile indices [T].
    place = (row, begin, inside, offset, mask, columns, tile)

    if skipped is None:
        seen = _taken(line, number, step_args, step_args, tables, place, across, F, FIRST, SECOND)
    elif tl.load(skipped) == 0:
        head = step_args - tl.load(skipped + 1) * HEAD
        seen = _taken(line, number, step_args, head, tables, place, across, F, FIRST, SECOND)
    # The step is skipped: its cast is the cast of the unchanged weight.
    else:
        seen = _read(tl.load(line + 4), offset, mask, F.weight, F.aligned)
    if F.casts != 0:
        largest = tl.max(tl.max(tl.where(mask, magnitude_bits(seen), 0), axis=1), axis=0)
        maxima = _pointer(tl.load(line + 16), tl.int32, True)
        # The bits of magnitudes have the order of the magnitudes, so an integer maximum is exact.
        tl.atomic_max(maxima + tl.program_id(0) % PARTS, largest, sem="relaxed")
    if F.casts == CODES:
        # One column of tiles: the same in all of its rows.
        turned = (tl.max(begin, axis=0) + tl.arange(0, F.tile))[:, None]
        _write_cast(seen, line, row, turned, total // per_row, offset, mask, columns, F)


@triton.jit
def foresee(table, BLOCK: tl.constexpr):
    """Prepare the cast of each weight before `step`; one program per line.

    Resets the amax of the last step. With delayed scaling (nonzero address of the expected amax),
    computes the amax that the history will give after `roll_history` has ended this step.
    """
    line = table + tl.program_id(0).to(tl.int64) * FIELDS
    place = tl.arange(0, PARTS)
    tl.store(_pointer(tl.load(line + 16), tl.int32, True) + place, tl.zeros_like(place))
    expected = tl.load(line + 17)
    if expected != 0:
        live = _pointer(tl.load(line + 18), tl.float32, False)
        history = _pointer(tl.load(line + 19), tl.float32, False)
        count = tl.load(line + 20).to(tl.int32)
        newest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            newest = tl.maximum(newest, tl.load(history + index, mask=index < count, other=0.0))
        seen = tl.load(live + 1)
        amax = tl.maximum(seen, tl.max(newest, axis=0)) * number_of(tl.load(line + 21).to(tl.int32))
        tl.store(_pointer(expected, tl.float32, False), tl.where(seen > 0, amax, tl.load(live)))
