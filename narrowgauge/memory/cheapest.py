"""Policy "auto" of checkpointing: the cheapest policy whose step fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.errors import ConfigError

# Ordered by recomputation per step: nothing; everything but matmuls and attention; each block once;
# three halves of the blocks; nearly each block twice.
BY_COST = ("none", "selective", "full", "every-2", "sqrt")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Result of `cheapest`.

    policy       the chosen policy
    limit_bytes  the limit it had to fit
    peaks        policy -> peak bytes, for the policies tried, in order of cost; the last one is the
                 choice
    """

    policy: str
    limit_bytes: int
    peaks: dict[str, int]

    def __str__(self) -> str:
        found = ", ".join(f"{policy} {_gib(peak)}" for policy, peak in self.peaks.items())
        return f"auto: {self.policy} is the cheapest whose step fits into {_gib(self.limit_bytes)} (counted: {found})"


def cheapest(peak_bytes: Callable[[str], int], limit_bytes: int) -> Choice:
    """Return the policy with the least recomputation whose peak fits.

    peak_bytes   policy name -> peak bytes at any moment of a step under it; called once per policy,
                 up to the first that fits
    limit_bytes  the available memory

    Raises ConfigError with the smallest peak if none fits.
    """
    peaks: dict[str, int] = {}
    for policy in BY_COST:
        peaks[policy] = peak_bytes(policy)
        if peaks[policy] <= limit_bytes:
            return Choice(policy=policy, limit_bytes=limit_bytes, peaks=peaks)
    least = min(peaks, key=lambda policy: peaks[policy])
    raise ConfigError(
        f"checkpoint: no policy fits into {_gib(limit_bytes)} ({limit_bytes:,} bytes); the least is {peaks[least]:,} bytes, with "
        f"{least!r}. Make the batch smaller (or micro_batches larger), or keep the optimizer's states in 8 bits.",
        code="checkpointing.nothing-fits",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
