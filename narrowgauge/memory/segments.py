"""Segments of blocks that keep the input of their first block alone; the inputs of the others are computed again in backward.

    n blocks in segments of k_0, k_1, ... k_(s-1)

    forward    kept are the s inputs of segments
    backward   of segment j: its blocks but the last run once more, each keeping its output, k_j - 1 inputs of blocks; then, from the last
               block on, each is computed again from its input, with all that its own backward needs, and its input is given back
    at most    max over j of (j + k_j) inputs of blocks, and one block's activations

What the first segments keep is still there when the last ones are computed, so each segment of "sqrt" is one block shorter than the one
before it: k_j = p - j, the smallest p with p (p + 1) / 2 >= n. That keeps p = about sqrt(2 n) inputs, where equal segments of sqrt(n)
blocks keep 2 sqrt(n) (Chen et al., arXiv 1604.06174), and runs as many blocks once more: all but the last of each segment.

Who calls the blocks is not asked: a block knows that its input is what the block before it returned, by its memory and version
(`addresses.validity`), and keeps how that one was called instead. An input that somebody changed or made in between is kept, and a
segment begins there. Tensors that every block is given (masks, rotary tables) are kept by reference.

A block that is called again sees what it saw: gradients on, generators and autocast of then. What it would keep for backward is thrown
away. Parameters that fully_shard has split are gathered for it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowgauge.addresses import Key, validity
from narrowgauge.errors import ConfigError
from narrowgauge.memory.blocks import is_compiled
from narrowgauge.memory.repeating import Surroundings


def sqrt_lengths(blocks: int) -> list[int]:
    """Blocks in each segment of "sqrt": p, p - 1, p - 2, ... as long as there are some."""
    longest = 0
    while longest * (longest + 1) // 2 < blocks:
        longest += 1
    found: list[int] = []
    while blocks:
        found.append(min(longest - len(found), blocks))
        blocks -= found[-1]
    return found


def equal_lengths(blocks: int, length: int) -> list[int]:
    """Segments of `length` blocks; the last may be shorter."""
    return [min(length, blocks - start) for start in range(0, blocks, length)]


def most_inputs(lengths: list[int]) -> int:
    """Inputs of blocks that are there at most at one moment of backward."""
    return max((place + length for place, length in enumerate(lengths)), default=0)


class SegmentMember:
    """How a block's forward is run so that backward repeats it; `before` is the one of the block before it in the same segment."""

    def __init__(self, name: str, before: SegmentMember | None) -> None:
        self.name, self.before = name, before
        self.warned = False
        self.output_bytes = 0  # of what its block returned the last time that is computed again for the next one
        self._last: weakref.ref[Call] | None = None

    def __call__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `forward` returns, of which backward keeps how it was called."""
        return self._eagerly(torch.compiler.is_compiling(), block, forward, args, kwargs)

    @_disable_dynamo
    def _eagerly(
        self, is_traced: bool, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """Between two graphs of a compiled model."""
        if is_traced and not is_compiled(block):
            raise ConfigError(
                f"checkpoint: {self.name} is in a segment of blocks, which code compiled for a whole model cannot repeat one by one. "
                "Call narrowgauge.memory.compile_blocks(model), which compiles each; or take 'full' or 'selective'."
            )
        previous = self.before.last() if self.before is not None else None
        call = Call(block, forward, args, kwargs, previous)
        if previous is not None and not call.continues and not self.warned:
            self.warned = True
            warnings.warn(
                f"checkpoint: the input of {self.name} is not what the block before it returned, so it is kept: a segment begins there.",
                stacklevel=2,
            )
        self._last = weakref.ref(call)
        live: list[Any] = [(args, kwargs)]  # for the first time; backward has none of them

        def once() -> Any:
            if not live:
                return call.repeat()
            given, named = live.pop()
            return forward(*given, **named)

        found = torch_checkpoint(once, use_reentrant=False, preserve_rng_state=False)
        self.output_bytes = call.returned(found)
        return found

    def last(self) -> Call | None:
        """The call of its block that is the latest, if anything needs it still."""
        return None if self._last is None else self._last()

    def __reduce__(self) -> Any:
        """Copies and pickles know of no calls."""
        return SegmentMember, (self.name, self.before)


class Call:
    """One call of a block, to be repeated.

    Its tensors are kept, or are outputs of the call before it. A call holds those before it alone: nothing that comes later in the
    graph, which would keep itself alive.

    continues  whether its input is an output of the call before it
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], previous: Call | None
    ) -> None:  # fmt: skip
        self.block, self.forward = block, forward
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._others = {place: leaf for place, leaf in enumerate(leaves) if place not in tensors}
        self._requires = {place: leaf.requires_grad for place, leaf in tensors.items()}
        self._from: dict[int, int] = {}  # place of a leaf -> which output of the call before it
        if previous is not None:
            for place, leaf in tensors.items():
                if leaf.requires_grad and (output := previous._which(leaf)) is not None:
                    self._from[place] = output
        self.continues = bool(self._from)
        self._previous = previous if self.continues else None
        self._kept = [place for place in tensors if place not in self._from]
        self._keeper = _keep([tensors[place] for place in self._kept])
        self._then = Surroundings(tensors.values())
        self._returned: dict[int, tuple[StorageWeakRef, Key]] = {}
        self._values: dict[int, Tensor] = {}  # outputs that were computed again, for who has asked
        self._wanted: set[int] = set()

    def returned(self, output: Any) -> int:
        """Notes what the call returned, to know it again; -> its bytes."""
        nbytes = 0
        for place, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.requires_grad and (key := validity(leaf)) is not None:
                self._returned[place] = StorageWeakRef(leaf.untyped_storage()), key
                nbytes += leaf.nbytes
        return nbytes

    def _which(self, tensor: Tensor) -> int | None:
        """Which of its outputs the tensor is, unchanged."""
        key = validity(tensor)
        for place, (storage, known) in self._returned.items():
            if key == known and not storage.expired():
                self._wanted.add(place)
                return place
        return None

    def repeat(self) -> Any:
        """What the block returns, computed again, from inputs that are given away."""
        return self._again(self._inputs(takes=True))

    def _again(self, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self._spec)
        with self._then.again():
            return self.forward(*args, **kwargs)

    def _inputs(self, takes: bool) -> list[Any]:
        """The leaves of its arguments. takes: outputs of the call before it are not needed once more."""
        found = dict(self._others)
        if self._keeper is not None:
            kept = self._keeper.saved_tensors
            found.update(zip(self._kept, (each.detach() for each in kept), strict=True))
        if self._previous is not None:
            self._previous._compute(set(self._from.values()))
            for place, output in self._from.items():
                found[place] = self._previous._values[output].detach()
            if takes:
                for output in set(self._from.values()):
                    del self._previous._values[output]
        for place, requires in self._requires.items():
            found[place].requires_grad_(requires)
        return [found[place] for place in range(len(found))]

    def _compute(self, outputs: set[int]) -> None:
        """Computes the outputs again, with those of the calls before it."""
        waiting: list[Call] = []
        call: Call | None = self
        while call is not None and not outputs <= call._values.keys():
            waiting.append(call)
            outputs, call = set(call._from.values()), call._previous
        for each in reversed(waiting):
            each._compute_outputs()

    def _compute_outputs(self) -> None:
        with _gathered(self.block), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _refuse):
            leaves = tree_leaves(self._again(self._inputs(takes=False)))
        self._values = {place: leaves[place].detach() for place in self._wanted}


def _drop(tensor: Tensor) -> None:
    return None


def _refuse(nothing: None) -> Tensor:
    raise AssertionError("a call that only gives its output has no backward")


class _Keep(torch.autograd.Function):
    """Keeps tensors as an operation of the graph would: hooks for saved tensors see them, and changes in place are noticed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("its result is not used")


def _keep(tensors: list[Tensor]) -> Any:
    """What has the tensors as `saved_tensors`; None without any."""
    if not tensors:
        return None
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    return _Keep.apply(anchor, *tensors).grad_fn


@contextmanager
def _gathered(block: Any) -> Iterator[None]:
    """The block's parameters are whole: of fully_shard a part is there, and its hooks are not on this way."""
    if not (hasattr(block, "unshard") and hasattr(block, "reshard")):
        yield
        return
    block.unshard()
    try:
        yield
    finally:
        block.reshard()
