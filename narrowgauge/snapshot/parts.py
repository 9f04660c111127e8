"""Parts of a training's state: which tensors a snapshot copies, and how it restores the rest.

Each part is recorded by a function that restores it. Containers are restored in place: the same
dicts, lists and tensors get their former members.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.nn.embedding import QEmbedding
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.rng import generators, set_generators
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.structure import DISTRIBUTED_STATE

if TYPE_CHECKING:
    from narrowgauge.nn.converted_state import ConvertedState

Restore = Callable[[], Any]


class Scope(Enum):
    """Changes that a snapshot covers; see the package."""

    STEPS = auto()
    PASS = auto()
    REPLAY = auto()
    PROGRESS = auto()


class Position(Protocol):
    """The position in the training data, as `train.tasks.task.Feed` has it."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """The objects whose state makes up a training.

    optimizer   an optimizer of torch or narrowgauge, a list of optimizers, or None
    also        more objects whose state a step changes, with `state_dict` and `load_state_dict`;
                a torch.Generator too
    agreements  rank agreements that no module of the model refers to
    feed        position in the data, or None
    counters    objects whose fields are all counters of the training
    """

    model: nn.Module
    optimizer: Any = None
    scaler: Any = None
    also: Sequence[Any] = ()
    agreements: Sequence[Any] = ()
    feed: Position | None = None
    counters: Sequence[Any] = ()

    @property
    def optimizers(self) -> list[Any]:
        given = self.optimizer
        return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


class Progress:
    """State that is no tensor of the model: position in the data, counters, scaler, generators."""

    def __init__(self, training: Training, scope: Scope) -> None:
        self.generators = generators()
        takes_steps = scope in (Scope.STEPS, Scope.PROGRESS)
        feed, counters = (training.feed, training.counters) if takes_steps else (None, ())
        self._position = None if feed is None else copy.deepcopy(feed.state())
        self._counters = [copy.deepcopy(vars(each)) for each in counters]
        # STEPS records the scaler as a member
        scaler = training.scaler if scope is Scope.PROGRESS else None
        self._scaler = None if scaler is None else copy.deepcopy(scaler.state_dict())

    def restore(self, training: Training) -> None:
        """Restores it into this or another training.

        A scaler keeps its state if there was none.
        """
        if self._position is not None and training.feed is not None:
            training.feed.restore(copy.deepcopy(self._position))
        for owner, fields in zip(training.counters, self._counters, strict=False):
            vars(owner).clear()
            vars(owner).update(copy.deepcopy(fields))
        if self._scaler is not None and training.scaler is not None:
            training.scaler.load_state_dict(copy.deepcopy(self._scaler))
        set_generators(self.generators)


class Parts:
    """The recorded state of a training.

    members   objects with tensors or a state dict, each once
    tensors   the tensors whose content a snapshot copies
    progress  everything that does not belong to a member
    """

    def __init__(self, training: Training, scope: Scope, earlier: Parts | None = None) -> None:
        """Records the present state.

        earlier  (REPLAY) parts of the same training, whose tensors and rank states are used again
        """
        self.training = training
        self.members: list[Any] = []
        self.tensors: list[Tensor] = earlier.tensors if earlier else []
        # Not searched in `earlier`: the search walks all modules, and every queued step has a snapshot.
        self.rank_states: list[Any] = earlier.rank_states if earlier else _agreements(training)
        self._restores: list[Restore] = []
        if scope is Scope.STEPS:
            self.members = _members(training)
            self._restores = [self._of_member(each) for each in self.members]
        elif scope is Scope.PASS:
            self._restores = [self._of_pass(training.model)]
        elif scope is Scope.REPLAY and earlier is None:
            self.tensors = list(_replayed(training.model))
        if scope is not Scope.PROGRESS:
            # After load_state_dict, which resets the count of micro-batches
            self._restores += [_integers(each) for each in self.rank_states]
        self.progress = Progress(training, scope)

    def restore(self) -> None:
        """Restores everything except the content of tensors."""
        for each in self._restores:
            each()
        self.progress.restore(self.training)

    def _of_member(self, part: Any) -> Restore:
        if isinstance(part, nn.Module):
            return self._of_model(part, with_weights=True)
        if isinstance(part, torch.optim.Optimizer):
            return self._of_optimizer(part)
        if isinstance(part, torch.Generator):
            states = part.get_state()
            return lambda: part.set_state(states)
        load, again = part.load_state_dict, self._recorded(part.state_dict())
        return lambda: load(again())

    def _of_model(self, model: nn.Module, with_weights: bool) -> Restore:
        tables = [
            self._recorded(table)
            for each in model.modules()
            for table in (each._buffers, each._parameters)
            if with_weights or table is each._buffers or isinstance(each, LayerState)
        ]
        extra = [
            (each.set_extra_state, self._recorded(each.get_extra_state()))
            for each in model.modules()
            if type(each).get_extra_state is not nn.Module.get_extra_state
        ]
        drawn = [(each, each.get_state()) for each in _own_generators(model)]
        states = [(each, self._recorded(each.progress())) for each in _layer_states(model)]

        def restore() -> None:
            for again in tables:
                again()
            for load, again in extra:
                load(again())
            for generator, saved in drawn:
                generator.set_state(saved)
            for state, again in states:
                state.restore_progress(again())

        return restore

    def _of_pass(self, model: nn.Module) -> Restore:
        restores = [_gradient(each) for each in model.parameters()]
        restores.append(self._of_model(model, with_weights=False))
        # Last: fields may hold versions of the tensors
        restores += [
            _fields(each)
            for each in model.modules()
            if isinstance(each, QLinear | QEmbedding | LayerState)
        ]
        restores += [each.snapshot() for each in _layer_states(model)]

        def restore() -> None:
            for each in restores:
                each()

        return restore

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Restore:
        if isinstance(optimizer, LowPrecisionOptimizer):
            optimizer.settle()
        state, groups = self._recorded(optimizer.state), self._recorded(optimizer.param_groups)
        norm = self._recorded(getattr(optimizer, "norm_before", None))

        def restore() -> None:
            # `load_state_dict` replaces both containers
            for name, again in (("state", state), ("param_groups", groups)):
                if getattr(optimizer, name) is not (held := again()):
                    setattr(optimizer, name, held)
            if isinstance(optimizer, LowPrecisionOptimizer):
                optimizer.norm_before = norm()

        return restore

    def _recorded(self, value: Any) -> Restore:
        """Returns a function that returns `value` with its present members."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return lambda: value
        if isinstance(value, dict):
            items = {key: self._recorded(each) for key, each in value.items()}

            def of_dict() -> Any:
                found = {key: again() for key, again in items.items()}
                if list(found) != list(value) or not _all_same(found.values(), value.values()):
                    value.clear()
                    value.update(found)
                return value

            return of_dict
        if isinstance(value, list | tuple):
            members = [self._recorded(each) for each in value]

            def of_list() -> Any:
                found = [again() for again in members]
                if isinstance(value, tuple):
                    return value if _all_same(found, value) else tuple(found)
                value[:] = found
                return value

            return of_list
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | torch.dtype | torch.device
        ):
            return lambda: value
        kept = copy.deepcopy(value)
        return lambda: copy.deepcopy(kept)


