"""A training step as CUDA graphs: one launch replays all kernels of a part of the step.

    step = GraphedStep(model, optimizer, backward, clip=1.0)
    for batch in micro_batches:
        step.accumulate(batch)              forward and backward: one graph per micro-batch shape,
                                            and one graph for the casts of the weights
    loss, norm = step.readings().tolist()   clipping: one graph; the step's only synchronisation
    step.update()                           optimizer, advance, zeroed gradients: one graph

Three graphs instead of one let a run stop between `readings` and `update`, before a non-finite loss
changes a weight. They also need one graph per micro-batch shape instead of one per combination of
shapes, at the cost of two more launches. All graphs share one memory pool, and inputs are copied
into static tensors.

A part first runs eagerly a few times on a side stream (real training steps), then it is captured.
`notes` lists the parts that stay eager. Optimizers of `narrowgauge.optim` read their scalars from
memory that the host fills before each replay (`optim.cuda_graph`). Stochastic rounding and dropout
draw new numbers at every replay, because the graph registers the device's default generator.

`refuse` names, before anything runs, the parts of a step that synchronise or that the host decides
in each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import BackendError, ConfigError, Reason
from narrowgauge.nn.converted_model import advance
from narrowgauge.nn.experts import GroupedExperts
from narrowgauge.nn.linear import QLinear
from narrowgauge.nn.operands import Casts, find
from narrowgauge.nn.rotation import Rotation
from narrowgauge.nn.weight_cache import WeightCache
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.clipping import clip_gradients

if TYPE_CHECKING:
    from narrowgauge.optim.cuda_graph import ReplayedStep

# Eager runs before a capture: libraries allocate and choose their kernels in the first runs.
WARMUP = 3
# Shapes that are captured; each graph keeps the activations of its micro-batch until the run ends.
FORWARD_BACKWARD, WEIGHT_CASTS = "forward and backward", "casts of the weights"  # parts of a step
MOST_SHAPES = 16

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class GraphPart:
    """The content of one graph.

    run             run(**inputs) in eager mode; also captured, unless `record` is given
    record          captured instead of `run`
    before_replay   called before each replay: fills the memory that the kernels read
    around_capture  called before and after a capture
    ready           True once the part may be captured
    refuse          clause on why the part cannot be captured, or ''; called before the capture
    """

    run: Callable[..., None]
    record: Callable[..., None] | None = None
    before_replay: Callable[[], None] = lambda: None
    around_capture: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    refuse: Callable[[], str] = lambda: ""


def refuse(
    model: nn.Module, optimizer: Any, device: torch.device, scaler: object | None = None
) -> list[Reason]:
    """Reasons why a step cannot be captured, one clause each; [] if it can."""
    reasons: list[Reason] = []
    if device.type != "cuda":
        reasons.append(
            Reason("device", f"CUDA graphs need a CUDA device, the model is on {device}")
        )
    elif torch.version.hip is not None:
        reasons.append(Reason("capability", "written for NVIDIA GPUs"))
    reasons += refuse_run(model, optimizer, scaler)
    if device.type == "cuda":  # reasons that `make_capturable` removes
        kind, groups = (
            type(optimizer).__name__,
            [group for group in optimizer.param_groups if "capturable" in group],
        )
        if not all(group["capturable"] for group in groups):
            reasons.append(
                Reason(
                    "capturable",
                    f"{kind} counts its steps on the host; call narrowgauge.cuda_graphs.make_capturable",
                )
            )
        elif not all(isinstance(group["lr"], Tensor) for group in groups):
            reasons.append(
                Reason(
                    "lr",
                    f"lr of {kind} is a number, which a graph would keep; call narrowgauge.cuda_graphs.make_capturable",
                )
            )
    return reasons


def refuse_run(model: nn.Module, optimizer: Any, scaler: object | None = None) -> list[Reason]:
    """Reasons that depend on recipes and optimizer, independent of the device."""
    reasons: list[Reason] = []
    seen: set[str] = set()
    for name, layer in model.named_modules():
        recipe = layer.recipe if isinstance(layer, QLinear) else None
        if (
            isinstance(layer, GroupedExperts)
            and "experts" not in seen
            and (found := layer.why_looped())
        ):
            seen.add("experts")
            words = f"the host reads how many tokens each expert has (first in {name}): {found}"
            reasons.append(Reason("experts", words))
        if recipe is None or recipe.name in seen:
            continue
        seen.add(recipe.name)
        which = f"recipe {recipe.name} (first in {name})"
        if recipe.learned_steps():
            reasons.append(
                Reason(
                    "learned-steps",
                    f"{which} learns steps, which the host initialises from the data",
                )
            )
        if recipe.samplers():
            reasons.append(
                Reason("samples", f"{which} samples rows, which the host decides after each step")
            )
    if isinstance(optimizer, LowPrecisionOptimizer):
        if optimizer.stepping is not None:
            reasons.append(
                Reason(
                    "in-backward",
                    "the optimizer steps inside backward, before the gradient's norm is known",
                )
            )
    elif not all("capturable" in group for group in optimizer.param_groups):
        reasons.append(
            Reason(
                "not-capturable",
                f"{type(optimizer).__name__} has no capturable=True: it counts its steps on the host",
            )
        )
    if scaler is not None:
        reasons.append(Reason("grad-scaler", "a GradScaler decides on the host whether to step"))
    return reasons


class CudaRecorder:
    """Captures calls as CUDA graphs in one memory pool.

    generators  CUDA generators from which a part draws, besides the device's default generator
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator] = ()) -> None:
        self.device, self.generators = device, tuple(generators)
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def warm(self, call: Callable[[], None]) -> None:
        """Run the call on the capture stream, ordered with the current stream."""
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            call()
        here.wait_stream(self.stream)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Capture the call without running it; the returned function replays it.

        Raises RuntimeError if the call cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(self.device)
        # thread_local: CUDA calls of other threads, such as pinning a batch, do not break the
        # capture.
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            call()
        return graph.replay


