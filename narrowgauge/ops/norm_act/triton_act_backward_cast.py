"""The kernel of act_backward_cast, see `ops.norm_act`: a program takes one piece of the gradients.

Of swiglu two results come from one read of g, u and h. A gradient is cast by one scale per tensor or not at all.
"""

import triton
import triton.language as tl

from narrowgauge.ops.norm_act.triton_act_cast import GELU, SWIGLU, normal, sigmoid, tanh_gate
from narrowgauge.ops.norm_act.triton_store import piece_of_program, store_piece


@triton.jit
def act_backward_cast(
    x, up, gy, first, second, rows, columns, KIND: tl.constexpr, H: tl.constexpr, SECOND: tl.constexpr
):
    """The gradient of x -> first, cast as H says; of swiglu, whose gate is x, that of up -> second, as SECOND says."""
    at = piece_of_program(rows, columns, H)
    here = at.start + at.place
    x = tl.load(x + here, mask=at.mask, other=0.0).to(tl.float32)
    h = tl.load(gy + here, mask=at.mask, other=0.0).to(tl.float32)
    if KIND == SWIGLU:
        share = sigmoid(x)
        u = tl.load(up + here, mask=at.mask, other=0.0).to(tl.float32)
        store_piece(h * u * (share * (1.0 + x * (1.0 - share))), first, at, H)
        store_piece(h * (x * share), second, at, SECOND)
    elif KIND == GELU:
        slope = tl.exp(-0.5 * x * x) * 0.3989422804014327
        store_piece(h * (normal(x) + x * slope), first, at, H)
    else:
        share = tanh_gate(x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        store_piece(h * (share + x * (share * (1.0 - share) * slope)), first, at, H)
