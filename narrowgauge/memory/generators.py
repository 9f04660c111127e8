"""What a forward pass depends on besides its arguments, to be brought back when it is repeated: torch's generators, and autocast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from narrowgauge.memory.measure import note


class Surroundings:
    """Those of now, for a call with these tensors. The state of the CPU's generator takes 5 KB, that of a GPU's 16 bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device: tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        kinds = sorted({device.type for device in devices})
        self._kind = kinds[0] if kinds else "cuda"  # torch's default, of which nothing is kept then
        self._cpu = torch.get_rng_state()
        note(self._cpu)
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
