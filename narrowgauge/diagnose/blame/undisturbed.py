"""A forward and a backward pass that leave no trace: gradients, windows, counters, generators and kept casts are as before, to the bit.

    with undisturbed(model):
        loss(model, batch).backward()

Weights are not copied, since no optimizer steps: what is copied are buffers, the state that recipes add to layers (learned steps write
theirs in a forward pass while they are cold), and the states of generators. Gradients are set aside, and copied on several ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose.generators import generators, set_generators
from narrowgauge.distributed import ATTRIBUTE
from narrowgauge.nn.amax_history import AmaxHistory, LayerState
from narrowgauge.nn.linear import QLinear

PutBack = Callable[[], Any]
_OF_LAYER = (
    "_step_watch", "step_ended", "_cache", "called", "suspects", "reads_last", "warned_of_ranks", "warned_of_eval",
)  # fmt: skip
_OF_WINDOW = ("_lineage", "_followed", "_was_seen")
_OF_DISTRIBUTED_STATE = ("step", "micro_batch")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes as in a step; afterwards nothing of it is left, also where it raises.

    Inside, gradients begin at None, and no cast of a weight is kept from call to call.
    """
    put_back = [*_tensors(model), *_attributes(model)]
    drawn = generators()
    try:
        for module in model.modules():
            if isinstance(module, QLinear):
                module.stop_keeping()
        yield
    finally:
        for each in put_back:
            each()
        set_generators(drawn)
        for module in model.modules():
            if isinstance(module, QLinear) and module.shared_inputs is not None:
                module.shared_inputs.clear()


def _tensors(model: nn.Module) -> Iterator[PutBack]:
    for parameter in model.parameters():
        yield _gradient(parameter)
        parameter.grad = None
    for module in model.modules():
        held = [each for each in module.buffers(recurse=False) if not each.is_meta]
        if isinstance(module, LayerState):
            held += [each for each in module.parameters(recurse=False) if not each.is_meta]
        for tensor in held:
            yield _content(tensor.detach(), tensor.detach().clone())


def _gradient(parameter: nn.Parameter) -> PutBack:
    before = parameter.grad
    # Of DistributedDataParallel gradients may be views of what it sends, which the next backward pass writes.
    content = before.detach().clone() if before is not None and torch.distributed.is_initialized() else None

    def put_back() -> None:
        parameter.grad = before
        if before is not None and content is not None:
            with torch.no_grad():
                before.copy_(content)

    return put_back


def _content(tensor: Tensor, before: Tensor) -> PutBack:
    def put_back() -> None:
        with torch.no_grad():
            if not torch.equal(tensor, before):  # nobody takes it for written
                tensor.copy_(before)

    return put_back


def _attributes(model: nn.Module) -> Iterator[PutBack]:
    """After the tensors: what follows their versions is put back last."""
    for module in model.modules():
        if isinstance(module, QLinear):
            yield _fields(module, _OF_LAYER)
        elif isinstance(module, AmaxHistory):
            yield _fields(module, _OF_WINDOW)
        if (state := module.__dict__.get(ATTRIBUTE)) is not None:
            yield _fields(state, _OF_DISTRIBUTED_STATE)


def _fields(owner: Any, names: tuple[str, ...]) -> PutBack:
    before = {name: getattr(owner, name) for name in names}

    def put_back() -> None:
        for name, value in before.items():
            setattr(owner, name, value)

    return put_back
