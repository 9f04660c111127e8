"""Gradients stored in FP8 between backward and the step: 1.01 bytes a parameter instead of 2 or 4.

    format        E4M3 codes and one power-of-two scale (E8M0 of OCP MX, one byte) per 1 x 128
                  elements of a row; |g - g'| <= 2^-4 |g| in range
    accumulation  decode, add in float32, encode again; round to nearest up to the eighth
                  micro-batch, then stochastically
    step          tensor by tensor: decode, clip, step, free

States "fp8-lm" and float16 weights that are their own master (master="stochastic") give the 6 bytes
of FP8-LM (arXiv 2310.18313): 1.01 + 1.01 + 2.01 + 2. With bfloat16 weights and "8bit" states it
takes 5. FP8-LM uses one scale per tensor with an adaptive factor mu. Tile scales are as exact
within half a decibel and need no state.

At most one 16-bit gradient exists at a time, while it is encoded or stepped. Vectors and tensors of
fewer than 4,096 elements are not encoded. Each backward pass encodes, and each step decodes twice
if it clips: about four passes over the gradient.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.addresses import holds_numbers
from narrowgauge.errors import ConfigError
from narrowgauge.formats import E4M3, E8M0
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.ops.random import Key
from narrowgauge.optim import noise, shards
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.clipping import NormInParts, scale_gradients
from narrowgauge.optim.param_groups import SMALLEST
from narrowgauge.optim.step import shape_of
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL

NEAREST = Cast(format=E4M3, tile=(1, 128), scale=E8M0_CEIL)
STOCHASTIC = Cast(format=E4M3, tile=(1, 128), scale=E8M0_CEIL, rounding="stochastic")
# Rounding to nearest is 2.5 dB better for few micro-batches. It loses an addend below half a gap
# (1/16 of the sum), such as the tenth of equal addends. Stochastic rounding keeps it on average.
# Measured by `python -m benchmarks.closed held_gradients`.
NEAREST_PASSES = 8
# Separates the random numbers of gradient sums from the random numbers of the step.
SUMS = 0x7F4A7C15


@dataclass(frozen=True)
class Fp8Gradient:
    """Sum of gradients in E4M3; for a DTensor, this rank's part.

    codes   uint8 [rows, columns]
    scale   uint8 [rows, ceil(columns / 128)], E8M0
    passes  number of backward passes in the sum
    """

    codes: Tensor
    scale: Tensor
    passes: int

    @classmethod
    def of(cls, rows: Tensor, key: int, passes: int) -> Fp8Gradient:
        """Encode rows [rows, columns], the sum of `passes` passes. key: 32-bit noise key."""
        draws = passes > NEAREST_PASSES
        found = Key((key, noise.mix(key ^ SUMS ^ passes))) if draws else None
        q = quantize(rows, STOCHASTIC if draws else NEAREST, noise=found)
        return cls(E4M3.pack(q.data), E8M0.encode(q.scale), passes)

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode to [rows, columns]. bfloat16 represents all values exactly, like float32."""
        columns = self.codes.shape[1]
        codes = E4M3.unpack(self.codes, columns)
        return dequantize(
            QTensor(data=codes, scale=E8M0.decode(self.scale), cast=NEAREST, inner=columns), dtype
        )


