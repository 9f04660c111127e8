"""DTensor parameters: the local block of a rank, and states with the placements of the parameter.

A step computes on local tensors alone and is bit-identical to the step of one process, for three
reasons:

    format    the shape of the whole parameter decides if a state is quantized
    tiles     a tile lies within a row, so shards of the first axis contain whole tiles; shards of
              other axes only if they begin at multiples of a tile, see `fits`
    noise     random numbers count elements by their position in the whole parameter (`Part`)

The code uses the public interface of torch.distributed.tensor with two exceptions (torch 2.13). The
private placement `_StridedShard` is recognized by its `split_factor`; FSDP2 gives it to a parameter
whose axis tensor parallelism has already sharded. DTensors with local tensors on another device
than the mesh are built from their private spec.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_PLAIN = Tensor.__torch_dispatch__


@dataclass(frozen=True, kw_only=True)
class Part:
    """Block of a parameter, read as [rows, columns], on this rank.

    columns      columns of the whole parameter
    row, column  position of the block's first element in the whole parameter
    """

    columns: int
    row: int = 0
    column: int = 0

    def row_length(self, tile: int) -> int:
        """Elements of a row, rounded up to whole tiles."""
        return -(-self.columns // tile) * tile

    def first(self, tile: int) -> int:
        """Index of the first element in the whole parameter, rows rounded up to whole tiles."""
        return self.row * self.row_length(tile) + self.column


def is_sharded(x: Tensor) -> bool:
    """Return True for a DTensor."""
    # Fast path. torch.distributed.tensor is never imported here: without the import there is no
    # DTensor.
    if type(x).__torch_dispatch__ is _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (the same memory), or any other tensor unchanged."""
    if type(x).__torch_dispatch__ is _PLAIN or not is_sharded(x):
        return x
    with torch.no_grad():
        found = x.to_local()  # type: ignore[attr-defined]
    # An asynchronous collective may still be in flight.
    return found.wait() if hasattr(found, "wait") else found


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the local part of a DTensor's gradient, with the placements of the parameter.

    Partial sums are reduced, and other placements are redistributed.
    """
    gradient = parameter.grad
    if gradient is None or not is_sharded(parameter):
        return gradient
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return local(gradient)


def refuse(parameter: Tensor, whole: bool = False) -> str:
    """Reason why the shards of a parameter cannot be stepped (a sentence), or ''.

    whole: True if the rule needs whole matrices.
    """
    if not is_sharded(parameter):
        return ""
    placements = parameter.placements  # type: ignore[attr-defined]
    if parameter.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return "this rank is not in its mesh. Give the optimizer of a rank the parameters that it holds."
    if any(each.is_partial() for each in placements):
        return (
            f"its placements {_words(placements)} hold sums that are not added up yet, so no rank has the weight. Redistribute it to "
            "Shard or Replicate before the optimizer is built."
        )
    if whole and any(_cuts_axis(each) for each in placements):
        return (
            f"its rule works on whole matrices, and with the placements {_words(placements)} no rank holds one. Keep it whole on every "
            "rank, or step it by narrowgauge.optim.zero, which gives whole tensors to ranks."
        )
    sizes = tuple(size for _, size in _block(parameter))
    if sizes != tuple(local(parameter).shape):
        return (
            f"of its shape {list(parameter.shape)} the placements {_words(placements)} give this rank {list(sizes)}, and it holds "
            f"{list(local(parameter).shape)}. Choose sizes that the mesh divides."
        )
    return ""


def part_of(parameter: Tensor) -> Part:
    """Position of the local part in the whole parameter.

    If shards cut inside a row's trailing axes, a row is not one run of elements, and only its first
    position is given.
    """
    shape = parameter.shape
    columns = math.prod(shape[1:]) if len(shape) > 1 else parameter.numel()
    if not is_sharded(parameter):
        return Part(columns=columns)
    offsets = [offset for offset, _ in _block(parameter)]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if len(shape) < 2:
        return Part(columns=columns, column=offsets[0] if offsets else 0)
    column = sum(offset * stride for offset, stride in zip(offsets[1:], strides[1:], strict=True))
    return Part(columns=columns, row=offsets[0], column=column)


def fits(parameter: Tensor, tile: int) -> bool:
    """Return True if every rank's shard contains whole tiles.

    Scales and packed 4-bit codes must also be cut at the boundaries of the shards.
    """
    if not is_sharded(parameter) or parameter.ndim < 2:
        return True
    if any(_cuts_axis(each) and each.dim > 1 for each in parameter.placements):  # type: ignore[attr-defined]
        return False
    ways, inner = [ways for _, ways in _cuts_of(parameter, 1)], math.prod(parameter.shape[2:])
    if not ways:
        return True
    columns = [(offset * inner, size * inner) for offset, size in pieces(parameter.shape[1], ways)]
    if any(offset % tile for offset, size in columns if size):
        return False
    whole = parameter.shape[1] * inner
    return all(
        _lengths([(offset // unit, -(-size // unit)) for offset, size in columns])
        == _lengths(pieces(-(-whole // unit), ways))
        for unit in (tile, 2)
    )


def pieces(size: int, ways: Iterable[int]) -> list[tuple[int, int]]:
    """(offset, size) of each shard of an axis, cut as torch.chunk cuts.

    The axis is cut into `ways[0]` pieces, each piece into `ways[1]`, and so on.
    """
    found = [(0, size)]
    for count in ways:
        found = [piece for offset, length in found for piece in _chunks(offset, length, count)]
    return found


def wrapped(x: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
    """Wrap a state's local tensor into a DTensor with the parameter's placements.

    shape: shape of the whole state tensor. Returns x itself for a plain parameter.
    """
    if not is_sharded(parameter):
        return x
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if x.device.type == mesh.device_type:
        return DTensor.from_local(
            x, mesh, placements, run_check=False, shape=shape, stride=_strides(shape)
        )
    # With CPU offload of FSDP2, `from_local` would move x to the mesh's devices.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, _strides(shape), x.dtype))
    return DTensor(x, spec, requires_grad=False)


def local_part(x: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a whole state tensor.

    Its axes are the parameter's axes, or [rows, positions along the columns] such as scales.
    """
    for axis in range(x.ndim):
        offset, size = _own_piece(parameter, axis, x.shape[axis])
        x = x.narrow(axis, offset, size)
    return x


