"""Sequence parallelism of a run: between their matrix products, the ranks of tp compute with other tokens each.

    first block of a stack    x [rows, tokens, width], equal on all ranks  ->  this rank's tokens
    norm, dropout, residual   this rank's tokens; the gradients of norms are summed over the ranks
    column-wise layers        their input gathered along the tokens, once for q, k and v
    row-wise layers           parts of sums, summed and cut along the tokens (`distributed.tensor_parallel`)
    last block of a stack     its output gathered

So an all-reduce is a gather and a reduce-scatter of the same bytes, and what blocks keep for backward outside of their products is shared
out. Counts of tokens need not be a multiple of the ranks: the last ones have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from narrowgauge.distributed.per_rank_dropout import PerRankDropout
from narrowgauge.distributed.tensor_parallel import GatherInput, RowwiseParallel
from narrowgauge.memory.blocks import find_blocks
from narrowgauge.train.parallel.tensor_plans import COLUMNS, GATHERED_COLUMNS

__all__ = ["TOKENS", "RowwiseParallel", "Stack", "styles_of"]

TOKENS = 1  # axis of [rows, tokens, width]
# Attention to what another stack has computed: keys and values read another tensor than the query, of which every rank has all tokens.
CROSS = ("encoder_attn", "EncDecAttention")


class Stack:
    """The blocks of one stack, from the first to the last. tokens: of the batch under way, on all ranks together."""

    def __init__(self, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
        self.blocks, self.mesh, self.tokens = blocks, mesh, 0
        blocks[0].register_forward_pre_hook(self._cut, with_kwargs=True)
        blocks[-1].register_forward_hook(self._gather)

    def per_rank_dropout(self, dropout: PerRankDropout) -> None:
        """Gives each rank its own dropout from the first block to the last."""
        self.blocks[0].register_forward_pre_hook(dropout.begin)
        self.blocks[-1].register_forward_hook(lambda block, given, _: dropout.end(block, given))

    def read_gathered(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """As `read`, gathered in 16 bits."""
        return _with_first(given, named, lambda x: self._cut_tensor(x).redistribute(placements=(Replicate(),)))

    def read(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A forward pre-hook of what reads all tokens: its first input as a DTensor, which knows how many there are."""
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
        shape = torch.Size((rows, self.tokens, width))
        stride = (self.tokens * width, width, 1)
        return DTensor.from_local(x, self.mesh, (Shard(TOKENS),), run_check=False, shape=shape, stride=stride)


class OwnTokens:
    """A norm that computes with a rank's tokens: in its forward pass its parameters are such that their gradients are summed over ranks.

    Not torch's SequenceParallel: of DTensors whose tokens not all ranks have, torch decides on each rank by other shapes, and waits for
    ever (2.13).
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self._held: dict[str, nn.Parameter | None] = {}
        norm.register_forward_pre_hook(self._begin)
        norm.register_forward_hook(self._end, always_call=True)

    def _begin(self, norm: nn.Module, _: Any) -> None:
        self._held = {name: each for name, each in norm._parameters.items() if each is not None}
        for name, parameter in self._held.items():
            del norm._parameters[name]
            norm.__dict__[name] = _SummedOverRanks.apply(parameter, self.group)

    def _end(self, norm: nn.Module, *_: Any) -> None:
        for name, parameter in self._held.items():
            norm.__dict__.pop(name, None)
            norm._parameters[name] = parameter
        self._held = {}


class _SummedOverRanks(torch.autograd.Function):
    """A parameter as it is; its gradient is the sum over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _with_first(given: tuple[Any, ...], named: dict[str, Any], change: Callable[[Tensor], Any]) -> Any:
    """The inputs of a module, the first of them changed; models give it by place or by name."""
    if given:
        return (change(given[0]), *given[1:]), named
    name = next(iter(named))
    return given, named | {name: change(named[name])}


def styles_of(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh
) -> tuple[list[Stack], dict[str, ParallelStyle]]:
    """The stacks, and the styles of what gathers, to be applied before those of the plan."""
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
                    styles[reader] = GatherInput(axis=TOKENS, activations="16bit")  # `distribute` says otherwise
            for norm in _norms(name, block, readers, plan):
                OwnTokens(norm, mesh)
    return stacks, styles


def _readers(block: str, names: Iterable[str], plan: Mapping[str, str]) -> list[str]:
    """Modules whose first input is gathered: those that hold column-wise layers, or such layers themselves right below the block."""
    found = dict[str, None]()
    for name in names:
        if plan[name] in (COLUMNS, GATHERED_COLUMNS):
            parent = name.rpartition(".")[0]
            found[name if parent == block else parent] = None
    return list(found)


def _norms(prefix: str, block: nn.Module, readers: list[str], plan: Mapping[str, str]) -> list[nn.Module]:
    """Modules with parameters of their own that compute with a rank's tokens, outside of what reads all of them."""
    inside = tuple(f"{each}." for each in readers)
    found = []
    for below, module in block.named_modules():
        name = f"{prefix}.{below}" if below else prefix
        has_own = next(module.parameters(recurse=False), None) is not None
        if has_own and name not in plan and not name.startswith(inside):
            found.append(module)
    return found
