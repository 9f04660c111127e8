"""Checkpointing in segments: save a segment's first input, recompute the other inputs in backward.

    n blocks in segments of k_0, k_1, ... k_(s-1)

    forward    saves the s inputs of segments
    backward   of segment j: run its blocks but the last again and save their outputs, k_j - 1
               inputs of blocks; then, from the last block on, recompute each block with all
               activations that its backward needs, and free its input
    peak       max over j of (j + k_j) block inputs, and one block's activations

Inputs of the first segments are still alive when backward processes the last ones. So each segment
of "sqrt" is one block shorter than the segment before: k_j = p - j. Here p is the smallest number
with p (p + 1) / 2 >= n. This saves p, about sqrt(2 n), inputs. Equal segments of sqrt(n) blocks
save 2 sqrt(n) (Chen et al., arXiv 1604.06174). Both recompute equally many blocks: all but the last
of each segment.

The model's own loop over its blocks is unchanged. A block recognizes its input as the output of the
block before, by memory and version (`addresses.validity`). It then saves that call instead of the
input. If the input was changed or created in between, it is saved, and a segment begins there.
Tensors passed to every block (masks, rotary tables) are saved by reference.

A recomputed block runs with gradients enabled and with its original generators and autocast
settings. Tensors that it saves for backward are dropped. Parameters sharded by fully_shard are
gathered for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from narrowgauge.addresses import Key, validity
from narrowgauge.errors import ConfigError, warn
from narrowgauge.memory.blocks import is_compiled
from narrowgauge.memory.recomputation import RngAndAutocast


def sqrt_lengths(blocks: int) -> list[int]:
    """Return the segment lengths of "sqrt": p, p - 1, p - 2, ... until all blocks are covered."""
    longest = 0
    while longest * (longest + 1) // 2 < blocks:
        longest += 1
    found: list[int] = []
    while blocks:
        found.append(min(longest - len(found), blocks))
        blocks -= found[-1]
    return found


def equal_lengths(blocks: int, length: int) -> list[int]:
    """Return segments of `length` blocks; the last may be shorter."""
    return [min(length, blocks - start) for start in range(0, blocks, length)]


def most_inputs(lengths: list[int]) -> int:
    """Return the largest number of block inputs alive at one moment of backward."""
    return max((index + length for index, length in enumerate(lengths)), default=0)


class SegmentMember:
    """Runs a block's forward so that backward recomputes it as part of a segment.

    name          of the block
    previous      the member for the preceding block of the segment, or None
    warned        the warning about a changed input was given
    output_bytes  bytes of the block's last output
    """

    def __init__(self, name: str, previous: SegmentMember | None) -> None:
        self.name, self.previous = name, previous
        self.warned = False
        self.output_bytes = 0
        self._last: weakref.ref[Call] | None = None

    def __call__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `forward` and return its output; backward repeats the call."""
        return self._run_eagerly(torch.compiler.is_compiling(), block, forward, args, kwargs)

    @_disable_dynamo
    def _run_eagerly(
        self, is_traced: bool, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """Run between two graphs if the model is compiled."""
        # Raised here, outside of traced code: Dynamo swallows errors of traced code and runs
        # eagerly.
        if is_traced and not is_compiled(block):
            raise ConfigError(
                f"checkpoint: {self.name} is in a segment of blocks, which code compiled for a whole model cannot repeat one by one. "
                "Call narrowgauge.memory.compile_blocks(model), which compiles each; or take 'full' or 'selective'.",
                code="checkpointing.compiled",
            )
        previous = self.previous.last() if self.previous is not None else None
        call = Call(block, forward, args, kwargs, previous)
        if previous is not None and not call.follows_previous and not self.warned:
            self.warned = True
            warn(
                f"checkpoint: the input of {self.name} is not what the block before it returned, so it is kept: a segment begins there.",
                code="checkpointing.segment-input",
                stacklevel=2,
            )
        self._last = weakref.ref(call)

        # Popped by the first call: the checkpoint's closure must not keep the arguments alive.
        live: list[Any] = [(args, kwargs)]

        def once() -> Any:
            if not live:
                return call.repeat()
            given, named = live.pop()
            return forward(*given, **named)

        # A function without arguments: torch saves nothing, and `once` fetches the inputs in
        # backward. Saved-tensor hooks that mark an input as recomputable were not needed.
        found = torch_checkpoint(once, use_reentrant=False, preserve_rng_state=False)
        self.output_bytes = call.returned(found)
        return found

    def last(self) -> Call | None:
        """Return the latest call of its block, if it is still referenced."""
        return None if self._last is None else self._last()

    def __reduce__(self) -> Any:
        """Copy and pickle without calls."""
        return SegmentMember, (self.name, self.previous)


class Call:
    """One call of a block, to be repeated in backward.

    Its tensor arguments are saved, or are outputs of the preceding call. A call references earlier
    calls only. A reference to a later part of the graph would keep the graph alive forever.

    follows_previous  True if an argument is an output of the preceding call
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], previous: Call | None
    ) -> None:  # fmt: skip
        self.block, self.forward = block, forward
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._other_leaves = {
            index: leaf for index, leaf in enumerate(leaves) if index not in tensors
        }
        self._requires_grad = {index: leaf.requires_grad for index, leaf in tensors.items()}
        # Position of an argument leaf -> index of the preceding call's output.
        self._from_previous: dict[int, int] = {}

        if previous is not None:
            for index, leaf in tensors.items():
                if leaf.requires_grad and (output := previous._output_index(leaf)) is not None:
                    self._from_previous[index] = output
        self.follows_previous = bool(self._from_previous)
        self._previous = previous if self.follows_previous else None
        self._saved_leaves = [index for index in tensors if index not in self._from_previous]
        self._saved_node = _save_tensors([tensors[index] for index in self._saved_leaves])
        self._snapshot = RngAndAutocast(tensors.values())
        self._returned: dict[int, tuple[StorageWeakRef, Key]] = {}
        # Recomputed outputs, for later calls whose arguments they are.
        self._recomputed_outputs: dict[int, Tensor] = {}
        self._requested_outputs: set[int] = set()

    def returned(self, output: Any) -> int:
        """Record the outputs, to recognize them as inputs of the next block; return their bytes."""
        nbytes = 0
        for index, leaf in enumerate(tree_leaves(output)):
            if (
                isinstance(leaf, Tensor)
                and leaf.requires_grad
                and (key := validity(leaf)) is not None
            ):
                # A weak reference: outputs are freed as without checkpointing. Address and version
                # alone could match a new tensor in freed memory.
                self._returned[index] = StorageWeakRef(leaf.untyped_storage()), key
                nbytes += leaf.nbytes
        return nbytes

    def _output_index(self, tensor: Tensor) -> int | None:
        """Return the index of the output that the tensor is, unchanged; else None."""
        key = validity(tensor)
        for index, (storage, recorded) in self._returned.items():
            if key == recorded and not storage.expired():
                self._requested_outputs.add(index)
                return index
        return None

    def repeat(self) -> Any:
        """Recompute the block's output, freeing the recomputed inputs."""
        return self._run_forward(self._inputs(frees=True))

    def _run_forward(self, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, self._spec)
        with self._snapshot.restored():
            return self.forward(*args, **kwargs)

    def _inputs(self, frees: bool) -> list[Any]:
        """Return the leaves of the arguments.

        frees  free the preceding call's outputs, since they are not needed again
        """
        found = dict(self._other_leaves)
        if self._saved_node is not None:
            saved = self._saved_node.saved_tensors
            found.update(zip(self._saved_leaves, (each.detach() for each in saved), strict=True))
        if self._previous is not None:
            self._previous._compute(set(self._from_previous.values()))
            for index, output in self._from_previous.items():
                found[index] = self._previous._recomputed_outputs[output].detach()
            if frees:
                for output in set(self._from_previous.values()):
                    del self._previous._recomputed_outputs[output]
        for index, requires in self._requires_grad.items():
            # As in forward: detach cleared the flag.
            found[index].requires_grad_(requires)
        return [found[index] for index in range(len(found))]

    def _compute(self, outputs: set[int]) -> None:
        """Recompute these outputs, after the outputs of all preceding calls."""
        waiting: list[Call] = []
        call: Call | None = self
        # Walk back to the nearest call whose outputs exist, then recompute forward from there.
        while call is not None and not outputs <= call._recomputed_outputs.keys():
            waiting.append(call)
            outputs, call = set(call._from_previous.values()), call._previous
        for each in reversed(waiting):
            each._compute_outputs()

    def _compute_outputs(self) -> None:
        # Gradients stay enabled although the saved tensors are dropped. With no_grad, layers would
        # take other paths (amax histories, caches, random numbers) and draw other numbers.
        with (
            _unsharded(self.block),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_drop, _refuse),
        ):
            leaves = tree_leaves(self._run_forward(self._inputs(frees=False)))
        self._recomputed_outputs = {
            index: leaves[index].detach() for index in self._requested_outputs
        }


def _drop(tensor: Tensor) -> None:
    return None


def _refuse(nothing: None) -> Tensor:
    raise AssertionError("a call that only gives its output has no backward")


class _SaveTensors(torch.autograd.Function):
    """Save tensors in an autograd node: saved-tensor hooks see them, in-place changes raise errors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("its result is not used")


def _save_tensors(tensors: list[Tensor]) -> Any:
    """Return a graph node with the tensors as `saved_tensors`; None if there are none."""
    if not tensors:
        return None
    # The node exists only if an input requires gradients; the saved tensors need not.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    return _SaveTensors.apply(anchor, *tensors).grad_fn


@contextmanager
def _unsharded(block: Any) -> Iterator[None]:
    """Unshard a block of fully_shard; its hooks do not run here, since `forward` is called directly."""
    if not (hasattr(block, "unshard") and hasattr(block, "reshard")):
        yield
        return
    block.unshard()
    try:
        yield
    finally:
        block.reshard()
