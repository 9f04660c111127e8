"""8-bit gradient reduction for FSDP2: a custom reduce-scatter, and an all-reduce across nodes.

FSDP2 calls the reduce-scatter with [ranks, columns]. Row r holds, parameter after parameter, the
gradient elements that rank r owns, padded with zero rows so that all ranks own equally many. FSDP2
divides by the number of ranks afterwards, and runs the reduction on its own streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.distributed import messages
from narrowgauge.distributed.gradient_state import Gradients
from narrowgauge.distributed.messages import Link
from narrowgauge.distributed.shared_scale import Pieces
from narrowgauge.distributed.torch_private import DefaultReduceScatter, ReduceScatter
from narrowgauge.errors import ConfigError

Parameters = Sequence[tuple[str, Tensor]]
# Key in the `__dict__` of an FSDP2 module: the setters that `distribute` has called on it.
CHANGED = "_narrowgauge_changed"
# torch's defaults, to undo those settings. A second `distribute` without this left gradients summed
# or 8-bit, silently.
TORCHS: dict[str, Callable[[], Any]] = {
    "set_force_sum_reduction_for_comms": lambda: False,
    "set_gradient_divide_factor": lambda: None,
    "set_custom_reduce_scatter": DefaultReduceScatter,
    "set_all_reduce_hook": lambda: None,
}


def install(model: nn.Module, made: Gradients, mesh: DeviceMesh | None) -> None:
    """Install the collectives on all FSDP2 modules; see `gradients.install`."""
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    made.names = (*(name for name, _ in model.named_parameters()), *(_whole(name) for name, _ in blocks))
    across = None if mesh is None else made.link(mesh.get_group(0))
    for name, block in blocks:
        own = [(at, it) for at, it in _own_parameters(name, cast(nn.Module, block)) if it.requires_grad]
        if mesh is not None:
            _check_mesh(own, mesh)
        _install(block, made, FsdpReduceScatter(made, name, own, across), across)
    first = next(model.parameters())
    made.bytes_per_number = made.bytes_to_sum(first)
    if mesh is not None:
        made.bytes_between_nodes = 2 * made.bytes_of_sum(first) / mesh.size(1)
    joined = f", then all-reduce over {across.size} nodes" if across else ""
    made.words.append(f"gradients: {made.format_words()}; reduce-scatter{joined}, {made.reduce}")
    if made.numbers != "16bit" and any(_is_hsdp(parameter) for parameter in model.parameters()):
        made.words.append(
            "gradients between HSDP's copies: torch's all-reduce of the shards in the dtype of reduction, which cannot be replaced. "
            "Shard over the ranks of a node alone and give mesh=(nodes, ranks) to have these narrow too."
        )


def _install(block: FSDPModule, made: Gradients, comm: ReduceScatter, across: Link | None) -> None:
    # Undo an earlier `distribute`.
    for method in block.__dict__.pop(CHANGED, ()):
        getattr(block, method)(TORCHS[method]())
    if made.reduce == "sum" or made.numbers != "16bit":
        # torch's alternative for a mean, PREMUL_SUM, is not implemented in gloo.
        _set(block, "set_force_sum_reduction_for_comms", True)
    if made.reduce == "sum":
        _set(block, "set_gradient_divide_factor", 1.0)
    try:
        if made.numbers != "16bit":
            _set(block, "set_custom_reduce_scatter", comm)
        if across is not None:
            _set(block, "set_all_reduce_hook", partial(_join, made, across))
    except ValueError as error:
        raise ConfigError(
            f"distribute: {error} Shard each module over one mesh.", code="distribute.one-mesh"
        ) from error


def _set(block: FSDPModule, method: str, value: Any) -> None:
    if not hasattr(block, method):
        raise ConfigError(
            f"distribute: torch {torch.__version__} has no FSDPModule.{method}, which these gradient messages need. "
            'Install a newer torch, or use gradients="16bit" with reduce="mean".',
            code="distribute.old-torch",
        )
    getattr(block, method)(value)
    block.__dict__.setdefault(CHANGED, []).append(method)


def _own_parameters(prefix: str, block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `block` outside its inner FSDP2 modules, in FSDP2's layout order."""
    inner = [f"{name}." for name, module in block.named_modules() if name and isinstance(module, FSDPModule)]
    for name, parameter in block.named_parameters():
        if not name.startswith(tuple(inner)):
            yield f"{prefix}.{name}" if prefix else name, parameter


