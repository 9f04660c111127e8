"""Linears in disguise: which modules of other classes `convert` adopts, and why the others stay.

    transformers' Conv1D     weight [in_features, out_features]
    subclasses of nn.Linear  with or without a forward of their own
    nn.Conv1d, 2d, 3d        whose kernels do not overlap, and 1x1 (nn/patches.py)

Adopted modules compute y = x @ matrix.T + bias and nothing else. Such a module holds a weight,
perhaps a bias, and no other parameter, buffer or submodule. And its forward is tried out: a
stand-in with the module's class and attributes, and a small weight of random integers, must give
the results of F.linear and its three gradients to the last bit in float32, in both modes, for
inputs of two and of three axes. Sums of such integers are exact in every order, so a difference in
a bit means another function. Convolutions are tried out the same way. oneDNN sums them in another
order than a Linear, so the trial shows what they compute and not how it rounds.

The trial costs some milliseconds for each class, draws from a generator of its own, and runs no
hook. The module is not called, so it may be on the meta device or under fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.errors import Reason, warn
from narrowgauge.ops import patches, rng
from narrowgauge.structure import is_conv1d

IN, OUT = 24, 40  # features of a stand-in
LARGEST = 4  # integers from -4 to 4: a sum of 24 products is far below 2**24
SIZES = {"in_features": IN, "out_features": OUT, "nx": IN, "nf": OUT}
# Attributes that every nn.Module has, and the sizes: all else belongs to the class.
COMMON = {*vars(nn.Module()), *SIZES}
_tried: dict[tuple[Any, ...], Reason | None] = {}


def reason_to_leave(layer: nn.Module) -> Reason | None:
    """The reason why `convert` does not adopt a Linear of another class than nn.Linear, or None.

    layer  not adopted yet
    """
    kind = type(layer).__name__
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return Reason(
            "own-class", f"{kind} is read without a call, by torch's attention that holds it"
        )
    if nn.utils.parametrize.is_parametrized(layer):
        return Reason(
            "parametrized", "it is parametrized: convert it first, and parametrize it then"
        )
    held = {name for name, each in layer._parameters.items() if each is not None}
    others = sorted({*held, *layer._buffers, *layer._modules} - {"weight", "bias"})
    if others or "weight" not in held:
        what = f"holds {', '.join(others)}" if others else "has no weight of its own"
        return Reason("own-parameters", f"{kind} {what} beside what an nn.Linear holds")
    weight: Any = layer._parameters["weight"]
    # Packages for quantized weights subclass Parameter; a fake or sharded one is no subclass of it.
    if type(weight) is not nn.Parameter and issubclass(type(weight), nn.Parameter):
        return Reason("own-class", f"the weight of {kind} is a {type(weight).__name__}")
    if is_conv1d(layer) and not _watched:
        _watched.append(register_module_module_registration_hook(_warn_of_adapter))
    return _tried_out(layer)


def reason_to_leave_convolution(layer: nn.Module) -> Reason | None:
    """The reason why `convert` does not compute a convolution as a Linear over patches, or None."""
    held = {name for name, each in layer._parameters.items() if each is not None}
    others = sorted({*held, *layer._buffers, *layer._modules} - {"weight", "bias"})
    kind, weight = type(layer).__name__, layer._parameters.get("weight")
    if nn.utils.parametrize.is_parametrized(layer) or weight is None or others:
        return Reason("own-parameters", f"{kind} holds more than a weight and a bias, or no weight")
    if type(weight) is not nn.Parameter and issubclass(type(weight), nn.Parameter):
        return Reason("own-class", f"the weight of {kind} is a {type(weight).__name__}")
    if (overlaps := patches.refuse_overlap(layer)) is not None:
        return overlaps
    has_bias = layer._parameters.get("bias") is not None
    settings: Any = (layer.kernel_size, layer.stride)
    # Attributes of a class of its own may decide what it computes.
    key = (type(layer), has_bias, *settings) if type(layer) in patches.KINDS else ()
    if key not in _tried or not key:
        _tried[key] = _differs_in_patches(layer, has_bias)
    return _tried[key]


def reason_without_recipe(name: str, layer: nn.Module, decided: Mapping[str, Any]) -> Reason | None:
    """Why a convolution has no recipe; None if it has one, or a pattern decided about it.

    decided  names of the layers that a pattern decided about
    """
    if patches.LINEAR in layer._modules or f"{name}.{patches.LINEAR}" in decided:
        return None
    return reason_to_leave_convolution(layer) or Reason("no-pattern", "no pattern named it")


def _differs_in_patches(layer: Any, has_bias: bool) -> Reason | None:
    """Compare the forward of a convolution's class with a Linear over patches, on the CPU."""
    kind, (channels, out) = type(layer).__name__, (2, 3)
    with _plain_torch():
        generator = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> Tensor:
            drawn = torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator, device="cpu")
            return drawn.to(torch.float32)

        weight, bias = integers(out, channels, *layer.kernel_size), None
        if has_bias:
            bias = integers(out)
        # Two patches along each axis, and a rest that is not read.
        sides = [max(pair) for pair in zip(layer.kernel_size, layer.stride, strict=True)]
        x = integers(2, channels, *(3 * side - 1 for side in sides))
        sizes = {"in_channels": channels, "out_channels": out}
        for training in (True, False):

            def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
                made = object.__new__(type(layer))
                held = {"weight": weight, "bias": bias}
                # Called in this pass alone, so `training` is that of the pass.
                own = {"training": training, "_parameters": held}  # noqa: B023
                made.__dict__ = vars(layer) | sizes | own
                return type(layer).forward(made, x)

            linear = partial(patches.as_linear, stride=layer.stride)
            gy = integers(*linear(x, weight, bias).shape)
            expected = _results(linear, x, weight, bias, gy)
            try:
                found = _results(forward, x, weight, bias, gy)
            except Exception as error:
                return Reason(
                    "own-arguments",
                    f"{kind} has a forward of its own, which a trial ended with {type(error).__name__}",
                )
            if not all(map(_same, found, expected)):
                return Reason(
                    "own-forward", f"{kind} has a forward of its own, which is not a convolution's"
                )
    return None


