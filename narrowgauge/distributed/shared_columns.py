"""Share one DTensor between ColwiseParallel layers that read the same input, such as q, k and v.

The gradient of the shared DTensor is summed over the ranks once. torch's ColwiseParallel creates a
DTensor per layer, and each has its own all-reduce in backward. torch's PrepareModuleInput creates
one at the parent module, but needs the names of the parent's forward arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import parallel as styles


class SharedInputDTensors:
    """Input DTensors of the column-wise layers directly below `parent`.

    Entries live until the parent's forward pass ends.
    """

    def __init__(self, parent: nn.Module) -> None:
        self._found: dict[tuple[int, bool], tuple[Tensor, DTensor]] = {}
        parent.register_forward_hook(lambda *_: self._found.clear(), always_call=True)

    def of(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        if isinstance(x, DTensor):
            return x
        # The grad mode is part of the key: a DTensor made under no_grad has no graph.
        key = id(x), torch.is_grad_enabled()
        if key not in self._found:
            # The entry also stores x, so that its id is not reused.
            self._found[key] = x, DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
        return self._found[key][1]


class ColwiseParallel(styles.ColwiseParallel):
    """torch's ColwiseParallel for an input that is replicated on all ranks.

    shared  SharedInputs of the layers that read the same input
    """

    def __init__(
        self, *, shared: SharedInputDTensors, output_layouts: Placement | None = None
    ) -> None:
        super().__init__(output_layouts=output_layouts)
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return self.shared.of(given[0], device_mesh), *given[1:]

        module.register_forward_pre_hook(replicate)
        return super()._apply(module, device_mesh)