def _groups(parameters: Parameters) -> list[dist.ProcessGroup]:
    """Return the process group of each mesh axis of the first DTensor; [] without DTensors."""
    for _, parameter in parameters:
        if isinstance(parameter, DTensor):
            return [parameter.device_mesh.get_group(axis) for axis in range(parameter.device_mesh.ndim)]
    return []


def _check_mesh(own: Parameters, mesh: DeviceMesh) -> None:
    across, within = (dist.get_process_group_ranks(mesh.get_group(axis)) for axis in (0, 1))
    axes = [dist.get_process_group_ranks(group) for group in _groups(own)]
    if own and (within not in axes or (across in axes and across != within)):
        raise ConfigError(
            f"distribute: {own[0][0]} lies on a mesh whose axes have the ranks {axes}; with mesh {list(mesh.mesh.shape)} it should be "
            f"sharded over the ranks of a node, {within}, and not over {across}. "
            "Call fully_shard(module, mesh=mesh[the last axis's name]), or leave mesh out.",
            code="distribute.mesh-axes",
        )


def _is_hsdp(parameter: Tensor) -> bool:
    """Return True for parameters of HSDP: replicated along the first mesh axis.

    Tensor parallelism replicates too, but on the last axis.
    """
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1 and parameter.placements[0].is_replicate()


def _join(made: Gradients, across: Link, shard: Tensor) -> None:
    """All-reduce hook: combine the shard with the same shard of the other nodes, in place."""
    joined = across.sum(shard) if made.numbers == "16bit" else messages.all_reduce(shard, across)
    # FSDP2 itself divides only by the number of ranks in the node.
    shard.copy_(joined / across.size if made.reduce == "mean" else joined)


class FsdpReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP2 module."""

    def __init__(self, made: Gradients, name: str, own: Parameters, across: Link | None) -> None:
        self.made, self.name, self.own, self.across = made, name, own, across
        self.layouts: dict[Link, tuple[Pieces, tuple[Link, ...]]] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ConfigError(
                f"gradient messages: FSDP2 asks for {op} in {self.name or 'the model'}, but narrow messages are summed. "
                "Call set_force_sum_reduction_for_comms(True) after whatever turned it off.",
                code="gradient-messages.reduction",
            )
        link = self.made.link(group)
        rows = input_tensor.view(link.size, -1)
        if link not in self.layouts:
            self.layouts[link] = self.pieces(link), self.elsewhere(link)
        pieces, elsewhere = self.layouts[link]
        # Some parameters have no gradient this time, or torch's layout differs: use one scale for
        # all.
        if pieces.numel != rows.numel():
            pieces = Pieces((_whole(self.name),), (rows.shape[1],), repeats=link.size)
        output_tensor.copy_(self.made.reduce_scatter(rows, pieces, link, elsewhere))

    def pieces(self, link: Link) -> Pieces:
        """Return the layout of a message in which every parameter has a gradient."""
        sizes = {name: _shard_numel(parameter, link) for name, parameter in self.own if parameter.numel()}
        return Pieces(tuple(sizes), tuple(sizes.values()), repeats=link.size)

    def elsewhere(self, link: Link) -> tuple[Link, ...]:
        """Return links to ranks with replicas or other shards of the same parameters.

        These are HSDP replicas, tensor-parallel ranks and other nodes; they share mu of "fp8-lm".
        """
        ranks = set(dist.get_process_group_ranks(link.group))
        groups = [group for group in _groups(self.own) if not ranks >= set(dist.get_process_group_ranks(group))]
        links = tuple(self.made.link(group) for group in groups)
        return (*links, self.across) if self.across else links


def _shard_numel(parameter: Tensor, link: Link) -> int:
    """Return the padded shard size of a parameter over the link's ranks, in elements.

    Axes sharded by other groups (tensor parallelism) are divided first.
    """
    sizes = list(parameter.shape) or [1]
    if isinstance(parameter, DTensor):
        groups = zip(_groups([("", parameter)]), parameter.placements, strict=True)
        for group, placement in groups:
            same = dist.get_process_group_ranks(group) == dist.get_process_group_ranks(link.group)
            if isinstance(placement, Shard) and not same:
                sizes[placement.dim] = -(-sizes[placement.dim] // group.size())
    return -(-sizes[0] // link.size) * math.prod(sizes[1:])


def _whole(block: str) -> str:
    """Return the name of a block's concatenated gradients; no parameter has such a name."""
    return f"{block}.*" if block else "*"