@dataclass
class _PartState:
    """Progress of one part for one input shape: eager `runs`, then a graph that reads `static`."""

    runs: int = 0
    static: dict[str, Tensor] = field(default_factory=dict)
    replay: Callable[[], None] | None = None


class Graphs:
    """Parts of a step, by name and input shape; each part is captured after `warmup` eager runs.

    notes  sentences that name the parts that stay eager, with the reason
    """

    def __init__(
        self,
        recorder: CudaRecorder,
        device: torch.device,
        warmup: int = WARMUP,
        most_shapes: int = MOST_SHAPES,
    ) -> None:
        if warmup < 1 or most_shapes < 1:
            raise ConfigError(
                f"Graphs: warmup = {warmup} and most_shapes = {most_shapes}; both must be at least 1.",
                code="cuda-graphs.counts",
            )
        self.recorder, self.device, self.warmup, self.most_shapes = (
            recorder,
            device,
            warmup,
            most_shapes,
        )
        self.notes: list[str] = []
        # (part, reason) pairs that `notes` already contains
        self._noted: set[tuple[str, str]] = set()
        self._parts: dict[Any, _PartState] = {}

    def run(self, name: str, part: GraphPart, inputs: Batch | None = None) -> None:
        """Run the part on these inputs, eagerly or by replaying its graph."""
        inputs = inputs or {}
        key = (
            name,
            tuple((key, tuple(value.shape), value.dtype) for key, value in sorted(inputs.items())),
        )
        state = self._parts.setdefault(key, _PartState())
        if state.replay is not None:
            _copy(inputs, state.static)
        else:
            static = {
                key: torch.empty_like(value, device=self.device) for key, value in inputs.items()
            }
            _copy(inputs, static)
            if state.runs < self.warmup or not part.ready() or self._stays_eager(name, part, key):
                state.runs += 1
                self.recorder.warm(lambda: part.run(**static))
                return
            # Capture records the kernels without running them, so the part runs by the replay
            # below.
            state.static, state.replay = static, self._captured(name, part, static)
        part.before_replay()
        state.replay()

    def _captured(
        self, name: str, part: GraphPart, static: dict[str, Tensor]
    ) -> Callable[[], None]:
        call = part.record or part.run
        part.around_capture()
        try:
            return self.recorder.capture(lambda: call(**static))
        except RuntimeError as error:
            raise BackendError(
                f"cuda graphs: {name} cannot be captured: {str(error).strip().splitlines()[0]} Something in it waits for the "
                "device, or allocates where a graph may not. Train without --device.cuda-graph.",
                code="cuda-graphs.capture",
            ) from error
        finally:
            part.around_capture()

    def _stays_eager(self, name: str, part: GraphPart, key: Any) -> bool:
        """True if this part or this shape is not captured.

        The first time, adds the reason to `notes`.
        """
        if reason := part.refuse():
            why, note = "refused", f"{name} stays eager: {reason}."
        elif self.captured.get(name, 0) >= self.most_shapes:
            shapes = ", ".join(f"{input} {list(shape)}" for input, shape, _ in key[1])
            others = f"the others stay eager, such as {shapes}. Lower length_buckets."
            why, note = (
                "shapes",
                f"{name}: more than {self.most_shapes} shapes of micro-batches, {others}",
            )
        else:
            return False
        if (name, why) not in self._noted:
            self._noted.add((name, why))
            self.notes.append(note)
        return True

    def clear(self) -> None:
        """Drop all graphs."""
        self._parts.clear()

    @property
    def captured(self) -> dict[str, int]:
        """Name of a part -> its graphs."""
        return Counter(name for (name, _), state in self._parts.items() if state.replay is not None)


