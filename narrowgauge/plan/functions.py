"""`narrowgauge.plan(...)`: what a training step of any model needs, given as functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.conversion import advance
from narrowgauge.errors import ConfigError
from narrowgauge.plan.count import Step
from narrowgauge.plan.extrapolate import FEW, MORE
from narrowgauge.plan.forecast import Forecast, forecast
from narrowgauge.plan.room import Room
from narrowgauge.plan.text import rendered


@dataclass(frozen=True)
class Plan:
    """The answer; `print` it."""

    name: str
    forecast: Forecast
    room: Room

    @property
    def allocated(self) -> int:
        """Bytes, the peak of two steps."""
        return self.forecast.allocated

    @property
    def fits(self) -> bool | None:
        """None where no card is named and none is here."""
        return self.room.fits(self.forecast) if self.room.usable else None

    def as_dict(self) -> dict[str, Any]:
        """JSON's types, as `narrowgauge plan --json` prints them."""
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
    """Two optimizer steps, counted under fake tensors: no GPU is needed, nothing is computed, and `model` stays as it is.

    model          a module, or better a function that makes one, converted and in its dtype: no weight then takes any memory
    loss           loss(model, batch), a tensor
    optimizer      optimizer(model)
    batch          tensors of a micro-batch's shapes, in any nesting; their values are not read
    update         update(model, optimizer); None: step, zero_grad and `narrowgauge.advance`
    card, memory   a card of narrowgauge.ops.timing.cards ("h100"), and another size of its memory ("24GiB"); neither: the GPU that is here
    layers         blocks of the model, if they are alike: `model` is then called with 3 and with 4 of them, in seconds for any depth
    full           with layers: called with all of them instead

    Raises ConfigError for an unknown card, and for a model that looks at values (which module, and by what). Errors: docs/planner.md.
    """
    for argument, number, least in (("layers", layers, 0), ("micro_batches", micro_batches, 1)):
        if type(number) is not int or number < least:
            raise ConfigError(f"plan: {argument} = {number!r}; it must be a whole number, {least} or more.")
    for argument, words, example in (("card", card, "h100"), ("memory", memory, "24GiB")):
        if not isinstance(words, str):
            raise ConfigError(f"plan: {argument} = {words!r}; it must be words such as {example!r}.")
    made = _maker(model, layers)
    room = Room.of(card, memory)

    def build(depth: int) -> Callable[[], Step]:
        def step() -> Step:
            built = made(depth or layers)
            own = optimizer(built)
            given = tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, batch)

            def stepped() -> None:
                if update is not None:
                    update(built, own)
                    return
                own.step()
                own.zero_grad()
                advance(built)

            return Step(
                built, lambda: _one_number(loss(built, given)), stepped, lambda: _states(own), given, micro_batches
            )

        return step

    found = forecast(build, room.device, layers, full=full)
    name = getattr(model, "__name__", "") or type(model).__name__
    return Plan("the model" if name == "<lambda>" else name, found, room)


def _one_number(loss: Any) -> Tensor:
    """What the loss function returned; ConfigError for what backward() refuses."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        raise ConfigError(
            f"plan: loss(model, batch) returned {found}, which has no backward(). Return a tensor of one number."
        )
    if not loss.requires_grad:
        raise ConfigError(
            "plan: the loss depends on nothing that requires a gradient. Unfreeze a part of the model, or compute the loss from its output."
        )
    return loss


def _maker(model: nn.Module | Callable[..., nn.Module], layers: int) -> Callable[[int], nn.Module]:
    if not callable(model):
        raise ConfigError(f"plan: model = {model!r}; it must be a module, or a function that makes one.")
    if isinstance(model, nn.Module):
        if layers:
            raise ConfigError(
                f"plan: layers = {layers}, but a {type(model).__name__} has the layers that it has. Pass a function of their number, "
                f"which is called with {FEW} and {MORE}, or leave layers out."
            )
        return lambda depth: _without_numbers(model)
    if layers and not inspect.signature(model).parameters:
        raise ConfigError(
            f"plan: layers = {layers}, but the function that makes the model takes no argument. Let it take the number of layers."
        )
    return (lambda depth: model(depth)) if layers else (lambda depth: model())


def _without_numbers(model: nn.Module) -> nn.Module:
    """A copy whose tensors are made anew under the modes that are active."""
    memo: dict[int, Any] = {}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.zeros_like(each), each.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer)
    return copy.deepcopy(model, memo)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (each for each in tree_leaves(state) if isinstance(each, Tensor))
