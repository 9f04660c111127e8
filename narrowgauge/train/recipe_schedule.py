"""Recipes over the steps of a run: its configured switches, resolved for its model before the first step.

The recipes of step n depend on n alone, so a resumed run computes as if it had never stopped: applying the stages up to step k brings
a new model to the state after step k, windows of delayed scaling included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Recipe
from narrowgauge.switching import widened
from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.model import chosen_recipe


@dataclass(frozen=True)
class Stage:
    """One switch. step: the first that computes with it. changes: layer -> its recipe before and after."""

    step: int
    switch: str
    changes: dict[str, tuple[Recipe, Recipe]]

    def apply(self, model: nn.Module) -> None:
        for name, (_, recipe) in self.changes.items():
            model.get_submodule(name).recipe = recipe  # type: ignore[assignment]

    @property
    def event(self) -> dict[str, Any]:
        """What metrics.jsonl says of it."""
        before, after = (sorted({recipe.name for recipe in side}) for side in zip(*self.changes.values(), strict=True))
        return {"switch": self.switch, "layers": len(self.changes), "before": before, "after": after}

    def __str__(self) -> str:
        before, after = (", ".join(self.event[side]) for side in ("before", "after"))
        return f"step {self.step}: switch {self.switch}: {len(self.changes)} layers from {before} to {after}"


def stages(config: TrainConfig, model: nn.Module) -> list[Stage]:
    """The switches in order. ConfigError for one that names no layer, or would change nothing."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    now = {name: layer.recipe for name, layer in layers.items() if layer.recipe is not None}
    found = []
    for entry in sorted(switch_syntax.parse(config.switch), key=lambda each: each.after_step(config.steps)):
        try:
            changes = widened(model, now, chosen_recipe(config, entry.recipe), entry.layers, entry.products)
        except ConfigError as error:
            raise ConfigError(f"switch = {config.switch!r}: {entry.text!r}: {error}") from None
        first = entry.after_step(config.steps) + 1
        found.append(Stage(first, entry.text, {name: (now[name], new) for name, new in changes.items()}))
        now |= changes
    return found
