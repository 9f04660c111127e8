"""Predict the duration of a traced step on a card.

    seconds(step) = max(eager * sum of operations (`ops.timing.rates`), host)

eager is the ratio of published step times to the sums of their operations. It covers gaps between
kernels, clocks under power limits, and kernels that are slower than others of their kind.

The prediction is for an eager step; a compiled one moves fewer bytes. It leaves out data loading,
and waits of the host. `plan.messages` predicts messages between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import ConfigError
from narrowgauge.ops.timing.rates import ERROR, RATES, Rates
from narrowgauge.ops.timing.rates import seconds as operation_seconds
from narrowgauge.plan.tally import KINDS, PHASES, Tally

if TYPE_CHECKING:
    from narrowgauge.ops.timing.cards import Card

# Host seconds per operation. nn.Linear with three GEMMs takes 52 us forward and backward. Our
# Linear with fp8-current takes 728 us for nine launches (processor time, with a CUDA runtime that
# computes nothing).
HOST_OPERATOR, HOST_KERNEL = 15e-6, 80e-6


@dataclass(frozen=True, kw_only=True)
class Time:
    """Predicted seconds of one optimizer step with all its micro-batches.

    by_kind      device time of products (GEMMs), attention, casts, elementwise (norms, activations,
                 residuals, rotary embedding), loss and optimizer
    by_phase     device time of forward, backward and step
    host         time of the host to launch all kernels, which overlaps with the device
    launches     number of kernels
    flops        FLOPs of GEMMs and attention
    model_flops  flops without recomputation
    """

    by_kind: dict[str, float]
    by_phase: dict[str, float]
    host: float
    launches: int
    flops: float
    model_flops: float

    @property
    def device(self) -> float:
        return sum(self.by_kind.values())

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)

    @property
    def likely(self) -> tuple[float, float]:
        """Interval by the error of predictions of published steps."""
        return self.seconds / (1 + ERROR["eager"]), self.seconds * (1 + ERROR["eager"])

    @property
    def is_launch_bound(self) -> bool:
        return self.host > self.device

    def utilisation(self, card: Card) -> float:
        """Return the model's FLOP/s relative to the bfloat16 peak."""
        return self.model_flops / (self.seconds * card.peak["bf16"])


def time(done: Tally, card: Card, rates: Rates = RATES) -> Time:
    """Predict the duration of an eager step on a card.

    Raises ConfigError if the card's rates are unknown, or if it has no unit for a GEMM.
    """
    if not card.peak or not card.bandwidth:
        raise ConfigError(
            f"plan: how fast {card.name} is, is not known, so the time of a step is not either. Name a card, as in --card h100.",
            code="plan.unknown-card",
        )
    by_kind, by_phase = dict.fromkeys(KINDS, 0.0), dict.fromkeys(PHASES, 0.0)
    host, launches, flops, forward = 0.0, 0.0, 0.0, 0.0
    for each, times in done.items():
        seconds = times * rates.eager * operation_seconds(each, card, rates)
        by_kind[each.kind] += seconds
        by_phase[each.phase] += seconds
        host += times * (HOST_KERNEL if each.own else HOST_OPERATOR)
        launches += times
        flops += times * each.flops
        forward += times * each.flops if each.phase == "forward" else 0.0
    # Backward takes twice the FLOPs of forward; the rest is recomputation.
    return Time(
        by_kind=by_kind, by_phase=by_phase, host=host, launches=round(launches), flops=flops, model_flops=min(3 * forward, flops)
    )  # fmt: skip


WORDS = {
    "products": "products", "attention": "attention", "casts": "casts", "elementwise": "norms, activations and the like",
    "loss": "loss", "optimizer": "update",
}  # fmt: skip


def as_dict(found: Time, card: Card, tokens: int, messages: float = 0.0) -> dict[str, Any]:
    """Return the prediction in JSON types, with `lines` of text.

    tokens    tokens of a step, over all micro-batches and ranks
    messages  seconds of the messages of a rank
    """
    low, high = found.likely
    # Messages may overlap with the device completely, or not at all.
    low, high = max(low, messages), high + messages
    rate = f"{tokens / high:,.0f} to {tokens / low:,.0f} tokens/s"
    bound = (
        "bound by launching, which Python does" if found.is_launch_bound else "bound by the device"
    )
    most = sorted(found.by_kind, key=lambda kind: -found.by_kind[kind])
    shares = ", ".join(
        f"{WORDS[kind]} {100 * found.by_kind[kind] / found.device:.0f} %"
        for kind in most
        if found.by_kind[kind]
    )
    lines = [
        f"A step takes {found.seconds:.3g} s in eager mode, predicted, {bound}; likely {low:.2g} to {high:.2g} s, {rate}.",
        f"Of the device's time: {shares}.",
    ]
    if found.is_launch_bound:
        lines.append(
            "Launches cost the same for larger micro-batches and wider layers; --device.cuda-graph launches a step at once."
        )
    if messages:
        lines.append(
            f"Messages between ranks take {messages:.2g} s, of which the device's work hides what it can."
        )
    return {
        "seconds": found.seconds, "likely_seconds": [low, high], "tokens_per_s": [tokens / high, tokens / low],
        "device_seconds": found.device, "host_seconds": found.host, "launches": found.launches,
        "utilisation": found.utilisation(card), "by_kind_seconds": found.by_kind, "by_phase_seconds": found.by_phase,
        "messages_seconds": messages, "lines": lines,
    }  # fmt: skip
