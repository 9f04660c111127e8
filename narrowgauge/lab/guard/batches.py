"""Batches stored for a replay: nested dicts, lists and tuples of tensors and other objects."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConfigError


class Kept:
    """A stored batch: containers are copied, tensors are shared with the loop."""

    def __init__(self, batch: Any) -> None:
        self._batch = _copied(batch)
        self._versions = self._versions_now()

    def given(self) -> Any:
        """The batch again, in fresh containers.

        Raises ConfigError if its tensors were written since.
        """
        if self._versions_now() != self._versions:
            raise ConfigError(
                "Guard: a tensor of a batch was written in place after its step, so the step cannot be taken again. Let the loop write "
                "to a copy of it.",
                code="guard.batch-written",
            )
        return _copied(self._batch)

    def _versions_now(self) -> list[int]:
        # Copying every batch would double its memory; comparing version counters costs nothing.
        # Inference tensors have no version counter.
        return [each._version for each in _tensors(self._batch) if not each.is_inference()]


def _copied(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        for key, each in batch.items():
            made[key] = _copied(each)
        return made
    if isinstance(batch, list):
        return [_copied(each) for each in batch]
    if isinstance(batch, tuple):
        parts = [_copied(each) for each in batch]
        # A named tuple takes its fields as arguments, a plain tuple an iterable.
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)
