"""8-bit gradient reduction for DistributedDataParallel, as a communication hook per bucket.

one group      bucket [ranks, columns] -> reduce-scatter -> all-gather
nodes x ranks  reduce-scatter in the node -> all-reduce across nodes -> all-gather in the node
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import messages
from narrowgauge.distributed.messages import TILE, Link
from narrowgauge.distributed.shared_scale import BufferLayout
from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.distributed.gradient_state import Gradients

Future = torch.futures.Future[Tensor]
# Key in the `__dict__` of a DistributedDataParallel.
HOOK = "_narrowgauge_hook"


class Bucket(Protocol):
    """The used part of `dist.GradBucket`: a flat buffer with the parameters' gradients in order."""

    def buffer(self) -> Tensor: ...
    def parameters(self) -> list[Tensor]: ...


def install(model: DistributedDataParallel, gradients: Gradients, mesh: DeviceMesh | None) -> None:
    """Install the hook on `model`; see `gradients.install`."""
    group = model.process_group
    within, across = _hops(gradients, group, mesh)
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    gradients.names = tuple(names.values())
    first = next(model.module.parameters())
    gradients.bytes_per_element = gradients.bytes_to_sum(first) + gradients.bytes_of_sum(first)
    if across is not None and gradients.format != "16bit":
        gradients.bytes_between_nodes = 2 * gradients.bytes_of_sum(first) / within.size
    hops = _describe_hops(gradients, within, across)
    gradients.descriptions.append(
        f"gradients: {gradients.describe_format()}; {hops}, {gradients.reduce}"
    )
    if gradients.format != "16bit":
        _register(model, Fp8AllReduceHook(gradients, names, within, across))
    elif gradients.reduce == "sum":
        _register(model, lambda bucket: _sum_by_torch(gradients, group, bucket))
    elif isinstance(model.__dict__.get(HOOK), _CommunicationHook):
        # An earlier `distribute` left a hook, which DDP cannot remove: make it torch's default
        # mean.
        _register(model, lambda bucket: allreduce_hook(group, bucket))


class Fp8AllReduceHook:
    """8-bit all-reduce of a bucket. On a GPU it runs on its own stream, beside backward."""

    def __init__(
        self, gradients: Gradients, names: Mapping[int, str], within: Link, across: Link | None
    ) -> None:
        self.gradients, self.names, self.within, self.across = gradients, names, within, across
        ranks = within.size * (across.size if across else 1)
        self.divisor = ranks if gradients.reduce == "mean" else 1
        self.streams: dict[torch.device, torch.Stream] = {}

    def __call__(self, bucket: Bucket) -> Future:
        self.gradients.was_reduced = True
        buffer = bucket.buffer()
        on_cpu = buffer.device.type == "cpu"
        with nullcontext() if on_cpu else self.side_stream(buffer.device):
            buffer.copy_(self.reduced(buffer, self.layout(bucket)))
            done = Future(devices=None if on_cpu else [buffer.device])
            done.set_result(buffer)
        return done

    def side_stream(self, device: torch.device) -> torch.Stream:
        """Return the hook's stream, synchronized with the current stream."""
        if device not in self.streams:
            self.streams[device] = torch.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream

    def reduced(self, flat: Tensor, layout: BufferLayout) -> Tensor:
        """Return the bucket's sum or mean over ranks, float32, bit-identical on every rank."""
        within, across = self.within, self.across
        # Columns are a multiple of TILE times the number of nodes. The all-gather then uses the
        # same tiles as the all-reduce across nodes, and quantizing E4M3 values again in the same
        # tiles is exact.
        rows = messages.as_rows(flat, within.size, TILE * across.size if across else 1)
        padding = rows.numel() - flat.numel()
        # Padding zeros count as part of the last tensor.
        layout = BufferLayout(layout.names, (*layout.lengths[:-1], layout.lengths[-1] + padding))
        shard = self.gradients.reduce_scatter(rows, layout, within, (across,) if across else ())
        # Divide before the second quantization: the mean is rounded once on its way back.
        shard = shard / self.divisor
        if across is not None:
            shard = messages.all_reduce(shard, across)
        return messages.gather(shard, within).reshape(-1)[: flat.numel()]

    def layout(self, bucket: Bucket) -> BufferLayout:
        parameters = [parameter for parameter in bucket.parameters() if parameter.numel()]
        names = tuple(self.names[id(parameter)] for parameter in parameters)
        return BufferLayout(names, tuple(parameter.numel() for parameter in parameters))


def _sum_by_torch(gradients: Gradients, group: dist.ProcessGroup, bucket: Bucket) -> Future:
    gradients.was_reduced = True
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class _CommunicationHook:
    """Mutable target of DDP's communication hook.

    DDP accepts one hook for its lifetime, but a model may be distributed again with other settings.
    """

    def __init__(self, call: Callable[[Bucket], Future]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied model has no hook registered, so its entry becomes an empty dict.
        return dict, ()


def _register(model: DistributedDataParallel, call: Callable[[Bucket], Future]) -> None:
    if isinstance(before := model.__dict__.get(HOOK), _CommunicationHook):
        before.call = call
        return
    hook = _CommunicationHook(call)

    # No annotations: DDP compares them with classes, which `from __future__ import annotations`
    # turns into strings. A plain function: DDP reads its `__name__`.
    def narrowgauge_gradients(state, bucket):  # type: ignore[no-untyped-def]
        return hook.call(bucket)

    try:
        model.register_comm_hook(None, narrowgauge_gradients)
    except RuntimeError as error:
        raise ConfigError(
            f"distribute: this DistributedDataParallel refuses a communication hook: {str(error).splitlines()[0]} "
            "Register none yourself.",
            code="distribute.comm-hook",
        ) from error
    model.__dict__[HOOK] = hook


def _hops(
    gradients: Gradients, group: dist.ProcessGroup, mesh: DeviceMesh | None
) -> tuple[Link, Link | None]:
    """Return the link of the reduce-scatter, and the link across nodes (None for one group)."""
    if mesh is None:
        return gradients.link(group), None
    given, found = sorted(mesh.mesh.flatten().tolist()), sorted(dist.get_process_group_ranks(group))
    if given != found:
        raise ConfigError(
            f"distribute: mesh {list(mesh.mesh.shape)} has the ranks {given}, but the model's group has {found}. "
            "Give a mesh of the same ranks.",
            code="distribute.mesh-ranks",
        )
    return gradients.link(mesh.get_group(1)), gradients.link(mesh.get_group(0))


def _describe_hops(gradients: Gradients, within: Link, across: Link | None) -> str:
    if gradients.format == "16bit":
        return "all-reduce"
    if across is None:
        return f"reduce-scatter and all-gather over {within.size} ranks"
    return f"reduce-scatter over the {within.size} ranks of a node, all-reduce over {across.size} nodes, all-gather in the node"
