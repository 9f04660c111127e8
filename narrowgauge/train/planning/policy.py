"""checkpointing = "auto": the cheapest policy whose step fits into the memory that there is, by counting (`memory.cheapest`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from narrowgauge.errors import ConfigError
from narrowgauge.memory import Choice, cheapest
from narrowgauge.ops.registry import device_facts
from narrowgauge.plan.room import KEPT_FREE
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.planning.counts import Counts

MEMORY, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def settled(config: TrainConfig, device: torch.device) -> tuple[str, str]:
    """(the policy for a run on this device, why, a sentence). Raises ConfigError, with the least that was counted, if none fits."""
    choice = chosen(config, Counts(device_facts(device.type, device.index)), available_bytes(device))
    return choice.policy, f"checkpointing {choice}"


def chosen(config: TrainConfig, counts: Counts, usable_bytes: int) -> Choice:
    """For a device of which a run can have so many bytes."""
    return cheapest(
        lambda policy: counts.of(replace(config, checkpointing=policy)).allocated, int(usable_bytes / (1 + KEPT_FREE))
    )


def available_bytes(device: torch.device) -> int:
    """What a run can have now: of a GPU what is free or unused by torch, of the machine what is available to its control group."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free: int = torch.cuda.mem_get_info(device)[0] + unused
        return free
    try:
        line = next(each for each in MEMORY.read_text().splitlines() if each.startswith("MemAvailable:"))
        found = int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError) as error:
        raise ConfigError(
            f"checkpointing = 'auto': {MEMORY} does not tell how much memory is available here. Name a policy, as --checkpointing full."
        ) from error
    try:
        limit, used = ((GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group of version 2
        return found
    return found if limit == "max" else min(found, max(int(limit) - int(used), 0))
