"""Master weights: the model in 16 bits, and float32 copies that the optimizer works on.

    masters  <- optimizer step with float32(gradients)
    weights  <- round(masters)

A bfloat16 weight has 8 significant bits: an update below 1/256 of the weight would be lost in it, and is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError

_NARROW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """A torch optimizer over float32 copies of 16-bit parameters, with the optimizer's own interface.

    parameters  those of the model; wider ones among them are optimized directly, without a copy
    build       makes the optimizer from the list of float32 parameters, e.g. lambda p: torch.optim.AdamW(p, lr=1e-3)

    Costs 4 bytes per 16-bit parameter, and during `step` 4 more for the float32 gradients.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        if not all(isinstance(parameter, Tensor) for parameter in self.parameters):
            raise ConfigError(
                "MasterWeights: parameters holds something else than tensors. Give model.parameters(); groups are made "
                "from the masters in build."
            )
        self.masters = [
            p if p.dtype not in _NARROW else torch.nn.Parameter(p.detach().to(torch.float32)) for p in self.parameters
        ]
        self.optimizer = build(self.masters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _copied(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self._copied():
            # A weight that was loaded, clipped or swapped since is taken over: the master would undo it in silence.
            changed = parameter != master.to(parameter.dtype)
            master.copy_(torch.where(changed, parameter.to(torch.float32), master))
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self.optimizer.step()
        for parameter, master in self._copied():
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, and the masters in the order of the parameters."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        masters: list[Tensor] = state["masters"]
        for master, saved in zip(self.masters, masters, strict=True):
            master.copy_(saved)
