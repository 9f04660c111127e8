"""The kernel of act_cast, see `ops.norm_act`: a program takes a piece of y, or whole rows where a row has a scale (`triton_store`)."""

import triton
import triton.language as tl

from narrowgauge.ops.norm_act.triton_store import BY_ROW, piece_of_program, store_piece, store_rows

SWIGLU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def normal(x):
    """The normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def tanh_gate(x):
    """(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _swiglu(inputs, at):
    gate, up = inputs
    raw = tl.load(gate + at.start + at.place, mask=at.mask, other=0.0)
    x = raw.to(tl.float32)
    by = tl.load(up + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
    return (x * sigmoid(x)).to(raw.dtype).to(tl.float32) * by


@triton.jit
def _gelu(inputs, at):
    x = tl.load(inputs[0] + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
    return x * normal(x)


@triton.jit
def _gelu_tanh(inputs, at):
    x = tl.load(inputs[0] + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
    return x * tanh_gate(x)


@triton.jit
def _compute(VALUE: tl.constexpr, inputs, out, rows, columns, H: tl.constexpr):
    if H.scaling == BY_ROW:
        store_rows(VALUE, inputs, out, rows, columns, H)
    else:
        at = piece_of_program(rows, columns, H)
        store_piece(VALUE(inputs, at), out, at, H)


@triton.jit
def act_cast(x, up, out, rows, columns, KIND: tl.constexpr, H: tl.constexpr):
    """x [rows, columns] -> out; up: of swiglu, whose gate is x, else None."""
    if KIND == SWIGLU:
        _compute(_swiglu, (x, up), out, rows, columns, H)
    elif KIND == GELU:
        _compute(_gelu, (x,), out, rows, columns, H)
    else:
        _compute(_gelu_tanh, (x,), out, rows, columns, H)
