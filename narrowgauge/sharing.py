"""What layers that read the same tensor share: q, k and v, or gate and up, cast one x and keep it for backward; it is done once.

A SharedInputs belongs to the layers of one model (`convert` installs it) and holds one entry, of the input that was seen last:

    input tensor (weakly), its version, what was made of it  ->  the casts

It serves only the very tensor object at the very version that the entry was made from, so what it serves is what would be computed.
The entry goes when the tensor goes, when another comes, and when `advance` ends the step. Casts that draw random numbers, and
those with a scale of the layer's own (learned steps, windows), are not shared. Copies and pickles begin empty. Under
torch.compile it is passed by: the compiler sees equal computations itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class SharedInputs:
    """One entry: (weak reference to the input, version, {key: casts}). Replaced as a whole, so threads see old or new."""

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], int, dict[Hashable, Any]] | None = None

    def of(self, x: Tensor) -> Share | None:
        """The share of a layer that reads x now; None for a tensor without a version."""
        if x.is_inference():
            return None
        entry, version = self._entry, x._version
        if entry is None or entry[0]() is not x or entry[1] != version:
            entry = (weakref.ref(x, self._forget), version, {})
            self._entry = entry
        return Share(entry[2])

    def clear(self) -> None:
        """Forgets the entry."""
        self._entry = None

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry[0] is gone:
            self._entry = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()


@dataclass(eq=False)
class Share:
    """The casts of one input, for the length of one forward call. Closed afterwards: backward keeps settings, not casts."""

    casts: dict[Hashable, Any] | None

    def get(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """The casts called `key`, made at most once per input."""
        if self.casts is None:
            return build()
        if key not in self.casts:
            self.casts[key] = build()
        found: Made = self.casts[key]
        return found

    def close(self) -> None:
        self.casts = None