def _copy(inputs: Batch, targets: Mapping[str, Tensor]) -> None:
    """Copy inputs into the static tensors through pinned memory, so that the host does not wait."""
    for name, target in targets.items():
        value = inputs[name]
        # A copy from pageable host memory synchronises with the device even with non_blocking=True.
        pinned = value.pin_memory() if target.is_cuda and not value.is_cuda else value
        target.copy_(pinned, non_blocking=True)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the learning rate and the step counters of a torch optimizer to the device.

    Call it again after load_state_dict. From then on change the learning rate with
    `group["lr"].fill_(value)`.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


class GraphedStep:
    """A training step of CUDA graphs; the module docstring shows a loop.

    optimizer  an optimizer of narrowgauge.optim, or a torch optimizer after `make_capturable`.
               Call `renew` after its load_state_dict
    backward   backward(**batch) -> the scalar loss of a micro-batch, on which it has called
               .backward()
    clip       largest norm of the gradient; None: no clipping
    warmup     eager runs of each part before it is captured

    Raises ConfigError with every reason that `refuse` returns. Gradient tensors are allocated once:
    other code must not set them to None. `accumulate` copies inputs from another device, and
    neither waits for the device nor reads from it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[..., Tensor],
        *,
        clip: float | None = None,
        warmup: int = WARMUP,
        most_shapes: int = MOST_SHAPES,
        generators: Iterable[torch.Generator] = (),
        recorder: CudaRecorder | None = None,
    ) -> None:
        device = next(model.parameters()).device
        reasons = refuse(model, optimizer, device) if recorder is None else []
        if reasons:
            raise ConfigError(
                f"cuda graphs: {'; '.join(reasons)}. Train without them, or change that.",
                code="cuda-graphs.unsupported",
            )
        self.model, self.optimizer, self.clip = (
            model,
            optimizer,
            float("inf") if clip is None else clip,
        )
        self.device = device
        self.graphs = Graphs(
            recorder or CudaRecorder(device, generators), device, warmup, most_shapes
        )
        if isinstance(optimizer, LowPrecisionOptimizer) and optimizer.casting is not None:
            # The optimizer would cast the weights in its own step as well; the graph below casts
            # them once.
            optimizer.cast_weights(None)
            self.graphs.notes.append(
                Reason(
                    "graphs.weight-casts",
                    "update: the optimizer's step casts no weights any more; graphs cast them.",
                )
            )
        self._backward = backward
        self._loss = torch.zeros((), device=device)
        self._readings = torch.zeros(2, device=device)
        self._replayed = self._replayable()
        self._casts: dict[QLinear, Casts] = {}
        self._taken, self._usual = 0, 0  # micro-batches in this step and in the previous step
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        for parameter in self._parameters:
            if parameter.grad is None:
                # Captured kernels write gradients at fixed addresses, so the tensors must exist
                # before the capture.
                parameter.grad = torch.zeros_like(parameter)

    def accumulate(self, batch: Batch) -> None:
        """Run forward and backward of a micro-batch.

        Its gradients and loss are added to the step's totals.
        """
        # A captured micro-batch cannot know that it is the first of its step, so a separate graph
        # casts the weights once per step. Once captured, this graph must run in every step, also in
        # a step with one micro-batch: the other graphs read its memory and would see casts of older
        # weights.
        if self._taken == 0 and (self._casts or self._shares_casts()):
            self.graphs.run(WEIGHT_CASTS, GraphPart(lambda: None, self._cast_weights))
        self._taken += 1
        part = GraphPart(
            self._forward_and_backward, around_capture=self._forget, ready=self._may_record
        )
        self.graphs.run(FORWARD_BACKWARD, part, batch)

    def readings(self) -> Tensor:
        """Clip the gradient; returns [2] on the device: loss and gradient norm before clipping.

        Every step returns the same tensor: read it before the next step.
        """
        self.graphs.run("clipping", GraphPart(self._clip))
        return self._readings

    def update(self) -> None:
        """Run the optimizer and `advance`, then zero the gradients and the loss."""
        eager, replayed = partial(self._update, self.optimizer.step), self._replayed
        part = GraphPart(eager)
        if replayed is not None:
            part = GraphPart(
                eager,
                partial(self._update, replayed.capture),
                replayed.before_replay,
                refuse=replayed.refuse,
            )
        self.graphs.run("update", part)
        self._end()

    def discard(self) -> None:
        """Zero the gradients and the loss without an optimizer step."""
        self._clear()
        self._end()

    def renew(self) -> None:
        """Warm up and capture all parts again.

        Call it after a change of the model, such as a layer's recipe.
        """
        self.graphs.clear()
        self._casts = {}
        self._replayed = self._replayable()
        self._forget()

    def _replayable(self) -> ReplayedStep | None:
        """The optimizer's step in a form that a graph can replay, or None for a torch optimizer."""
        # Called outside a capture: this memory must not come from the graphs' pool, which a later
        # graph may reuse.
        return (
            self.optimizer.replayable()
            if isinstance(self.optimizer, LowPrecisionOptimizer)
            else None
        )

    def _shares_casts(self) -> bool:
        """True if several micro-batches of a step share the weight casts of some layer."""
        return self._usual > 1 and any(keeps_casts(layer) for layer in self._casting())

    def _layers(self) -> list[QLinear]:
        return [layer for layer in self.model.modules() if isinstance(layer, QLinear)]

    def _casting(self) -> list[QLinear]:
        """The layers whose casts micro-batches share, without experts: a pass casts their stack."""
        return [layer for layer in self._layers() if not layer.is_expert]

    def _may_record(self) -> bool:
        """True once micro-batches per step and addresses of the shared casts are known."""
        return self._usual > 0 and (bool(self._casts) or not self._shares_casts())

    def _cast_weights(self) -> None:
        """Cast the weights for all micro-batches of a step. Captured, never run eagerly.

        In eager mode the first micro-batch casts the weights and the others reuse its casts.
        """
        self._casts = {layer: cast_weight(layer) for layer in self._casting()}

    def _forward_and_backward(self, **batch: Tensor) -> None:
        for layer, casts in self._casts.items():
            layer.use_casts(casts)
        try:
            self._loss += self._backward(**batch).detach()
        finally:
            for layer in self._casts:
                layer.empty_cache(keep=True)

    def _clip(self) -> None:
        norm = clip_gradients(self._parameters, self.clip, wide=True)
        self._readings.copy_(torch.stack((self._loss, norm.to(self._loss.dtype))))

    def _update(self, step: Callable[[], object]) -> None:
        step()
        advance(self.model)
        self._clear()

    @torch.no_grad()
    def _clear(self) -> None:
        torch._foreach_zero_([each.grad for each in self._parameters if each.grad is not None])
        self._loss.zero_()

    def _end(self) -> None:
        """Reset the micro-batch count and drop cached casts."""
        self._taken, self._usual = 0, self._taken
        self._forget()

    def _forget(self) -> None:
        """Drop the casts that layers cache."""
        for layer in self._layers():
            # A replay writes weights and inputs without changing torch's version counters, so
            # `validity` keys would match stale casts.
            layer.end_step()