def room(x: Tensor, parameter: Tensor) -> Tensor:
    """Return an uninitialized state tensor with the dtype and shape of x.

    For a DTensor parameter it is a DTensor with this rank's part.
    """
    sizes = (
        [_own_piece(parameter, axis, size)[1] for axis, size in enumerate(x.shape)]
        if is_sharded(parameter)
        else x.shape
    )
    return wrapped(
        torch.empty(sizes, dtype=x.dtype, device=local(parameter).device), parameter, x.shape
    )


def gathered(x: Tensor) -> Tensor:
    """Gather a DTensor on every rank of its mesh."""
    if not is_sharded(x):
        return x
    # Collectives support neither float8 nor int16, so the tensor travels as bytes.
    own = local(x).contiguous().to(x.device_mesh.device_type)  # type: ignore[attr-defined]
    bytes_of, shape = (
        own.unsqueeze(-1).view(torch.uint8),
        torch.Size((*x.shape, own.element_size())),
    )
    return wrapped(bytes_of, x, shape).full_tensor().view(x.dtype).squeeze(-1)  # type: ignore[attr-defined]


def without_partial_sums(x: Tensor) -> Tensor:
    """Reduce a DTensor's partial sums, if it has any."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if each.is_partial() else each for each in x.placements]  # type: ignore[attr-defined]
    return x if placements == list(x.placements) else x.redistribute(x.device_mesh, placements)  # type: ignore[attr-defined]


def sum_of_shards(x: Tensor, cut_by: Any) -> Tensor:
    """Sum of the ranks' 0-d tensors over the sharding axes of a mesh.

    cut_by: result of `cut_of`. All ranks add in the same order, so all get the same bits.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, cut = cut_by
    count = math.prod(mesh.size(axis) for axis, is_cut in enumerate(cut) if is_cut)
    placements = [Shard(0) if is_cut else Replicate() for is_cut in cut]
    spread = DTensor.from_local(
        x.reshape(1), mesh, placements, run_check=False, shape=torch.Size((count,)), stride=(1,)
    )
    return spread.full_tensor().sum()


def sum_over_mesh(x: Tensor, like: Tensor) -> Tensor:
    """Sum of the 0-d tensors of all ranks of a DTensor's mesh."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = like.device_mesh  # type: ignore[attr-defined]
    size = torch.Size((mesh.size(),))
    spread = DTensor.from_local(
        x.reshape(1), mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=size, stride=(1,)
    )
    return spread.full_tensor().sum()


def meshes_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one DTensor for each mesh and set of sharding axes, in order."""
    found: dict[Any, Tensor] = {}
    for x in tensors:
        if is_sharded(x):
            found.setdefault(cut_of(x), x)
    return list(found.values())


def cut_of(x: Tensor) -> Any:
    """Key of the ranks over which a DTensor's sums go: (mesh, flags of its sharding axes)."""
    return x.device_mesh, tuple(_cuts_axis(each) for each in x.placements)  # type: ignore[attr-defined]


def same_placement(x: Tensor, parameter: Tensor) -> bool:
    """Return True if two DTensors have the same mesh and placements."""
    return bool(x.device_mesh == parameter.device_mesh and x.placements == parameter.placements)  # type: ignore[attr-defined]


def _cuts_axis(placement: Any) -> bool:
    return hasattr(placement, "dim")


def _cuts_of(parameter: Tensor, axis: int) -> list[tuple[int, int]]:
    """(mesh axis, its size) of the mesh axes that shard a tensor axis, in the order of the cuts.

    A strided shard comes first in the mesh but cuts last.
    """
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for place, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if _cuts_axis(placement) and placement.dim % max(parameter.ndim, 1) == axis:
            (strided if hasattr(placement, "split_factor") else plain).append(
                (place, mesh.size(place))
            )
    return plain + strided[::-1]


def _own_piece(parameter: Tensor, axis: int, size: int) -> tuple[int, int]:
    """(offset, size) of this rank's shard of an axis of length `size`."""
    coordinate = parameter.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:
        return 0, 0
    offset = 0
    for place, ways in _cuts_of(parameter, axis):
        begin, size = _chunks(0, size, ways)[coordinate[place]]
        offset += begin
    return offset, size


def _block(parameter: Tensor) -> list[tuple[int, int]]:
    """(offset, size) of this rank's shard along each axis."""
    return [_own_piece(parameter, axis, size) for axis, size in enumerate(parameter.shape)]


def _chunks(offset: int, size: int, count: int) -> list[tuple[int, int]]:
    length = -(-size // count)
    begins = [min(place * length, size) for place in range(count + 1)]
    return [(offset + begin, end - begin) for begin, end in pairwise(begins)]


def _lengths(found: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Set the offsets of empty shards to 0, so that lists compare equal."""
    return [(offset if size else 0, size) for offset, size in found]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _words(placements: Sequence[Any]) -> str:
    return f"({', '.join(map(str, placements))})"
