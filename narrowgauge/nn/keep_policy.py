"""Tensors that a Linear saves for backward: one table, and the functions that apply it.

Of x, if the gradient of w is needed. The first line that applies:

    1  backward="straight-through"        packed codes of the forward GEMM and mask bits
       backward="recast-codes"            packed codes of the forward GEMM and their scales
    2  the producer of x saves its inputs PRODUCER_INPUTS, from which backward recomputes the cast
    3  save="original"                    INPUT: x itself
    4  an observer needs x in backward    INPUT
    5  backward recasts the weight        INPUT if the producer of x saves it anyway, else CODES
    6  CPU; x.T needs a read of its own   INPUT, unless weight_codes="recast": encoding and decoding
                                          takes longer there than casting x.T in backward. INT8 on
                                          a CPU that multiplies it has both casts from one read
    7  else                               CODES: the codes of x.T and their scales; on a CPU that
                                          emulates the GEMM, decoded values (`Operand._saved_codes`)

Line 5 follows from memory: codes beside a saved input would add to it. Line 3 is `Recipe.save`.

So of x by recipe, with weight_codes="auto", without a fused producer and without an observer:

    recipe                                                CPU      GPU
    fp8-current, fp8-delayed, fp8-current-fast            values   codes
    int8                                                  codes    codes
    fp8-row, fp8-block, mxfp8, mxfp6, nvfp4, nvfp4-46     x        codes
    bf16, mxfp4                                           x        x
    int4-*, quartet2, quartet2-46, tetrajet2              packed   packed

    values  the elements that `output` read, before scales, and the scale: a transposed view, in
            bfloat16. In float32 if the CPU has no bfloat16 instructions. In float32 too if x, the
            weight and the output of a QLinear are float32 (eager mode, no autocast)
    codes   one byte per element, [K, T], or half of one, and the scales. x in their place if its
            producer saves it (line 5), from the first `advance` on; and on a CPU that emulates int8
    packed  half a byte per element, and in straight-through recipes one bit per element that says
            whether it was in range; else the scales of `output`

Of w, by `weight_codes`. Autograd always saves w itself. Results are bit-identical:

    "step"     codes of w and w.T are cached for the optimizer step, 2 bytes per weight for 8-bit
               formats, so further micro-batches cast nothing. Compiled code has no cache: it casts
               both in forward with one read and saves the codes of w.T, one byte per weight
    "recast"   only noise keys and an amax are saved: each micro-batch casts a weight twice
    "none"     eager code before the first `advance`, or without gradients: no cache exists

Of gy nothing is saved. Its two casts are made together if both gradients are needed.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

WeightCodes = Literal["auto", "recast", "step"]
WeightMode = Literal["step", "recast", "none"]
# What a fused producer saves (`fuse`). "inputs": readers recompute y from its inputs. "outputs": its
# backward uses the readers' codes of y.T. "both": each saves its own.
SavePolicy = Literal["inputs", "outputs", "both"]
# Autograd nodes whose output is a view of their input.
VIEWS = (
    "ViewBackward",
    "UnsafeViewBackward",
    "TransposeBackward",
    "ReshapeAliasBackward",
    "PermuteBackward",
    "AliasBackward",
)
# Autograd nodes whose backward reads their own output.
SAVES_OUTPUT = (
    "ScaledDotProduct",
    "ReluBackward",
    "TanhBackward",
    "SigmoidBackward",
    "SoftmaxBackward",
)
LONGEST = 8  # chain of views that is followed


class SavedInput(Enum):
    """The form in which x is saved for backward; see the table."""

    NOTHING = auto()
    INPUT = auto()
    CODES = auto()
    PRODUCER_INPUTS = auto()


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Tensors that one call of a layer may save for backward.

    grads             autograd records, so a backward pass may follow
    codes_of_x        lines 5 to 7 of the table: codes of x.T instead of x
    weight            "step", "recast" or "none", see the table
    observer_needs_x  line 4: also in straight-through recipes
    """

    grads: bool = True
    codes_of_x: bool = False
    weight: WeightMode = "none"
    observer_needs_x: bool = False

    def of_input(self, needs_grad_weight: bool, is_recomputed: bool) -> SavedInput:
        """Lines 2 to 7 of the table.

        is_recomputed  the producer of x saves its inputs and can recompute the cast
        """
        if not needs_grad_weight:
            return SavedInput.NOTHING
        if is_recomputed:
            return SavedInput.PRODUCER_INPUTS
        return SavedInput.CODES if self.codes_of_x else SavedInput.INPUT

    def casts_both(
        self, role: str, needs: tuple[bool, bool], is_stochastic: bool, is_recomputed: bool
    ) -> bool:
        """True if t.T is cast in the same read as t, since a later GEMM will find that cast.

        needs  (gradient of x is needed, gradient of w is needed)
        """
        if role == "gy":
            return needs[0] and needs[1]
        if role == "w":
            # A stochastic cast draws at every forward pass, so it is not made ahead.
            return self.weight == "step" and needs[0] and not is_stochastic
        if self.of_input(needs[1], is_recomputed) is not SavedInput.CODES:
            return False
        # Draw noise whether or not autograd records: the first pass of reentrant checkpointing runs
        # without gradients, and its repetition must draw the same numbers.
        return self.grads or is_stochastic