def tensors_of(training: Training) -> Iterator[Tensor]:
    """Parameters and buffers of all modules of a training."""
    for each in _members(training):
        if isinstance(each, nn.Module):
            yield from each.parameters()
            yield from each.buffers()


def _members(training: Training) -> list[Any]:
    scaler = [] if training.scaler is None else [training.scaler]
    given = [training.model, *training.optimizers, *scaler, *training.also]
    # accelerate wraps an optimizer, and ZeRO holds one for the part of this rank
    given += [
        inner
        for each in training.optimizers
        for name in ("optimizer", "optim")
        if (inner := getattr(each, name, None)) is not None
    ]
    given += _agreements(training)
    for each in given:
        if not isinstance(each, torch.Generator) and not (
            hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        ):
            raise ConfigError(
                f"fork: {type(each).__name__} has no state_dict and load_state_dict, by which it could be put back. Leave it out, or "
                "give it both.",
                code="fork.no-state-dict",
            )
    return list({id(each): each for each in given}.values())


def _agreements(training: Training) -> list[Any]:
    attached = [
        each.__dict__[DISTRIBUTED_STATE]
        for each in training.model.modules()
        if DISTRIBUTED_STATE in each.__dict__
    ]
    return list(
        {id(each): each for each in [*attached, *training.agreements] if each is not None}.values()
    )


def _replayed(model: nn.Module) -> Iterator[Tensor]:
    """Low-precision state that a forward pass reads and a step changes."""
    for module in model.modules():
        if isinstance(module, LayerState):
            for name, each in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]:
                if name not in module.not_replayed:
                    yield each


def _own_generators(model: nn.Module) -> Iterator[torch.Generator]:
    """Generators that modules hold as attributes."""
    for module in model.modules():
        yield from (each for each in vars(module).values() if isinstance(each, torch.Generator))


def _layer_states(model: nn.Module) -> Iterator[ConvertedState]:
    """The attributes of converted layers (`nn.converted_state`)."""
    for module in model.modules():
        if isinstance(module, QLinear | QEmbedding):
            yield module.state


def _integers(owner: Any) -> Restore:
    before = {name: value for name, value in vars(owner).items() if type(value) is int}
    return lambda: vars(owner).update(before)


def _fields(owner: nn.Module) -> Restore:
    """Restores the Python attributes of a layer, by reference."""
    before = dict(vars(owner))

    def restore() -> None:
        for name in [each for each in vars(owner) if each not in before]:
            del vars(owner)[name]
        vars(owner).update(before)

    return restore


def _gradient(parameter: nn.Parameter) -> Restore:
    before = parameter.grad
    # Under DistributedDataParallel gradients may be views of message buckets, which the next
    # backward pass overwrites.
    content = (
        before.detach().clone()
        if before is not None and torch.distributed.is_initialized()
        else None
    )

    def restore() -> None:
        parameter.grad = before
        if before is not None and content is not None:
            with torch.no_grad():
                before.copy_(content)

    return restore


def _all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))
