"""Snapshot of a training: copies everything that steps change, and restores it bit for bit.

    before = Snapshot.take(Training(model=model, optimizer=optimizer, scaler=scaler))
    ... n steps ...
    before.restore()                as if the steps had not happened
    before.swap()                   or: exchange the copy with the present state

    with undisturbed(model):        a forward and backward pass that leaves the training as it was
        loss(model, batch).backward()

A `Scope` says which changes the snapshot covers:

    STEPS      optimizer steps. Every tensor of model and optimizers, tables that hold tensors,
               scaler, position in the data, counters, generators, rank agreements
    PASS       a forward and backward pass without an optimizer step. Buffers, low-precision state,
               Python fields of converted layers, gradients, generators, counters of rank agreements
    REPLAY     the low-precision state that a forward pass reads, generators, and counters of rank
               agreements. Cheap enough for every step: one concatenation on the device, which the
               host does not wait for
    PROGRESS   no tensors: scaler, position in the data, counters, generators

New state needs no entry here. A buffer or parameter of the model, a field of a converted layer or
of its `LayerState`, a field of a counters object, an integer field of a rank agreement, and an entry
of `rng.SOURCES` are found where they are.

Tensors keep their addresses. State that was created after the copy, as by an optimizer's first step,
is removed. Of a DTensor each rank copies its own part, so all ranks must take and restore at the
same steps. STEPS copies no gradients: take it between two steps. It drops casts of weights, which
are computed again.

    cost   STEPS: each byte once in host memory or on the disk, BLOCK bytes more on the device
           during an exchange. PASS, REPLAY: the copied bytes once more on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.rng import set_generators
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.size import bytes_to_come
from narrowgauge.snapshot.copies import OffDeviceCopy, OnDeviceCopy, storages
from narrowgauge.snapshot.parts import Parts, Scope, Training, tensors_of

__all__ = ["NAME", "Scope", "Snapshot", "Training", "snapshot_bytes", "undisturbed"]

NAME = "a copy of the run's state"


@dataclass
class Snapshot:
    """A copy of a training's state. Made by `take`."""

    training: Training
    scope: Scope
    _parts: Parts
    _copy: OffDeviceCopy | OnDeviceCopy | None

    @classmethod
    def take(
        cls, training: Training, scope: Scope = Scope.STEPS, where: str | Path = "host"
    ) -> Self:
        """Copies the present state.

        where  of STEPS: "host" for host memory, or a folder on a disk

        Raises OutOfMemoryError or StorageError before anything is copied if there is no space, and
        ConfigError for objects that cannot be restored.
        """
        parts = Parts(training, scope)
        copy: OffDeviceCopy | OnDeviceCopy | None = None
        if scope is Scope.STEPS:
            pinned = where == "host" and any(each.is_cuda for each in tensors_of(training))
            copy = OffDeviceCopy(parts.tensors, where, pinned, NAME)
        elif parts.tensors:
            copy = OnDeviceCopy.of(parts.tensors)
        return cls(training, scope, parts, copy)

    def retake(self) -> Snapshot:
        """Another snapshot of the present content, for REPLAY alone.

        Uses the tensors and rank states that this snapshot found, so it walks no modules. Take a
        new one after a layer got another recipe.
        """
        assert self.scope is Scope.REPLAY
        copy = self._copy.retake() if isinstance(self._copy, OnDeviceCopy) else None
        return Snapshot(
            self.training, self.scope, Parts(self.training, self.scope, self._parts), copy
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the copied tensors."""
        return 0 if self._copy is None else self._copy.nbytes

    def restore(self) -> None:
        """Restores the copied state. The copy stays and can be restored again."""
        self._begin()
        if self._copy is not None:
            self._copy.restore()
        self._parts.restore()
        self._end()

    def restore_into(self, other: Training) -> None:
        """Restores what PROGRESS covers into another training, whose tensors may differ."""
        self._parts.progress.restore(other)

    def restore_generators(self) -> None:
        """Restores the generators alone."""
        set_generators(self._parts.progress.generators)

    def swap(self) -> None:
        """Exchanges the copy with the present state, for STEPS alone.

        Swapping twice changes nothing. Needs no further memory, except for tensors that were
        created since.
        """
        assert isinstance(self._copy, OffDeviceCopy)
        self._begin()
        now = Parts(self.training, self.scope)
        self._copy.exchange(keeps_copy=False)
        self._copy.add(now.tensors)
        self._parts.restore()
        self._parts = now
        self._end()

    def _begin(self) -> None:
        """Refuses tensors that moved, and settles step counts that an optimizer has not read."""
        if self.scope is not Scope.STEPS:
            return
        assert isinstance(self._copy, OffDeviceCopy)
        if self._copy.has_moved():
            raise ConfigError(
                "fork: a tensor lies elsewhere than when the copy was taken: the model was moved or converted since. Take the copy anew.",
                code="fork.moved",
            )
        for each in self.training.optimizers:
            if isinstance(each, LowPrecisionOptimizer):
                each.settle()

    def _end(self) -> None:
        if self.scope is not Scope.STEPS:
            return
        for part in self._parts.members:
            for module in part.modules() if isinstance(part, nn.Module) else ():
                if isinstance(module, QLinear):
                    module.empty_cache()
                    if module.state.shared_inputs is not None:
                        module.state.shared_inputs.clear()
                elif isinstance(module, LayerState):
                    module.reread()


def snapshot_bytes(model: nn.Module, optimizer: Any, also: Iterable[Any] = ()) -> int:
    """Size of a STEPS copy before it is taken, also for an optimizer that has not stepped yet.

    `block_storage.require_free_space` compares it with the available space.
    """
    parts = Parts(Training(model=model, optimizer=optimizer, also=tuple(also)), Scope.STEPS)
    found = sum(flat.numel() for flat in storages(parts.tensors).values())
    return found + sum(
        bytes_to_come(part) for part in parts.members if isinstance(part, torch.optim.Optimizer)
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restores the model's state after the block, also if the block raises.

    Gradients, buffers, low-precision state, counters, generators and kept casts are restored (scope
    PASS). Weights are not copied, since no optimizer steps. Inside the block gradients start as
    None, and no weight cast is cached from call to call.
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
