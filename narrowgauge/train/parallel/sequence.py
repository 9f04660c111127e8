"""Sequence parallelism: between matmuls, each rank of a tp group holds a part of the tokens.

    first block of a stack    x [rows, tokens, width], equal on all ranks  ->  this rank's tokens
    norm, dropout, residual   this rank's tokens; gradients of norms are summed over the ranks
    column-wise layers        input is all-gathered along the tokens, once for q, k and v
    row-wise layers           partial sums, reduce-scattered along the tokens
                              (`distributed.tensor_parallel`)
    last block of a stack     output is all-gathered

An all-reduce becomes an all-gather and a reduce-scatter of the same total size. Tensors that blocks
save for backward outside of their matmuls are divided among the ranks. The number of tokens need
not be a multiple of the ranks: the last ranks get fewer tokens, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from narrowgauge.distributed.tensor_parallel import GatherInput, RowwiseParallel
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.train.parallel.tensor_plans import COLUMNS, GATHERED_COLUMNS

if TYPE_CHECKING:
    from narrowgauge.distributed.per_rank_dropout import PerRankDropout

__all__ = ["TOKENS", "RowwiseParallel", "Stack", "styles_of"]

TOKENS = 1  # axis of [rows, tokens, width]
# Cross-attention modules. Keys and values read the encoder's output, which is whole on every rank;
# only the query's input is split by tokens.
CROSS = ("encoder_attn", "EncDecAttention")


class Stack:
    """A stack of blocks whose activations are split by tokens.

    blocks  the blocks, first to last
    mesh    one-dimensional tp mesh
    tokens  tokens of the current batch on all ranks together
    """

    def __init__(self, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
        self.blocks, self.mesh, self.tokens = blocks, mesh, 0
        # The stack's input is equal on all ranks, so cutting it needs no communication in forward.
        blocks[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        blocks[-1].register_forward_hook(self._gather)

    def per_rank_dropout(self, dropout: PerRankDropout) -> None:
        """Gives each rank its own dropout generators from the first to the last block."""
        self.blocks[0].register_forward_pre_hook(dropout.begin)
        self.blocks[-1].register_forward_hook(lambda block, given, _: dropout.end(block, given))

    def read_gathered(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """As `read`, but gathers the tokens in 16 bits and passes a whole DTensor."""
        return _with_first(
            given, named, lambda x: self._cut_tensor(x).redistribute(placements=(Replicate(),))
        )

    def read(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Forward pre-hook of modules that need all tokens: the first input becomes a DTensor.

        The DTensor is sharded along the tokens and has the global shape.
        """
        return _with_first(given, named, self._cut_tensor)

    def _cut(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        def cut(x: Tensor) -> Tensor:
            self.tokens = x.shape[TOKENS]
            whole = DTensor.from_local(x, self.mesh, (Replicate(),), run_check=False)
            return whole.redistribute(placements=(Shard(TOKENS),)).to_local()

        return _with_first(given, named, cut)

    def _gather(self, _: nn.Module, __: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        whole = self._cut_tensor(first).redistribute(placements=(Replicate(),)).to_local()
        return whole if isinstance(output, Tensor) else type(output)((whole, *output[1:]))

    def _cut_tensor(self, x: Tensor) -> DTensor:
        rows, _, width = x.shape
        # Shape and stride are given explicitly: from_local would assume equal shards, and shards
        # may be uneven.
        shape = torch.Size((rows, self.tokens, width))
        stride = (self.tokens * width, width, 1)
        return DTensor.from_local(
            x, self.mesh, (Shard(TOKENS),), run_check=False, shape=shape, stride=stride
        )


class OwnTokens:
    """Makes a norm compute with this rank's tokens, with gradients summed over the ranks.

    In the forward pass its parameters are replaced by outputs of `_SummedOverRanks`.

    torch's SequenceParallel is not used. If some ranks have no tokens, DTensor decides on each rank
    from a different shape, and the ranks deadlock (torch 2.13).
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self._held: dict[str, nn.Parameter | None] = {}
        norm.register_forward_pre_hook(self._begin)
        # always_call: restore the parameters even if the forward pass raises.
        norm.register_forward_hook(self._end, always_call=True)

    def _begin(self, norm: nn.Module, _: Any) -> None:
        self._held = {name: each for name, each in norm._parameters.items() if each is not None}
        for name, parameter in self._held.items():
            # A non-Parameter cannot be assigned to a registered name, so the name moves to __dict__
            # for the forward pass.
            del norm._parameters[name]
            norm.__dict__[name] = _SummedOverRanks.apply(parameter, self.group)

    def _end(self, norm: nn.Module, *_: Any) -> None:
        for name, parameter in self._held.items():
            norm.__dict__.pop(name, None)
            norm._parameters[name] = parameter
        self._held = {}


class _SummedOverRanks(torch.autograd.Function):
    """Identity on a parameter; its gradient is all-reduced (sum) over the group."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A clone: all_reduce works in place, and autograd may hold `gradient` elsewhere.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _with_first(
    given: tuple[Any, ...], named: dict[str, Any], change: Callable[[Tensor], Any]
) -> Any:
    """Applies `change` to a module's first input, passed by position or by keyword."""
    if given:
        return (change(given[0]), *given[1:]), named
    name = next(iter(named))
    return given, named | {name: change(named[name])}


def styles_of(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh
) -> tuple[list[Stack], dict[str, ParallelStyle]]:
    """Installs token splitting; returns (stacks, {module name: style that gathers its input}).

    These styles must be applied before the plan's own styles.
    """
    containers: dict[str, dict[str, nn.Module]] = {}
    for name, block in find_blocks(model, verb="parallel").items():
        containers.setdefault(name.rpartition(".")[0], {})[name] = block
    stacks: list[Stack] = []
    styles: dict[str, ParallelStyle] = {}
    for blocks in containers.values():
        stack = Stack(list(blocks.values()), mesh)
        stacks.append(stack)
        for name, block in blocks.items():
            readers = _readers(name, [each for each in plan if each.startswith(f"{name}.")], plan)
            for reader in readers:
                is_cross = reader.rpartition(".")[2] in CROSS
                hook = stack.read_gathered if is_cross else stack.read
                model.get_submodule(reader).register_forward_pre_hook(hook, with_kwargs=True)
                if not is_cross:
                    # 16 bits until `distribute` sets the format of messages.
                    styles[reader] = GatherInput(axis=TOKENS, activations="16bit")
            for norm in _norms(name, block, readers, plan):
                OwnTokens(norm, mesh)
    return stacks, styles


def _readers(block: str, names: Iterable[str], plan: Mapping[str, str]) -> list[str]:
    """Modules whose first input must hold all tokens.

    These are the parents of column-wise layers, or such a layer itself if its parent is the block.
    """
    found = dict[str, None]()
    for name in names:
        if plan[name] in (COLUMNS, GATHERED_COLUMNS):
            parent = name.rpartition(".")[0]
            found[name if parent == block else parent] = None
    return list(found)


def _norms(
    prefix: str, block: nn.Module, readers: list[str], plan: Mapping[str, str]
) -> list[nn.Module]:
    """Modules with own parameters that compute with a rank's tokens, outside of `readers`."""
    inside = tuple(f"{each}." for each in readers)
    found = []
    for below, module in block.named_modules():
        name = f"{prefix}.{below}" if below else prefix
        # Modules of the plan and modules inside a reader see all tokens.
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and name not in plan and not name.startswith(inside):
            found.append(module)
    return found