_watched: list[Any] = []  # the handle of `_warn_of_adapter`, once


def _warn_of_adapter(owner: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Warn of a PEFT adapter around a converted Conv1D. torch calls this for each new submodule.

    PEFT asks `isinstance(layer, nn.Linear)` first, and a QLinear is one. It would add the product of
    its factors to the weight without transposing it: silently wrong where the weight is square.
    """
    is_transposed = isinstance(layer, nn.Linear) and getattr(layer, "is_transposed", False)
    if name == "base_layer" and is_transposed:
        warn(
            f"{type(owner).__name__}: PEFT takes a converted {type(layer).__name__.removeprefix('Q')} for an nn.Linear, and its weight is "
            "stored [in_features, out_features]. Merging would add the adapter without transposing it, and DoRA and PiSSA would take "
            "rows for columns. Add adapters first and convert then, or set fan_in_fan_out = True on the adapter's layers.",
            code="adapter.transposed-base",
            stacklevel=3,
        )


def _tried_out(layer: nn.Module) -> Reason | None:
    own = {name: value for name, value in vars(layer).items() if name not in COMMON}
    plain = all(isinstance(value, bool | int | float | str | None) for value in own.values())
    has_bias = layer._parameters.get("bias") is not None
    key = (type(layer), type(layer).forward, has_bias, *sorted(own.items())) if plain else ()
    if key not in _tried or not plain:
        _tried[key] = _differs(layer, has_bias)
    return _tried[key]


def _differs(layer: nn.Module, has_bias: bool) -> Reason | None:
    """Compare the forward of the layer's class with a Linear's, in float32 on the CPU."""
    kind = type(layer).__name__
    with _plain_torch():
        generator = torch.Generator().manual_seed(0)

        def integers(*shape: int) -> Tensor:
            drawn = torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator, device="cpu")
            return drawn.to(torch.float32)

        matrix, bias = integers(OUT, IN), integers(OUT) if has_bias else None
        for training in (True, False):
            for outer in ((3,), (2, 3)):
                x, gy = integers(*outer, IN), integers(*outer, OUT)
                expected = _results(F.linear, x, matrix, bias, gy)
                try:
                    found = _results(_stand_in(layer, training), x, matrix, bias, gy)
                except Exception as error:
                    return Reason(
                        "own-arguments",
                        f"{kind} has a forward of its own, which a trial ended with {type(error).__name__}",
                    )
                if not all(map(_same, found, expected)):
                    return Reason(
                        "own-forward", f"{kind} has a forward of its own, which is not a Linear's"
                    )
    return None


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Compute real numbers with gradients, whatever modes are active, and restore the generators."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(rng.preserved())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def _stand_in(layer: nn.Module, training: bool) -> Any:
    """forward(x, matrix, bias) of an object with the layer's class and attributes."""

    def forward(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Any:
        made = object.__new__(type(layer))
        sizes = {name: size for name, size in SIZES.items() if name in vars(layer)}
        weight = matrix.t() if is_conv1d(layer) else matrix
        made.__dict__ = (
            vars(layer)
            | sizes
            | {"training": training, "_parameters": {"weight": weight, "bias": bias}}
        )
        return type(layer).forward(made, x)

    return forward


def _results(forward: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, gy: Tensor) -> list[Any]:
    """[y, and the gradients of x, the matrix and the bias]."""
    leaves = [each.clone().requires_grad_() for each in (x, matrix, bias) if each is not None]
    y = forward(*leaves, *[None] * (3 - len(leaves)))
    return [y, *torch.autograd.grad(y, leaves, gy)]


def _same(found: Any, expected: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found, expected)
    )