def keep_policy(
    *,
    save: str,
    casts_once: bool,
    device_type: str,
    weight_codes: WeightCodes,
    weight: WeightMode,
    observer_needs_x: bool = False,
    grads: bool = True,
    x: Tensor | None = None,
) -> KeepPolicy:
    """Decide for one call, by lines 3 to 7 of the table.

    save         `Recipe.save`
    casts_once   x.T needs no read of its own, see `OperandPlan`
    device_type  type of the device whose kernels run
    x            (eager code) the input, for the function that produced it
    """
    if save != "quantized" or observer_needs_x:
        codes = False
    elif weight == "recast" and x is not None:
        codes = not producer_saves(x)
    else:
        codes = casts_once or weight_codes == "recast" or device_type != "cpu"
    return KeepPolicy(
        grads=grads, codes_of_x=codes, weight=weight, observer_needs_x=observer_needs_x
    )


def producer_policy(grads: bool, shares_codes: bool, is_recomputable: bool) -> SavePolicy:
    """Decide what a fused norm or activation saves, line 2 of the table.

    grads            autograd records
    shares_codes     its backward can use the codes that its readers save
    is_recomputable  a recomputed y gives its readers the same casts
    """
    if grads and shares_codes:
        return "outputs"
    return "inputs" if grads and is_recomputable else "both"


def forward_codes(needs: tuple[bool, bool], casts_x: bool, casts_w: bool) -> tuple[bool, bool]:
    """Line 1 of the table: (mask bits are saved, codes are saved) of x in a straight-through recipe.

    needs             (gradient of x is needed, gradient of w is needed)
    casts_x, casts_w  a backward GEMM reads codes of x, of w

    A learned step has a gradient exactly if the mask is saved.
    """
    return needs[0] and casts_w, needs[1] and casts_x


def resolved(
    weight_codes: WeightCodes,
    device_type: str,
    compiled: bool = False,
) -> Literal["recast", "step"]:
    """Resolve weight_codes="auto" for a device. Other values are returned as they are.

    compiled  True for compiled code, where "auto" means "step"

    A CPU caches: emulated casts take longer than a GEMM there, and memory is not the bottleneck.
    """
    if weight_codes != "auto":
        return weight_codes
    caches = device_type == "cpu" or compiled
    return "step" if caches else "recast"


def producer_saves(x: Tensor) -> bool:
    """True if x is a view of a tensor that the function before it saves for backward.

    Attention and relu do. Follows the names of autograd nodes from x back through views of the same
    memory. Saved tensors are not read: hooks of checkpointing or offloading would answer by
    recomputing or copying. False while such hooks are active, since they may not store tensors as
    they are.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    node = x.grad_fn
    for _ in range(LONGEST):
        if node is None:
            return False
        name = node.name()
        if name.startswith(SAVES_OUTPUT):
            return True
        if not name.startswith(VIEWS):
            return False
        node = node.next_functions[0][0]
    return False


Saved = tuple[Tensor | None, ...]


class Recompute:
    """Recomputes in backward the operand of one call of a fused function (line 2 of the table).

    The fused norm or activation (`fuse.saving`) already saves its own inputs. The Linears that read
    its output save the same tensors, which autograd stores once. The recomputed operand is
    bit-identical to the operand of the forward pass. Holds no tensor of the forward pass.

    readers   number of Linears that save these tensors and nothing else for the operand
    """

    readers: int = 0

    def restore(self, operand: Any, saved: Saved) -> None:
        """Set the tensor or the `cols` of an Operand in backward.

        operand  the Operand of the Linear, which has neither yet
        saved    (amax, *tensors), as the forward pass saved them
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RecomputeSource:
    """The inputs from which backward recomputes an operand, and the object that recomputes it.

    tensors    inputs of the fused function, which that function saves as well
    recompute  recomputes the operand from `tensors`
    """

    tensors: tuple[Tensor | None, ...]
    recompute: Recompute


class Keeper(Protocol):
    """Stores results of `output` GEMMs until their recomputation, under selective checkpointing.

    Policies of torch.utils.checkpoint see dispatcher operations. They miss kernels outside the
    dispatcher (Triton, C++), and torch's GEMMs are surrounded by casts, rotations, padding and
    scaling. The Linear therefore asks the active Keeper itself. Results are in the order of calls.

    begin  a Linear starts; returns its stored result during recomputation, else None
    end    the Linear has finished with this result
    """

    def begin(self) -> Tensor | None: ...
    def end(self, output: Tensor | None) -> None: ...


KEEPER: ContextVar[Keeper | None] = ContextVar("narrowgauge_kept_products", default=None)
