"""Copies of tensor bytes.

    OffDeviceCopy   in host memory or in a file
    OnDeviceCopy    on the device of the tensors

Both write back into the same memory, so addresses stay valid. Tensors that share a storage are
copied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from narrowgauge.nn import coded_weight
from narrowgauge.snapshot.block_storage import BlockStorage

Key = tuple[torch.device, int]  # device and address of a storage


class OffDeviceCopy:
    """Copy of whole storages in host memory or in a file (`BlockStorage`)."""

    def __init__(self, tensors: list[Tensor], where: str | Path, pinned: bool, name: str) -> None:
        self._tensors, self._storages = tensors, storages(tensors)
        self._apart, self._name = BlockStorage(where, pinned), name
        self._copies: dict[Key, list[Tensor]] = {}  # storage -> blocks of bytes
        self._fill(self._storages)

    @property
    def nbytes(self) -> int:
        return self._apart.nbytes

    def add(self, tensors: list[Tensor]) -> None:
        """Replaces the tensors of the copy, and copies storages that have no blocks yet."""
        self._tensors, self._storages = tensors, storages(tensors)
        self._fill(self._storages)

    def has_moved(self) -> bool:
        """True if a tensor has another address than when it was copied."""
        return any(
            key not in self._storages for tensor in self._tensors for key, _ in _storages_of(tensor)
        )

    def restore(self) -> None:
        self.exchange(keeps_copy=True)

    @torch.no_grad()
    def exchange(self, keeps_copy: bool) -> None:
        """Writes the copied bytes back. keeps_copy: False puts the present bytes into the copy."""
        for key, flat in self._storages.items():
            for piece, room in _pieces(flat, self._copies[key]):
                before = None if keeps_copy else piece.clone()
                piece.copy_(room, non_blocking=True)
                if before is not None:
                    room.copy_(before, non_blocking=True)
        _wait(self._storages.values())
        torch.autograd.graph.increment_version(
            [each for each in self._tensors if not each.is_inference()]
        )

    def _fill(self, found: dict[Key, Tensor]) -> None:
        new = {key: flat for key, flat in found.items() if key not in self._copies}
        rooms = iter(self._apart.add([flat.numel() for flat in new.values()], self._name))
        for key, flat in new.items():
            self._copies[key] = next(rooms)
            for piece, room in _pieces(flat, self._copies[key]):
                room.copy_(piece, non_blocking=True)
        _wait(new.values())


@dataclass
class OnDeviceCopy:
    """Copy of small tensors on their own devices. Restoring writes only tensors that changed.

    flats   views of the tensors' bytes, by device
    copies  device -> concatenated copy
    """

    flats: dict[torch.device, list[Tensor]]
    copies: dict[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> OnDeviceCopy:
        flats: dict[torch.device, list[Tensor]] = {}
        seen: set[tuple[torch.device, int, int]] = set()
        for flat in (
            flat for tensor in tensors for plain in _plain(tensor) for flat in _bytes_of(plain)
        ):
            if (key := (flat.device, flat.data_ptr(), flat.numel())) not in seen:
                seen.add(key)
                flats.setdefault(flat.device, []).append(flat)
        return cls(flats, _concatenated(flats))

    def retake(self) -> OnDeviceCopy:
        return OnDeviceCopy(self.flats, _concatenated(self.flats))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.copies.values())

    @torch.no_grad()
    def restore(self) -> None:
        for device, flats in self.flats.items():
            for flat, before in zip(
                flats, self.copies[device].split([len(each) for each in flats]), strict=True
            ):
                # A write would raise the tensor's version, after which casts of it are discarded.
                if not torch.equal(flat, before):
                    flat.copy_(before)


def storages(tensors: Iterable[Tensor]) -> dict[Key, Tensor]:
    """(device, address) -> bytes of the storage, uint8. Meta tensors have none."""
    found: dict[Key, Tensor] = {}
    for tensor in tensors:
        for key, flat in _storages_of(tensor):
            found.setdefault(key, flat)
    return found


def _concatenated(flats: dict[torch.device, list[Tensor]]) -> dict[torch.device, Tensor]:
    with torch.no_grad():
        return {device: torch.cat(members) for device, members in flats.items()}


def _bytes_of(plain: Tensor) -> Iterator[Tensor]:
    """A view of the tensor's bytes that shares its version counter."""
    if not plain.is_meta and plain.numel():
        is_dense, strides = plain.is_contiguous(), plain.stride()
        # A permuted dense tensor is viewed in the order of its memory.
        dense = (
            plain
            if is_dense
            else plain.permute(sorted(range(plain.ndim), key=lambda dim: -strides[dim]))
        )
        if dense.is_contiguous():
            yield dense.view(-1).view(torch.uint8)
        else:
            yield from (flat for _, flat in _storages_of(plain))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors with memory of their own: of a DTensor the local part."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # not a mesh
                yield from _plain(inner)
    else:
        yield (
            coded_weight.plain(tensor)
            if isinstance(tensor, coded_weight.CodedWeight)
            else tensor.detach()
        )


def _storages_of(tensor: Tensor) -> Iterator[tuple[Key, Tensor]]:
    for plain in _plain(tensor):
        storage = plain.untyped_storage()
        if not plain.is_meta and storage.nbytes():
            with torch.inference_mode(False):
                yield (
                    (plain.device, storage.data_ptr()),
                    torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage),
                )


def _pieces(flat: Tensor, rooms: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(flat.split([len(room) for room in rooms]), rooms, strict=True)


def _wait(tensors: Iterable[Tensor]) -> None:
    """Waits until copies to and from the host have arrived."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)
