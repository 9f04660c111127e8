"""Detect layers whose weight is multiplied without calling them: their recipe has no effect there.

    F.linear(x, layer.weight)            PEFT's HRA and SHiRA, and losses that read the output head
    F.linear(x, layer.weight + delta)

A layer may be skipped for good reasons: an expert without tokens, LayerDrop, a branch for
evaluation, another stage of a pipeline. The warning therefore needs two observations:

    1. for PATIENCE optimizer steps in a row the layer is not called, while other layers are
    2. in the next WATCHED steps its weight, or a matrix of its shape that is computed from it, is
       an operand of a GEMM

For 2 the Parameter's class changes while the step is computed, and changes
back before an optimizer of torch steps. No value changes. Calls and weights
of compiled layers are invisible here, so nothing is reported once
torch.compile has compiled anything. Not watched: weights stored as codes, weights of another class
than nn.Parameter, suspended layers, and layers whose recipe casts nothing (bf16).

Rejected: hooks on the modules that own the layers. They cause recompilations, and cannot
distinguish an unused branch from a read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowgauge.errors import warn

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

PATIENCE, WATCHED = 3, 3  # optimizer steps without a call, then steps with a watch
PRODUCTS = frozenset(
    (
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "__matmul__", "__rmatmul__",
        "multi_head_attention_forward",
    )
)  # fmt: skip

QLinear = Any  # nn.linear imports this module through step_end
_watched: dict[int, tuple[Tensor, Watch]] = {}  # weights whose class is changed now, by id
_registered: list[Any] = []


class Watch:
    """Observations of one weight.

    products   number of GEMMs that read it
    is_active  False once the watch has ended; tensors computed from the weight may live longer
    """

    def __init__(self) -> None:
        self.products = 0
        self.is_active = True


def end_step(layers: dict[QLinear, str]) -> None:
    """End an optimizer step.

    layers  layer -> name
    """
    own = [each for each in layers if not isinstance(each, nn.Embedding)]
    others = sum(each.state.was_called for each in own)
    bypassed = []
    for layer in own:
        state = layer.state
        if (
            state.was_called
            or not others
            or state.recipe is None
            or state.is_suspended
            or _casts_nothing(state.recipe)
        ):
            if state.was_called:
                state.steps_without_call = 0
            state.was_called = False
            if state.weight_watch is not None:
                _stop(layer)
            continue
        state.steps_without_call += 1
        if (watch := state.weight_watch) is not None and watch.products and not state.is_bypassed:
            state.is_bypassed = True
            bypassed.append(layer)
        if (
            PATIENCE <= state.steps_without_call < PATIENCE + WATCHED
            and not state.is_bypassed
            and not has_compiled()
        ):
            _watch(layer)
        elif watch is not None:
            _stop(layer)
    if bypassed:
        _warn(bypassed, layers, others)


def _casts_nothing(recipe: Recipe) -> bool:
    """True for recipe `bf16`, which loses nothing if a loss multiplies the head's weight itself.

    `memory.chunked_cross_entropy` does so.
    """
    return all(gemm.lhs is None and gemm.rhs is None for gemm in recipe.gemms().values())


def _warn(bypassed: list[QLinear], names: dict[QLinear, str], others: int) -> None:
    first, more = names[bypassed[0]], f" and {len(bypassed) - 1} more" if len(bypassed) > 1 else ""
    steps = bypassed[0].state.steps_without_call
    warn(
        f"advance: the weight of {first!r}{more} is multiplied without calling the layer, which was not called in {steps} "
        f"steps in which {others} others were. Recipe {bypassed[0].recipe.name!r} takes no effect there: the products are computed in the "
        f"dtype of the weight. Call the layer instead of reading its weight, or say that it stays wide: narrowgauge.convert(model, "
        f"{{{first!r}: None}}). describe marks these layers.",
        code="advance.bypassed",
        stacklevel=4,
    )


def has_compiled() -> bool:
    """True if torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _watch(layer: QLinear) -> None:
    weight: Any = layer._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_pause))
    watch = layer.state.weight_watch = layer.state.weight_watch or Watch()
    weight.__class__ = WatchedWeight
    weight.__dict__["_watch"] = watch
    _watched[id(weight)] = weight, watch


def _stop(layer: QLinear) -> None:
    watch = layer.state.weight_watch
    watch.is_active = False
    layer.state.weight_watch = None
    for weight, each in list(_watched.values()):
        if each is watch:
            _give_back(weight)


def _pause(*_: Any) -> None:
    """Make the weights ordinary Parameters before an optimizer reads them."""
    for weight, _watch in list(_watched.values()):
        _give_back(weight)


def _give_back(weight: Any) -> None:
    _watched.pop(id(weight), None)
    if type(weight) is WatchedWeight:
        weight.__class__ = nn.Parameter  # type: ignore[assignment]
        weight.__dict__.pop("_watch", None)


def _seen(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation. If it is a GEMM, count it for the watches of its operands."""
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
        operands = [
            each for each in (*args, *kwargs.values()) if type(each) in (WatchedWeight, FromWatched)
        ]
        watches = [
            watch
            for each in operands
            if (watch := each.__dict__.get("_watch")) is not None and watch.is_active
        ]
        if not watches:
            return found
        if func.__name__ in PRODUCTS:
            for watch in watches:
                watch.products += 1
        # Follow results of the weight's size: W + delta, a cast, W.T. Not `detach`, with which
        # state dicts read their tensors.
        if (
            type(found) is Tensor
            and found.ndim == 2
            and found.numel() == operands[0].numel()
            and func.__name__ != "detach"
        ):
            derived = found.as_subclass(FromWatched)
            derived._watch = watches[0]
            return derived
    return found


class WatchedWeight(nn.Parameter):
    """A Parameter during a watch; `_watch` counts its GEMMs."""

    _watch: Watch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _seen(func, args, kwargs or {})

    # Copies and pickles made during a watch are ordinary Parameters.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_plain(self).detach(), _plain(self).requires_grad).__reduce_ex__(
            protocol
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_plain(self).detach().clone(), _plain(self).requires_grad)
        return memo[id(self)]


class FromWatched(Tensor):
    """A matrix computed from a watched weight: W + delta, a cast of W, W.T."""

    _watch: Watch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _seen(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