def keeps_casts(layer: QLinear) -> bool:
    """True if a cast of the weight serves a whole optimizer step and needs no input."""
    if (
        layer.recipe is None
        or layer.is_suspended
        or layer.steps is not None
        or layer.code_source is not None
    ):
        return False
    return any(layer.plan(layer.weight.device).w.serves_a_step)


def cast_weight(layer: QLinear) -> Casts:
    """Cast the weight before the step's first forward pass. Empty if `keeps_casts` is False."""
    # A cache of its own: the casts that the layer holds now stay as they are.
    cache = WeightCache()
    weight: Tensor = layer.matrix
    if type(weight).__name__ == "DTensor":
        from narrowgauge.nn.sharded import plain

        weight = plain(weight)
    if not keeps_casts(layer):
        return cache.casts
    with torch.no_grad():
        context = layer.context(weight, cache)
        operand, plan = (
            find("w", weight, context, (True, True), layer.amax_state("w")),
            context.plan.w,
        )
        rows, cols = plan.serves_a_step
        if rows:
            operand.rows(Rotation.draw(plan.rows_rotate, weight))
        if cols and layer.recipe is not None and layer.recipe.backward != "straight-through":
            # Straight-through recipes have no cols of their own: backward reads the codes of rows.
            operand.cols(Rotation.draw(plan.cols_rotate, weight.T), operand)
    return cache.casts
