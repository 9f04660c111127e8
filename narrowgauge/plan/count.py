"""Trace the live memory in two optimizer steps of a model, by part and by phase.

The first step has no optimizer states and no cached casts of weights yet; every later step is like
the second. Phases of a step:

    forward, forward K     before the blocks, in block K
    forward K end, head    after block K, after the last block
    backward, backward K   of the head, from the gradient of block K's output on
    step                   clipping, the optimizer, `advance`

Parts of the memory:

    weights, gradients, batch
    states     optimizer states
    codes      cached casts of weights
    saved      allocated in a forward pass and alive at its end, for backward
    head       the same behind the last block: logits, and tensors that the loss saves
    transient  everything else
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import find_blocks, forward_of
from narrowgauge.memory.segments import SegmentMember
from narrowgauge.nn.linear import QLinear
from narrowgauge.plan.trace import Recorder, Trace, recording
from narrowgauge.structure import GROUPED, other_weights

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

PARTS = ("weights", "codes", "gradients", "states", "saved", "head", "batch", "transient")


@dataclass
class Step:
    """A training step as the planner needs it; everything is created under fake tensors.

    model          the converted model in training mode
    loss           returns the loss of one micro-batch, a tensor
    update         clips, steps, clears gradients, calls `advance`
    states         returns the optimizer's tensors
    batch          the micro-batch
    micro_batches  micro-batches of a step
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    update: Callable[[], None]
    states: Callable[[], Iterable[Tensor]]
    batch: Any = None
    micro_batches: int = 1


@dataclass
class Count:
    """Trace of two steps.

    trace         allocations of building the model and of two steps
    blocks        number of blocks of the model
    second        index of the second step's first event in trace.events
    head_weights  bytes of the output head's weight, if no other module shares it
    differing     clause that says why the blocks do not repeat each other, or ''
    notes         sentences without a full stop on modules that the recipe does not convert, with
                  the dtype in which they were traced
    """

    trace: Trace
    blocks: int
    second: int
    head_weights: int = 0
    differing: str = ""
    notes: tuple[str, ...] = ()

    def peak(self, start: int = 0) -> tuple[int, dict[str, int]]:
        """Return (bytes, bytes by part) at the largest moment from event `start` on.

        Bytes are the requested sizes, without an allocator's rounding.
        """
        alive: dict[int, int] = {}
        most, total, place = 0, 0, 0
        for at, (_, change) in enumerate(self._changes()):
            total += change
            if at >= start and total > most:
                most, place = total, at
        # A second pass, because a dictionary of live allocations at every event would be slow.
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
        """Return (phase, largest number of bytes alive in it, bytes alive at its end) in order."""
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
    """Trace two steps of the model that `build` creates, for a device that need not be present.

    `build` runs under fake tensors.
    """
    with recording(device) as recorder:
        step = build()
        trace, model = recorder.trace, step.model
        recorder.names.update((module, name) for name, module in model.named_modules())
        recorder.name("weights", [*model.parameters(), *model.buffers()])
        recorder.name(
            "batch", (each for each in tree_leaves(step.batch) if isinstance(each, Tensor))
        )
        blocks = _mark_blocks(model, recorder)
        _one_step(step, recorder)
        second = len(trace.events)
        _one_step(step, recorder)
        return Count(
            trace,
            blocks,
            second,
            _head_weights(model),
            _differing(model),
            tuple(_of_experts(model)),
        )


def _of_experts(model: nn.Module) -> Iterator[str]:
    """Yield notes on fused experts: without a recipe, autocast does not cast them."""
    types: dict[str, list[str]] = {}
    if any(hasattr(module, GROUPED) for module in model.modules()):
        yield "all experts of a layer are counted with equally many tokens, which the router decides in a run"
    for name, module in model.named_modules():
        for weight, shape, _ in other_weights(name, module):
            if " experts of " in shape:
                parameter = getattr(module, weight.rpartition(".")[2])
                types.setdefault(str(parameter.dtype).removeprefix("torch."), []).append(
                    f"{weight}, {shape}"
                )
    for dtype, found in types.items():
        yield (
            f"the experts in {len(found)} parameters (the first: {found[0]}) have no recipe: their products "
            f"are counted in {dtype}"
        )


def _differing(model: nn.Module) -> str:
    """See `Count.differing`."""
    runs = [
        forward.recompute for each in model.modules() if (forward := forward_of(each)) is not None
    ]
    in_segments = any(
        isinstance(run, partial) and isinstance(run.args[0], SegmentMember) for run in runs
    )
    return "its blocks are computed again in segments" if in_segments else ""


def _head_weights(model: Any) -> int:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear):
        return 0
    holders = [
        each
        for each in model.modules()
        if any(own is head.weight for own in each.parameters(recurse=False))
    ]
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
        # As in `allocations.run_step`, which holds no reference to the loss during the next phase.
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
    """Label the casts of weights that the layers cache."""
    layers = [module for module in model.modules() if isinstance(module, QLinear)]
    recorder.name(
        "codes",
        (each for layer in layers for casts in layer.cached_casts() for each in casts.tensors()),
    )
    # A GEMM may take a weight without a cast (nvfp4's last blocks): relabel it as a weight.
    recorder.name("weights", model.parameters())


def _mark_blocks(model: nn.Module, recorder: Recorder) -> int:
    """Begin a phase at every block, forward and backward. Returns the number of blocks."""
    try:
        blocks = list(find_blocks(model, verb="plan").values())
    except ConfigError:  # a model without a stack of blocks is one phase
        return 0
    last = len(blocks) - 1

    def mark(number: int, block: nn.Module) -> None:
        def enter(module: nn.Module, arguments: Any) -> None:
            if recorder.is_forward:
                recorder.begin(f"forward {number}", is_forward=True)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if recorder.is_forward:
                recorder.begin(
                    "head" if number == last else f"forward {number} end", is_forward=True
                )
                tensors = [
                    each
                    for each in tree_leaves(output)
                    if isinstance(each, Tensor) and each.requires_grad
                ]
                # Hooks on the first output suffice: its gradient arrives when the backward pass of
                # the block begins.
                for each in tensors[:1]:
                    each.register_hook(lambda gradient: recorder.begin(f"backward {number}"))

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

    for number, block in enumerate(blocks):
        mark(number, block)
    return len(blocks)
