"""Memory of a guarded run: a step under its recipe or in BF16, and copies of the state.

A BF16 step can need more memory than the recipe's: it saves 16-bit tensors for backward where the
recipe saves codes. The copies of the state lie on the host or on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from narrowgauge.diagnose.guard_settings import COPIES
from narrowgauge.plan.text import gib
from narrowgauge.train.config.settings import FUSED_SAVES, NO_RECIPE, TrainConfig

if TYPE_CHECKING:
    from narrowgauge.plan.forecast import Forecast


def in_bf16(config: TrainConfig) -> TrainConfig:
    """Configuration of a guard's probe: Linears in the precision's dtype, plain embeddings."""
    save = config.save if config.save in FUSED_SAVES else ""
    return replace(
        config,
        recipe=NO_RECIPE,
        layers_recipe={},
        embedding_codes="",
        switch="",
        save=save,
        guard="",
    )


def larger(narrow: Forecast, wide: Forecast) -> Forecast:
    """Larger forecast of recipe (`narrow`) and BF16 probe (`wide`), with a note on the guard."""
    copied = COPIES * max(
        sum(each.parts.get((part, ""), 0) for part in ("weights", "states"))
        for each in narrow.moments
    )
    note = (
        f"a step of a check in BF16 needs {gib(wide.allocated)}, one of the recipe {gib(narrow.allocated)}; in a check up to "
        f"{gib(copied)} of state wait in the host's memory, or on the disk"
    )
    found = wide if wide.allocated > narrow.allocated else narrow
    return replace(found, notes=(*found.notes, note))
