"""A Linear on DTensors, computed on local tensors: casts, caches and kernels see plain tensors.

One row per placement of the weight, for each mesh axis. x is redistributed first if it differs.

                   weight      x            y            gradient of x   of weight
    column-wise    Shard(0)    Replicate    Shard(last)  Partial         Shard(0)
    row-wise       Shard(1)    Shard(last)  Partial      Shard(last)     Shard(1)
    replicated     Replicate   Replicate    Replicate    Replicate       Replicate
    tokens         Replicate   Shard(i)     Shard(i)     Shard(i)        summed here, Replicate

The parallel style that requests another placement of y reduces Partial. A row-wise bias is added on
the first rank alone, before y is rounded. Its gradient comes from the whole y. Current scaling and
tiles use the local shard. Learned steps are equal on all ranks. Their gradients are summed over the
ranks that hold a part of x or of the weight.

QLinear.forward imports this module on the first DTensor, since torch.distributed.tensor takes a
second to import. torch.compile traces it.

`DTensor.to_local` and `from_local` recompute layouts in both directions, which is half of their
cost. In eager mode each layout is computed once instead, with DTensor's constructor and its
DTensorSpec, which are private to torch (checked on 2.13). Compiled code uses the public functions.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

Placements = tuple[Placement, ...]


class Locals:
    """The local tensors of one call, and the placement of its result.

    x, weight, bias  plain tensors; bias is zero on ranks that do not add it
    owner            the tensor that identifies x for caches that layers share
    placements       of y
    shape            global shape of y
    partly           per mesh axis, True if a rank holds a part of x or weight, or of their
                     gradients
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None = None
    ) -> None:
        """Redistribute x if needed. state: a tensor of the recipe's state, which is checked."""
        if isinstance(state, DTensor):
            raise ConfigError(
                "linear: amax histories or learned steps of a recipe are DTensors, as distribute_module makes of all buffers of a model. "
                "Parallelise with parallelize_module, which leaves them alone, or convert afterwards.",
                code="linear.distributed-buffers",
            )
        if not isinstance(x, DTensor) or not isinstance(weight, DTensor):
            named = ("x", "weight") if isinstance(x, DTensor) else ("weight", "x")
            raise ConfigError(
                f"linear: {named[0]} is a DTensor and {named[1]} is not. Parallelise the layer with a style that turns both into "
                "DTensors, as ColwiseParallel and RowwiseParallel do, or hand it local tensors.",
                code="linear.mixed-dtensors",
            )
        self.mesh: DeviceMesh = weight.device_mesh
        if x.device_mesh != self.mesh:
            raise ConfigError(
                f"linear: x lies on {x.device_mesh}, weight on {self.mesh}. Redistribute x to the mesh of the weight.",
                code="linear.mesh",
            )
        last = x.ndim - 1
        laid = [
            _laid(each, its, last)
            for each, its in zip(x.placements, weight.placements, strict=True)
        ]
        wanted = tuple(each[0] for each in laid)
        if wanted != x.placements:
            x = x.redistribute(placements=wanted)
        self.placements: Placements = tuple(each[1] for each in laid)
        self.shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        self.x = local_part(x, tuple(each[2] for each in laid))
        self.owner = self.x if torch.compiler.is_compiling() else owner_of(x)
        # Tokens are sharded and the weight is replicated: sum its gradient here, since optimizers
        # do not reduce a Partial gradient.
        token_axes = tuple(
            its.is_replicate() and each.is_shard()
            for each, its in zip(wanted, weight.placements, strict=True)
        )
        self.weight = self.summed(local_part(weight, weight.placements), token_axes)
        self.bias = None if bias is None else self._bias(bias, token_axes)
        self.partly = tuple(
            each.is_shard() or its.is_shard()
            for each, its in zip(wanted, weight.placements, strict=True)
        )
        self._wholes = {"x": (self.x, x), "w": (self.weight, weight)}

    def _bias(self, bias: Tensor, token_axes: tuple[bool, ...]) -> Tensor:
        if not isinstance(bias, DTensor):
            raise ConfigError(
                "linear: weight is a DTensor and bias is not. Distribute both.",
                code="linear.bias-placement",
            )
        own = self.summed(local_part(bias, bias.placements), token_axes)
        others = [
            its.is_partial() and self.mesh.get_local_rank(axis) > 0
            for axis, its in enumerate(self.placements)
        ]
        return _Zeros.apply(own) if any(others) else own

    def summed(self, local: Tensor, axes: tuple[bool, ...]) -> Tensor:
        """Return local, equal on all ranks of the mesh axes. Sum its gradient over these axes."""
        if not any(axes):
            return local
        there = (Replicate(),) * len(axes)
        back = tuple(Partial() if axis else Replicate() for axis in axes)
        return local_part(DTensor.from_local(local, self.mesh, there, run_check=False), back)

    def step(self, step: Tensor | None, role: str) -> Tensor | None:
        """A learned step of "x" or "w" with the gradient of the whole tensor."""
        if step is None:
            return None
        part, whole = self._wholes[role]
        # LSQ divides by sqrt(numel), and the local gradient by sqrt(numel of the part). The factor
        # turns the second into the first, for the whole tensor.
        share = part.numel() / max(whole.numel(), 1)
        everywhere = self.summed(step, self.partly)
        return everywhere.detach() + (everywhere - everywhere.detach()) * share**0.5

    def wrap(self, y: Tensor) -> Tensor:
        """Wrap the local result as a DTensor."""
        if torch.compiler.is_compiling():
            strides = _strides(self.shape)
            return DTensor.from_local(
                y, self.mesh, self.placements, run_check=False, shape=self.shape, stride=strides
            )
        found: Tensor = _Whole.apply(y, _spec(self.mesh, self.placements, self.shape, y.dtype))
        return found


