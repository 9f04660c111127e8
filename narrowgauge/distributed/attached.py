"""The state that `distribute` attaches to a model, for readers that must not import torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.distributed.state import DistributedState

# Key in the `__dict__` of a distributed model.
ATTRIBUTE = "_narrowgauge_distributed_state"


def distributed_state(model: nn.Module) -> DistributedState:
    """Return the state that `distribute` attached to the model; ConfigError if there is none."""
    found: DistributedState | None = model.__dict__.get(ATTRIBUTE)
    if found is None:
        raise ConfigError(
            f"distributed_state: this {type(model).__name__} was not distributed. Pass the module that distribute was given.",
            code="distribute.not-distributed",
        )
    return found
