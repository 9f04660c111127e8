"""Optimizers with low-precision states and 16-bit weights, and the precisions of a training run.

A name is imported at its first use. So the settings of a run can read `rules` without torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # `X as X` is a re-export for type checkers.
    from narrowgauge.optim.checks import (
        refuse_silent_failures as refuse_silent_failures,
    )
    from narrowgauge.optim.checks import (
        silent_failures as silent_failures,
    )
    from narrowgauge.optim.clipping import clip_gradients as clip_gradients
    from narrowgauge.optim.held_gradients import (
        float16_weights as float16_weights,
    )
    from narrowgauge.optim.held_gradients import (
        hold_gradients as hold_gradients,
    )
    from narrowgauge.optim.masters import round_to_bfloat16 as round_to_bfloat16
    from narrowgauge.optim.optimizers import *  # noqa: F403
    from narrowgauge.optim.param_groups import groups as groups
    from narrowgauge.optim.precision import (
        PRECISIONS as PRECISIONS,
    )
    from narrowgauge.optim.precision import (
        Precision as Precision,
    )
    from narrowgauge.optim.size import state_bytes as state_bytes
    from narrowgauge.optim.state_dict import full_state_dict as full_state_dict
    from narrowgauge.optim.step_in_backward import in_backward as in_backward
    from narrowgauge.optim.zero_sharding import (
        ZeroBalance as ZeroBalance,
    )
    from narrowgauge.optim.zero_sharding import (
        zero as zero,
    )
    from narrowgauge.optim.zero_sharding import (
        zero_balance as zero_balance,
    )

# Public name -> the module that defines it. The optimizers are `optimizers.__all__`.
_HOMES = {
    "PRECISIONS": "precision",
    "Precision": "precision",
    "ZeroBalance": "zero_sharding",
    "clip_gradients": "clipping",
    "float16_weights": "held_gradients",
    "full_state_dict": "state_dict",
    "groups": "param_groups",
    "hold_gradients": "held_gradients",
    "in_backward": "step_in_backward",
    "refuse_silent_failures": "checks",
    "round_to_bfloat16": "masters",
    "silent_failures": "checks",
    "state_bytes": "size",
    "zero": "zero_sharding",
    "zero_balance": "zero_sharding",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif find_spec(f"{__name__}.{name}") is not None:
        found = import_module(f"{__name__}.{name}")
    else:
        found = _of_optimizers(name)
    # Stored as a global, so that this function runs once for each name.
    globals()[name] = found
    return found


def _of_optimizers(name: str) -> Any:
    from narrowgauge.optim import optimizers

    if name == "__all__":
        return sorted([*_HOMES, *optimizers.__all__])
    if name in optimizers.__all__:
        return getattr(optimizers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_of_optimizers("__all__")})
