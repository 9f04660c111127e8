"""Caches of quantized operands, searched in this order for each role:

    InputCasts       x    casts by the fused function that computed x (`fuse`), or by another layer
                          that reads the same tensor (q, k and v)
    PrecastSource    w    casts left by the optimizer's step (`ops.quantize.precast_weight`)
    WeightCache      w    casts made earlier in this optimizer step; new casts are stored here
    GradientCasts    gy   casts by the fused function that computed the gradient

q, k and v share one cast of x in eager code, if `convert` gave the model one SharedInputs, the same
tensor object is read, unchanged and by each layer once, and no other input is read in between.
Their casts must also agree (`Operand.share_key`) in

    cast and rotation of the rows; the form in which the GEMM reads them (codes or values)
    type of the output, and whether autograd records
    what backward saves of x: its transposed cast and rotation, if codes are saved
    the amax history, under delayed scaling

Not shared: stochastic casts, random signs, and operands with a learned step (`share_key` in
straight_through has the rule for INT4).

`lookup(operand)` returns a Casts object, possibly empty, to which new casts are added, or None for
an unknown tensor. Other sources (gathered codes, codes of a message) implement `lookup` and are
listed in `CastSources`.

All caches compare one key, `addresses.validity`. It contains `_version`, which does
not change on writes through `.data`, NumPy or raw pointers, so `weight_cache` compares
the bytes of a weight too. Casts live for at most one optimizer step. A forward pass
without gradients never reads a cached cast of a weight. Copies and pickles start
empty. torch.compile bypasses the caches: compiled code casts weights at every call.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from narrowgauge.addresses import Key, validity
from narrowgauge.nn.operands import Casts, Operand

NUMBERS = itertools.count()  # one per input tensor, for AmaxHistory.saw


@dataclass(eq=False)
class CacheStats:
    """Counters of casts by fused functions.

    made   casts that were handed over to readers
    taken  number of times that a layer used one
    """

    made: int = 0
    taken: int = 0


@dataclass(eq=False)
class InputCasts:
    """The casts of one input tensor.

    input    weak reference to the tensor
    key      `addresses.validity` of the tensor
    made     (key, casts, stats): first the casts of the producer, with its counters, then the casts
             of layers that read the tensor, with stats None
    readers  id -> weak reference of each layer that read the entry, in order
    number   unique number of the input
    """

    input: weakref.ref[Tensor]
    key: Key
    made: list[tuple[Key, Casts, CacheStats | None]] = field(default_factory=list)
    readers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    number: int = field(default_factory=NUMBERS.__next__)

    def lookup(self, operand: Operand) -> Casts | None:
        """Return the casts that fit this operand, or new ones that later readers can share.

        operand  the input as [T, K]; its tensor may be another object than `input`, as a reshaped
                 view is
        """
        shared = operand.share_key()
        for key, casts, stats in self.made:
            # Casts of a producer match on the cast alone, casts of another layer on all of
            # `share_key`: a producer knows nothing of what a reader saves for backward.
            if key == (shared if stats is None else _precast_key(operand)):
                if stats is not None:
                    stats.taken += 1
                return casts
        if shared is None:
            return None
        self.made.append((shared, Casts(), None))
        return self.made[-1][1]

    def was_read(self, reader: Any) -> None:
        """Drop the casts if this layer was the last reader of its input in the previous pass.

        Memory is then free before the input itself is. reader: the layer, after it took its casts.
        """
        if reader.state.is_last_reader:
            self.made.clear()

    def close(self) -> None:
        """Note which layer read the entry last, for `was_read` in the next pass."""
        readers = (each for found in self.readers.values() if (each := found()) is not None)
        # A layer that was turned back while a graph waited has no state.
        states = [each for reader in readers if (each := vars(reader).get("state")) is not None]
        for state in states:
            # A field of `state`, since nn.Module.__setattr__ fails at interpreter exit: an input may
            # be freed after torch's globals.
            state.is_last_reader = state is states[-1]

    def put(self, operand: Operand, stats: CacheStats) -> None:
        """Attach casts to the input, for every layer whose operand has the same key."""
        self.made.append((_precast_key(operand), operand.casts, stats))
        stats.made += 1


def _precast_key(operand: Operand) -> Key:
    """The settings on which layers must agree to use one cast of x by its producer."""
    plan = operand.plan
    cols = plan.cols if operand.saves_codes else None
    return plan.rows, plan.rows_expand, cols, cols is not None and plan.transposes


class SharedInputs:
    """Cache with one entry: the input that the layers of a model read last. `convert` installs it.

    An entry is valid only for the same tensor object with an unchanged key, and once per layer. The
    entry is dropped when the tensor is freed, when another input arrives, and when `advance` ends
    the step. It is replaced as a whole, so a thread reads either the old entry or the new one.
    """

    def __init__(self) -> None:
        self._entry: InputCasts | None = None
        self.gradients = GradientCasts()

    def of(
        self, x: Tensor, reader: object | None = None, owner: Tensor | None = None
    ) -> InputCasts | None:
        """Return the entry of x, created if needed; None for a tensor without a version counter.

        reader  the layer that reads x; None for the function that computed x
        owner   the tensor that x is a view of, if each reader receives another view object
        """
        if (key := validity(x)) is None:
            return None
        entry, x = self._entry, x if owner is None else owner
        # A second read by the same layer belongs to another forward pass. The buffer may have been
        # refilled through NumPy or `.data`, which leaves `_version` unchanged.
        if (
            entry is None
            or entry.input() is not x
            or entry.key != key
            or id(reader) in entry.readers
        ):
            if entry is not None:
                entry.close()
            # A weak reference: the cache must not keep activations alive.
            entry = self._entry = InputCasts(weakref.ref(x, self._forget), key)
        if reader is not None:
            entry.readers[id(reader)] = weakref.ref(reader)
        return entry

    def clear(self) -> None:
        """Drop the entry and the gradients."""
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
    """Casts of gradients that were computed in this backward pass and not read yet.

    Autograd passes a gradient on as another object and through views, so the key is the memory
    address and the version, which all views share. The tensor is held until its casts are read or
    the step ends. Otherwise its address could be reused.
    """

    def put(self, gradient: Tensor, casts: Casts) -> None:
        """Attach casts to a gradient that is contiguous and has no other owner."""
        # The key of a flat view, since it contains shape and strides, and
        # readers receive other views.
        if (key := validity(gradient.view(-1))) is not None:
            self[key] = gradient, casts

    def lookup(self, operand: Operand) -> Casts | None:
        """Return and remove the casts of an unchanged view of all elements; None for others."""
        key = validity(operand.tensor.view(-1)) if self and operand.tensor.is_contiguous() else None
        return None if key is None or key not in self else self.pop(key)[1]
