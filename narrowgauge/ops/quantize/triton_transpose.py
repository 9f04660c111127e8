"""Cast x, x.T or both from one read, with a scale of the tensor, of each row or of each column.

    amax           largest magnitude of a tensor: PARTS programs iterate over it and store a maximum
                   each
    maxima         largest magnitude of each row and each column of x, from one read
    cast_both      casts with scales from the maxima, and writes the codes of x, of x.T, or of
                   both
    amax_and_cast  the largest magnitudes and then the cast in one launch; programs wait for each
                   other in between
    cast_rows      one scale per row in one launch, only codes of x
    both_delayed   (delayed scaling) casts by the tensor's scale of earlier steps, and records its
                   amax in the state
    settle_both    (delayed scaling) the last part of both_delayed, for codes and an amax of another
                   kernel

A program casts ROWS x COLUMNS elements, or several such pieces. The codes of x.T are transposed through shared memory, so
that both orientations are written in long runs. With one scale per tensor and rounding to nearest,
both orientations have the same codes, which are computed once. If only codes of x are requested and
its memory is dense, x is passed as one row. Two 4-bit codes share a byte. Data that fits into the
L2 cache (50 MB on Hopper) is read from memory once, even if a kernel reads it twice.

x is a `Matrix`, plain and transposed are `Orientation`s, state is an `AmaxState`, C is
`CastConstants`. Maxima are int32, the bits of magnitudes.
"""

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import encode, magnitude_bits, pack
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import reciprocal_of, scale_of

IN_USE = tl.constexpr(0)  # indices of `AmaxBuffers.live`
SEEN = tl.constexpr(1)
NONFINITE = tl.constexpr(2)


@triton.jit
def place_of_program(columns, COLUMNS: tl.constexpr):
    """Return (down, across) int64 of this program's piece."""
    # A grid of one axis: a second axis ends at 65,535.
    return place_of_piece(tl.program_id(0), columns, COLUMNS)


@triton.jit
def place_of_piece(piece, columns, COLUMNS: tl.constexpr):
    """Return (down, across) int64 of a piece, int32, numbered row by row."""
    # int32: a 64-bit quotient takes as long as the cast of two elements.
    width = tl.cast(tl.cdiv(columns, COLUMNS), tl.int32)
    down = piece // width
    return down.to(tl.int64), (piece - down * width).to(tl.int64)


