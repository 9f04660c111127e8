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

from narrowgauge.errors import ConfigError
from narrowgauge.plan.cards import Card
from narrowgauge.plan.count import Count
from narrowgauge.plan.work import KINDS, Work

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
    flops: int
    model_flops: int

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

    def deeper(self, more: Time, layers: int) -> Time:
        """Of a model of so many layers more than this one, of which `more` has one more: all of it lies on a line."""

        def line(a: float, b: float) -> float:
            return a + layers * (b - a)

        return Time(
            by_kind={kind: line(each, more.by_kind[kind]) for kind, each in self.by_kind.items()},
            by_phase={phase: line(each, more.by_phase[phase]) for phase, each in self.by_phase.items()},
            host=line(self.host, more.host), launches=round(line(self.launches, more.launches)),
            flops=round(line(self.flops, more.flops)), model_flops=round(line(self.model_flops, more.model_flops)),
        )  # fmt: skip


def time(found: Count, card: Card) -> Time:
    """The second step of a count on a card. Raises ConfigError for one whose rates are not known, or that has no unit for a product."""
    if not card.peak or not card.bandwidth:
        raise ConfigError(
            f"plan: how fast {card.name} is, is not known, so the time of a step is not either. Name a card, as in --card h100."
        )
    names = [name for _, name in found.trace.phases]
    second = next(at for at, (place, _) in enumerate(found.trace.phases) if at and place >= found.second)
    by_kind, by_phase = dict.fromkeys(KINDS, 0.0), {"forward": 0.0, "backward": 0.0, "step": 0.0}
    host, launches, flops, forward = 0.0, 0, 0, 0
    for each in found.trace.work:
        if each.phase < second:
            continue
        name = names[each.phase]
        phase = "forward" if name == "head" else name.split()[0]
        seconds = _seconds(each, card)
        by_kind[_kind(each, name)] += seconds
        by_phase[phase] += seconds
        host += HOST_KERNEL if each.own else HOST_OPERATOR
        launches += 1
        flops += each.flops
        forward += each.flops if phase == "forward" else 0
    return Time(
        by_kind=by_kind, by_phase=by_phase, host=host, launches=launches, flops=flops, model_flops=min(3 * forward, flops)
    )  # fmt: skip


def _seconds(work: Work, card: Card) -> float:
    compute = 0.0
    if work.flops:
        if work.operands not in card.peak:
            raise ConfigError(
                f"plan: {card.name} has no unit for {work.operation} of {work.operands or 'such'} operands. "
                f"It multiplies {', '.join(card.peak)}; choose a recipe of those, or another card."
            )
        share = ATTENTION if work.kind == "attention" else PRODUCTS / SUMS[work.sums]
        compute = work.flops / (share * card.peak[work.operands])
    return max(compute, work.nbytes / (BYTES * card.bandwidth), LAUNCH)


def _kind(work: Work, phase: str) -> str:
    if work.kind in ("products", "attention"):
        return work.kind
    if phase == "step":
        return "optimizer"
    return "loss" if phase in ("head", "backward") and work.kind == "elementwise" else work.kind
