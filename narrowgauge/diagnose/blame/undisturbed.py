"""Run a forward and a backward pass without side effects on the model.

    with undisturbed(model):
        loss(model, batch).backward()

Gradients, amax histories, counters, random generators and cached casts are restored bit for bit.
Weights are not copied, since no optimizer steps. Buffers, layer state of recipes and generator
states are copied; learned steps write their state in a forward pass during their cold start.
Gradients are set aside, and copied on several ranks only.
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
# Fields of QLinear, AmaxHistory and the agreement of ranks that a step changes. A new field of
# these classes must be added here.
_OF_LAYER = (
    "_step_watch", "step_ended", "_cache", "called", "suspects", "reads_last", "warned_of_ranks", "warned_of_eval",
)  # fmt: skip
_OF_WINDOW = ("_lineage", "_followed", "_was_seen")
_OF_DISTRIBUTED_STATE = ("step", "micro_batch")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the model after the block, also if it raises.

    Inside the block gradients start as None, and no weight cast is cached from call to call.
    """
    put_back = [*_tensors(model), *_attributes(model)]
    drawn = generators()
    try:
        for module in model.modules():
            if isinstance(module, QLinear):
                module.stop_keeping()
        yield
    finally:
        # Tensors first: the fields below hold version counters, which writing a tensor back
        # changes.
        for each in put_back:
            each()
        set_generators(drawn)
        for module in model.modules():
            if isinstance(module, QLinear) and module.shared_inputs is not None:
                # Casts of inputs of the block would be found again by the address of freed memory.
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
    # Under DistributedDataParallel gradients may be views of communication buckets, which the next
    # backward pass overwrites.
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
            # An unchanged tensor keeps its version, so that casts of it stay valid.
            if not torch.equal(tensor, before):
                tensor.copy_(before)

    return put_back


def _attributes(model: nn.Module) -> Iterator[PutBack]:
    """Yield restores of fields.

    They follow the tensors, because some fields follow tensor versions.
    """
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