def _laid(x: Placement, weight: Placement, last: int) -> tuple[Placement, Placement, Placement]:
    """Placements of (x, y, gradient of x) on one mesh axis, by the table of the module docstring.

    last  the contracted axis of x
    """
    # Subclasses of Shard (strided shards) have another layout and are refused below.
    if weight.is_shard(0) and type(weight) is Shard:
        return Replicate(), Shard(last), Partial()
    if weight.is_shard(1) and type(weight) is Shard:
        return Shard(last), Partial(), Shard(last)
    if not weight.is_replicate():
        raise ConfigError(
            f"linear: the weight lies as {weight!r} on an axis of the mesh; a Linear multiplies by Shard(0), Shard(1) or Replicate. "
            "Redistribute it, or parallelise the layer with ColwiseParallel or RowwiseParallel.",
            code="linear.weight-placement",
        )
    if x.is_shard() and not x.is_shard(last):
        return x, x, x
    return Replicate(), Replicate(), Replicate()


def local_part(x: DTensor, gradient: Placements | None = None) -> Tensor:
    """Return this rank's part of x, after pending collectives have finished.

    gradient  placements of the gradient of the result; None: as x
    """
    if torch.compiler.is_compiling():
        local = x.to_local(grad_placements=gradient or x.placements)
        return _Waited.apply(local) if type(local).__name__ == "AsyncCollectiveTensor" else local
    # Without autograd no layout of a gradient is needed.
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _waited(x._local_tensor)
    own: DTensorSpec = x._spec
    is_same = (gradient is None or gradient == own.placements) and own.stride == _strides(own.shape)
    spec = copy(own) if is_same else _spec(own.mesh, gradient or own.placements, own.shape, x.dtype)
    found: Tensor = _Part.apply(x, spec)
    return found


def plain(x: Tensor) -> Tensor:
    """Return x, or this rank's part of a DTensor."""
    return local_part(x) if isinstance(x, DTensor) else x


def cut_tiles(weight: Tensor, recipe: Recipe) -> str:
    """Describe the axis of the weight that ranks cut within a tile of the recipe; '' if none."""
    if not isinstance(weight, DTensor):
        return ""
    casts = {
        cast
        for gemm in recipe.gemms().values()
        for cast in (gemm.lhs, gemm.rhs)
        if cast is not None
    }
    tiles = {size for cast in casts for size in cast.tile if size > 1}
    blocks = {gemm.rotate.block for gemm in recipe.gemms().values() if gemm.rotate is not None}
    found = []
    for axis, name in ((0, "rows"), (1, "columns")):
        ranks = 1
        for dim, placement in enumerate(weight.placements):
            ranks *= weight.device_mesh.size(dim) if placement.is_shard(axis) else 1
        each = -(-weight.shape[axis] // ranks)
        cut = sorted(size for size in tiles | blocks if each % size)
        if ranks > 1 and cut:
            found.append(
                f"{each} {name} on each of {ranks} ranks: the last tile of {' and of '.join(map(str, cut))} is shorter there"
            )
    return ", ".join(found)


def owner_of(x: DTensor) -> Tensor:
    """Return the tensor that identifies x in caches.

    `from_local` builds another DTensor for each reader, so the DTensor itself does not.
    """
    local: Tensor = x._local_tensor
    return local if local._base is None else local._base


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def _spec(
    mesh: DeviceMesh, placements: Placements, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """Layout of a contiguous DTensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, _strides(shape), dtype))


def _waited(local: Any) -> Tensor:
    found: Tensor = local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local
    return found


class _Part(torch.autograd.Function):
    """x's local tensor. The gradient is wrapped as a DTensor of `spec`."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        # Without a gradient, pass None on instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        local = _waited(x._local_tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else DTensor(
            gradient.contiguous(), ctx.spec, requires_grad=False
        ), None


class _Whole(torch.autograd.Function):
    """The DTensor of `spec` with local part y. Backward returns the local part of the gradient.

    If y is Partial, its gradient is the whole (Replicate) gradient.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return DTensor(y.view_as(y), spec, requires_grad=y.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        wanted = tuple(Replicate() if each.is_partial() else each for each in ctx.spec.placements)
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return _waited(gradient._local_tensor), None


class _Waited(torch.autograd.Function):
    """Wait for an asynchronous collective. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.wait()
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Zeros(torch.autograd.Function):
    """Zeros in place of a bias that another rank adds. The gradient passes to the bias."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
