"""A forward pass that backward repeats, and what it depends on besides its arguments: torch's generators, and autocast.

`checkpointed` is torch's non-reentrant checkpoint; the generators are kept here, where they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from narrowgauge.addresses import dry_run_on
from narrowgauge.memory.measure import note


class Surroundings:
    """Those of now, for a call with these tensors. The state of the CPU's generator takes 5 KB, that of a GPU's 16 bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device: tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        kinds = sorted({device.type for device in devices})
        self._kind = kinds[0] if kinds else "cuda"  # torch's default, of which nothing is kept then
        self._cpu = torch.get_rng_state()
        device = dry_run_on()
        if not kinds and (device is None or device.type == "cpu"):
            note(self._cpu)  # it lies where the activations do
        self._devices, self._states = get_device_states(*devices.values()) if kinds else ([], [])
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", *kinds)
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """They are as they were then; afterwards as they were before."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches))
            yield


def checkpointed(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], contexts: Callable[[], Any] | None = None
) -> Any:  # fmt: skip
    """What `forward` returns; its tensors are kept, and backward calls it again with them. contexts: torch's context_fn."""
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if contexts else {})
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, preserve_rng_state=True, **options, **kwargs)
    then = Surroundings(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    calls = 0

    def repeatable(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        with then.again():
            return forward(*args, **kwargs)

    return checkpoint(repeatable, *args, preserve_rng_state=False, **options, **kwargs)
