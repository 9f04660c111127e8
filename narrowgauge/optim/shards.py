"""Parameters that are DTensors: which block of them a rank holds, and states that are DTensors of the same placements.

A step computes on local tensors alone. What makes it the step of one process, bit for bit: whether a state is narrow is decided by the
shape of the whole parameter; a tile lies within a row, so shards of the first axis hold whole tiles; and random numbers count elements
by their place in the whole (`Part`). Shards of further axes hold whole tiles only where they begin at multiples of one: see `fits`.

Public interface of torch.distributed.tensor, but for two things (torch 2.13): the private placement `_StridedShard`, which FSDP2 gives
to a parameter whose axis tensor parallelism has cut before, is told by its `split_factor`; and DTensors whose part lies on another
device than the mesh are made from their private spec.
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
    """The block of a parameter, read as [rows, columns], that this rank holds.

    columns      of the whole parameter
    row, column  of the block's first element within it
    """

    columns: int
    row: int = 0
    column: int = 0

    def row_length(self, tile: int) -> int:
        """Elements of a row, counted by whole tiles."""
        return -(-self.columns // tile) * tile

    def first(self, tile: int) -> int:
        """The place of the first element within the whole parameter, counted by whole tiles."""
        return self.row * self.row_length(tile) + self.column


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor; the class is looked for only where something has imported it."""
    if type(x).__torch_dispatch__ is _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same memory; any other tensor as it is."""
    if type(x).__torch_dispatch__ is _PLAIN or not is_sharded(x):
        return x
    with torch.no_grad():
        found = x.to_local()  # type: ignore[attr-defined]
    return found.wait() if hasattr(found, "wait") else found  # of a collective that is under way


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Of a DTensor what belongs to the local part; partial sums, and other placements than the parameter's, are brought to them."""
    gradient = parameter.grad
    if gradient is None or not is_sharded(parameter):
        return gradient
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(mesh, placements)  # type: ignore[attr-defined]
    return local(gradient)


def refuse(parameter: Tensor, whole: bool = False) -> str:
    """Why the shards of a parameter cannot be stepped, a sentence, or ''. whole: the rule needs all of a matrix."""
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
    """Where the local part of a parameter lies in the whole; where a row's elements are not one run, only where it begins."""
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
    """Whether every rank's shard holds whole tiles, and its scales and packed codes are cut where it is."""
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
    """(offset, size) of each shard of an axis that is cut into `ways[0]` pieces, each of those into `ways[1]`, ... as torch.chunk cuts."""
    found = [(0, size)]
    for count in ways:
        found = [piece for offset, length in found for piece in _chunks(offset, length, count)]
    return found


def wrapped(x: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
    """A state's local tensor as a DTensor of the parameter's placements; shape: of the whole. Of a plain parameter x itself."""
    if not is_sharded(parameter):
        return x
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if x.device.type == mesh.device_type:
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=_strides(shape))
    # Where FSDP2 offloads parameters to the CPU, `from_local` would move x to the mesh's devices.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, _strides(shape), x.dtype))
    return DTensor(x, spec, requires_grad=False)


def local_part(x: Tensor, parameter: Tensor) -> Tensor:
    """Of a whole state tensor, whose axes are the parameter's or [rows, something along the columns], what belongs to this rank."""
    for axis in range(x.ndim):
        offset, size = _own_piece(parameter, axis, x.shape[axis])
        x = x.narrow(axis, offset, size)
    return x


def room(x: Tensor, parameter: Tensor) -> Tensor:
    """A new tensor for a state of the type and shape of x: of a DTensor what belongs to this rank, as a DTensor of its placements."""
    sizes = (
        [_own_piece(parameter, axis, size)[1] for axis, size in enumerate(x.shape)]
        if is_sharded(parameter)
        else x.shape
    )
    return wrapped(torch.empty(sizes, dtype=x.dtype, device=local(parameter).device), parameter, x.shape)


def gathered(x: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank of its mesh; it travels as bytes, for collectives take neither float8 nor int16."""
    if not is_sharded(x):
        return x
    own = local(x).contiguous().to(x.device_mesh.device_type)  # type: ignore[attr-defined]
    bytes_of, shape = own.unsqueeze(-1).view(torch.uint8), torch.Size((*x.shape, own.element_size()))
    return wrapped(bytes_of, x, shape).full_tensor().view(x.dtype).squeeze(-1)  # type: ignore[attr-defined]


def without_partial_sums(x: Tensor) -> Tensor:
    """A DTensor whose partial sums, if it has any, are added up on every rank."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if each.is_partial() else each for each in x.placements]  # type: ignore[attr-defined]
    return x if placements == list(x.placements) else x.redistribute(x.device_mesh, placements)  # type: ignore[attr-defined]


def sum_of_shards(x: Tensor, cut_by: Any) -> Tensor:
    """The sum of the 0-d tensors that the ranks have, over those axes of a mesh that cut DTensors (`cut_of`); in one order on all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, cut = cut_by
    count = math.prod(mesh.size(axis) for axis, is_cut in enumerate(cut) if is_cut)
    placements = [Shard(0) if is_cut else Replicate() for is_cut in cut]
    spread = DTensor.from_local(
        x.reshape(1), mesh, placements, run_check=False, shape=torch.Size((count,)), stride=(1,)
    )
    return spread.full_tensor().sum()


def sum_over_mesh(x: Tensor, like: Tensor) -> Tensor:
    """The sum of the 0-d tensors that all ranks of a DTensor's mesh have."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = like.device_mesh  # type: ignore[attr-defined]
    size = torch.Size((mesh.size(),))
    spread = DTensor.from_local(x.reshape(1), mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=size, stride=(1,))
    return spread.full_tensor().sum()


def meshes_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One DTensor for each mesh and set of its axes that cut, in order."""
    found: dict[Any, Tensor] = {}
    for x in tensors:
        if is_sharded(x):
            found.setdefault(cut_of(x), x)
    return list(found.values())


def cut_of(x: Tensor) -> Any:
    """What DTensors have in common whose sums go over the same ranks."""
    return x.device_mesh, tuple(_cuts_axis(each) for each in x.placements)  # type: ignore[attr-defined]


def same_placement(x: Tensor, parameter: Tensor) -> bool:
    """Whether two DTensors lie on the same ranks in the same way."""
    return bool(x.device_mesh == parameter.device_mesh and x.placements == parameter.placements)  # type: ignore[attr-defined]


def _cuts_axis(placement: Any) -> bool:
    return hasattr(placement, "dim")


def _cuts_of(parameter: Tensor, axis: int) -> list[tuple[int, int]]:
    """(axis of the mesh, its size) of those that cut an axis of a parameter, in the order of the cuts.

    A strided shard is one that came first in the mesh and cut last.
    """
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for place, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if _cuts_axis(placement) and placement.dim % max(parameter.ndim, 1) == axis:
            (strided if hasattr(placement, "split_factor") else plain).append((place, mesh.size(place)))
    return plain + strided[::-1]


def _own_piece(parameter: Tensor, axis: int, size: int) -> tuple[int, int]:
    """(offset, size) of this rank's shard of an axis of that size."""
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
    """Without the offsets of empty ones."""
    return [(offset if size else 0, size) for offset, size in found]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _words(placements: Sequence[Any]) -> str:
    return f"({', '.join(map(str, placements))})"
