"""Predict the memory of a step from traces of the whole model or of shallow ones.

Known errors (docs/planner.md): `alive` agrees with a CPU's real allocations within 0.1 %, and
extrapolation with the full trace within 0.1 %. Workspaces of kernels are not traced: cuBLAS takes
up to 32 MiB. `reserved` is the replay of torch's allocator if every layer was traced. Otherwise the
gap between reserved and allocated bytes of four layers is added, which was wrong by up to a tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.plan.count import PARTS, Step, count
from narrowgauge.plan.extrapolate import FEW, MORE, extrapolated
from narrowgauge.plan.moments import MemoryMoment, moments
from narrowgauge.plan.tally import Tally, deeper, tally

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

# build(number of layers in each stack, or 0 for all) returns a function that builds the step.
Builder = Callable[[int], Callable[[], Step]]
ALLOCATED_ERROR, RESERVED_ERROR, ESTIMATED_ERROR = 0.002, 0.03, 0.10


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted memory of two steps.

    moments          largest moment of each phase
    counted          text: which layers were traced
    reserved         bytes that the allocator takes from the device
    reserved_error   relative error of reserved
    on_gpu           True for torch's GPU allocator; a CPU's allocator caches nothing
    notes            sentences without a full stop
    allocated_error  relative error of allocated
    block_weights    bytes of the weights of one block of each stack; 0: unknown
    head_weights     bytes of the output head's weight, if no other module shares it
    work             operations of the second step, for the traced micro-batches
    """

    moments: tuple[MemoryMoment, ...]
    counted: str
    reserved: int
    reserved_error: float
    on_gpu: bool
    notes: tuple[str, ...] = field(default=())
    allocated_error: float = ALLOCATED_ERROR
    block_weights: int = 0
    head_weights: int = 0
    work: Tally = field(default_factory=dict)

    @property
    def top(self) -> MemoryMoment:
        """Moment with the most memory."""
        return max(self.moments, key=self._size)

    @property
    def allocated(self) -> int:
        return self._size(self.top)

    def _size(self, moment: MemoryMoment) -> int:
        return moment.allocated if self.on_gpu else moment.alive

    def parts(self) -> dict[str, int]:
        """Bytes at the top by part."""
        return by_part(self.top)

    def saved(self) -> dict[str, int]:
        """Bytes saved for backward by a forward pass, by module, in descending order."""
        head = next(
            (each for each in reversed(self.moments) if each.phase in ("head", "forward")), self.top
        )
        kinds = {
            kind: nbytes
            for (part, kind), nbytes in head.parts.items()
            if part == "saved" and nbytes
        }
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        top = self.top
        last = max(each.step for each in self.moments)
        timeline = [
            {
                "phase": each.phase, "micro_batch": each.micro_batch, "peak_bytes": self._size(each), "end_bytes": each.end,
                "parts": by_part(each),
            }
            for each in self.moments if each.step == last
        ]  # fmt: skip
        return {
            "allocated_bytes": self.allocated,
            "allocated_error": self.allocated_error,
            "reserved_bytes": self.reserved,
            "reserved_error": self.reserved_error,
            "counted": self.counted,
            "peak": {"step": top.step, "phase": top.phase, "module": top.module},
            "parts": self.parts(),
            "saved": self.saved(),
            "timeline": timeline,
            "notes": list(self.notes),
        }


def forecast(
    build: Builder, device: Device, layers: int, differing: str = "", full: bool = False
) -> Forecast:
    """Trace two steps, of shallow models or of the whole one.

    layers     blocks in each stack; 0: unknown
    differing  clause that says why the blocks differ, or ''
    full       True traces the whole model
    """
    on_gpu = device.type == "cuda"
    # Up to 5 layers the whole model is cheaper to trace than models of 3 and 4 layers.
    if full or differing or layers <= MORE + 1:
        counted = count(build(0), device)
        found = moments(counted)
        why = f": {differing}" if differing and layers > MORE + 1 else ""
        words = f"all {layers} layers{why}" if layers else f"the whole model{why}"
        return Forecast(
            moments=tuple(found), counted=words, reserved=found[-1].reserved, reserved_error=RESERVED_ERROR, on_gpu=on_gpu,
            block_weights=_weights(found) // layers if layers else 0, head_weights=counted.head_weights, work=tally(counted),
            notes=counted.notes,
        )  # fmt: skip
    counts = [count(build(FEW), device)]
    if counts[0].differing:
        return forecast(build, device, layers, counts[0].differing)
    counts.append(count(build(MORE), device))
    few, more = map(moments, counts)
    try:
        found = extrapolated(few, more, layers)
    except (ValueError, KeyError):
        return forecast(build, device, layers, "its layers do not take the same phases", full=True)
    # Reserved bytes are not linear in the layers, because of fragmentation, so their gap is carried
    # over.
    gap = more[-1].reserved - max(each.allocated for each in more)
    top = max(each.allocated for each in found)
    return Forecast(
        moments=tuple(found), counted=f"{FEW} and {MORE} of {layers} layers", reserved=top + gap,
        reserved_error=ESTIMATED_ERROR, on_gpu=on_gpu, block_weights=_weights(more) - _weights(few), head_weights=counts[0].head_weights,
        notes=counts[0].notes,
        work=deeper(tally(counts[0]), tally(counts[1]), layers - FEW),
    )  # fmt: skip


def by_part(moment: MemoryMoment) -> dict[str, int]:
    """Return the bytes of each part, summed over kinds."""
    found = dict.fromkeys(PARTS, 0)
    for (part, _), nbytes in moment.parts.items():
        found[part] += nbytes
    return found


def _weights(found: list[MemoryMoment]) -> int:
    return found[-1].parts.get(("weights", ""), 0)
