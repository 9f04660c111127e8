"""State of torch's random generators in this process: the CPU and the current GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def seed_of(device: torch.device) -> int:
    """Return the initial seed of the device's generator (any device but CUDA: the CPU's)."""
    if device.type == "cuda":
        # seed_all seeds the current GPU, which "cuda" without an index means too.
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(torch.cuda.default_generators[index].initial_seed())
    return torch.initial_seed()


def generators() -> tuple[Tensor, list[Tensor]]:
    """Return the generator states: the CPU's, and [the current GPU's] once CUDA is initialized."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []


def set_generators(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    for each in states[1]:
        torch.cuda.set_rng_state(each)


def seed_all(seed: int) -> None:
    # torch.manual_seed would seed every GPU of the process, not only the current one.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
