"""Two optimizer steps of a model, counted: what is alive at each moment, by part and by phase.

The first step has no moments and no casts of weights yet; the second is what every later one is like. Phases of a step:

    forward, forward K, forward K end, head      before the blocks, the block number K, what follows it, what follows the last one
    backward, backward K                         of the head, and from the gradient of a block's output on
    step                                         clipping, the optimizer, `advance`

Parts of what is alive: weights, gradients, states (the optimizer's), codes (casts of weights that are kept), saved (made in a forward
pass and alive at its end, for backward), head (that, behind the last block: logits and what the loss keeps), batch, and transient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, forward_of
from narrowgauge.memory.segments import SegmentMember
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.registry import Device
from narrowgauge.plan.trace import Recorder, Trace, recording
from narrowgauge.structure import other_weights

PARTS = ("weights", "codes", "gradients", "states", "saved", "head", "batch", "transient")


@dataclass
class Step:
    """A run, as far as memory is concerned; all of it is made under fake tensors.

    model      the converted model in training mode
    loss       the loss of one micro-batch, a tensor
    update     clips, steps, clears gradients, calls `advance`
    states     the optimizer's tensors
    batch      the micro-batch
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    update: Callable[[], None]
    states: Callable[[], Iterable[Tensor]]
    batch: Any = None
    micro_batches: int = 1


@dataclass
class Count:
    """What was counted.

    trace   of the building and of two steps
    blocks  how many the model has
    second  where the second step begins in trace.events
    head_weights  bytes of the weight of an output head that is its own
    differing  why its blocks do not repeat each other, a clause, or ''
    notes      sentences without a full stop on what was counted in another type
    """

    trace: Trace
    blocks: int
    second: int
    head_weights: int = 0
    differing: str = ""
    notes: tuple[str, ...] = ()

    def peak(self, start: int = 0) -> tuple[int, dict[str, int]]:
        """(bytes, by part) at the largest moment from event `start` on; bytes as asked for, not as an allocator rounds them."""
        alive: dict[int, int] = {}
        most, total, place = 0, 0, 0
        for at, (_, change) in enumerate(self._changes()):
            total += change
            if at >= start and total > most:
                most, place = total, at
        for event, change in list(self._changes())[: place + 1]:
            if change > 0:
                alive[event] = change
            else:
                alive.pop(~event, None)
        parts = dict.fromkeys(PARTS, 0)
        for number, nbytes in alive.items():
            parts[self.trace.allocations[number].part or "transient"] += nbytes
        return most, parts

    def _changes(self) -> Iterator[tuple[int, int]]:
        allocations = self.trace.allocations
        for event in self.trace.events:
            yield event, allocations[event].nbytes if event >= 0 else -allocations[~event].nbytes

    def peaks_by_phase(self) -> list[tuple[str, int, int]]:
        """(phase, the most that was alive in it, what was alive at its end), in order."""
        found, total = [], 0
        allocations = self.trace.allocations
        for name, events in self.trace.by_phase():
            most = total
            for event in events:
                total += allocations[event].nbytes if event >= 0 else -allocations[~event].nbytes
                most = max(most, total)
            found.append((name, most, total))
        return found


def count(build: Callable[[], Step], device: Device) -> Count:
    """Two steps of what `build` makes, on a device of which only the facts are needed. `build` runs under fake tensors."""
    with recording(device) as recorder:
        step = build()
        trace, model = recorder.trace, step.model
        recorder.names.update((module, name) for name, module in model.named_modules())
        recorder.name("weights", [*model.parameters(), *model.buffers()])
        recorder.name("batch", (each for each in tree_leaves(step.batch) if isinstance(each, Tensor)))
        blocks = _mark_blocks(model, recorder)
        _one_step(step, recorder)
        second = len(trace.events)
        _one_step(step, recorder)
        return Count(trace, blocks, second, _head_weights(model), _differing(model), tuple(_of_experts(model)))


def _of_experts(model: nn.Module) -> Iterator[str]:
    """A sentence on fused experts, which no recipe converts, and autocast does not touch."""
    types: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for weight, shape, _ in other_weights(name, module):
            if " experts of " in shape:
                parameter = getattr(module, weight.rpartition(".")[2])
                types.setdefault(str(parameter.dtype).removeprefix("torch."), []).append(f"{weight}, {shape}")
    for dtype, found in types.items():
        yield (
            f"the experts in {len(found)} parameters (the first: {found[0]}) share one parameter, which no recipe converts: their products "
            f"are counted in {dtype}"
        )


def _differing(model: nn.Module) -> str:
    """See `Count.differing`."""
    runs = [forward.recompute for each in model.modules() if (forward := forward_of(each)) is not None]
    in_segments = any(isinstance(run, partial) and isinstance(run.args[0], SegmentMember) for run in runs)
    return "its blocks are computed again in segments" if in_segments else ""


def _head_weights(model: Any) -> int:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return 0
    holders = [each for each in model.modules() if any(own is head.weight for own in each.parameters(recurse=False))]
    return head.weight.nbytes if len(holders) == 1 else 0


def _one_step(step: Step, recorder: Recorder) -> None:
    trace = recorder.trace
    for _ in range(step.micro_batches):
        recorder.begin("forward", is_forward=True)
        before = len(trace.allocations)
        loss = step.loss()
        _name_codes(step.model, recorder)
        _name_saved(trace, before, recorder)
        recorder.begin("backward")
        loss.backward()
        del loss
        recorder.name("gradients", (parameter.grad for parameter in step.model.parameters()))
    recorder.begin("step")
    step.update()
    recorder.name("states", step.states())
    _name_codes(step.model, recorder)


def _name_saved(trace: Trace, before: int, recorder: Recorder) -> None:
    alive = recorder.alive()
    names = [name for _, name in trace.phases]
    for allocation in trace.allocations[before:]:
        if allocation.number in alive and not allocation.part:
            allocation.part = "head" if names[allocation.phase] == "head" else "saved"


def _name_codes(model: nn.Module, recorder: Recorder) -> None:
    """The casts of weights that its layers keep from call to call; a weight that a product takes as it is stays one."""
    layers = [module for module in model.modules() if isinstance(module, QLinear)]
    recorder.name("codes", (each for layer in layers for casts in layer.kept_casts() for each in casts.tensors()))
    recorder.name("weights", model.parameters())


def _mark_blocks(model: nn.Module, recorder: Recorder) -> int:
    """Has the recorder begin a phase with every block, forward and backward."""
    try:
        blocks = list(find_blocks(model, verb="plan").values())
    except ConfigError:  # one that is no stack is one phase
        return 0
    last = len(blocks) - 1

    def mark(number: int, block: nn.Module) -> None:
        def enter(module: nn.Module, arguments: Any) -> None:
            if recorder.is_forward:
                recorder.begin(f"forward {number}", is_forward=True)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if recorder.is_forward:
                recorder.begin("head" if number == last else f"forward {number} end", is_forward=True)
                tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
                for each in tensors[:1]:
                    each.register_hook(lambda gradient: recorder.begin(f"backward {number}"))

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

    for number, block in enumerate(blocks):
        mark(number, block)
    return len(blocks)
