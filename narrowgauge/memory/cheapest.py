"""The cheapest policy of checkpointing whose step fits: `auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.errors import ConfigError

# By what a step computes again: nothing, what lies between products, each block, three halves of the blocks, nearly each block twice.
BY_COST = ("none", "selective", "full", "every-2", "sqrt")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `cheapest` chose. peaks: bytes of each policy that was tried, in the order of their cost; the last one is the chosen."""

    policy: str
    limit_bytes: int
    peaks: dict[str, int]

    def __str__(self) -> str:
        found = ", ".join(f"{policy} {_gib(peak)}" for policy, peak in self.peaks.items())
        return f"auto: {self.policy} is the cheapest whose step fits into {_gib(self.limit_bytes)} (counted: {found})"


def cheapest(peak_bytes: Callable[[str], int], limit_bytes: int) -> Choice:
    """Tries the policies from the one that computes least again on; each is counted once, and none behind the first that fits.

    peak_bytes  a policy's name -> the most bytes that are there at any moment of a step with it

    Raises ConfigError with the least that was counted if none fits.
    """
    peaks: dict[str, int] = {}
    for policy in BY_COST:
        peaks[policy] = peak_bytes(policy)
        if peaks[policy] <= limit_bytes:
            return Choice(policy=policy, limit_bytes=limit_bytes, peaks=peaks)
    least = min(peaks, key=lambda policy: peaks[policy])
    raise ConfigError(
        f"checkpoint: no policy fits into {_gib(limit_bytes)} ({limit_bytes:,} bytes); the least is {peaks[least]:,} bytes, with "
        f"{least!r}. Make the batch smaller (or micro_batches larger), or keep the optimizer's states in 8 bits."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
