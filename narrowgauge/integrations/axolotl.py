"""Plugin of axolotl: a recipe, and a run folder, by three lines of its configuration.

    plugins:
      - narrowgauge.integrations.axolotl.NarrowgaugePlugin
    narrowgauge_recipe: fp8-row
    narrowgauge_run_folder: runs/mine      # optional: what `RunFolder` writes

axolotl imports the class by this name and calls its hooks:

    register(cfg)                     with the file as it was read; other hooks get a validated copy,
                                      which lacks keys that axolotl does not know
    post_trainer_create(cfg, trainer) after the Trainer and before its optimizer: model and frozen
                                      reference are converted (`convert_trainer`)
    add_callbacks_post_trainer        the run folder's callback

axolotl's own `fp8: true` converts the same Linears to torchao's, so both together are refused.
Written to axolotl 0.19. Importing this file imports axolotl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from narrowgauge.errors import ConfigError
from narrowgauge.integrations.convert_trainer import convert_trainer
from narrowgauge.integrations.run_folder import RunFolder

RECIPE, FOLDER = "narrowgauge_recipe", "narrowgauge_run_folder"


class NarrowgaugePlugin(BasePlugin):  # type: ignore[misc]
    """Converts the Trainer's model to a recipe. See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.recipe, self.folder = "", ""

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Takes the recipe and the folder. Raises ConfigError without a recipe, or beside `fp8`."""
        if not cfg.get(RECIPE):
            raise ConfigError(
                f"axolotl: the plugin of narrowgauge is listed, and {RECIPE} names no recipe. Add one, as {RECIPE}: fp8-row; "
                "`narrowgauge recipes` lists them.",
                code="axolotl.no-recipe",
            )
        if cfg.get("fp8"):
            raise ConfigError(
                f"axolotl: fp8 = {cfg['fp8']} converts Linears to torchao's, and {RECIPE} = {cfg[RECIPE]} to ours. Leave out one.",
                code="axolotl.two-recipes",
            )
        # Kept here: the configuration of later hooks lacks both keys.
        self.recipe, self.folder = str(cfg[RECIPE]), str(cfg.get(FOLDER) or "")

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        # Not in post_model_load: a reference for DPO is loaded after it.
        convert_trainer(trainer, self.recipe)

    def add_callbacks_post_trainer(self, cfg: Mapping[str, Any], trainer: Any) -> list[Any]:
        return [RunFolder(Path(self.folder))] if self.folder else []
