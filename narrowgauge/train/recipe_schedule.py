"""Recipes over the steps of a run: its configured switches, resolved for its model before the first step.

The recipes of step n depend on n alone, so a resumed run computes as if it had never stopped: `fast_forward(k)` brings a new model
to the state after step k, windows of delayed scaling included, and `apply(n)` continues from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from narrowgauge.conversion.switching import widened
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Recipe
from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.model import chosen_recipe


@dataclass(frozen=True)
class Stage:
    """One switch. step: the first that computes with it. changes: layer -> its recipe before and after."""

    step: int
    switch: str
    changes: dict[str, tuple[Recipe, Recipe]]

    @property
    def event(self) -> dict[str, Any]:
        """What metrics.jsonl says of it."""
        before = sorted({old.name for old, _ in self.changes.values()})
        after = sorted({new.name for _, new in self.changes.values()})
        return {"switch": self.switch, "layers": len(self.changes), "before": before, "after": after}

    def __str__(self) -> str:
        event = self.event
        return (
            f"step {self.step}: switch {self.switch}: {event['layers']} layers from {', '.join(event['before'])} "
            f"to {', '.join(event['after'])}"
        )


class Schedule:
    """The stages of a run, in order."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    @classmethod
    def of(cls, config: TrainConfig, model: nn.Module) -> Schedule:
        """ConfigError for a switch that names no layer, or would change nothing."""
        now = {name: layer.recipe for name, layer in _layers(model).items() if layer.recipe is not None}
        stages = []
        for entry in sorted(switch_syntax.parse(config.switch), key=lambda each: each.after_step(config.steps)):
            try:
                changes = widened(model, now, chosen_recipe(config, entry.recipe), entry.layers, entry.products)
            except ConfigError as error:
                raise ConfigError(f"switch = {config.switch!r}: {entry.text!r}: {error}") from None
            first = entry.after_step(config.steps) + 1
            stages.append(Stage(first, entry.text, {name: (now[name], new) for name, new in changes.items()}))
            now |= changes
        return cls(stages)

    def apply(self, model: nn.Module, step: int) -> list[Stage]:
        """Applies the switches whose first step is `step`, and returns them."""
        begun = [stage for stage in self.stages if stage.step == step]
        layers = _layers(model) if begun else {}
        for stage in begun:
            for name, (_, recipe) in stage.changes.items():
                layers[name].recipe = recipe
        return begun

    def fast_forward(self, model: nn.Module, step: int) -> None:
        """Gives a freshly built model the recipes it has after `step` steps."""
        for number in sorted({stage.step for stage in self.stages if stage.step <= step}):
            self.apply(model, number)


def _layers(model: nn.Module) -> dict[str, QLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
