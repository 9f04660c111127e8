"""Sums over ranks whose messages take one byte per number: quantize, move bytes, decode, sum in float32. Never a sum of codes.

    encode          [rows, columns] -> E4M3 codes in tiles of 1 x 128 and, at the end of each row, a byte of E8M0 per tile
    reduce_scatter  every rank encodes a row for each rank; all-to-all; each decodes the rows that it got and adds them in rank order
    all_reduce      then each encodes its sum; all-gather; all, its owner too, go on with the decoded codes, so ranks stay equal to the bit

    message of a row   columns codes | ceil(columns / 128) scales, 2 ** (byte - 127), 255 is NaN

A contribution is rounded once on its way to the sum (to nearest: stochastic rounding costs 3 dB) and the sum once on its way back, however
many ranks there are. A tile with NaN or infinity is all NaN at the end, on every rank.

    bytes per number   129/128 for reduce_scatter, 129/64 for all_reduce; float32 ring: 4 and 8, bfloat16: 2 and 4

A ring or a pairwise exchange among N ranks moves (N - 1) / N of a message, whatever its numbers; bytes here are of whole messages.

One rank alone sends nothing, and nothing is rounded.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.formats import E4M3, E8M0
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL

TILE = 128
BYTES = 1 + 1 / TILE  # per number
MESSAGE = Cast(format=E4M3, tile=(1, TILE), scale=E8M0_CEIL)

# torch 2.13 renamed it and warns about the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def tiles(numbers: int) -> int:
    """How many scales a row of so many numbers has."""
    return -(-numbers // TILE)


def encode(rows: Tensor) -> Tensor:
    """[rows, columns] of any float dtype -> uint8 [rows, columns + ceil(columns / 128)]."""
    q = quantize(rows, MESSAGE)
    return torch.cat((E4M3.pack(q.data), E8M0.encode(q.scale)), dim=1)


def decode(messages: Tensor, columns: int) -> Tensor:
    """What `encode` made of [rows, columns] -> float32 [rows, columns]."""
    codes, scales = messages.split((columns, tiles(columns)), dim=1)
    return dequantize(QTensor(data=E4M3.unpack(codes, columns), scale=E8M0.decode(scales), cast=MESSAGE, inner=columns))


def total(messages: Tensor, columns: int) -> Tensor:
    """The sum of the decoded rows, in their order: float32 [columns]."""
    sum = torch.zeros(columns, dtype=torch.float32, device=messages.device)
    for message in messages.split(1):
        sum += decode(message, columns)[0]
    return sum


class Link:
    """A process group, and what was given to its collectives: `sent` in bytes, `calls`, both by kind.

    Every message of this package's gradients goes through one of these four. Kinds: "all-to-all", "all-gather", "maximum", "sum".
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def to_each(self, rows: Tensor) -> Tensor:
        """Row r of [ranks, bytes] goes to rank r; -> [ranks, bytes], row r is from rank r."""
        received = torch.empty_like(rows)
        self._count("all-to-all", rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    def from_each(self, row: Tensor) -> Tensor:
        """[bytes] of every rank -> [ranks, bytes]."""
        gathered = row.new_empty(self.size, row.numel())
        self._count("all-gather", gathered)
        _all_gather(gathered.view(-1), row, group=self.group)
        return gathered

    def maximum(self, numbers: Tensor) -> Tensor:
        """In place. Not for numbers that may be NaN: gloo loses it in one order of ranks, NCCL in any."""
        self._count("maximum", numbers)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def sum(self, numbers: Tensor) -> Tensor:
        """In place, in the dtype of the numbers."""
        self._count("sum", numbers)
        dist.all_reduce(numbers, group=self.group)
        return numbers

    def _count(self, kind: str, message: Tensor) -> None:
        self.sent[kind] += message.nbytes
        self.calls[kind] += 1


def reduce_scatter(rows: Tensor, link: Link) -> Tensor:
    """rows [ranks, columns], of the same shape on every rank -> float32 [columns]: the sum over ranks of their row for this one."""
    if link.size == 1 or rows.numel() == 0:
        return rows[link.rank].to(torch.float32)
    return total(link.to_each(encode(rows)), rows.shape[1])


def gather(row: Tensor, link: Link) -> Tensor:
    """row [columns] of every rank -> float32 [ranks, columns], the same bits on every rank."""
    if link.size == 1 or row.numel() == 0:
        return row.to(torch.float32).expand(link.size, -1)
    return decode(link.from_each(encode(row[None])[0]), row.numel())


def as_rows(x: Tensor, rows: int, multiple: int = 1) -> Tensor:
    """x as [rows, columns], zeros added at its end; columns is a multiple of `multiple`."""
    flat = x.reshape(-1)
    columns = -(-flat.numel() // (rows * multiple)) * multiple
    return torch.nn.functional.pad(flat, (0, rows * columns - flat.numel())).view(rows, columns)


def all_reduce(x: Tensor, link: Link) -> Tensor:
    """The sum of x over the ranks, in the shape of x, float32: the same bits on every rank."""
    mine = reduce_scatter(as_rows(x, link.size), link)
    return gather(mine, link).reshape(-1)[: x.numel()].view(x.shape)
