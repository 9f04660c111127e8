"""What layers that read the same tensor share: q, k and v, or gate and up, cast one x and keep it for backward; it is done once.

A SharedInputs belongs to the layers of one model (`convert` installs it) and holds one entry, of the input that was seen last:

    input tensor (weakly), its version, what was made of it  ->  the casts

It serves only the very tensor object at the very version that the entry was made from, and each layer once: a layer that reads the
same tensor again is in another forward pass, and the tensor may have been refilled where its version does not show it (a buffer of
numpy's, shared memory, `.data`). The entry goes when the tensor goes, when another comes, and when `advance` ends the step. Casts
that draw random numbers, and those with a scale of the layer's own (learned steps, windows), are not shared. Copies and pickles
begin empty. Under torch.compile it is passed by: the compiler sees equal computations itself.

What computed the input may hand over its casts with it (`fusing`): they lie in the same entry, and are served the same way. A
gradient comes back through views and as another object, so the casts handed over with one (SharedGradients) are known by its memory,
which is held until they are taken or `advance` ends the step, and by its version, which every view of it shares.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.ops.quantize.pair import OneRead
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

Made = TypeVar("Made")


@dataclass(eq=False)
class Reads:
    """made: casts that were handed over; taken: how often a layer took one."""

    made: int = 0
    taken: int = 0


@dataclass(eq=False)
class Handed:
    """x as one or more layers will read it, cast ahead by what computed x (`fusing`).

    lhs        the operand of `output`
    kept       codes, scale and global scale of x.T for grad_weight, cast by kept_cast; None: each layer keeps x itself
    amax       by which a window had it cast
    reads      counts the layers that took it; of the producer, since the casts go when they are read
    """

    lhs: QTensor | Tensor
    kept: tuple[Tensor | None, ...] | None
    kept_cast: Cast | None
    amax: Tensor | None
    reads: Reads = field(default_factory=Reads)


@dataclass(eq=False)
class _Entry:
    """Of one input. readers: the layers (by id) that took a share."""

    input: weakref.ref[Tensor]
    version: tuple[int, bool]
    casts: dict[Hashable, Any] = field(default_factory=dict)
    handed: dict[Hashable, Handed] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)

    def serves(self, x: Tensor, version: tuple[int, bool], reader: object | None) -> bool:
        return self.input() is x and self.version == version and id(reader) not in self.readers


class SharedInputs:
    """One entry, replaced as a whole, so that threads see the old one or the new one."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self.gradients = SharedGradients()

    def of(self, x: Tensor, reader: object | None = None) -> Share | None:
        """The share of the layer `reader`, or of what made x, now; None for a tensor without a version."""
        if x.is_inference():
            return None
        # What is made in inference mode cannot be saved for backward.
        entry, version = self._entry, (x._version, torch.is_inference_mode_enabled())
        if entry is None or not entry.serves(x, version, reader):
            entry = self._entry = _Entry(weakref.ref(x, self._forget), version)
        if reader is not None:
            entry.readers.add(id(reader))
        return Share(entry.casts, entry.handed)

    def clear(self) -> None:
        """Forgets the entry, and the gradients."""
        self._entry = None
        self.gradients.clear()

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry.input is gone:
            self._entry = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()


@dataclass(eq=False)
class Share:
    """The casts of one input, for the length of one forward call. Closed afterwards: backward keeps settings, not casts.

    handed  those that came with it
    """

    casts: dict[Hashable, Any] | None
    handed: dict[Hashable, Handed] | None = None

    def get(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """The casts called `key`, made at most once per input."""
        if self.casts is None:
            return build()
        if key not in self.casts:
            self.casts[key] = build()
        found: Made = self.casts[key]
        return found

    def close(self) -> None:
        self.casts = self.handed = None


class SharedGradients:
    """The casts of gradients that a backward pass has computed and not read yet."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, int, OneRead]] = {}

    def put(self, gradient: Tensor, casts: OneRead) -> None:
        """Hands over `casts` with a gradient, contiguous, that nobody else holds."""
        self._held[identity(gradient)] = (gradient, gradient._version, casts)

    def take(self, gy: Tensor) -> OneRead | None:
        """The casts that came with the gradient of which gy is a view of the same elements, once; or None."""
        if identity(gy) not in self._held or not gy.is_contiguous():
            return None
        gradient, version, casts = self._held.pop(identity(gy))
        same = gradient.numel() == gy.numel() and gradient.dtype == gy.dtype and gy._version == version
        return casts if same else None

    def clear(self) -> None:
        self._held.clear()

    def __reduce__(self) -> tuple[type[SharedGradients], tuple[()]]:
        return SharedGradients, ()