class HeldGradients:
    """Handle returned by `hold_gradients`; printing it shows the stored bytes.

    `remove()` returns the gradients to the training loop.

        norm  gradient norm of the last step before clipping, from the decoded gradients: 0-d
              float32, or None before the first step
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, clip_norm: float | None) -> None:
        self._optimizer, self._largest = optimizer, clip_norm
        self._held: dict[Tensor, Fp8Gradient] = {}
        # Inputs of the noise key: (seed of the group, noise number of the parameter).
        self._numbers: dict[Tensor, tuple[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        self.norm: Tensor | None = None
        # True if `measure` was called since the last step.
        self._is_measured = False

    def take_group(self, place: int) -> list[Tensor]:
        """Register and return the trainable matrices of one group."""
        group = self._optimizer.param_groups[place]
        numbers = {parameter: number for parameter, _, number in self._optimizer._indexed()}
        found = [
            each
            for each in group["params"]
            if each.requires_grad and each.ndim > 1 and each.numel() >= SMALLEST
        ]
        for parameter in found:
            self._numbers[parameter] = group["seed"], numbers[parameter]
            if parameter.dtype == torch.float16:
                # float16 gradients would underflow below 6e-8.
                parameter.grad_dtype = torch.bfloat16
        return found

    def hook_group(self, place: int) -> None:
        """Register backward hooks on the trainable matrices of one group."""
        # A strong reference would keep the optimizer alive through hooks that Python's garbage
        # collector cannot see.
        reference = weakref.ref(self)  # see `step_in_backward`

        @torch.no_grad()
        def came(parameter: Tensor) -> None:
            held = reference()
            if held is None:
                raise ConfigError(
                    f"hold_gradients: the optimizer of this parameter of {list(parameter.shape)} is gone, nothing held it. Keep it, or "
                    "what hold_gradients returned, for as long as the model trains.",
                    code="hold-gradients.no-optimizer",
                )
            held.add(parameter)

        for parameter in self.take_group(place):
            self._handles.append(parameter.register_post_accumulate_grad_hook(came))

    def add(self, parameter: Tensor) -> None:
        """Add the parameter's gradient to its FP8 sum and set `parameter.grad` to None.

        The parameter must have been registered by `take_group`.
        """
        gradient = shards.local_gradient(parameter)
        assert gradient is not None
        rows, held = gradient.reshape(shape_of(gradient)), self._held.get(parameter)
        if held is not None:
            # Added in float32, then encoded once.
            rows = held.decoded() + rows
        state, (seed, number) = self._optimizer.state.get(parameter, {}), self._numbers[parameter]
        # The key of the noise changes with the step, so repeated steps do not repeat their rounding
        # errors.
        step = int(state["step"]) if state and holds_numbers(state["step"]) else 0
        key = noise.key(noise.step_key(seed, step), number)
        self._held[parameter] = Fp8Gradient.of(rows, key, 1 if held is None else held.passes + 1)
        parameter.grad = None

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the norm of the stored gradients, 0-d float32; the next step clips by it."""
        parts = NormInParts()
        for place, (parameter, _, _) in enumerate(self._optimizer._indexed()):
            gradient = self._gradient(parameter)
            if gradient is not None:
                parts.add(place, gradient)
        self.norm, self._is_measured = parts.norm(), True
        return self.norm

    @torch.no_grad()
    def step(self) -> None:
        """Step the parameters with FP8 gradients, and clip the other gradients.

        The optimizer steps parameters with ordinary gradients afterwards.
        """
        if self._largest is not None and not self._is_measured:
            self.measure()
        self._is_measured = False
        for parameter, group, number in list(self._optimizer._indexed()):
            if parameter.grad is None and parameter not in self._held:
                continue
            parameter.grad = self._gradient(parameter)
            if self._largest is not None and self.norm is not None:
                scale_gradients([parameter], self._largest, self.norm)
            if self._held.pop(parameter, None) is not None:
                # One tensor at a time: the decoded gradient is freed before the next is decoded.
                self._optimizer._step([(parameter, group, number)])
                parameter.grad = None

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's full gradient, decoded to a new tensor if it is in FP8."""
        held = self._held.get(parameter)
        if held is None:
            return parameter.grad
        local = shards.local(parameter)
        decoded = held.decoded(parameter.grad_dtype or parameter.dtype)
        return shards.wrapped(decoded.view(local.shape), parameter, parameter.shape)

    def hold(self, parameter: Tensor) -> None:
        """Call `add` for a registered parameter. Other gradients stay in `parameter.grad`."""
        if parameter in self._numbers:
            self.add(parameter)

    def give_back(self, parameter: Tensor) -> None:
        """Set `parameter.grad` to the decoded sum plus the gradient of a last pass."""
        held = self._held.pop(parameter, None)
        if held is None:
            return
        local, last = shards.local(parameter), shards.local_gradient(parameter)
        whole = held.decoded()
        if last is not None:
            whole += last.reshape(whole.shape)
        whole = whole.to(parameter.grad_dtype or parameter.dtype).view(local.shape)
        parameter.grad = shards.wrapped(whole, parameter, parameter.shape)

    def clear(self) -> None:
        self._held.clear()
        self._is_measured = False

    @property
    def matrices(self) -> int:
        """Number of parameters whose gradients are stored in FP8."""
        return len(self._numbers)

    @property
    def bytes(self) -> int:
        """Bytes of all gradients now, in FP8 or not."""
        held = sum(each.codes.nbytes + each.scale.nbytes for each in self._held.values())
        plain = [
            parameter.grad
            for parameter, _, _ in self._optimizer._indexed()
            if parameter.grad is not None
        ]
        return held + sum(shards.local(each).nbytes for each in plain)

    def __str__(self) -> str:
        held = sum(shards.local(each).numel() for each in self._numbers)
        return f"{self.matrices} matrices of {held:,} parameters hold their gradients in FP8, {self.bytes:,} bytes now."

    @torch.no_grad()
    def remove(self) -> None:
        """Return all gradients, including those in FP8 now, to the training loop."""
        for parameter in list(self._held):
            self.give_back(parameter)
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._optimizer.holding = None
        self._handles.clear()


