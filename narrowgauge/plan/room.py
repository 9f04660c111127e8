"""Decide if a step fits into the memory of a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.ops.registry import Device, device_facts
from narrowgauge.ops.timing.cards import CARDS, CONTEXT, Card, card, of_memory
from narrowgauge.plan.text import gib

if TYPE_CHECKING:
    from narrowgauge.plan.forecast import Forecast

KEPT_FREE = 0.02  # share of the usable memory for fragmentation and workspaces of kernels
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Room:
    """Memory of a card; usable is 0 if none is known.

    name    name of the card
    memory  total bytes
    usable  bytes that torch's allocator can reserve
    device  Device by which kernels are chosen
    card    the card with its rates, or None if they are unknown
    """

    name: str
    memory: int
    usable: int
    device: Device
    card: Card | None = None

    @classmethod
    def of(cls, card_name: str, memory: str, place: str = "auto") -> Room:
        """Return the room of a named card, of this machine's GPU, or an unknown one.

        card_name  name of a card
        memory     size that replaces the card's memory
        place      GPU of this machine if neither is given, as "auto", "cuda:0"; "cpu": none

        A card without narrowgauge's kernels, and an unknown one, are traced with Hopper's kernels.
        """
        hopper = CARDS["h100"].device
        assert hopper is not None
        if card_name or memory:
            named = card(card_name) if card_name else None
            found = of_memory(memory, named) if memory else named
            assert found is not None
            # A card of a given memory size alone has no rates, so no time can be predicted.
            rated = found if found.device and found.peak else None
            return cls(found.name, found.memory, found.usable, found.device or hopper, rated)
        if place != "cpu" and torch.cuda.is_available():
            index = torch.device(place).index or 0 if place.startswith("cuda") else 0
            total = torch.cuda.get_device_properties(index).total_memory
            return cls(
                torch.cuda.get_device_name(index),
                total,
                total - CONTEXT,
                device_facts("cuda", index),
            )
        return cls("a GPU like an H100", 0, 0, hopper)

    def fits(self, found: Forecast) -> bool:
        return self._spare(found) >= 0

    def _spare(self, found: Forecast) -> int:
        """Return the bytes that remain after the step and the reserve."""
        # The larger of the known error and the reserve: they are not added.
        return self.usable - int(found.allocated * (1 + max(found.allocated_error, KEPT_FREE)))

    def verdict(self, found: Forecast) -> str:
        if not self.usable:
            return "No card is named."
        if not self.fits(found):
            free = self.usable - found.allocated
            words = f"{gib(-free)} too much" if free < 0 else f"only {gib(free)} would be free"
            return f"It does not fit: {words}."
        if found.reserved > self.usable:
            return f"It fits, tightly: set {EXPANDABLE}, else up to {gib(found.reserved)} may be reserved."
        return f"It fits, with {gib(self._spare(found))} to spare beside {KEPT_FREE:.0%} that is kept free."

    def answer(self, found: Forecast) -> dict[str, Any]:
        """Return the part of an answer that every plan has (`text.rendered`)."""
        return {
            "card": {"name": self.name, "memory_bytes": self.memory, "usable_bytes": self.usable},
            **found.as_dict(),
            "fits": self.fits(found) if self.usable else None,
            "verdict": self.verdict(found),
        }
