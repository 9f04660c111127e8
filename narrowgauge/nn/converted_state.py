"""All attributes that a recipe adds to a layer, in one object: `QLinear.state`, `QEmbedding.state`.

A field is declared here and nowhere else. Its `Lifetime` says what copies, snapshots and the end
of a conversion do with it:

    PROGRESS    counters and flags of the training. Copied with the layer, restored by every snapshot
    SETTING     chosen by the user or by `convert`. Copied; restored after a forward and backward
                pass, not after steps, since a run may switch recipes before it rewinds
    OBSERVED    facts about the program that trains, as a layer that is never called. As SETTING:
                steps that are rewound were computed by the same program
    PER_STEP    as PROGRESS, but a copy of the layer starts without it: the copy has seen no step
    CACHE       can be computed again. Not copied; restored after a pass; steps drop it
    ATTACHED    belongs to an object outside, which knows this layer and not its copy: an observer,
                an optimizer, `distribute`, a count of reads. Neither copied nor restored
    LASTING     copied, never restored: warnings that the user has read, a cache shared by layers

`QLinear.__getstate__` makes the state of copy.copy, copy.deepcopy and pickle: all attributes of
the module, with the copied fields of this object (`copied`). deepcopy then copies the values; the
cache that layers share (LASTING) copies as an empty one.

A field without a lifetime is PROGRESS, so a new field is copied, restored and removed by being
declared. `convert(model, None)` deletes the whole object.

Tensors of a recipe are not fields: amax histories, learned steps, samplers and frozen codes are
submodules of the layer (SUBMODULES), so that their keys in state dicts stay `scaling.*`, `steps.*`,
`sampling.*` and `frozen.*`. Snapshots find them as buffers and parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from narrowgauge.ops.fingerprint import Readback

T = TypeVar("T")
# Submodule with the state of a recipe -> its name in messages.
ADDED = {
    "scaling": "amax histories",
    "steps": "learned steps",
    "sampling": "readings of the sampler",
}
SUBMODULES = (*ADDED, "frozen")


class Lifetime(NamedTuple):
    """What happens to a field.

    is_copied      a copy or pickle of the layer has the value; else the default
    after_pass     a snapshot of a forward and backward pass restores it
    after_steps    a snapshot of optimizer steps restores it
    """

    is_copied: bool
    after_pass: bool
    after_steps: bool


PROGRESS = {"lifetime": Lifetime(is_copied=True, after_pass=True, after_steps=True)}
SETTING = {"lifetime": Lifetime(is_copied=True, after_pass=True, after_steps=False)}
OBSERVED = SETTING
PER_STEP = {"lifetime": Lifetime(is_copied=False, after_pass=True, after_steps=True)}
CACHE = {"lifetime": Lifetime(is_copied=False, after_pass=True, after_steps=False)}
ATTACHED = {"lifetime": Lifetime(is_copied=False, after_pass=False, after_steps=False)}
LASTING = {"lifetime": Lifetime(is_copied=True, after_pass=False, after_steps=False)}


class StateField(Generic[T]):
    """An attribute of a layer that is the field of the same name in `layer.state`."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type[Any]) -> T:
        found: T = getattr(layer.state, self.name)
        return found

    def __set__(self, layer: Any, value: T) -> None:
        setattr(layer.state, self.name, value)


@dataclass(eq=False, kw_only=True)
class ConvertedState:
    """Fields of every converted layer, and the methods that copy, save and restore all fields.

    is_suspended     True: the layer computes as the module of torch that it was
    peers            (distributed.state.Peers) ranks that hold the layer; None without `distribute`
    step_ended       an optimizer of torch ended the step, and no other step has begun
    write_checks     comparisons of reused casts with the weight, read at the end of a later step
    warned_of_ranks  a warning about several ranks without `distribute` was given
    """

    is_suspended: bool = field(default=False, metadata=SETTING)
    peers: Any = field(default=None, metadata=ATTACHED)
    step_ended: bool = field(default=False, metadata=PER_STEP)
    write_checks: tuple[Readback, ...] = field(default=(), metadata=CACHE)
    warned_of_ranks: bool = field(default=False, metadata=LASTING)

    def copied(self) -> Self:
        """A new object with the fields that a copy of the layer has; values by reference."""
        found = type(self)()
        lifetimes = self._lifetimes()
        vars(found).update(
            {name: each for name, each in vars(self).items() if lifetimes[name].is_copied}
        )
        return found

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the fields after a pass, by reference.

        Fields that were added since are removed.
        """
        before = self._with(lambda lifetime: lifetime.after_pass)
        return lambda: self._restore(before, lambda lifetime: lifetime.after_pass)

    def progress(self) -> dict[str, Any]:
        """Name -> value of the fields that optimizer steps change."""
        return self._with(lambda lifetime: lifetime.after_steps)

    def restore_progress(self, before: dict[str, Any]) -> None:
        """Restore what `progress` returned."""
        self._restore(before, lambda lifetime: lifetime.after_steps)

    def _lifetimes(self) -> dict[str, Lifetime]:
        declared = {each.name: each.metadata for each in fields(self)}
        return {name: (declared.get(name) or PROGRESS)["lifetime"] for name in vars(self)}

    def _with(self, chosen: Callable[[Lifetime], bool]) -> dict[str, Any]:
        lifetimes = self._lifetimes()
        return {name: each for name, each in vars(self).items() if chosen(lifetimes[name])}

    def _restore(self, before: dict[str, Any], chosen: Callable[[Lifetime], bool]) -> None:
        for name, lifetime in self._lifetimes().items():
            if chosen(lifetime) and name not in before:
                delattr(self, name)
        vars(self).update(before)
