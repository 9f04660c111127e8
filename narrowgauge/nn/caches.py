"""Who may have the casts of an operand already, asked about one role in this order:

    InputCasts       x    what computed it cast it as well (`fuse`), or a sister layer that reads the same tensor did: q, k and v
    PrecastSource    w    the optimizer's step left them beside the weight (`ops.quantize.precast_weight`)
    WeightCache      w    made earlier in this optimizer step; what nobody has is made now, and kept here
    GradientCasts    gy   what computed the gradient cast it as well

`lookup(operand)` gives the casts that there are, to which those are added that are made now, or None for an unknown tensor. Another source
(gathered codes, a message's) is one more object with it in a context's `sources`.

All of them go by one key, `addresses.validity`. It contains `_version`, which misses writes through `.data`, NumPy and raw pointers:
`weight_cache` compares the bytes of a weight besides. Casts are kept from one optimizer step to the next only, and a forward pass
without gradients never reads a kept one. Copies and pickles begin empty. torch.compile bypasses caches: its code casts weights at
every call.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.nn.operands import Casts, Operand

NUMBERS = itertools.count()  # of inputs


@dataclass(eq=False)
class CacheStats:
    """made: casts that were handed over; taken: how often a layer took one."""

    made: int = 0
    taken: int = 0


@dataclass(eq=False)
class InputCasts:
    """The casts of one input.

    made     (key, casts, who counts them) of what computed it, then of layers that read it, which nobody counts
    readers  the layers (by id) that took a share, in order
    number   its own, which no other input has
    """

    input: weakref.ref[Tensor]
    key: Key
    made: list[tuple[Key, Casts, CacheStats | None]] = field(default_factory=list)
    readers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    number: int = field(default_factory=NUMBERS.__next__)

    def lookup(self, operand: Operand) -> Casts | None:
        """operand: of the input as [T, K], another object than the one that this goes by."""
        shared = operand.share_key()
        for key, casts, stats in self.made:
            if key == (shared if stats is None else _precast_key(operand)):
                if stats is not None:
                    stats.taken += 1
                return casts
        if shared is None:
            return None
        self.made.append((shared, Casts(), None))
        return self.made[-1][1]

    def was_read(self, reader: Any) -> None:
        """By a layer, which found what it needs; casts that nobody else read when it was last here go now, not with the input."""
        if reader.reads_last:
            self.made.clear()

    def close(self) -> None:
        """Another input comes: who read this one last will know it next time."""
        readers = [each for found in self.readers.values() if (each := found()) is not None]
        for each in readers:
            # Past torch's `__setattr__`, which fails while the interpreter ends: an input may go after torch's names have gone.
            each.__dict__["reads_last"] = each is readers[-1]

    def put(self, operand: Operand, stats: CacheStats) -> None:
        """Hands over the operand's casts with the input, for every layer whose operand is like this one."""
        self.made.append((_precast_key(operand), operand.casts, stats))
        stats.made += 1


def _precast_key(operand: Operand) -> Key:
    """What layers that may take the same casts of x have in common."""
    plan = operand.plan
    cols = plan.cols if operand.keeps_codes else None
    return plan.rows, plan.rows_expand, cols, cols is not None and plan.transposes


class SharedInputs:
    """The casts of the input that the layers of one model saw last (`convert` installs it).

    It serves only the very tensor object with its numbers unchanged, and each layer once: a layer that reads it again is in another forward
    pass, and it may have been refilled where its version does not show it. The entry goes when the tensor goes, when another comes, and
    when `advance` ends the step; it is replaced as a whole, so threads see the old one or the new one.
    """

    def __init__(self) -> None:
        self._entry: InputCasts | None = None
        self.gradients = GradientCasts()

    def of(self, x: Tensor, reader: object | None = None, owner: Tensor | None = None) -> InputCasts | None:
        """What there is of x for the layer `reader`, or for what made x; None for a tensor without a version.

        owner: the tensor that x is a view of, if x is another object for each reader.
        """
        if (key := validity(x)) is None:
            return None
        entry, x = self._entry, x if owner is None else owner
        if entry is None or entry.input() is not x or entry.key != key or id(reader) in entry.readers:
            if entry is not None:
                entry.close()
            entry = self._entry = InputCasts(weakref.ref(x, self._forget), key)
        if reader is not None:
            entry.readers[id(reader)] = weakref.ref(reader)
        return entry

    def clear(self) -> None:
        """Forgets the entry, and the gradients."""
        if self._entry is not None:
            self._entry.close()
        self._entry = None
        self.gradients.clear()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry.input is gone:
            entry.close()
            self._entry = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()


class GradientCasts(dict[Key, tuple[Tensor, Casts]]):
    """The casts of gradients that a backward pass has computed and not read yet.

    A gradient comes back through views and as another object, so it is known by its memory, which is held until its casts are taken or the
    step ends, and by its version, which every view of it shares.
    """

    def put(self, gradient: Tensor, casts: Casts) -> None:
        """Hands over `casts` with a gradient, contiguous, that nobody else holds."""
        if (key := validity(gradient.view(-1))) is not None:
            self[key] = gradient, casts

    def lookup(self, operand: Operand) -> Casts | None:
        """Once, if the tensor is a view of the same elements, unchanged."""
        key = validity(operand.tensor.view(-1)) if self and operand.tensor.is_contiguous() else None
        return None if key is None or key not in self else self.pop(key)[1]
