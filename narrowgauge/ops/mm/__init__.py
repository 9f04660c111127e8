"""mm: matrix multiplication of two quantized matrices, lhs @ rhs.T.

Both operands have the contracted axis last.

    out[m, n] = sum over k of x_lhs[m, k] * x_rhs[n, k] + bias[n],    x = decode(data) * scale

Contract of `mm(lhs, rhs)`

    lhs        [M, K], rhs [N, K]: QTensors, or plain tensors, which are rounded to 16 bits (see
               `high_precision`)
    bias       [N] or None; added in float32, before the only rounding to out_dtype. GEMMs with a
               bias in their epilogue take it in bfloat16: a float32 bias of a bfloat16 result is
               rounded first there, an error of 2^-9 |bias| (torch's Linear does so under autocast)
    out_dtype  dtype of the result
    ->         [M, N]

Products of decoded elements are exact, and are summed in float32 (with about 14 bits on FP8 tensor
cores with fast_accumulate). If the device has no units for the operands, they are decoded to a
float dtype that represents them exactly. An emulated GEMM therefore differs from a native one only
by the order of summation.

On a GPU, a kernel must pass a self-check before its first use (selfcheck.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.addresses import wrapper
from narrowgauge.errors import ShapeError
from narrowgauge.ops.mm import definition
from narrowgauge.ops.mm.spec import MmSpec, refuse
from narrowgauge.ops.registry import (
    Kernel,
    KernelChoice,
    Refusal,
    Registry,
    constant_while_compiling,
    facts_of,
    imported,
)
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Gemm

if TYPE_CHECKING:
    from narrowgauge.ops.selfcheck import KernelCheck


def check_of_products() -> KernelCheck[MmSpec]:
    """Return the self-check of the GEMMs."""
    from narrowgauge.ops.mm.selfcheck import CHECK  # imported only when a kernel is checked

    return CHECK


_CUBLAS, _BLOCKS, _CPP, _INT4, _INT8_CPP = (
    f"narrowgauge.ops.mm.{name}" for name in ("cublas", "triton", "cpp", "int4_units", "int8_cpp")
)


def _refuse_with(kernel: str, module: str) -> Callable[[MmSpec], Refusal | None]:
    """Combine the refusals by NEEDS with the refusals of the kernel's module.

    The module checks properties of the machine.
    """
    by_needs, by_machine = refuse(kernel), imported(module, "refuse")
    return lambda spec: by_needs(spec) or by_machine(spec)


@constant_while_compiling
def _slower_in_int4(device_type: str, index: int | None) -> str | None:
    from narrowgauge.ops.mm import int4_units

    return int4_units.slower(device_type, index)


KERNELS: Registry[MmSpec] = Registry("mm")
# Order of speed; each kernel module is imported at its first use, so importing mm stays cheap.
KERNELS.register(
    Kernel("native", refuse("native"), imported(_CUBLAS, "run_scaled"), by_torch=True, check=check_of_products),
    Kernel("native-block", refuse("native-block"), imported(_CUBLAS, "run_block"), by_torch=True, check=check_of_products),
    Kernel("native-mx", refuse("native-mx"), imported(_CUBLAS, "run_mx"), by_torch=True, check=check_of_products),
    Kernel("native-int4", _refuse_with("native-int4", _INT4), imported(_INT4, "run"), check=check_of_products, slower=_slower_in_int4),
    Kernel("native-int8-cpp", _refuse_with("native-int8-cpp", _INT8_CPP), imported(_INT8_CPP, "run"),
           check=check_of_products, instructions=imported(_INT8_CPP, "instructions")),
    Kernel("native-int8", refuse("native-int8"), imported(_CUBLAS, "run_int8"), by_torch=True, check=check_of_products),
    Kernel("native-cpp", _refuse_with("native-cpp", _CPP), imported(_CPP, "run"), check=check_of_products),
    Kernel("triton", _refuse_with("triton", _BLOCKS), imported(_BLOCKS, "run"), check=check_of_products),
    Kernel("reference", lambda spec: None, definition.run, by_torch=True),
)  # fmt: skip


@dataclass(frozen=True)
class MmPlan:
    """Kernel for a GEMM of two casts on a device.

    choice  the kernel, and why those before it were refused
    expand  dtype of the decoded values that the kernel takes in place of codes; None: it takes
            codes
    """

    choice: KernelChoice[MmSpec]
    expand: torch.dtype | None


def plan(
    gemm: Gemm,
    device: torch.device,
    backend: str | None = None,
    expanded: bool = False,
    hidden_by: str = "",
) -> MmPlan:
    """Choose the kernel for `gemm` on `device`.

    expanded   True if the operands hold decoded values already, which only the reference accepts
    hidden_by  kind of wrapper that hides their memory, see `addresses.wrapper`
    """
    facts = facts_of(device, hidden_by)
    choice = KERNELS.choose(MmSpec(gemm.lhs, gemm.rhs, facts, expanded), backend)
    # Operands are expanded once, when they are quantized, and not again at every GEMM.
    emulates = choice.kernel.name == "reference"
    return MmPlan(
        choice, definition.compute_dtype((gemm.lhs, gemm.rhs), facts) if emulates else None
    )


def why_emulated(gemm: Gemm, device: torch.device) -> str | None:
    """Return a clause that says why `device` emulates a GEMM of two quantized operands.

    None if the GEMM is native, or if an operand is not quantized.
    """
    how = plan(gemm, device)
    if how.expand is None or gemm.lhs is None or gemm.rhs is None:
        return None
    return "; ".join(how.choice.reasons) or "no kernel is made for these operands"


def why_not_int8(device: torch.device) -> str | None:
    """Return why INT8 products lose to bfloat16 on `device`, or None where they may gain.

    Passes of their own scale their INT32 sums. Predicted for H100, H200 and B200 in
    benchmarks/results/planned_time.jsonl.
    """
    facts = facts_of(device, "")
    if facts.type != "cuda" or facts.capability[0] not in (9, 10):
        return None
    return "predicted 0.77 to 0.93 of bf16's speed over a layer, its INT32 sums are scaled apart"


def mm(
    lhs: QTensor | Tensor, rhs: QTensor | Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32,
    fast_accumulate: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute lhs [M, K] @ rhs [N, K].T + bias [N] -> [M, N]; see the module.

    `backend` forces a kernel by name.
    """
    _check(lhs, rhs, bias)
    lhs, rhs = (x if isinstance(x, QTensor) else high_precision(x, out_dtype) for x in (lhs, rhs))
    casts = [x.cast if isinstance(x, QTensor) else None for x in (lhs, rhs)]
    expanded = any(isinstance(x, QTensor) and x.is_expanded for x in (lhs, rhs))
    hidden_by = wrapper(*(x.memory if isinstance(x, QTensor) else x for x in (lhs, rhs)), bias)
    gemm = Gemm(lhs=casts[0], rhs=casts[1], fast_accumulate=fast_accumulate)
    return plan(gemm, lhs.device, backend, expanded, hidden_by).choice.kernel.run(
        lhs, rhs, bias, out_dtype, fast_accumulate
    )


