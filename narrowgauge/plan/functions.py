"""`narrowgauge.plan(...)`: predict the memory of a training step given as functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.errors import ConfigError
from narrowgauge.nn.converted_model import advance
from narrowgauge.plan.count import Step
from narrowgauge.plan.extrapolate import FEW, MORE
from narrowgauge.plan.forecast import Forecast, forecast
from narrowgauge.plan.room import Room
from narrowgauge.plan.text import rendered


@dataclass(frozen=True)
class Plan:
    """Result of `narrowgauge.plan`; `print` it."""

    name: str
    forecast: Forecast
    room: Room

    @property
    def allocated(self) -> int:
        """Peak of two steps in bytes."""
        return self.forecast.allocated

    @property
    def fits(self) -> bool | None:
        """True if the step fits; None if no card is named and none is present."""
        return self.room.fits(self.forecast) if self.room.usable else None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in JSON types, as `narrowgauge plan --json` prints it."""
        return {"run": self.name, **self.room.answer(self.forecast)}

    def __str__(self) -> str:
        return rendered(self.as_dict())


def plan(
    model: nn.Module | Callable[..., nn.Module],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batch: Any,
    *,
    update: Callable[[Any, torch.optim.Optimizer], None] | None = None,
    card: str = "",
    memory: str = "",
    layers: int = 0,
    micro_batches: int = 1,
    full: bool = False,
) -> Plan:
    """Predict the memory of a training step by tracing two steps under fake tensors.

    No GPU is needed, nothing is computed, and `model` stays unchanged.

    model          a module, or better a function that makes one, converted and in its dtype: its
                   weights then take no memory
    loss           loss(model, batch) returns a tensor with one element
    optimizer      optimizer(model) returns an optimizer
    batch          tensors with a micro-batch's shapes, in any nesting; their values are not read
    update         update(model, optimizer); None: step, zero_grad and `narrowgauge.advance`
    card           a card of narrowgauge.ops.timing.cards ("h100"); without card and memory, the GPU
                   of this machine
    memory         another memory size of the card ("24GiB")
    layers         number of the model's blocks, if all are alike: `model` is then called with 3 and
                   with 4. This takes seconds for any depth
    micro_batches  micro-batches of a step
    full           with layers: True calls `model` with the full number instead

    Raises ConfigError for an unknown card, and for a model whose control flow depends on values;
    the message names the module and the operation. Errors of the prediction: docs/planner.md.
    """
    for argument, number, least in (("layers", layers, 0), ("micro_batches", micro_batches, 1)):
        if type(number) is not int or number < least:
            raise ConfigError(
                f"plan: {argument} = {number!r}; it must be a whole number, {least} or more.",
                code="plan.whole-number",
            )
    for argument, words, example in (("card", card, "h100"), ("memory", memory, "24GiB")):
        if not isinstance(words, str):
            raise ConfigError(
                f"plan: {argument} = {words!r}; it must be words such as {example!r}.",
                code="plan.words",
            )
    made = _maker(model, layers)
    room = Room.of(card, memory)

    def build(depth: int) -> Callable[[], Step]:
        def step() -> Step:
            built = made(depth or layers)
            own = optimizer(built)
            # Created under the fake mode, so that the batch counts as allocated on the device.
            given = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, batch)

            def stepped() -> None:
                if update is not None:
                    update(built, own)
                    return
                own.step()
                own.zero_grad()
                advance(built)

            return Step(
                built,
                lambda: _one_number(loss(built, given)),
                stepped,
                lambda: _states(own),
                given,
                micro_batches,
            )

        return step

    found = forecast(build, room.device, layers, full=full)
    name = getattr(model, "__name__", "") or type(model).__name__
    return Plan("the model" if name == "<lambda>" else name, found, room)


def _one_number(loss: Any) -> Tensor:
    """Return the loss. Raises ConfigError for a loss that backward() would refuse."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"{type(loss).__name__}"
        )
        raise ConfigError(
            f"plan: loss(model, batch) returned {found}, which has no backward(). Return a tensor of one number.",
            code="plan.loss-type",
        )
    if not loss.requires_grad:
        raise ConfigError(
            "plan: the loss depends on nothing that requires a gradient. Unfreeze a part of the model, "
            "or compute the loss from its output.",
            code="plan.no-gradient",
        )
    return loss


def _maker(model: nn.Module | Callable[..., nn.Module], layers: int) -> Callable[[int], nn.Module]:
    if not callable(model):
        raise ConfigError(
            f"plan: model = {model!r}; it must be a module, or a function that makes one.",
            code="plan.model",
        )
    if isinstance(model, nn.Module):
        if layers:
            raise ConfigError(
                f"plan: layers = {layers}, but a {type(model).__name__} has the layers that it has. Pass a function of their number, "
                f"which is called with {FEW} and {MORE}, or leave layers out.",
                code="plan.layers",
            )
        return lambda depth: _without_numbers(model)
    if layers and not inspect.signature(model).parameters:
        raise ConfigError(
            f"plan: layers = {layers}, but the function that makes the model takes no argument. Let it take the number of layers.",
            code="plan.no-argument",
        )
    return (lambda depth: model(depth)) if layers else (lambda depth: model())


def _without_numbers(model: nn.Module) -> nn.Module:
    """Copy a model with tensors that are created under the active modes."""
    memo: dict[int, Any] = {}
    for each in model.parameters():
        # deepcopy finds the new tensors in its memo, so it never reads the real ones.
        memo[id(each)] = nn.Parameter(torch.zeros_like(each), each.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer)
    return copy.deepcopy(model, memo)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in tree_leaves(state) if isinstance(each, Tensor))
