"""torch's generators on this process: of the CPU, and of the current GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def seed_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.default_generators[device.index or 0].initial_seed())
    return torch.initial_seed()


def generators() -> tuple[Tensor, list[Tensor]]:
    """Their states: of the CPU, and of the current GPU."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []


def set_generators(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    for each in states[1]:
        torch.cuda.set_rng_state(each)


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