def high_precision(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as a 16-bit operand: float16 if x or the result is float16, else bfloat16.

    No copy if x has that dtype.
    """
    return x.to(torch.float16 if torch.float16 in (dtype, x.dtype) else torch.bfloat16)


def _describe(operand: QTensor | Tensor) -> str:
    kind = (
        str(operand.cast)
        if isinstance(operand, QTensor)
        else str(operand.dtype).removeprefix("torch.")
    )
    return f"{kind} {list(operand.shape)}"


def _check(lhs: QTensor | Tensor, rhs: QTensor | Tensor, bias: Tensor | None) -> None:
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(operand, QTensor | Tensor):
            raise ShapeError(
                f"mm: {name} is of type {type(operand).__name__}. Pass a tensor or a QTensor.",
                code="mm.type",
            )
    if len(lhs.shape) != 2 or len(rhs.shape) != 2:
        both = f"lhs {_describe(lhs)} and rhs {_describe(rhs)}"
        raise ShapeError(f"mm: {both} must be two-dimensional. Flatten them first.", code="mm.axes")
    if lhs.shape[1] != rhs.shape[1]:
        both = f"lhs {_describe(lhs)} and rhs {_describe(rhs)}"
        hint = "; pass rhs.T." if lhs.shape[1] == rhs.shape[0] else "."
        raise ShapeError(
            f"mm: contracted axes differ, {both}. Both operands keep the contracted axis last{hint}",
            code="mm.contracted",
        )
    if lhs.device != rhs.device:
        raise ShapeError(
            f"mm: lhs is on {lhs.device}, rhs on {rhs.device}. Move them to one device.",
            code="mm.device",
        )
    if bias is not None and tuple(bias.shape) != (rhs.shape[0],):
        raise ShapeError(
            f"mm: bias is {list(bias.shape)}, it must be [{rhs.shape[0]}], one number per row of rhs.",
            code="mm.bias",
        )
