"""States of random number generators: save, restore, seed, preserve.

All code of the package that saves or restores a generator uses this module. Three sets of generators
are distinguished, because each caller must restore exactly the generators that it disturbs:

    generators, set_generators, seed_all      the training's: torch on the CPU and all GPUs, Python,
                                              numpy; in checkpoints and snapshots
    own_generators, set_own, seed_own         torch's CPU generator and the current GPU, without
                                              initializing CUDA; several times per forward pass
    preserved(devices), TorchStates           torch's CPU generator and the given devices, as
                                              torch.random.fork_rng

A source that is added to SOURCES is restored by every snapshot. Checkpoints keep the keys of
`generators`, which `train.checkpoint.state` validates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

np: ModuleType | None
try:
    import numpy as np
except ImportError:  # torch works without numpy
    np = None


# --- all generators of a training


def seed_all(seed: int) -> None:
    """Seeds torch, Python and numpy. The system seeds Python and numpy at random otherwise."""
    torch.manual_seed(seed)
    random.seed(seed)
    if np is not None:
        np.random.seed(seed % 2**32)


def generators() -> dict[str, Any]:
    """States of all SOURCES, each made of tensors, numbers, strings, lists and tuples."""
    return {key: value for read, _ in SOURCES.values() for key, value in read().items()}


def set_generators(saved: dict[str, Any]) -> None:
    """Restores the states that `generators` returned."""
    for _, write in SOURCES.values():
        write(saved)


def _read_torch() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def _write_torch(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])


def _read_python() -> dict[str, Any]:
    return {"python": random.getstate()}


def _write_python(saved: dict[str, Any]) -> None:
    random.setstate(saved["python"])


def _read_numpy() -> dict[str, Any]:
    if np is None:
        return {}
    name, key, *rest = np.random.get_state()
    return {
        "numpy_key": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "numpy": [name, *[value.item() if hasattr(value, "item") else value for value in rest]],
    }


def _write_numpy(saved: dict[str, Any]) -> None:
    if np is not None and "numpy" in saved:
        name, *rest = saved["numpy"]
        np.random.set_state((name, saved["numpy_key"].numpy().astype(np.uint32), *rest))


# Name -> (read, write). `read` returns entries of the saved state, `write` gets the whole state.
SOURCES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "torch": (_read_torch, _write_torch),
    "python": (_read_python, _write_python),
    "numpy": (_read_numpy, _write_numpy),
}


# --- torch's own, per forward pass


def seed_of(device: torch.device) -> int:
    """The initial seed of the device's generator (any device but CUDA: the CPU's)."""
    if device.type == "cuda":
        # seed_own seeds the current GPU, which "cuda" without an index means too.
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(torch.cuda.default_generators[index].initial_seed())
    return torch.initial_seed()


def own_generators() -> tuple[Tensor, list[Tensor]]:
    """The generator states: the CPU's, and [the current GPU's] once CUDA is initialized."""
    return torch.get_rng_state(), [
        torch.cuda.get_rng_state()
    ] if torch.cuda.is_initialized() else []


def set_own(states: tuple[Tensor, list[Tensor]]) -> None:
    """Restores the states that `own_generators` returned."""
    torch.set_rng_state(states[0])
    for each in states[1]:
        torch.cuda.set_rng_state(each)


def seed_own(seed: int) -> None:
    # torch.manual_seed would seed every GPU of the process, not only the current one.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


# --- around a block


def preserved(devices: Iterable[Any] = ()) -> AbstractContextManager[None]:
    """Restores torch's CPU generator and the generators of the CUDA devices after the block."""
    return torch.random.fork_rng(devices=list(devices))


@contextmanager
def python_preserved() -> Iterator[None]:
    """Restores Python's generator after the block."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class TorchStates:
    """Present states of torch's CPU generator and of the generators of the tensors' devices.

    cpu  uint8, 5 KB. A GPU generator's state takes 16 bytes.
    """

    def __init__(self, tensors: Sequence[Tensor], kind: str) -> None:
        """Copies the states. kind: device type of the tensors."""
        self._kind = kind
        self.cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors) if tensors else ([], [])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the copied states inside the block, and the present states afterwards."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self.cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


def cpu_state_bytes() -> int:
    """Length of the CPU generator's state."""
    return torch.get_rng_state().numel()
