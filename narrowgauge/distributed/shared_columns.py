"""ColwiseParallel layers that read one tensor, as q, k and v do: one DTensor of it for all, so its gradient is summed over the ranks once.

From a plain tensor each of torch's ColwiseParallel layers makes a DTensor of its own, whose gradient is an all-reduce of its own. torch's
PrepareModuleInput makes one before the module that holds them, but has to know by which arguments it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import parallel as styles


class SharedInputs:
    """What the column-wise layers right below `parent` read in its forward pass, as DTensors; kept until that ends."""

    def __init__(self, parent: nn.Module) -> None:
        self._found: dict[tuple[int, bool], tuple[Tensor, DTensor]] = {}
        parent.register_forward_hook(lambda *_: self._found.clear(), always_call=True)

    def of(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        if isinstance(x, DTensor):
            return x
        key = id(x), torch.is_grad_enabled()
        if key not in self._found:
            self._found[key] = x, DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        return self._found[key][1]


class ColwiseParallel(styles.ColwiseParallel):
    """torch's, for a layer whose input is the same on all ranks; `shared`: with those that read it too."""

    def __init__(self, *, shared: SharedInputs, output_layouts: Placement | None = None) -> None:
        super().__init__(output_layouts=output_layouts)
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return self.shared.of(given[0], device_mesh), *given[1:]

        module.register_forward_pre_hook(replicate)
        return super()._apply(module, device_mesh)
