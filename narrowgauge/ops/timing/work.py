"""FLOPs and bytes of one operation; each tensor is read or written once.

A dispatch mode reports torch's operators, and the launcher reports our kernels. FLOPs come from
torch.utils.flop_counter. It lacks scaled, integer and grouped GEMMs, which count as 2 m n k. Causal
attention counts half. Views and uninitialized buffers cost nothing. A table lookup counts only the
elements that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

OPERANDS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.float4_e2m1fn_x2: "fp4", torch.uint8: "fp8",
}  # fmt: skip  # uint8: codes that our own GEMM kernels read
# Operators that read a few elements of one argument, and its position.
LOOKED_UP = {
    "embedding": 0,
    "index_select": 0,
    "gather": 0,
    "index": 0,
    "nll_loss_forward": 0,
    "nll_loss_backward": 1,
}
# Operators that write their first argument without reading it.
FILLED = ("copy_", "fill_", "zero_", "_foreach_zero_", "_foreach_copy_")
FILLS_NOTHING = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "resize_",
    "_local_scalar_dense",
    "lift_fresh",
)
MAXIMA = ("group_maxima", "amax", "maxima")  # kernels that read x and write no codes
# GEMMs that report themselves, with [m, k] and [n, k] first: torch cannot run those of cuBLAS under
# fake tensors.
PRODUCTS = {
    "block_mm": "triton",
    "int4_mm": "fast",
    "scaled_mm_blocks": "blocks",
    "scaled_mm_mx": "mx",
}
# Products of all experts, whose rows are told by `_of_groups`.
CASTS_OF_GROUPS = ("group_maxima", "cast_groups")
GROUPED = {"grouped_mm": "triton", "grouped_grad": "triton"}
# It reads its first argument for the maximum, and again to cast it.
READS_TWICE = ("amax_and_cast",)
# Our kernels that receive whole matrices and usually read none.
SETTLES = ("settle_both", "settle_stepped", "clear_rest")


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of one operation.

    kind           "products" (GEMMs), "attention", "casts" or "elementwise"
    operands       operand type of a GEMM, a key of `Card.peak`, or ""
    own            True for our kernels
    sums           accumulation and scales of an 8-bit GEMM: "fast"; "split": partial sums leave the
                   tensor core early; "rows", "split rows": the same with a scale per row; "grouped
                   rows", "split grouped rows": of all experts, by CUTLASS on every GPU; "blocks":
                   a scale multiplies each partial sum; "triton": the same by our kernel; "mx": the
                   tensor core multiplies by scales
    rows, columns  shape of a GEMM's result
    elements       number of elements that a narrowgauge kernel casts
    """

    phase: int
    operation: str
    kind: str
    flops: int
    nbytes: int
    operands: str = ""
    own: bool = False
    sums: str = "fast"
    rows: int = 0
    columns: int = 0
    elements: int = 0


def of_operator(
    phase: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
) -> Work | None:
    """Return the work of a call of a torch operator, or None if it runs nothing."""
    how = _how(func)
    if how.idle:
        return None
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
    places = {each.untyped_storage()._cdata for each in given}
    fresh = [each for each in made if each.untyped_storage()._cdata not in places]
    if made and not fresh and not how.writes:  # a view
        return None
    flops, operands = _flops(how, func, args, kwargs, found)
    looked_up = args[how.looked_up] if how.looked_up is not None else None
    read = sum(_span(each) for each in given if each is not looked_up)
    if how.fills:
        read -= sum(_span(each) for each in tree_leaves(args[0]) if isinstance(each, Tensor))
    written = sum(map(_span, fresh)) + sum(
        _span(each)
        for place in how.writes
        for each in tree_leaves(_argument(how, place, args, kwargs))
        if isinstance(each, Tensor)
    )
    # A lookup reads as many elements of the table as it writes.
    if looked_up is not None:
        read += written
    kind = _kind(how.name, flops)
    columns = made[0].shape[-1] if kind == "products" else 0
    rows = made[0].numel() // columns if columns else 0
    return Work(
        phase,
        how.name,
        kind,
        flops,
        read + written,
        operands,
        sums=_sums(how, args, kwargs),
        rows=rows,
        columns=columns,
    )


