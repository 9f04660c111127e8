"""How long a counted step takes on a card, by its roofline: each operation at the rate of what bounds it.

    seconds(operation) = max(FLOPs / (share * peak of its operands), bytes / (share * bandwidth), LAUNCH)
    seconds(step)      = max(the sum of them, what Python takes to launch them)

That is eager mode, whose kernels wait for each other. Shares are what large kernels were seen to reach:

    products    0.78 of the peak (torchao, testing/training/roofline_utils.py, H100; an H200 gave 788 of 989 TFLOP/s in bfloat16), 1.13
                times slower where sums leave the tensor core (fast accumulation gains 1.1 to 1.2, github.com/pytorch/ao/pull/2377), 1.22
                times in blocks (cuBLAS on Hopper)
    attention   0.5: FlashAttention and cuDNN, causal, heads of 128, forward and backward together
    bytes       0.9 of the bandwidth (torchao 0.92; an H200 copied at 4.2 of 4.8 TB/s)

Not counted: messages between devices, reading of data, the host where it waits, kernels that are slower than their kind at small or odd
sizes, clocks that power limits. So it is what a step takes at least; published ones took LONGER times as long (benchmarks/planned_time.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.plan.cards import Card
from narrowgauge.plan.tally import KINDS, PHASES, Done, Tally

PRODUCTS, ATTENTION, BYTES = 0.78, 0.5, 0.9
SUMS = {"fast": 1.0, "split": 1.13, "blocks": 1.22}
LAUNCH = 2e-6  # from one kernel's end to the next one's (torchao, same file)
# Of the host: nn.Linear, three products, takes 52 us forward and backward; our Linear of fp8-current 728 us for nine launches
# (processor time, over a CUDA runtime that computes nothing).
HOST_OPERATOR, HOST_KERNEL = 15e-6, 80e-6
LONGER = (1.2, 1.5)


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one optimizer step with all its micro-batches, at least.

    by_kind   of the device: products, attention, casts, elementwise (norms, activations, residuals, rotary embedding), loss, optimizer
    by_phase  of the device: forward, backward, step
    host      what launching takes, beside which the device computes
    launches  kernels
    flops     of products and attention; model_flops without those that are computed again
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
        """Between these, by what published steps took."""
        return self.seconds * LONGER[0], self.seconds * LONGER[1]

    @property
    def is_launch_bound(self) -> bool:
        return self.host > self.device

    def utilisation(self, card: Card) -> float:
        """Of the peak in bfloat16, by the model's FLOPs."""
        return self.model_flops / (self.seconds * card.peak["bf16"])


def time(done: Tally, card: Card) -> Time:
    """Of a step on a card. Raises ConfigError for one whose rates are not known, or that has no unit for a product."""
    if not card.peak or not card.bandwidth:
        raise ConfigError(
            f"plan: how fast {card.name} is, is not known, so the time of a step is not either. Name a card, as in --card h100."
        )
    by_kind, by_phase = dict.fromkeys(KINDS, 0.0), dict.fromkeys(PHASES, 0.0)
    host, launches, flops, forward = 0.0, 0.0, 0.0, 0.0
    for each, times in done.items():
        seconds = times * _seconds(each, card)
        by_kind[each.kind] += seconds
        by_phase[each.phase] += seconds
        host += times * (HOST_KERNEL if each.own else HOST_OPERATOR)
        launches += times
        flops += times * each.flops
        forward += times * each.flops if each.phase == "forward" else 0.0
    return Time(
        by_kind=by_kind, by_phase=by_phase, host=host, launches=round(launches), flops=flops, model_flops=min(3 * forward, flops)
    )  # fmt: skip


def _seconds(each: Done, card: Card) -> float:
    compute = 0.0
    if each.flops:
        if each.operands not in card.peak:
            raise ConfigError(
                f"plan: {card.name} has no unit for {each.operation} of {each.operands or 'such'} operands. "
                f"It multiplies {', '.join(card.peak)}; choose a recipe of those, or another card."
            )
        share = ATTENTION if each.kind == "attention" else PRODUCTS / SUMS[each.sums]
        compute = each.flops / (share * card.peak[each.operands])
    return max(compute, each.nbytes / (BYTES * card.bandwidth), LAUNCH)


WORDS = {
    "products": "products", "attention": "attention", "casts": "casts", "elementwise": "norms, activations and the like",
    "loss": "loss", "optimizer": "update",
}  # fmt: skip


def as_dict(found: Time, card: Card, tokens: int) -> dict[str, Any]:
    """In JSON's types, with `lines` for people; tokens: of a step, all micro-batches."""
    low, high = found.likely
    rate = f"{tokens / high:,.0f} to {tokens / low:,.0f} tokens/s"
    bound = "bound by launching, which Python does" if found.is_launch_bound else "bound by the device"
    most = sorted(found.by_kind, key=lambda kind: -found.by_kind[kind])
    shares = ", ".join(
        f"{WORDS[kind]} {100 * found.by_kind[kind] / found.device:.0f} %" for kind in most if found.by_kind[kind]
    )
    return {
        "seconds": found.seconds, "likely_seconds": [low, high], "tokens_per_s": [tokens / high, tokens / low],
        "device_seconds": found.device, "host_seconds": found.host, "launches": found.launches,
        "utilisation": found.utilisation(card), "by_kind_seconds": found.by_kind, "by_phase_seconds": found.by_phase,
        "lines": [
            f"A step takes {found.seconds:.3g} s at least by roofline, in eager mode, {bound}; likely {low:.2g} to {high:.2g} s, {rate}.",
            f"Of the device's time: {shares}.",
        ],
    }  # fmt: skip
