"""8-bit gradient reduction for FSDP2: a custom reduce-scatter, and an all-reduce across nodes.

FSDP2 calls the reduce-scatter with [ranks, columns]. Row r holds, parameter after parameter, the
gradient elements that rank r owns, padded with zero rows so that all ranks own equally many. FSDP2
divides by the number of ranks afterwards, and runs the reduction on its own streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from narrowgauge.distributed import messages
from narrowgauge.distributed.shared_scale import BufferLayout
from narrowgauge.distributed.torch_private import DefaultReduceScatter, ReduceScatter
from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.distributed.gradient_state import Gradients
    from narrowgauge.distributed.messages import Link

Parameters = Sequence[tuple[str, Tensor]]
# Key in the `__dict__` of an FSDP2 module: the setters that `distribute` has called on it.
SETTERS_CALLED = "_narrowgauge_setters_called"
# torch's defaults, to undo those settings. A second `distribute` without this left gradients summed
# or 8-bit, silently.
TORCH_DEFAULTS: dict[str, Callable[[], Any]] = {
    "set_force_sum_reduction_for_comms": lambda: False,
    "set_gradient_divide_factor": lambda: None,
    "set_custom_reduce_scatter": DefaultReduceScatter,
    "set_all_reduce_hook": lambda: None,
}


def install(model: nn.Module, gradients: Gradients, mesh: DeviceMesh | None) -> None:
    """Install the collectives on all FSDP2 modules; see `gradients.install`."""
    blocks = [
        (name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)
    ]
    gradients.names = (
        *(name for name, _ in model.named_parameters()),
        *(_concatenated_name(name) for name, _ in blocks),
    )
    across = None if mesh is None else gradients.link(mesh.get_group(0))
    for name, block in blocks:
        parameters = [
            (at, it) for at, it in _own_parameters(name, cast(nn.Module, block)) if it.requires_grad
        ]
        if mesh is not None:
            _check_mesh(parameters, mesh)
        _install(block, gradients, FsdpReduceScatter(gradients, name, parameters, across), across)
    first = next(model.parameters())
    gradients.bytes_per_element = gradients.bytes_to_sum(first)
    if mesh is not None:
        gradients.bytes_between_nodes = 2 * gradients.bytes_of_sum(first) / mesh.size(1)
    suffix = f", then all-reduce over {across.size} nodes" if across else ""
    gradients.descriptions.append(
        f"gradients: {gradients.describe_format()}; reduce-scatter{suffix}, {gradients.reduce}"
    )
    if gradients.format != "16bit" and any(_is_hsdp(parameter) for parameter in model.parameters()):
        gradients.descriptions.append(
            "gradients between HSDP's copies: torch's all-reduce of the shards in the dtype of reduction, which cannot be replaced. "
            "Shard over the ranks of a node alone and give mesh=(nodes, ranks) to have these narrow too."
        )


def _install(
    block: FSDPModule, gradients: Gradients, comm: ReduceScatter, across: Link | None
) -> None:
    # Undo an earlier `distribute`.
    for method in block.__dict__.pop(SETTERS_CALLED, ()):
        getattr(block, method)(TORCH_DEFAULTS[method]())
    if gradients.reduce == "sum" or gradients.format != "16bit":
        # torch's alternative for a mean, PREMUL_SUM, is not implemented in gloo.
        _set(block, "set_force_sum_reduction_for_comms", True)
    if gradients.reduce == "sum":
        _set(block, "set_gradient_divide_factor", 1.0)
    try:
        if gradients.format != "16bit":
            _set(block, "set_custom_reduce_scatter", comm)
        if across is not None:
            _set(block, "set_all_reduce_hook", partial(_all_reduce_across_nodes, gradients, across))
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
    block.__dict__.setdefault(SETTERS_CALLED, []).append(method)


def _own_parameters(prefix: str, block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of `block` outside its inner FSDP2 modules, in FSDP2's layout order."""
    inner = [
        f"{name}."
        for name, module in block.named_modules()
        if name and isinstance(module, FSDPModule)
    ]
    for name, parameter in block.named_parameters():
        if not name.startswith(tuple(inner)):
            yield f"{prefix}.{name}" if prefix else name, parameter