def hold_gradients(
    optimizer: LowPrecisionOptimizer, *, clip_norm: float | None = None
) -> HeldGradients:
    """Store gradients of matrices in FP8 until `optimizer.step()`; the loop does not change.

        clip_norm  clips by the norm of the stored gradients. `clip_gradients` and torch's
                   clip_grad_norm_ see only vectors, so pass the norm here

    `parameter.grad` is None for these matrices. Several backward passes before a step are summed.
    `optimizer.zero_grad()` drops the sums; `model.zero_grad()` cannot reach them.

    Raises ConfigError if the optimizer is not from narrowgauge or steps in backward, or if no
    matrix has 4,096 elements.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        raise ConfigError(
            f"hold_gradients: {type(optimizer).__name__} cannot step one parameter. Use an optimizer of narrowgauge.optim; AdamW with "
            'states="fp32" is torch\'s AdamW.',
            code="hold-gradients.optimizer",
        )
    if optimizer.stepping is not None or optimizer.holding is not None:
        how = (
            "steps in backward, so it holds no gradient"
            if optimizer.stepping is not None
            else "holds gradients already"
        )
        raise ConfigError(
            f"hold_gradients: this {type(optimizer).__name__} {how}. Call remove() on what the first call returned.",
            code="hold-gradients.twice",
        )
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise ConfigError(
            f"hold_gradients: clip_norm = {clip_norm!r}: must be above 0. Leave it out for no clipping.",
            code="hold-gradients.clip-norm",
        )
    holding = HeldGradients(optimizer, clip_norm)
    for place in range(len(optimizer.param_groups)):
        holding.hook_group(place)
    if not holding._handles:
        raise ConfigError(
            f"hold_gradients: no parameter is a matrix of {SMALLEST:,} elements or more that requires a gradient. Leave it out.",
            code="hold-gradients.nothing",
        )
    optimizer.holding = holding
    return holding


def float16_weights(model: nn.Module) -> list[str]:
    """Convert the weights of a converted model's Linears to float16, in place; return their names.

    Call it before the optimizer is built. The Linear casts float16 weights to codes like bfloat16
    weights, and computes in the dtype of its input. With master="stochastic" they take 2 bytes with
    11 significant bits, without another copy. Layers without a recipe and weights shared with
    another module (a tied head) keep their dtype.

    Raises ConfigError if no weight qualifies, or if a weight exceeds 65,504.
    """
    users: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append((name, module))
    found = {
        users[parameter][0][0]: parameter
        for parameter, [(_, module), *others] in users.items()
        if not others
        and isinstance(module, QLinear)
        and module.recipe is not None
        and parameter is module.weight
    }
    if not found:
        raise ConfigError(
            "float16_weights: no Linear of the model has a recipe and a weight of its own. Call ng.convert first.",
            code="float16-weights.none",
        )
    for name, parameter in found.items():
        largest = float(parameter.detach().abs().max()) if parameter.numel() else 0.0
        if not largest <= torch.finfo(torch.float16).max:
            raise ConfigError(
                f"float16_weights: {name}: its largest weight is {largest:g}, and float16 ends at 65504. Leave this model in bfloat16.",
                code="float16-weights.too-large",
            )
    for parameter in found.values():
        parameter.data = parameter.data.to(torch.float16)
        parameter.grad_dtype = torch.bfloat16
    return list(found)
