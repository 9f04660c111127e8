"""Batches that are kept to be taken once more: any nest of dicts, lists and tuples that ends in tensors and other things."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConfigError


class Kept:
    """A batch as it is now: the containers are copied, the tensors are not."""

    def __init__(self, batch: Any) -> None:
        self._batch = _mapped(batch, lambda x: x)
        self._versions = self._versions_now()

    def given(self) -> Any:
        """The batch again, in containers of its own. Raises ConfigError if its tensors were written since."""
        if self._versions_now() != self._versions:
            raise ConfigError(
                "Guard: a tensor of a batch was written in place after its step, so the step cannot be taken again. Let the loop write "
                "to a copy of it."
            )
        return _mapped(self._batch, lambda x: x)

    def _versions_now(self) -> list[int]:
        return [each._version for each in _tensors(self._batch) if not each.is_inference()]


def rows_reversed(batch: Any) -> Any:
    """The batch with the rows of each tensor in the reverse order; rows: along the first axis, as many as the first tensor has.

    None if that would change nothing: no tensor has two rows. Tensors of another length stay as they are.
    """
    sizes = [each.shape[0] for each in _tensors(batch) if each.ndim]
    if not sizes or sizes[0] < 2:
        return None
    return _mapped(batch, lambda x: x.flip(0) if x.ndim and x.shape[0] == sizes[0] else x)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)
        for key, each in batch.items():
            made[key] = _mapped(each, change)
        return made
    if isinstance(batch, list):
        return [_mapped(each, change) for each in batch]
    if isinstance(batch, tuple):
        parts = [_mapped(each, change) for each in batch]
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