def _groups(parameters: Parameters) -> list[dist.ProcessGroup]:
    """Return the process group of each mesh axis of the first DTensor; [] without DTensors."""
    for _, parameter in parameters:
        if isinstance(parameter, DTensor):
            return [
                parameter.device_mesh.get_group(axis) for axis in range(parameter.device_mesh.ndim)
            ]
    return []


def _check_mesh(parameters: Parameters, mesh: DeviceMesh) -> None:
    across, within = (dist.get_process_group_ranks(mesh.get_group(axis)) for axis in (0, 1))
    axes = [dist.get_process_group_ranks(group) for group in _groups(parameters)]
    if parameters and (within not in axes or (across in axes and across != within)):
        raise ConfigError(
            f"distribute: {parameters[0][0]} lies on a mesh whose axes have the ranks {axes}; with mesh {list(mesh.mesh.shape)} it "
            f"should be sharded over the ranks of a node, {within}, and not over {across}. "
            "Call fully_shard(module, mesh=mesh[the last axis's name]), or leave mesh out.",
            code="distribute.mesh-axes",
        )


def _is_hsdp(parameter: Tensor) -> bool:
    """Return True for parameters of HSDP: replicated along the first mesh axis.

    Tensor parallelism replicates too, but on the last axis.
    """
    return (
        isinstance(parameter, DTensor)
        and parameter.device_mesh.ndim > 1
        and parameter.placements[0].is_replicate()
    )


def _all_reduce_across_nodes(gradients: Gradients, across: Link, shard: Tensor) -> None:
    """All-reduce hook: combine the shard with the same shard of the other nodes, in place."""
    reduced = (
        across.all_reduce_sum(shard)
        if gradients.format == "16bit"
        else messages.all_reduce(shard, across)
    )
    # FSDP2 itself divides only by the number of ranks in the node.
    shard.copy_(reduced / across.size if gradients.reduce == "mean" else reduced)


class FsdpReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP2 module."""

    def __init__(
        self, gradients: Gradients, name: str, parameters: Parameters, across: Link | None
    ) -> None:
        self.gradients, self.name, self.parameters, self.across = (
            gradients,
            name,
            parameters,
            across,
        )
        self.layouts: dict[Link, tuple[BufferLayout, tuple[Link, ...]]] = {}

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
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
        link = self.gradients.link(group)
        rows = input_tensor.view(link.size, -1)
        if link not in self.layouts:
            self.layouts[link] = self.layout(link), self.other_links(link)
        layout, other_links = self.layouts[link]
        # Some parameters have no gradient this time, or torch's layout differs: use one scale for
        # all.
        if layout.numel != rows.numel():
            layout = BufferLayout(
                (_concatenated_name(self.name),), (rows.shape[1],), repeats=link.size
            )
        output_tensor.copy_(self.gradients.reduce_scatter(rows, layout, link, other_links))

    def layout(self, link: Link) -> BufferLayout:
        """Return the layout of a message in which every parameter has a gradient."""
        sizes = {
            name: _shard_numel(parameter, link)
            for name, parameter in self.parameters
            if parameter.numel()
        }
        return BufferLayout(tuple(sizes), tuple(sizes.values()), repeats=link.size)

    def other_links(self, link: Link) -> tuple[Link, ...]:
        """Return links to ranks with replicas or other shards of the same parameters.

        These are HSDP replicas, tensor-parallel ranks and other nodes; they share mu of "fp8-lm".
        """
        ranks = set(dist.get_process_group_ranks(link.group))
        groups = [
            group
            for group in _groups(self.parameters)
            if not ranks >= set(dist.get_process_group_ranks(group))
        ]
        links = tuple(self.gradients.link(group) for group in groups)
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


def _concatenated_name(block: str) -> str:
    """Return the name of a block's concatenated gradients; no parameter has such a name."""
    return f"{block}.*" if block else "*"
