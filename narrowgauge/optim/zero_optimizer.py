"""torch's ZeroRedundancyOptimizer around an optimizer of narrowgauge; see `zero`.

A file of its own, because torch.distributed.optim takes a while to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.errors import CheckpointError

if TYPE_CHECKING:
    from narrowgauge.optim.base import LowPrecisionOptimizer

# torch.distributed.optim calls torch.jit.script at import, which torch 2.13 deprecates with a
# warning.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroOptimizer(ZeroRedundancyOptimizer):
    """Optimizer returned by `zero`.

    `optim` is this rank's optimizer of its own parameters. `consolidate_state_dict` gathers the
    states. Converted models advance once per step, after the weights have arrived. Loading is
    exact, while torch's class casts states to the dtype of the weights and stores them twice.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[Tensor, str],
        optimizer: type[LowPrecisionOptimizer],
        process_group: Any,
        options: Mapping[str, Any],
    ) -> None:
        build: Any = partial(_build, optimizer, names)
        super().__init__(groups, build, process_group, **options)

    def step(self, closure: Any = None, **given: Any) -> Any:
        """Step this rank's parameters and receive the others, as in torch."""
        loss = super().step(closure, **given)
        # torch writes received weights through `.data`, which leaves their version unchanged. Code
        # that caches results of a weight compares versions.
        torch.autograd.graph.increment_version(
            [each for group in self.param_groups for each in group["params"]]
        )
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a consolidated state, or of the state of one process, exactly.

        If one rank refuses its part, all ranks raise CheckpointError.
        """
        reason = ""
        try:
            local = self._own(state_dict)
            self.optim.check_state_dict(local)
        except CheckpointError as error:
            reason = str(error)
        # Before any change: a rank that raised alone would leave the others waiting in the next
        # collective.
        if refused := self._refused_by(reason):
            raise CheckpointError(
                reason
                or f"zero: rank {refused[0]} refused its part of the saved state, and says why.",
                code="zero.refused-part",
            )
        self.optim.load_state_dict(local)
        for own, group in zip(self.optim.param_groups, self.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})

    def _own(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a state, renumbered as in its own optimizer."""
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_groups = state_dict.get("param_groups", ())
        if [len(group["params"]) for group in saved_groups] != sizes or "state" not in state_dict:
            raise CheckpointError(
                f"zero: the saved state has groups of {[len(group['params']) for group in saved_groups]} parameters, this optimizer "
                f"{sizes}. Pass what state_dict() returned after consolidate_state_dict(), of the same model.",
                code="zero.groups",
            )
        state, groups, number = {}, [], 0
        for own, group, saved in zip(
            self.optim.param_groups, self.param_groups, saved_groups, strict=True
        ):
            places = dict(zip(group["params"], saved["params"], strict=True))
            numbers = range(number, number + len(own["params"]))
            for each, parameter in zip(numbers, own["params"], strict=True):
                if (found := state_dict["state"].get(places[parameter])) is not None:
                    state[each] = found
            groups.append({**saved, "params": list(numbers)})
            number = numbers.stop
        return {"state": state, "param_groups": groups}

    def _refused_by(self, reason: str) -> list[int]:
        """Ranks with a reason to refuse. Collective."""
        own = torch.tensor([float(bool(reason))], device=self.join_device)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self.process_group)
        return [rank for rank, each in enumerate(found) if each > 0]


def _build(
    optimizer: type[LowPrecisionOptimizer],
    names: Mapping[Tensor, str],
    groups: list[dict[str, Any]],
    **options: Any,
) -> LowPrecisionOptimizer:
    made = optimizer(groups, **options)
    made._names.update(names)
    # ZeroRedundancyOptimizer runs torch's step hooks itself, so the inner optimizer steps without
    # them.
    made.step = made._step_all  # type: ignore[method-assign]
    return made
