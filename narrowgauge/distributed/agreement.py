"""What ranks that hold the same layers agree on at the end of each step, so that they stay equal to the bit.

    amax windows     the largest amax that a rank saw, and whether one was not finite: MAX
    samplers         the largest variance that a rank predicted: MAX
    learned steps    in their cold start, the mean over all micro-batches: SUM of float64, which is exact

One MAX for all layers of a group, in `advance`. NaN never travels: a MAX of NaN is lost on some backends, so a window keeps the
largest finite amax and a flag apart. Every rank must end the same steps; torch's own optimizers do, also where a GradScaler skips one.

Random numbers (stochastic rounding, random signs, samples of rows) are drawn by name (`ops.random.Stream`): by the seed of the
micro-batch and the layer's name. `Agreement` seeds torch's generators for the length of a forward pass by (seed, step, global
number of the micro-batch), so a rank draws what one process would draw for the same micro-batch, in dropout too; checkpointing, which
brings the generators back, repeats it; and after the forward pass the generators are as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import ATTRIBUTE
from narrowgauge.distributed.generators import generators, seed_all, seed_of, set_generators
from narrowgauge.distributed.gradient_state import Gradients
from narrowgauge.distributed.topology import Topology
from narrowgauge.distributed.torch_private import has_compiled, in_backward, is_rehearsal
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize.amax_state import SEEN
from narrowgauge.ops.random import Stream, hashed
from narrowgauge.structure import plain_name


@dataclass(eq=False)
class Peers:
    """The ranks that hold a layer, as the layer sees them.

    name    of the layer in the whole model
    groups  in which its state is agreed on, one after the other; empty: it stands alone
    shard   see `ops.random.Stream`
    """

    agreement: Agreement
    name: str
    groups: tuple[dist.ProcessGroup, ...] = ()
    shard: dict[str, str] = field(default_factory=dict)

    def sends(self, layer: QLinear) -> str:
        """What of the layer travels between ranks, in which format, how many bytes, and why not fewer; '' for nothing."""
        return "; ".join(words for tell in self.agreement.tells.values() if (words := tell(layer)))

    def stream(self, device: torch.device) -> Stream | None:
        """Where the layer's random numbers come from, in eager mode; None: from torch's generator, as outside of a forward pass."""
        words = self.agreement.words(device)
        return None if words is None else Stream(self.name, words, self.shard)


@dataclass(eq=False)
class Agreement:
    """Of one model, or one stage of a pipeline, on this rank.

    seed          of the random numbers; equal on all ranks
    arrange       finds layers and replica for a model, as it is parallelised now: arrange(agreement, model, is_running=False)
    layers        those that are converted, and their peers
    weights       of those whose weights travel as codes (weights.WeightGathers), or None
    replica       (number, count) of this rank among those that read other data
    step          optimizer steps that have ended
    micro_batch   forward passes with gradients in this step
    messages      counts what was sent (bytes), by what it was
    gradients     how gradients travel, and the state of that
    tells         "gradient", "weight" -> what says in words how that of a layer travels
    is_counted    random numbers go by micro-batch though no layer is converted; then who trains calls `end_step(())` after each step
    arranged      what the ranks were compared by: (layers and recipes, groups of ranks that read other data)
    waits_for     the wrapper whose other ranks wait for this one's gradients: "DistributedDataParallel", "fully_shard", or ""
    number        of this among those of the process: where one optimizer ends the step of several, they do so in one order on all ranks
    """

    seed: int
    arrange: Callable[..., Topology] | None = None
    layers: dict[QLinear, Peers] = field(default_factory=dict)
    weights: Any = None
    replica: tuple[int, int] = (0, 1)
    step: int = 0
    micro_batch: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    gradients: Gradients | None = None
    tells: dict[str, Callable[[QLinear], str]] = field(default_factory=dict)
    is_counted: bool = False
    arranged: Any = None
    waits_for: str = ""
    _seeds: dict[int, Any] = field(default_factory=dict, init=False)
    _before: list[Any] = field(default_factory=list, init=False)
    _hooks: list[Any] = field(default_factory=list, init=False)
    _rehearsing: list[QLinear] = field(default_factory=list, init=False)
    number: int = field(default_factory=itertools.count().__next__, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model stands alone: it is on no rank but this one."""
        return Agreement, (0,)

    def attach(self, model: nn.Module) -> Topology:
        """Follows the forward passes of the model; of what did so before, the hooks go."""
        assert self.arrange is not None
        before = model.__dict__.get(ATTRIBUTE)
        for handle in before._hooks if isinstance(before, Agreement) else ():
            handle.remove()
        first = model.register_forward_pre_hook(self.begin_forward, prepend=True)
        last = model.register_forward_hook(self.end_forward, always_call=True)
        self._hooks = [first, last]
        model.__dict__[ATTRIBUTE] = self
        return self.arrange(self, model)

    def follow(self, handle: Any) -> None:
        """Another hook that goes when the model is distributed anew."""
        self._hooks.append(handle)

    # --- random numbers

    def words(self, device: torch.device) -> tuple[int, int] | Tensor | None:
        """Of the micro-batch whose forward pass seeded the generator of the device; None if none did."""
        found = self._seeds.get(seed_of(device))
        if found is None or device.type != "cuda":
            return found
        return self._on_device(found, device)

    def continue_as(self, seed: int, device: torch.device) -> None:
        """Of the micro-batch under way, for a part of its forward pass in which torch's generators are seeded anew."""
        if (words := self._seeds.get(seed_of(device))) is not None:
            self._seeds[seed] = words

    def _on_device(self, words: tuple[int, int], device: torch.device) -> Tensor:
        key = hash((words, device))
        if key not in self._seeds:
            self._seeds[key] = torch.tensor(words, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        tensor: Tensor = self._seeds[key]
        return tensor

    def begin_forward(self, module: nn.Module, _: Any) -> None:
        """A forward pre-hook of the whole model."""
        if torch.compiler.is_compiling() or in_backward():
            return  # checkpointing repeats it, with the generators of then
        if is_rehearsal():
            self._rehearsing = [each for each in self.layers if each.training]
            for each in self._rehearsing:
                each.training = False
            return
        trains = module.training and torch.is_grad_enabled()
        if self.gradients is not None and trains:
            self.gradients.refuse_a_second_sum(module)
        if self.layers and trains and self.arrange is not None:  # a framework may have wrapped it since
            self.arrange(self, module, is_running=True)
            self.arrange = None
        if self.weights is not None:
            self.weights.before_forward(is_first=not trains or self.micro_batch == 0)
        if not (trains and (self.layers or self.is_counted)):
            return
        number, count = self.replica
        words = hashed(self.seed, self.step, self.micro_batch * count + number)
        # Stages of a pipeline begin with other numbers: dropout would leave out the same elements in all of them.
        names = (peers.name for peers in self.layers.values())
        drawn = hashed(*words, next(names, "") or plain_name(next(name for name, _ in module.named_parameters())))
        seed = drawn[0] | (drawn[1] & 0x7FFFFFFF) << 32
        self._seeds[seed] = words
        self.micro_batch += 1
        self._before.append(generators())
        seed_all(seed)

    def end_forward(self, *_: Any) -> None:
        """A forward hook of the whole model, called also where the forward pass raises."""
        for each in self._rehearsing:
            each.training = True
            each.end_step()  # casts by the scales of evaluation are not those of training
        self._rehearsing = []
        if self._before and not torch.compiler.is_compiling() and not in_backward():
            set_generators(self._before.pop())

    # --- the end of a step

    @torch.no_grad()
    def end_step(self, ended: Collection[QLinear]) -> None:
        """Before windows, steps and samplers take over what was seen in the step."""
        if self.waits_for and self.arrange is not None and self.layers and not self.micro_batch and not has_compiled():
            raise ConfigError(
                f"advance: rank {dist.get_rank()} has run no forward pass with gradients since distribute, and {self.waits_for} on the "
                "other ranks waits for its gradients. Give every rank a batch in every step, with drop_last=True or a "
                "DistributedSampler."
            )
        members: dict[tuple[dist.ProcessGroup, ...], list[QLinear]] = {}
        for layer, peers in self.layers.items():  # in one order on all ranks
            if layer in ended and peers.groups:
                members.setdefault(peers.groups, []).append(layer)
        for groups, layers in members.items():
            self._agree(groups, layers)
        if self.micro_batch or any(layer in ended for layer in self.layers):  # a rank may have had no micro-batch
            self.step, self.micro_batch = self.step + 1, 0
            self._seeds.clear()
            if self.gradients is not None:
                self.gradients.is_summed = False

    def _agree(self, groups: tuple[dist.ProcessGroup, ...], layers: list[QLinear]) -> None:
        parts = [part for layer in layers for part in _largest(layer)]
        self._reduce("windows", parts, dist.ReduceOp.MAX, groups)
        found = [layer.steps.found for layer in layers if layer.steps is not None and layer.steps.is_cold]
        self._reduce("learned steps", found, dist.ReduceOp.SUM, groups)

    def _reduce(self, what: str, parts: list[Tensor], by: Any, groups: tuple[dist.ProcessGroup, ...]) -> None:
        """In place, all parts in one message."""
        if not parts:
            return
        together = torch.cat(parts)
        for group in groups:
            dist.all_reduce(together, by, group=group)
            self.count(what, together)
        torch._foreach_copy_(parts, list(together.split([len(part) for part in parts])))

    def count(self, what: str, sent: Tensor) -> None:
        """Counts a message."""
        self.messages[what] = self.messages.get(what, 0) + sent.numel() * sent.element_size()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks that hold the same layers."""
        own = {} if self.gradients is None else self.gradients.state_dict()
        return {"seed": self.seed, "step": self.step, "gradients": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, on any number of ranks. Raises CheckpointError if it is none."""
        if not all(type(state.get(key)) is int and state[key] >= 0 for key in ("seed", "step")):
            raise CheckpointError(
                f"distribute: {dict(state)!r} is no state of it, which has whole numbers 'seed' and 'step'. Pass what state_dict() gave."
            )
        if self.gradients is not None:
            self.gradients.load_state_dict(state.get("gradients", {}))
        self.seed, self.step, self.micro_batch = state["seed"], state["step"], 0


def _largest(layer: QLinear) -> Iterator[Tensor]:
    """Views of what ranks take the largest of: seen and nonfinite of each window, and the sampler's readings."""
    for window in (layer.scaling or {}).values():
        yield window.live[SEEN:]  # type: ignore[index]
    if layer.sampling is not None:
        yield layer.sampling.live