@triton.jit
def load_piece(x, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (values [ROWS, COLUMNS], zero outside of x; row [ROWS]; column [COLUMNS]).

    Indices are int64.
    """
    row = tl.arange(0, ROWS) + down * ROWS
    column = tl.arange(0, COLUMNS) + across * COLUMNS
    mask = (row < x.rows)[:, None] & (column < x.columns)[None, :]
    return (
        tl.load(x.data + row[:, None] * x.stride + column[None, :], mask=mask, other=0.0),
        row,
        column,
    )


@triton.jit
def amax(x, maxima, whole, ended, n, PARTS: tl.constexpr, RUN: tl.constexpr):
    """Entry point: largest magnitude of n elements.

    maxima  [PARTS] int32, receives the bits of the largest magnitude of each program
    whole   [1] int32, receives the maximum of all; None: not requested
    ended   int32 [1], zero before and after: counts finished programs, so that the last one knows
            it is the last
    """
    part = tl.program_id(0)
    largest = tl.zeros((RUN,), tl.int32)
    for start in range(part.to(tl.int64) * RUN, n, PARTS * RUN):
        index = start + tl.arange(0, RUN)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x + index, mask=index < n, other=0.0)))
    if whole is None:
        tl.store(maxima + part, tl.max(largest, axis=0))
    else:
        tl.atomic_xchg(maxima + part, tl.max(largest, axis=0), sem="relaxed")
        if tl.atomic_add(ended, 1, sem="acq_rel") == PARTS - 1:
            # An atomic read, because a plain load could hit a stale line of the L1 cache.
            every = tl.atomic_or(maxima + tl.arange(0, PARTS), tl.zeros((PARTS,), tl.int32))
            tl.store(whole, tl.max(every, axis=0))
            tl.store(ended, 0)


@triton.jit
def maxima(x, of_rows, of_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Entry point: largest magnitude of each row and column.

    of_rows     [rows] int32, zero on entry; None: not requested
    of_columns  [columns] int32, zero on entry; None: not requested

    `cast_both` resets them to zero.
    """
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    _note_lines(values, row, column, x, of_rows, of_columns)


@triton.jit
def _note_lines(values, row, column, x, of_rows, of_columns):
    bits = magnitude_bits(values)
    if of_rows is not None:
        tl.atomic_max(of_rows + row, tl.max(bits, axis=1), mask=row < x.rows, sem="relaxed")
    if of_columns is not None:
        tl.atomic_max(
            of_columns + column, tl.max(bits, axis=0), mask=column < x.columns, sem="relaxed"
        )


@triton.jit
def _encoded(values, scale, key, first, second, length, C: tl.constexpr):
    """Return codes of values.

    The noise is that for element (first, second) of a matrix with rows of `length` elements.
    """
    y = values.to(tl.float32) * reciprocal_of(scale, None, C)
    noise = uniform(key, first, length, second) if C.stochastic else y
    return encode(y, noise, C)


@triton.jit
def store_codes(found, codes, down, across, rows, columns, C: tl.constexpr):
    """Store piece (down, across), int64, of codes [rows, columns] uint8; packed if C.packed."""
    ROWS: tl.constexpr = found.shape[0]
    COLUMNS: tl.constexpr = found.shape[1]
    row, column = tl.arange(0, ROWS) + down * ROWS, tl.arange(0, COLUMNS) + across * COLUMNS
    inside = (row < rows)[:, None]
    if C.packed:
        # An odd row ends in a zero nibble.
        found = tl.where(inside & (column < columns)[None, :], found, 0)
        # Rounded up in this form, so that Triton can infer its divisibility.
        width = columns // 2 + (columns - columns // 2 * 2)
        byte = tl.arange(0, COLUMNS // 2) + across * (COLUMNS // 2)
        place = row[:, None] * width + byte[None, :]
        tl.store(codes + place, pack(found, ROWS, COLUMNS), mask=inside & (byte < width)[None, :])
    else:
        place = row[:, None] * columns + column[None, :]
        tl.store(codes + place, found, mask=inside & (column < columns)[None, :])


@triton.jit
def _line_scale(of, maxima, place, length, writes, C: tl.constexpr):
    """Return the scale of each line from maxima. Programs with `writes` store it."""
    # Bypass the L1 cache (.cg): other programs of the same launch may have written the maxima.
    scale = scale_of(tl.load(maxima + place, mask=place < length, other=0, cache_modifier=".cg"), C)
    if writes:
        tl.store(of.scales + place, scale, mask=place < length)
    return scale


@triton.jit
def _cast_piece(
    values, row, column, whole, of_rows, of_columns, x, plain, transposed, down, across, C: tl.constexpr
):  # fmt: skip
    """Cast a piece of x and of x.T.

    whole  the one scale; None: each line has its own scale, computed from its maximum and stored
    """
    SAME: tl.constexpr = whole is not None and not C.stochastic
    if plain.codes is not None or SAME:
        scale = (
            whole
            if whole is not None
            else _line_scale(plain, of_rows, row, x.rows, across == 0, C)[:, None]
        )
        found = _encoded(values, scale, plain.key, row[:, None], column[None, :], x.columns, C)
        if plain.codes is not None:
            store_codes(found, plain.codes, down, across, x.rows, x.columns, C)
        if transposed.codes is not None and SAME:
            store_codes(tl.trans(found), transposed.codes, across, down, x.columns, x.rows, C)
    if transposed.codes is not None and not SAME:
        scale = whole
        if whole is None:
            scale = _line_scale(transposed, of_columns, column, x.columns, down == 0, C)[None, :]
        found = _encoded(values, scale, transposed.key, column[None, :], row[:, None], x.rows, C)
        store_codes(tl.trans(found), transposed.codes, across, down, x.columns, x.rows, C)


@triton.jit
def cast_both(
    x, plain, transposed, ended, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Entry point: codes of x [rows, columns] and of x.T [columns, rows], by known maxima.

    PARTS  above zero: one scale, from the largest of plain.maxima [PARTS], stored in plain.scales;
           zero: one scale per row of x and per row of x.T
    ended  int32 [1], zero before and after: counts finished programs, and the last one resets the
           maxima to zero; None: the maxima stay
    """
    if ROWS == 1:  # x is passed as one row
        down, across = 0, tl.program_id(0).to(tl.int64)
    else:
        down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    whole = None
    if PARTS > 0:
        whole = scale_of(tl.max(tl.load(plain.maxima + tl.arange(0, PARTS)), axis=0), C)
        if tl.program_id(0) == 0:
            tl.store(plain.scales, whole)
    _cast_piece(
        values,
        row,
        column,
        whole,
        plain.maxima,
        transposed.maxima,
        x,
        plain,
        transposed,
        down,
        across,
        C,
    )
    if ended is not None:
        # Every thread of this program has read the maxima before it counts as finished.
        tl.debug_barrier()
        if tl.atomic_add(ended, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            _clear(plain.maxima, x.rows)
            _clear(transposed.maxima, x.columns)
            tl.store(ended, 0)


@triton.jit
def _clear(maxima, length):
    """Reset maxima [length] to zero, if there are any."""
    if maxima is not None:
        for start in range(0, length, 1024):
            place = start + tl.arange(0, 1024)
            tl.store(maxima + place, tl.zeros((1024,), tl.int32), mask=place < length)


@triton.jit
def wait_for_all(arrived):
    """Grid barrier: wait until all programs have arrived. arrived: int32 [1], zero before.

    All programs must be resident, i.e. launched cooperatively. Stores before the barrier are
    visible after it to loads that bypass the L1 cache. Like Inductor's `x_grid_barrier` (torch 2.11
    to 2.13).
    """
    tl.debug_barrier()  # every thread of this program has stored
    tl.atomic_add(arrived, 1, sem="acq_rel")
    while tl.atomic_add(arrived, 0, sem="acquire") < tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def _place(piece, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if ROWS == 1:  # x is passed as one row
        down, across = tl.cast(0, tl.int64), tl.cast(piece, tl.int64)
    else:
        down, across = place_of_piece(piece, columns, COLUMNS)
    return down, across


@triton.jit
def amax_and_cast(
    x, plain, transposed, whole, shared, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Entry point: `amax` or `maxima`, and then `cast_both`, in one cooperative launch.

    Programs share the pieces.

    PARTS    above zero, and at least the number of programs: one scale; zero: one per row of x and
             of x.T
    whole    int32 [1], receives the bits of the largest magnitude; None: not requested
    shared   int32, maxima and one counter for the barrier. The maxima are [PARTS], one per program,
             or [rows + columns], zero before and after. The counter is zero before and after
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    pieces = tl.cast(tl.cdiv(x.rows, ROWS) * tl.cdiv(x.columns, COLUMNS), tl.int32)
    of_columns = shared + x.rows
    arrived = shared + PARTS if PARTS > 0 else of_columns + x.columns
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for piece in range(program, pieces, programs):
        at = _place(piece, x.columns, ROWS, COLUMNS)
        values, row, column = load_piece(x, at[0], at[1], ROWS, COLUMNS)
        if PARTS > 0:
            largest = tl.maximum(largest, magnitude_bits(values))
        else:
            _note_lines(values, row, column, x, shared, of_columns)
    if PARTS > 0:
        tl.store(shared + program, tl.max(tl.max(largest, axis=1), axis=0))
    wait_for_all(arrived)
    scale = None
    if PARTS > 0:
        part = tl.arange(0, PARTS)
        found = tl.max(
            tl.load(shared + part, mask=part < programs, other=0, cache_modifier=".cg"), axis=0
        )
        scale = scale_of(found, C)
        if program == 0:
            tl.store(plain.scales, scale)
            if whole is not None:
                tl.store(whole, found)
    # In reverse order: the pieces that were read last are still in the L2 cache.
    for before in range(program, pieces, programs):
        at = _place(pieces - 1 - before, x.columns, ROWS, COLUMNS)
        values, row, column = load_piece(x, at[0], at[1], ROWS, COLUMNS)
        _cast_piece(
            values, row, column, scale, shared, of_columns, x, plain, transposed, at[0], at[1], C
        )
    # Every thread of this program has read the maxima before it counts as finished.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == 2 * programs - 1:
        if PARTS == 0:
            _clear(shared, x.rows + x.columns)
        tl.store(arrived, 0)


@triton.jit
def cast_rows(
    x, out, C: tl.constexpr, WHOLE_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Entry point: one scale per row.

    A program computes the largest magnitude of its ROWS rows, and casts them.

    WHOLE_ROW  True: a row has at most COLUMNS elements and stays in registers. Longer rows are read
               again, from the cache
    """
    down = tl.program_id(0).to(tl.int64)
    row = down * ROWS + tl.arange(0, ROWS)
    if WHOLE_ROW:
        values, _, column = load_piece(x, down, 0, ROWS, COLUMNS)
        scale = scale_of(tl.max(magnitude_bits(values), axis=1), C)
        found = _encoded(
            values, scale[:, None], out.key, row[:, None], column[None, :], x.columns, C
        )
        store_codes(found, out.codes, down, 0, x.rows, x.columns, C)
    else:
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for across in range(0, tl.cdiv(tl.cast(x.columns, tl.int64), COLUMNS)):
            values, _, column = load_piece(x, down, across, ROWS, COLUMNS)
            largest = tl.maximum(largest, magnitude_bits(values))
        scale = scale_of(tl.max(largest, axis=1), C)
        for across in range(0, tl.cdiv(tl.cast(x.columns, tl.int64), COLUMNS)):
            values, _, column = load_piece(x, down, across, ROWS, COLUMNS)
            found = _encoded(
                values, scale[:, None], out.key, row[:, None], column[None, :], x.columns, C
            )
            store_codes(found, out.codes, down, across, x.rows, x.columns, C)
    tl.store(out.scales + row, scale, mask=row < x.rows)


@triton.jit
def store_both(values, scale, x, codes, transposed, down, across, C: tl.constexpr):
    """Cast a piece to nearest with one scale, and store the requested orientations."""
    found = _encoded(values, scale, None, None, None, None, C)
    store_codes(found, codes, down, across, x.rows, x.columns, C)
    if transposed is not None:
        store_codes(tl.trans(found), transposed, across, down, x.columns, x.rows, C)


@triton.jit
def both_delayed(
    x, codes, transposed, state, patience,
    RECORDS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, HELPERS: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entry point: codes of x and of x.T, or of x, by the scale of state.live[IN_USE].

    state.maxima is [PARTS + 4], zero before and after: maxima that programs share, a counter of
    finished programs, and three numbers of `_first_cast`. The last program updates state.scale,
    state.amax and state.live by `settled`. If no earlier step gave a scale, no program stores codes,
    and the last HELPERS of them cast all pieces by the scale that the last one has found.

    AHEAD     True: few programs share the pieces, and load the next piece before they cast one; of x
              in 16 bits. False: one piece per program
    patience  polls after which a program stops waiting for the scale. The last one never waits, and
              casts the pieces that nobody else takes, so no program needs another to be resident
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    pieces = programs
    in_use = tl.load(state.live + IN_USE)  # no program of this launch writes it
    is_first = in_use <= 0
    scale = scale_of(in_use.to(tl.int32, bitcast=True), C)
    rows, columns = tl.where(is_first, 0, x.rows), tl.where(is_first, 0, x.columns)
    at = _place(program, x.columns, ROWS, COLUMNS)
    values = load_piece(x, at[0], at[1], ROWS, COLUMNS)[0]
    # A ticket instead of a second launch: three fills and three launches less. Its fence waits for the codes
    # that the program has stored: for those of many pieces at once, or for none.
    if AHEAD:
        pieces = tl.cast(tl.cdiv(x.rows, ROWS) * tl.cdiv(x.columns, COLUMNS), tl.int32)
        largest = values.to(tl.int16, bitcast=True) & 0x7FFF
        for piece in range(program, pieces, programs):
            at = _place(piece, x.columns, ROWS, COLUMNS)
            # Beyond the last piece every element is masked.
            then = _place(piece + programs, x.columns, ROWS, COLUMNS)
            following = load_piece(x, then[0], then[1], ROWS, COLUMNS)[0]
            largest = tl.maximum(largest, values.to(tl.int16, bitcast=True) & 0x7FFF)
            found = _encoded(values, scale, None, None, None, None, C)
            store_codes(found, codes, at[0], at[1], rows, x.columns, C)
            if transposed is not None:
                store_codes(tl.trans(found), transposed, at[1], at[0], columns, x.rows, C)
            values = following
        ended = _ticket(state, _bits_of_16(largest, x), PARTS)
    else:
        largest = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
        ended = _ticket(state, largest, PARTS)
        found = _encoded(values, scale, None, None, None, None, C)
        store_codes(found, codes, at[0], at[1], rows, x.columns, C)
        if transposed is not None:
            store_codes(tl.trans(found), transposed, at[1], at[0], columns, x.rows, C)
    if ended >= programs - HELPERS:
        shared = state.maxima + PARTS + 1
        if ended == programs - 1:
            place = tl.arange(0, PARTS)
            own_bits = tl.max(
                tl.atomic_xchg(state.maxima + place, tl.zeros((PARTS,), tl.int32)), axis=0
            )
            tl.store(state.maxima + PARTS, 0)
            settled(state, own_bits, True, RECORDS, C)
            if is_first:
                tl.debug_barrier()  # the scale is stored
                tl.atomic_xchg(shared, 1, sem="release")
        if is_first:
            _first_cast(
                x, codes, transposed, state.scale, shared, pieces, min(programs, HELPERS), patience, C, ROWS, COLUMNS
            )  # fmt: skip


@triton.jit
def _ticket(state, largest, PARTS: tl.constexpr):
    """Note a program's largest magnitude, and return how many programs have done so before."""
    tl.atomic_max(state.maxima + tl.program_id(0) % PARTS, largest, sem="relaxed")
    return tl.atomic_add(state.maxima + PARTS, 1, sem="acq_rel")


@triton.jit
def _bits_of_16(largest, x):
    """Return the `magnitude_bits` of the largest of int16 bits of magnitudes, which are ordered alike.

    x  the matrix that they are of. Maxima in 16 bits take half of the registers
    """
    whole = tl.max(tl.max(largest, axis=1), axis=0)
    if x.data.dtype.element_ty == tl.bfloat16:
        bits = whole.to(tl.int32) << 16
    else:
        bits = magnitude_bits(whole.to(tl.int16).to(tl.float16, bitcast=True))
    return bits


@triton.jit
def _first_cast(
    x, codes, transposed, scale, shared, pieces, count, patience,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast the pieces that no other program of `count` takes, by the scale that the last one stores.

    shared  int32 [3], zero before and after: 1 once the scale is stored; pieces taken; programs that
            are done. The last of these resets all three
    """
    polls = 0
    while polls < patience:
        polls = tl.where(tl.atomic_add(shared, 0, sem="acquire") > 0, patience, polls + 1)
    tl.debug_barrier()
    piece = pieces
    if tl.atomic_add(shared, 0, sem="acquire") > 0:
        piece = tl.atomic_add(shared + 1, 1, sem="relaxed")
    while piece < pieces:
        at = place_of_piece(piece, x.columns, COLUMNS)
        values = load_piece(x, at[0], at[1], ROWS, COLUMNS)[0]
        # Bypass the L1 cache (.cg): another program of this launch wrote the scale.
        found = tl.load(scale, cache_modifier=".cg")
        store_both(values, found, x, codes, transposed, at[0], at[1], C)
        piece = tl.atomic_add(shared + 1, 1, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(shared + 2, 1, sem="acq_rel") == count - 1:
        for i in range(3):
            tl.store(shared + i, 0)


@triton.jit
def settled(state, own_bits, is_first, RECORDS: tl.constexpr, C: tl.constexpr):
    """Return (scale, live[IN_USE]) of a tensor whose amax has these bits.

    The amax that sets the scale is chosen as by `update_amax`.

    is_first  True for the program that stores scale, amax and live
    """
    live = state.live
    in_use = tl.load(live + IN_USE)
    own = own_bits.to(tl.float32, bitcast=True)
    finite = own_bits < 0x7F800000
    amax = tl.where(finite & (in_use > 0), in_use, own)
    scale = scale_of(amax.to(tl.int32, bitcast=True), C)
    if is_first:
        tl.store(state.amax, amax)
        tl.store(state.scale, scale)
        if RECORDS:  # no other program reads these two
            seen = tl.load(live + SEEN)
            tl.store(live + SEEN, tl.where(finite, tl.maximum(seen, own), seen))
            tl.store(live + NONFINITE, tl.where(finite, tl.load(live + NONFINITE), 1.0))
    return scale, in_use


@triton.jit
def settle_both(
    x, codes, transposed, state, expected,
    RECORDS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entry point: update the amax state after a kernel that left state.maxima [PARTS].

    It sets state.scale, state.amax and state.live as `update_amax` does. It casts only if no
    earlier step gave a scale, or if the amax in use is not expected[0], by which the codes were
    written. A non-finite amax makes the scale NaN. The codes then stay as they are, because
    that scale makes every value NaN. Few programs share the pieces, since most steps have nothing
    to cast.
    """
    program = tl.program_id(0).to(tl.int64)
    own_bits = tl.max(tl.load(state.maxima + tl.arange(0, PARTS)), axis=0)
    scale, in_use = settled(state, own_bits, program == 0, RECORDS, C)
    serves = in_use > 0
    if expected is not None:
        serves = serves & (in_use == tl.load(expected))
    if not serves:
        width = tl.cdiv(x.columns, COLUMNS)
        for piece in range(program, tl.cdiv(x.rows, ROWS) * width, tl.num_programs(0)):
            down, across = piece // width, piece % width
            values, _, _ = load_piece(x, down, across, ROWS, COLUMNS)
            store_both(values, scale, x, codes, transposed, down, across, C)
