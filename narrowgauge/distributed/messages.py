"""Sums over ranks with one byte per element: quantize, send codes, dequantize, sum in float32.

    encode          [rows, columns] -> E4M3 codes and, at the end of each row, E8M0 scales
    reduce_scatter  encode one row per rank; all-to-all; decode and add the rows in rank order
    all_reduce      reduce_scatter; encode the sum; all-gather; decode

    layout of a row  columns codes | ceil(columns / 128) scales, 2 ** (byte - 127), 255 is NaN

Tiles are 1 x 128. Each contribution is rounded once before the sum and the sum once after it, for
any number of ranks. Rounding is to nearest: stochastic rounding costs 3 dB. A tile with NaN or
infinity becomes all NaN on every rank. Codes are never added: sums in FP8 lose 10 to 30 dB.

    bytes per element  129/128 for reduce_scatter, 129/64 for all_reduce
    ring in float32    4 and 8
    ring in bfloat16   2 and 4

Bytes count complete messages; a ring or pairwise exchange of N ranks moves (N - 1) / N as much. A
single rank sends and rounds nothing.
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
# Bytes per element: one code, and a one-byte scale per tile.
BYTES_PER_ELEMENT = 1 + 1 / TILE
MESSAGE = Cast(format=E4M3, tile=(1, TILE), scale=E8M0_CEIL)

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
_all_gather = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


def tiles(elements: int) -> int:
    """Return the number of scales in a row of `elements` elements."""
    return -(-elements // TILE)


def encode(rows: Tensor) -> Tensor:
    """Quantize [rows, columns], any float dtype, to uint8 [rows, columns + ceil(columns / 128)]."""
    q = quantize(rows, MESSAGE)
    # Scales follow the codes of their row, so each rank's row is a self-contained message.
    return torch.cat((E4M3.pack(q.data), E8M0.encode(q.scale)), dim=1)


def decode(messages: Tensor, columns: int) -> Tensor:
    """Dequantize messages of `encode` to float32 [rows, columns]."""
    codes, scales = messages.split((columns, tiles(columns)), dim=1)
    return dequantize(
        QTensor(
            data=E4M3.unpack(codes, columns), scale=E8M0.decode(scales), cast=MESSAGE, inner=columns
        )
    )


def total(messages: Tensor, columns: int) -> Tensor:
    """Return the sum of the decoded rows, added in order: float32 [columns]."""
    # A fixed order of additions makes the sum independent of message arrival.
    sum = torch.zeros(columns, dtype=torch.float32, device=messages.device)
    for message in messages.split(1):
        sum += decode(message, columns)[0]
    return sum


class Link:
    """A process group with counters: `bytes_sent` and `calls`, by kind of collective.

    Kinds: "all-to-all", "all-gather", "maximum", "sum". Every 8-bit gradient message is sent by a
    method of Link.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row r of [ranks, bytes] to rank r; return [ranks, bytes], row r from rank r."""
        # Equal sizes on all ranks: no exchange of sizes is needed.
        received = torch.empty_like(rows)
        self._count("all-to-all", rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    def all_gather(self, row: Tensor) -> Tensor:
        """Gather [bytes] of every rank into [ranks, bytes]."""
        gathered = row.new_empty(self.size, row.numel())
        self._count("all-gather", gathered)
        _all_gather(gathered.view(-1), row, group=self.group)
        return gathered

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Reduce by MAX, in place. Do not pass NaN: gloo loses it for some rank orders, NCCL always."""
        self._count("maximum", tensor)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Reduce by SUM, in place, in the dtype of `tensor`."""
        self._count("sum", tensor)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def _count(self, kind: str, message: Tensor) -> None:
        self.bytes_sent[kind] += message.nbytes
        self.calls[kind] += 1


def reduce_scatter(rows: Tensor, link: Link) -> Tensor:
    """Return the sum over ranks of their row for this rank, float32 [columns].

    rows  [ranks, columns], the same shape on every rank; row r is the contribution to rank r
    """
    if link.size == 1 or rows.numel() == 0:
        return rows[link.rank].to(torch.float32)
    return total(link.all_to_all(encode(rows)), rows.shape[1])


def gather(row: Tensor, link: Link) -> Tensor:
    """Return the rows [columns] of all ranks, float32 [ranks, columns], bit-identical on every rank."""
    if link.size == 1 or row.numel() == 0:
        return row.to(torch.float32).expand(link.size, -1)
    # The owner of a row also continues with its decoded codes: otherwise ranks would drift apart.
    return decode(link.all_gather(encode(row[None])[0]), row.numel())


def as_rows(x: Tensor, rows: int, multiple: int = 1) -> Tensor:
    """Return x as [rows, columns], padded with zeros; columns is a multiple of `multiple`."""
    flat = x.reshape(-1)
    columns = -(-flat.numel() // (rows * multiple)) * multiple
    return torch.nn.functional.pad(flat, (0, rows * columns - flat.numel())).view(rows, columns)


def all_reduce(x: Tensor, link: Link) -> Tensor:
    """Return the sum of x over the ranks, float32, in x's shape and bit-identical on every rank."""
    shard = reduce_scatter(as_rows(x, link.size), link)
    return gather(shard, link).reshape(-1)[: x.numel()].view(x.shape)
