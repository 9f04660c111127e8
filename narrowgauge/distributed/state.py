"""State that ranks with the same layers synchronize each step, and random numbers keyed by name.

    amax histories       MAX of each rank's largest finite amax, and of its non-finite flag
    sampling statistics  MAX of the predicted variances
    learned step sizes   during initialization: mean over all micro-batches (float64 SUM)

`end_step` sends one MAX all-reduce for all layers of a process group, and one SUM while step sizes
are initialized. Every rank must end the same steps. torch's optimizers guarantee that, also if
GradScaler skips a step.

Random numbers (stochastic rounding, random signs, row sampling) come from `ops.random.Stream`,
keyed by micro-batch and layer name. In each forward pass, `DistributedState` seeds torch's
generators with a hash of (seed, step, global index of the micro-batch) and restores their state
afterwards. A rank then draws the same numbers, dropout included, as one process would for the same
micro-batch. Activation checkpointing restores the generator and so repeats the draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed.torch_private import has_compiled, in_backward, is_shape_inference
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.ops.quantize.amax_state import SEEN
from narrowgauge.ops.random import Stream, hashed
from narrowgauge.ops.rng import own_generators, seed_of, seed_own, set_own
from narrowgauge.structure import DISTRIBUTED_STATE, plain_name

if TYPE_CHECKING:
    from narrowgauge.distributed.gradient_state import Gradients
    from narrowgauge.distributed.topology import Topology
    from narrowgauge.nn.linear import QLinear


@dataclass(eq=False)
class Peers:
    """The ranks that share one layer, seen from this rank.

    state   the DistributedState of the model
    name    of the layer in the whole model
    groups  process groups that synchronize the layer's state, one after the other; empty: no other
            rank holds the layer
    shard   role -> label of this rank's part of a sharded tensor; see `ops.random.Stream`
    """

    state: DistributedState
    name: str
    groups: tuple[dist.ProcessGroup, ...] = ()
    shard: dict[str, str] = field(default_factory=dict)

    def describe_traffic(self, layer: QLinear) -> str:
        """Describe the layer's messages for `describe`: format, bytes, and the reason if not 8-bit.

        Returns "" if nothing of the layer is sent.
        """
        return "; ".join(
            text for describe in self.state.describe_traffic.values() if (text := describe(layer))
        )

    def stream(self, device: torch.device) -> Stream | None:
        """Return the layer's random number stream for this forward pass (eager mode).

        None outside a forward pass: the layer then draws from torch's generator.
        """
        key = self.state.micro_batch_key(device)
        return None if key is None else Stream(self.name, key, self.shard)


@dataclass(eq=False)
class DistributedState:
    """Distributed state of one model, or of one pipeline stage, on this rank.

    seed                  of the recipes' random numbers; equal on all ranks
    detect                detect(state, model, is_running=False) finds the layers and the
                          data-parallel index for the model as currently parallelized; None after
                          the first training forward pass
    layers                converted layer -> its Peers
    weights               weights.WeightGathers if weights are gathered as codes, else None
    replica               (index, count) of this rank among the data-parallel ranks
    step                  optimizer steps completed
    micro_batch           forward passes with gradients so far in this step
    bytes_sent            bytes sent, by kind of message
    gradients             gradient messages and their state; None: torch reduces gradients unchanged
    describe_traffic      {"gradient" | "weight": f(layer) -> str}, the text of describe()'s "sends"
                          column
    counts_micro_batches  count micro-batches although no layer is converted, so that dropout
                          follows the same random numbers; the training loop then calls
                          `end_step(())` after each step
    compared_settings     the settings last compared between ranks: (layers and recipes,
                          data-parallel groups)
    blocking_wrapper      the wrapper that blocks until this rank sends gradients:
                          "DistributedDataParallel", "fully_shard", or ""
    creation_index        creation index in this process; an optimizer of several models ends their
                          steps in this order, the same on all ranks
    """

    seed: int
    detect: Callable[..., Topology] | None = None
    layers: dict[QLinear, Peers] = field(default_factory=dict)
    weights: Any = None
    replica: tuple[int, int] = (0, 1)
    step: int = 0
    micro_batch: int = 0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    gradients: Gradients | None = None
    describe_traffic: dict[str, Callable[[QLinear], str]] = field(default_factory=dict)
    counts_micro_batches: bool = False
    compared_settings: Any = None
    blocking_wrapper: str = ""
    _seeds: dict[int, Any] = field(default_factory=dict, init=False)
    _generator_states: list[Any] = field(default_factory=list, init=False)
    _hooks: list[Any] = field(default_factory=list, init=False)
    _shape_inference_layers: list[QLinear] = field(default_factory=list, init=False)
    creation_index: int = field(default_factory=itertools.count().__next__, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as the state of a single rank: the copied model belongs to no group."""
        return DistributedState, (0,)

    def attach(self, model: nn.Module) -> Topology:
        """Register the forward hooks on the model and replace an earlier state's hooks."""
        assert self.detect is not None
        before = model.__dict__.get(DISTRIBUTED_STATE)
        for handle in before._hooks if isinstance(before, DistributedState) else ():
            handle.remove()
        # Before FSDP's pre-forward hook: its all-gather of codes needs the scales exchanged here.
        first = model.register_forward_pre_hook(self.begin_forward, prepend=True)
        last = model.register_forward_hook(self.end_forward, always_call=True)
        self._hooks = [first, last]
        model.__dict__[DISTRIBUTED_STATE] = self
        return self.detect(self, model)

    def add_hook(self, handle: Any) -> None:
        """Register a hook handle to remove when the model is distributed again."""
        self._hooks.append(handle)

    # --- random numbers

    def micro_batch_key(self, device: torch.device) -> tuple[int, int] | Tensor | None:
        """Return the key (two 32-bit integers) of the micro-batch that seeded the device's generator.

        On CUDA an int64 tensor [2] on the device. None if no forward pass set the generator's seed.
        """
        # The generator's initial seed identifies the micro-batch. A recomputed forward pass finds
        # its own key even after a later micro-batch has begun (pipelines). Counters on layers were
        # considered and rejected.
        found = self._seeds.get(seed_of(device))
        if found is None or device.type != "cuda":
            return found
        return self._on_device(found, device)

    def reuse_key(self, seed: int, device: torch.device) -> None:
        """Reuse the running micro-batch's key for `seed`, with which torch is reseeded mid-forward."""
        if (key := self._seeds.get(seed_of(device))) is not None:
            self._seeds[seed] = key

    def _on_device(self, key: tuple[int, int], device: torch.device) -> Tensor:
        # One copy per micro-batch and device, shared by all layers.
        cache_key = hash((key, device))
        if cache_key not in self._seeds:
            # Pinned and non_blocking: the copy must not stall the launch queue.
            self._seeds[cache_key] = (
                torch.tensor(key, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
            )
        tensor: Tensor = self._seeds[cache_key]
        return tensor

    def begin_forward(self, module: nn.Module, _: Any) -> None:
        """Forward pre-hook of the whole model: exchange weight scales, then seed torch's generators."""
        # A forward pass inside backward is recomputation under activation checkpointing. torch
        # restores the generator state of the original pass, so do not seed again or count a
        # micro-batch.
        if torch.compiler.is_compiling() or in_backward():
            return
        # Pipeline shape inference may run on uninitialized memory. Evaluation mode keeps its amax
        # values out of the histories.
        if is_shape_inference():
            self._shape_inference_layers = [each for each in self.layers if each.training]
            for each in self._shape_inference_layers:
                each.training = False
            return

        trains = module.training and torch.is_grad_enabled()
        if self.gradients is not None and trains:
            self.gradients.refuse_double_reduction(module)
        # A framework may have wrapped the model in DDP after `distribute`.
        if self.layers and trains and self.detect is not None:
            self.detect(self, module, is_running=True)
            self.detect = None

        if self.weights is not None:
            # Here and not in `advance`: loaded or manually written weights are seen too.
            self.weights.before_forward(is_first=not trains or self.micro_batch == 0)
        if not (trains and (self.layers or self.counts_micro_batches)):
            return

        index, count = self.replica
        key = hashed(self.seed, self.step, self.micro_batch * count + index)
        # Mix in the first layer's name: otherwise dropout would mask the same elements in every
        # pipeline stage.
        names = (peers.name for peers in self.layers.values())
        drawn = hashed(
            *key, next(names, "") or plain_name(next(name for name, _ in module.named_parameters()))
        )
        # 63 bits, so that the seed is a non-negative int64.
        seed = drawn[0] | (drawn[1] & 0x7FFFFFFF) << 32
        self._seeds[seed] = key
        self.micro_batch += 1
        self._generator_states.append(own_generators())
        seed_own(seed)

    def end_forward(self, *_: Any) -> None:
        """Forward hook of the whole model, also called if the forward pass raises."""
        for each in self._shape_inference_layers:
            each.training = True
            # Drop the cached weight casts: evaluation scales differ from training scales.
            each.end_step()
        self._shape_inference_layers = []
        if self._generator_states and not torch.compiler.is_compiling() and not in_backward():
            set_own(self._generator_states.pop())

    # --- the end of a step

    @torch.no_grad()
    def end_step(self, ended: Collection[QLinear]) -> None:
        """Synchronize layer state; runs before amax histories, step sizes and samplers are updated.

        ended  the layers whose optimizer step ends now
        """
        if (
            self.blocking_wrapper
            and self.detect is not None
            and self.layers
            and not self.micro_batch
            and not has_compiled()
            # torch's get_state_dict makes an optimizer's states by a step on gradients of zeros.
            and not any(each.weight.grad is not None for each in self.layers)
        ):
            raise ConfigError(
                f"advance: rank {dist.get_rank()} has run no forward pass with gradients since distribute, and "
                f"{self.blocking_wrapper} on the other ranks waits for its gradients. Give every rank a batch in every "
                "step, with drop_last=True or a DistributedSampler.",
                code="distribute.no-forward",
            )
        members: dict[tuple[dist.ProcessGroup, ...], list[QLinear]] = {}
        # The order of layers is the same on all ranks, so the messages match element by element.
        for layer, peers in self.layers.items():
            if layer in ended and peers.groups:
                members.setdefault(peers.groups, []).append(layer)
        for groups, layers in members.items():
            self._synchronize(groups, layers)

        # A rank without a micro-batch in this step still counts the step, as the other ranks do.
        if self.micro_batch or any(layer in ended for layer in self.layers):
            self.step, self.micro_batch = self.step + 1, 0
            self._seeds.clear()
            if self.gradients is not None:
                self.gradients.was_reduced = False

    def _synchronize(self, groups: tuple[dist.ProcessGroup, ...], layers: list[QLinear]) -> None:
        parts = [part for layer in layers for part in _max_reduced_state(layer)]
        # NaN is never sent: some backends lose it in a MAX. Each history has a finite maximum and a
        # separate non-finite flag.
        self._reduce("windows", parts, dist.ReduceOp.MAX, groups)
        # Sums of log step sizes in float64, so the result does not depend on the order of the
        # ranks.
        found = [
            layer.steps.found for layer in layers if layer.steps is not None and layer.steps.is_cold
        ]
        self._reduce("learned steps", found, dist.ReduceOp.SUM, groups)

    def _reduce(
        self, kind: str, parts: list[Tensor], by: Any, groups: tuple[dist.ProcessGroup, ...]
    ) -> None:
        """Reduce `parts` in place, concatenated into one message."""
        if not parts:
            return
        message = torch.cat(parts)
        for group in groups:
            dist.all_reduce(message, by, group=group)
            self.count(kind, message)
        # `parts` are views of the layers' buffers: one launch writes all of them back.
        torch._foreach_copy_(parts, list(message.split([len(part) for part in parts])))

    def count(self, kind: str, message: Tensor) -> None:
        """Add a message's bytes to `bytes_sent`."""
        self.bytes_sent[kind] = (
            self.bytes_sent.get(kind, 0) + message.numel() * message.element_size()
        )

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, identical on all ranks that hold the same layers."""
        own = {} if self.gradients is None else self.gradients.state_dict()
        return {"seed": self.seed, "step": self.step, "gradients": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, saved by any number of ranks. CheckpointError if it is malformed."""
        if not all(type(state.get(key)) is int and state[key] >= 0 for key in ("seed", "step")):
            raise CheckpointError(
                f"distribute: {dict(state)!r} is no state of it, which has whole numbers 'seed' and 'step'. Pass what state_dict() gave.",
                code="distribute.state",
            )
        if self.gradients is not None:
            self.gradients.load_state_dict(state.get("gradients", {}))
        self.seed, self.step, self.micro_batch = state["seed"], state["step"], 0


def _max_reduced_state(layer: QLinear) -> Iterator[Tensor]:
    """Yield views of the state reduced by MAX.

    These are (seen, nonfinite) of each amax history and the sampler's readings.
    """
    for history in (layer.scaling or {}).values():
        yield history.live[SEEN:]  # type: ignore[index]
    if layer.sampling is not None:
        yield layer.sampling.live
