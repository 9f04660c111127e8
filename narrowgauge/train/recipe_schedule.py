"""Recipe switches of a run: recipes over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion.switching import bits, widened
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import GEMMS, Recipe
from narrowgauge.train.config import switch_syntax
from narrowgauge.train.config.settings import FUSED_SAVES, TrainConfig


def chosen_recipe(config: TrainConfig, name: str) -> Recipe:
    """The recipe called `name`, with the run's option `save`."""
    recipe = recipes.get(name)
    if config.save in ("", *FUSED_SAVES) or recipe.grad_weight.rhs is None:
        return recipe
    return replace(recipe, save=config.save)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RecipeSwitch:
    """One recipe switch."""

    step: int  # first step with the new recipes
    switch: str  # text of the setting
    changes: dict[str, tuple[Recipe, Recipe]]  # layer -> (recipe before, recipe after)

    def apply(self, model: nn.Module) -> None:
        """Sets the new recipes. With pipeline switches, on the layers of this rank."""
        layers = dict(model.named_modules())
        for name, (_, recipe) in self.changes.items():
            if name in layers:
                layers[name].recipe = recipe

    @property
    def event(self) -> dict[str, Any]:
        """Fields of the `switch` event."""
        before, after = (
            sorted({pair[side].name for pair in self.changes.values()}) for side in (0, 1)
        )
        return {
            "switch": self.switch,
            "layers": len(self.changes),
            "before": before,
            "after": after,
        }

    def __str__(self) -> str:
        before, after = (", ".join(self.event[side]) for side in ("before", "after"))
        return f"step {self.step}: switch {self.switch}: {len(self.changes)} layers from {before} to {after}"


def recipe_switches(config: TrainConfig, model: nn.Module) -> list[RecipeSwitch]:
    """The configured recipe switches in order of their steps, resolved to layers of the model.

    The recipes of step n depend on n alone, so a resumed run computes the same numbers. Applying
    the switches up to step k to a new model creates the modules and amax histories that the run has
    after step k.

    Raises ConfigError for a switch that matches no layer or changes nothing.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    now = {name: layer.recipe for name, layer in layers.items() if layer.recipe is not None}
    found = []
    for entry in sorted(
        switch_syntax.parse(config.switch), key=lambda each: each.after_step(config.steps)
    ):
        try:
            changes = widened(
                model, now, chosen_recipe(config, entry.recipe), entry.layers, entry.products
            )
        except ConfigError as error:
            raise ConfigError(
                f"recipe.switch = {config.switch!r}: {entry.text!r}: {error}", code="switch.refused"
            ) from None
        first = entry.after_step(config.steps) + 1
        found.append(
            RecipeSwitch(
                first, entry.text, {name: (now[name], new) for name, new in changes.items()}
            )
        )
        now |= changes
    return found


class RecipeSchedule:
    """The recipe switches of a run, in order of their steps."""

    def __init__(self, switches: list[RecipeSwitch]) -> None:
        self._switches = list(switches)

    def __iter__(self) -> Iterator[RecipeSwitch]:
        return iter(self._switches)

    def replace(self, switches: list[RecipeSwitch]) -> None:
        """Continues with other switches, as a plugin asked. Applies none."""
        self._switches = list(switches)

    def apply_until(self, step: int, model: nn.Module) -> None:
        """Applies the switches whose first step is at most `step`."""
        for switch in self._switches:
            if switch.step <= step:
                switch.apply(model)

    def names_until(self, step: int) -> list[str]:
        """Texts of the switches whose first step is at most `step`."""
        return [switch.switch for switch in self._switches if switch.step <= step]

    def starts_at(self, step: int) -> bool:
        """True if a switch starts with this step."""
        return any(switch.step == step for switch in self._switches)


def with_switch(
    switches: list[RecipeSwitch], model: nn.Module, recipe: Recipe, after: int, words: str
) -> list[RecipeSwitch]:
    """The recipe switches plus one more, to `recipe` after step `after`.

    words  name of the switch in the log

    The switch changes all layers for which `recipe` has more bits. Later switches then start from
    the new recipes, and may change nothing. Raises ConfigError if the new switch changes nothing
    itself.
    """
    now = {
        name: each.recipe
        for name, each in model.named_modules()
        if isinstance(each, QLinear) and each.recipe
    }
    # Undo the switches already applied to the model: start from the first recipes
    for switch in reversed(switches):
        now |= {name: before for name, (before, _) in switch.changes.items() if name in now}
    found = [switch for switch in switches if switch.step <= after]
    for switch in found:
        now |= {name: new for name, (_, new) in switch.changes.items()}
    changes = widened(model, now, recipe)
    found.append(
        RecipeSwitch(after + 1, words, {name: (now[name], new) for name, new in changes.items()})
    )
    now |= changes
    for switch in switches[len(found) - 1 :]:
        later = {name: _still_wider(now[name], new) for name, (_, new) in switch.changes.items()}
        changes = {name: new for name, new in later.items() if new is not now[name]}
        found.append(
            RecipeSwitch(
                switch.step,
                switch.switch,
                {name: (now[name], new) for name, new in changes.items()},
            )
        )
        now |= changes
    return found


def _still_wider(now: Recipe, planned: Recipe) -> Recipe:
    """The planned recipe if each of its matmuls has at least as many bits as now, else `now`."""
    return (
        planned
        if all(bits(planned.gemms()[name]) >= bits(now.gemms()[name]) for name in GEMMS)
        else now
    )
