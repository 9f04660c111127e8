"""A forward and backward pass that leaves the training bit-identical.

    with undisturbed(model):
        loss(model, batch).backward()

Gradients, buffers, low-precision state, counters, generators and kept casts are restored
(`Snapshot`, scope PASS). Weights are not copied, since no optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from narrowgauge.nn.linear import QLinear
from narrowgauge.snapshot import Scope, Snapshot, Training


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restores the model's state after the block, also if the block raises.

    Inside the block gradients start as None, and no weight cast is cached from call to call.
    """
    before = Snapshot.take(Training(model=model), Scope.PASS)
    try:
        for parameter in model.parameters():
            parameter.grad = None
        for module in model.modules():
            if isinstance(module, QLinear):
                module.stop_caching()
        yield
    finally:
        before.restore()
        for module in model.modules():
            if isinstance(module, QLinear) and module.state.shared_inputs is not None:
                # Casts of inputs of the block would be found again by the address of freed memory.
                module.state.shared_inputs.clear()