def of_kernel(phase: int, kernel: str, tensors: Iterable[Tensor]) -> Work:
    """Return the work of one launch of a narrowgauge kernel. kernel: its module and name."""
    tensors = list(tensors)
    name, flops, operands, m, n = kernel.rsplit(".", 1)[-1], 0, "", 0, 0
    if name in PRODUCTS:
        (m, k), n = tensors[0].shape, tensors[1].shape[0]
        operands = "int4" if name == "int4_mm" else OPERANDS[tensors[0].dtype]
        # Packed operands have two codes per byte.
        flops = 2 * m * n * k * (2 if operands in ("fp4", "int4") else 1)
    elif name in GROUPED:
        m, n, k = _of_groups(name, tensors)
        operands, flops = OPERANDS[tensors[0].dtype], 2 * m * n * k
    nbytes = (
        0
        if name in SETTLES
        else sum(map(_span, tensors)) + sum(map(_span, tensors[: name in READS_TWICE]))
    )
    kind = (
        "products"
        if flops
        else "casts"
        if ".quantize." in kernel or ".hadamard." in kernel or name in CASTS_OF_GROUPS
        else "elementwise"
    )
    is_cast = kind == "casts" and nbytes > 0 and name not in MAXIMA
    cast = max((each.numel() for each in tensors), default=0) if is_cast else 0
    sums, own = (PRODUCTS | GROUPED).get(name, "fast"), not name.startswith("scaled_mm")
    return Work(
        phase,
        name,
        kind,
        flops,
        nbytes,
        operands,
        own=own,
        sums=sums,
        rows=m,
        columns=n,
        elements=cast,
    )


def _of_groups(name: str, tensors: list[Tensor]) -> tuple[int, int, int]:
    """Return rows and columns of the result, and the contracted length, of a product of all experts.

    tensors  the arguments of `ops.grouped.kernels`: both operands with their scales, then a bias or
             none, the result and the counts. Each row of `grouped_grad` contracts its own expert's
             tokens, so together the experts contract all tokens once.
    """
    *_, out, _ = tensors
    if name == "grouped_mm":
        return out.shape[0], out.shape[1], tensors[0].shape[1]
    experts, rows, columns = out.shape
    return experts * rows, columns, tensors[0].shape[1] // experts


@dataclass(frozen=True)
class _How:
    """Facts about an operator that do not depend on its arguments.

    writes     positions of the arguments that the operator modifies
    names      names of the arguments
    idle       True if it runs nothing
    fills      True if it writes its first argument without reading it
    looked_up  position of the argument that is a lookup table, or None
    """

    name: str
    idle: bool
    writes: tuple[int, ...]
    names: tuple[str, ...]
    fills: bool
    looked_up: int | None


@cache
def _how(func: Any) -> _How:
    schema = func._schema
    name = schema.name.split("::")[-1]
    changed = [
        each.alias_info is not None and each.alias_info.is_write for each in schema.arguments
    ]
    # Its schema marks gradients as written, but only a grad_scale writes them.
    if name.startswith("_fused_") and len(changed) > 1:
        changed[1] = False
    writes = tuple(at for at, each in enumerate(changed) if each)
    views = any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )
    names = tuple(each.name for each in schema.arguments)
    idle = views or name in FILLS_NOTHING or schema.name.startswith("prim::")
    return _How(name, idle, writes, names, name in FILLED, LOOKED_UP.get(name))


def _argument(how: _How, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(how.names[place])


def _span(x: Tensor) -> int:
    """Return the bytes of a tensor's elements, or of its storage if it is expanded."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _flops(
    how: _How, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
) -> tuple[int, str]:
    from torch.utils.flop_counter import flop_registry

    if how.name == "_int_mm":
        a, b = args[0], args[1]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1], OPERANDS[a.dtype]
    if how.name in ("_grouped_mm", "_scaled_grouped_mm"):
        # Groups share one axis of a 2-D operand, so their products together are one of that length.
        a, b = args[0], args[1]
        groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
        return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1], OPERANDS[b.dtype]
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0, ""
    flops = int(formula(*args, **kwargs, out_val=found))
    if "attention" in how.name and _argument(how, how.names.index("is_causal"), args, kwargs):
        flops //= 2
    last = args[2] if how.name in ("addmm", "baddbmm") else args[1]
    return flops, OPERANDS.get(last.dtype, "")


def _sums(how: _How, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    is_fast = kwargs.get("use_fast_accum", False)
    if how.name == "_scaled_grouped_mm":
        if args[2].dtype == torch.float8_e8m0fnu:
            return "mx"
        return "grouped rows" if is_fast else "split grouped rows"
    if how.name != "_scaled_mm":
        return "fast"
    scales = (
        _argument(how, how.names.index(name), args, kwargs) for name in ("scale_a", "scale_b")
    )
    if any(each.numel() > 1 for each in scales):
        return "rows" if is_fast else "split rows"
    return "fast" if is_fast else "split"


def _kind(name: str, flops: int) -> str:
    return "attention" if "attention" in name else "products" if flops else "elementwise"
