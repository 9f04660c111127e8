"""Snapshot of a training state, in host memory or on disk, that can be restored bit for bit.

    fork = Fork.take(model, optimizer, scaler)     copies the current state
    ... n steps ...
    fork.restore()                                 goes back to the copied state
    ... or fork.swap() ...                         goes back, and the copy then holds the later
                                                   state

A snapshot copies the memory of all tensors: parameters, buffers (including amax histories, learned
steps and sampler statistics of recipes), optimizer states, and the states of further objects. It
also records non-tensors: the dicts that hold the tensors, parameter groups, the loss scaler, all
random generators, and counters of ranks that share a model. Tensors keep their addresses in a
restore or swap. A state created since, by an optimizer's first step, is removed again.

Each rank copies its own shard of a DTensor; all ranks must take, restore and swap at the same
steps. Gradients are not copied: take a snapshot between two steps, where there are none. Cached
weight casts are dropped and recomputed from the weights.

Costs each byte of the state once in host memory or on the disk, and BLOCK bytes more on the device
during an exchange.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose.generators import generators, set_generators
from narrowgauge.diagnose.guard.bytes_apart import BytesApart, refuse_room
from narrowgauge.distributed import ATTRIBUTE
from narrowgauge.errors import ConfigError
from narrowgauge.nn import coded_weight
from narrowgauge.nn.amax_history import LayerState
from narrowgauge.nn.linear import QLinear
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.optim.size import bytes_to_come

NAME = "a copy of the run's state"
PutBack = Callable[[], Any]


class Fork:
    """A snapshot; create it by `take`.

    nbytes  size of the copy in bytes
    """

    def __init__(self, parts: list[Any], apart: BytesApart) -> None:
        self._parts, self._apart = parts, apart
        self._present = _Present(parts)
        # (device, address of a storage) -> blocks of bytes.
        self._copies: dict[tuple[torch.device, int], list[Tensor]] = {}
        self._copy(self._present)

    @classmethod
    def take(
        cls, model: nn.Module, optimizer: Any, scaler: Any = None, where: str | Path = "host", also: Iterable[Any] = ()
    ) -> Fork:  # fmt: skip
        """Copy the current state.

        optimizer  an optimizer of torch or narrowgauge, or a list of optimizers
        where      "host" for host memory, or a folder on a disk
        also       other objects that a step changes: schedulers, averaged models, torch.Generators,
                   or any object with `state_dict` and `load_state_dict`

        Raises OutOfMemoryError or StorageError before copying if there is no free space, and
        ConfigError for an object that cannot be restored.
        """
        parts = _parts(model, optimizer, scaler, also)
        pinned = where == "host" and any(each.is_cuda for part in parts for each in _tensors_of(part))
        return cls(parts, BytesApart(where, pinned))

    @property
    def nbytes(self) -> int:
        return self._apart.nbytes

    def restore(self) -> None:
        """Restore the copied state. The copy stays, so it can be restored again."""
        self._begin()
        self._exchange(keeps_copy=True)
        self._present.put_back()
        self._forget_casts()

    def swap(self) -> None:
        """Exchange the copy with the current state; two swaps cancel out.

        Needs no further memory, except for tensors created since.
        """
        self._begin()
        # Recorded before the exchange: these closures describe the state that the copy will hold.
        now = _Present(self._parts)
        self._exchange(keeps_copy=False)
        self._copy(now)
        self._present.put_back()
        self._present = now
        self._forget_casts()

    def _copy(self, present: _Present) -> None:
        """Copy the storages that have no blocks yet."""
        new = {key: flat for key, flat in present.storages.items() if key not in self._copies}
        rooms = iter(self._apart.add([flat.numel() for flat in new.values()], NAME))
        for key, flat in new.items():
            self._copies[key] = next(rooms)
            for piece, room in _pieces(flat, self._copies[key]):
                room.copy_(piece, non_blocking=True)
        _wait(new.values())

    @torch.no_grad()
    def _exchange(self, keeps_copy: bool) -> None:
        """Copy the blocks back to their storages.

        Without keeps_copy, the current bytes take the place of the copy.
        """
        storages = self._present.storages
        for key, flat in storages.items():
            for piece, room in _pieces(flat, self._copies[key]):
                # One block at a time: a clone of the whole state would double the device's memory.
                before = None if keeps_copy else piece.clone()
                piece.copy_(room, non_blocking=True)
                if before is not None:
                    room.copy_(before, non_blocking=True)
        _wait(storages.values())
        # The bytes were written behind autograd's back. Without new versions, cached casts would
        # look valid.
        torch.autograd.graph.increment_version([each for each in self._present.tensors if not each.is_inference()])

    def _begin(self) -> None:
        """Check that no storage has moved, and let optimizers read pending counters."""
        storages = self._present.storages
        if any(key not in storages for tensor in self._present.tensors for key, _ in _storages(tensor)):
            raise ConfigError(
                "fork: a tensor lies elsewhere than when the copy was taken: the model was moved or converted since. Take the copy anew.",
                code="fork.moved",
            )
        for part in self._parts:
            if isinstance(part, NarrowOptimizer):
                part.settle()

    def _forget_casts(self) -> None:
        for part in self._parts:
            for module in part.modules() if isinstance(part, nn.Module) else ():
                if isinstance(module, QLinear):
                    module.empty_cache()
                    if module.shared_inputs is not None:
                        module.shared_inputs.clear()
                elif isinstance(module, LayerState):
                    module.reread()


def fork_bytes(model: nn.Module, optimizer: Any, also: Iterable[Any] = ()) -> int:
    """Size of a future copy in bytes, also for an optimizer that has not stepped yet.

    `refuse_room` checks it against the free space.
    """
    parts = _parts(model, optimizer, None, also)
    found = sum(flat.numel() for flat in _Present(parts).storages.values())
    return found + sum(bytes_to_come(part) for part in parts if isinstance(part, torch.optim.Optimizer))


__all__ = ["Fork", "fork_bytes", "refuse_room"]


def _parts(model: nn.Module, optimizer: Any, scaler: Any, also: Iterable[Any]) -> list[Any]:
    """All objects with a state, each once."""
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    given = [model, *optimizers, *([scaler] if scaler is not None else []), *also]
    # accelerate's wrappers hold the optimizer inside, and a ZeRO optimizer holds this rank's part.
    given += [
        inner
        for each in optimizers
        for name in ("optimizer", "optim")
        if (inner := getattr(each, name, None)) is not None
    ]
    for module in model.modules():
        if (agreement := module.__dict__.get(ATTRIBUTE)) is not None:
            given.append(agreement)
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


class _Present:
    """The current state: its tensors, and closures that restore everything else.

    storages  (device, address) -> bytes of a storage, uint8. Tied weights and views of one buffer
              share a storage, which is copied once: swapped twice, its bytes would come back wrong
    """

    def __init__(self, parts: list[Any]) -> None:
        self.tensors: list[Tensor] = []
        found = [self._of_part(part) for part in parts]
        states = generators()
        self._put_back: list[PutBack] = [*found, lambda: set_generators(states)]
        self.storages: dict[tuple[torch.device, int], Tensor] = {}
        for tensor in self.tensors:
            for key, flat in _storages(tensor):
                self.storages.setdefault(key, flat)

    def put_back(self) -> None:
        for each in self._put_back:
            each()

    def _of_part(self, part: Any) -> PutBack:
        if isinstance(part, nn.Module):
            return self._of_model(part)
        if isinstance(part, torch.optim.Optimizer):
            return self._of_optimizer(part)
        if isinstance(part, torch.Generator):
            states = part.get_state()
            return lambda: part.set_state(states)
        take_up, again = part.load_state_dict, self._recorded(part.state_dict())
        return lambda: take_up(again())

    def _of_model(self, model: nn.Module) -> PutBack:
        tables = [self._recorded(table) for each in model.modules() for table in (each._buffers, each._parameters)]
        extra = [
            (each.set_extra_state, self._recorded(each.get_extra_state()))
            for each in model.modules()
            if type(each).get_extra_state is not nn.Module.get_extra_state
        ]

        def put_back() -> None:
            for again in tables:
                again()
            for take_up, again in extra:
                take_up(again())

        return put_back

    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> PutBack:
        if isinstance(optimizer, NarrowOptimizer):
            optimizer.settle()
        state, groups = self._recorded(optimizer.state), self._recorded(optimizer.param_groups)
        norm = self._recorded(getattr(optimizer, "norm_before", None))

        def put_back() -> None:
            # `load_state_dict` replaces both objects.
            for name, again in (("state", state), ("param_groups", groups)):
                if getattr(optimizer, name) is not (held := again()):
                    setattr(optimizer, name, held)
            if isinstance(optimizer, NarrowOptimizer):
                optimizer.norm_before = norm()

        return put_back

    def _recorded(self, value: Any) -> PutBack:
        """Closure that restores `value`: same tensors, dicts and lists, with the same contents."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return lambda: value
        if isinstance(value, dict):
            items = {key: self._recorded(each) for key, each in value.items()}

            def of_dict() -> Any:
                found = {key: again() for key, again in items.items()}
                # Written only if changed: the dict object itself must stay, since optimizers and
                # modules refer to it.
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
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return lambda: value
        # Opaque objects are copied on record and on restore, so that a restore can be repeated.
        kept = copy.deepcopy(value)
        return lambda: copy.deepcopy(kept)


def _all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors with memory of their own behind a tensor; for a DTensor this rank's shard."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # skips the mesh of a DTensor
                yield from _plain(inner)
    else:
        yield coded_weight.plain(tensor) if isinstance(tensor, coded_weight.CodedWeight) else tensor.detach()


def _storages(tensor: Tensor) -> Iterator[tuple[tuple[torch.device, int], Tensor]]:
    """Memory of a tensor as bytes: ((device, address), uint8 [bytes]).

    Nothing for tensors without data.
    """
    for plain in _plain(tensor):
        storage = plain.untyped_storage()
        if not plain.is_meta and storage.nbytes():
            # Inside inference mode the view would be an inference tensor, which cannot be written
            # outside of it.
            with torch.inference_mode(False):
                yield (
                    (plain.device, storage.data_ptr()),
                    torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage),
                )


def _tensors_of(part: Any) -> Iterator[Tensor]:
    if isinstance(part, nn.Module):
        yield from part.parameters()
        yield from part.buffers()


def _pieces(flat: Tensor, rooms: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(flat.split([len(room) for room in rooms]), rooms, strict=True)


def _wait(tensors: Iterable[Tensor]) -> None:
    """Wait until asynchronous copies to and from the host have finished."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)
