"""State of all random generators that training draws from: torch, CUDA, numpy and Python."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import torch

np: ModuleType | None
try:
    import numpy as np
except ImportError:  # torch works without numpy
    np = None


def seed_all(seed: int) -> None:
    """Seed every generator; numpy and Python would otherwise start from the system's entropy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if np is not None:
        # numpy accepts 32 bits only.
        np.random.seed(seed % 2**32)


def generators() -> dict[str, Any]:
    """States of all generators: tensors, numbers, strings, and nested lists and tuples.

    Skips absent numpy.
    """
    found = {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "python": random.getstate(),
    }
    if np is not None:
        name, key, *rest = np.random.get_state()
        found["numpy_key"] = torch.from_numpy(np.asarray(key).astype(np.int64))
        found["numpy"] = [name, *[value.item() if hasattr(value, "item") else value for value in rest]]
    return found


def set_generators(saved: dict[str, Any]) -> None:
    """Restore the states returned by `generators`."""
    torch.set_rng_state(saved["torch"])
    # With another number of GPUs no state fits, so the CUDA generators stay as they are.
    if torch.cuda.is_available() and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    random.setstate(saved["python"])
    if np is not None and "numpy" in saved:
        name, *rest = saved["numpy"]
        np.random.set_state((name, saved["numpy_key"].numpy().astype(np.uint32), *rest))
