"""memory.checkpointing = "auto": the cheapest policy that fits the memory (`memory.cheapest`), traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from narrowgauge.errors import ConfigError
from narrowgauge.memory import Choice, cheapest
from narrowgauge.ops.registry import device_facts
from narrowgauge.plan.room import KEPT_FREE
from narrowgauge.train.planning.counts import Counts

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.parallel.ranks import Ranks

MEMORY, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def resolved(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, str]:
    """Returns (settings whose checkpointing is not "auto", reason for the chosen policy or '').

    Call it before the model is allocated, since the choice needs the free memory. Rank 0 resolves
    "auto" and broadcasts the result, since estimates could differ between ranks.
    """
    if config.checkpointing != "auto":
        return config, ""
    device = ranks.device(config.device)
    policy, note = ranks.told_by_first(lambda: settled(config, device))
    return replace(config, checkpointing=policy), note


def settled(config: TrainConfig, device: torch.device) -> tuple[str, str]:
    """Returns (policy for a run on this device, a sentence with the reason).

    Raises ConfigError, with the smallest traced size, if no policy fits.
    """
    choice = chosen(
        config, Counts(device_facts(device.type, device.index)), available_bytes(device)
    )
    return choice.policy, f"checkpointing {choice}"


def chosen(config: TrainConfig, counts: Counts, usable_bytes: int) -> Choice:
    """Cheapest policy for a device with `usable_bytes`."""
    return cheapest(
        # KEPT_FREE: room for fragmentation and for workspaces of kernels.
        lambda policy: counts.of(replace(config, checkpointing=policy)).allocated,
        int(usable_bytes / (1 + KEPT_FREE)),
    )


def available_bytes(device: torch.device) -> int:
    """Bytes that a run can allocate now.

    On a GPU: free memory and torch's unused reserved memory. On a CPU: MemAvailable, limited by the
    cgroup.
    """
    if device.type == "cuda":
        # Cached blocks of torch's allocator count as used for the driver but can be reused.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free: int = torch.cuda.mem_get_info(device)[0] + unused
        return free
    try:
        line = next(
            each for each in MEMORY.read_text().splitlines() if each.startswith("MemAvailable:")
        )
        found = int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError) as error:
        raise ConfigError(
            f"memory.checkpointing = 'auto': {MEMORY} does not tell how much memory is available here. Name a policy, as "
            "--memory.checkpointing full.",
            code="checkpointing.unknown-memory",
        ) from error
    try:
        limit, used = (
            (GROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:  # no cgroup v2
        return found
    # The tighter of machine and cgroup: a container's limit can be far below the machine's memory.
    return found if limit == "max" else min(found, max(int(limit) - int(used), 0))
