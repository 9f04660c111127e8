"""What the guard of a run needs beside its steps: a step in BF16, and a copy of the state apart from the device.

Such a step keeps more for backward than a recipe that keeps codes.
"""

from __future__ import annotations

from dataclasses import replace

from narrowgauge.plan.forecast import Forecast
from narrowgauge.plan.text import gib
from narrowgauge.train.config.settings import FUSED_SAVES, NO_RECIPE, TrainConfig


def in_bf16(config: TrainConfig) -> TrainConfig:
    """The run as a stretch of its guard computes: every Linear in the numbers of the precision, rows of embeddings as they are."""
    save = config.save if config.save in FUSED_SAVES else ""
    return replace(config, recipe=NO_RECIPE, layers_recipe={}, embedding_codes="", switch="", save=save, guard="")


def larger(narrow: Forecast, wide: Forecast) -> Forecast:
    """Of the recipe and of a stretch what needs more, with a note on the guard."""
    copied = max(sum(each.parts.get((part, ""), 0) for part in ("weights", "states")) for each in narrow.moments)
    note = (
        f"a step of a check in BF16 needs {gib(wide.allocated)}, one of the recipe {gib(narrow.allocated)}; in a check "
        f"{gib(copied)} of state wait in the host's memory, or on the disk"
    )
    found = wide if wide.allocated > narrow.allocated else narrow
    return replace(found, notes=(*found.notes, note))
