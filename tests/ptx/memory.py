"""Global memory of one launch, and shared memory of its programs, with what a GPU would not forgive.

An access faults if it leaves every tensor of the launch, is not aligned to its size, or races. The
order of accesses is that of `order.Order`: two accesses to one byte race if no barrier, or pair of
a release and an acquire, lies between them and one of them writes something else than was there.

A load that races with a store of its own program gives junk instead of a fault: where a program
updates a number, all its threads may load it and one of them, which alone needs it, store it.

A plain load of what another program of the launch stored faults as well, even behind an acquire: it
may come from a first-level cache that nobody invalidates (`ld.global.cg` does not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ptx.numerics import UNSIGNED, Bits
from tests.ptx.order import Order

Array = NDArray[Any]
Places = NDArray[np.int64]  # [n] threads, or [n, bytes]


class Fault(Exception):
    """A GPU would raise, hang, or might compute something else."""


def _bytes_of(values: Bits) -> Array:
    """[n, count] values -> [n, bytes]."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


class GlobalMemory:
    """Tensors at their own addresses.

    storages       uint8 arrays, the whole storage of each tensor
    watches_reads  also faults at a store over what another program may still read; dear, and
                   useless where programs learn nothing of each other
    """

    GAP = 512  # bytes between two tensors, which belong to nobody

    def __init__(self, storages: Sequence[Array], order: Order, watches_reads: bool = True) -> None:
        arrays = sorted(storages, key=lambda each: each.ctypes.data)
        self.order, self.arrays, self.junk = order, arrays, np.random.default_rng(0)
        self.starts = np.array([each.ctypes.data for each in arrays], np.int64)
        self.ends = self.starts + np.array([each.nbytes for each in arrays], np.int64)
        sizes = [-(-each.nbytes // self.GAP) * self.GAP + self.GAP for each in arrays]
        self.places = np.cumsum([0, *sizes])[:-1].astype(np.int64)
        self.data = np.zeros(sum(sizes), np.uint8)
        for place, each in zip(self.places, arrays, strict=True):
            self.data[place : place + each.nbytes] = each
        self.writer = np.full(len(self.data), -1, np.int32)  # thread of the launch
        self.written = np.zeros(len(self.data), np.int32)  # its epoch
        self.was_read = np.zeros(len(self.data), bool)
        self.read_by: dict[int, Array] = {}  # program -> epoch of its last read of each byte
        self.watches_reads = watches_reads

    def copy_back(self) -> None:
        for place, each in zip(self.places, self.arrays, strict=True):
            each[:] = self.data[place : place + each.nbytes]

    def place(self, address: Bits, size: int, what: str) -> Places:
        """Indices into `data` of accesses to `size` bytes."""
        if (address % np.uint64(size)).any():
            wrong = int(address[address % np.uint64(size) != 0][0])
            raise Fault(f"misaligned: {what} of {size} bytes at {wrong:#x}")
        at = address.astype(np.int64)
        n = np.maximum(np.searchsorted(self.starts, at, "right") - 1, 0)
        outside = (at < self.starts[n]) | (at + size > self.ends[n])
        if outside.any():
            raise Fault(
                f"outside of every tensor: {what} of {size} bytes, {int(outside.sum())} threads"
            )
        return at - self.starts[n] + self.places[n]

    def load(self, address: Bits, size: int, count: int, threads: Places, cached: bool) -> Bits:
        """[n, count] values of `size` bytes. cached: perhaps from the first-level cache."""
        at = self.place(address, size * count, "load")[:, None] + np.arange(size * count)
        raw = self.read(at, threads, cached)
        return np.ascontiguousarray(raw).view(UNSIGNED[8 * size])

    def read(self, at: Places, threads: Places, cached: bool) -> Array:
        """Bytes at indices [n, size]. Where threads of one program race, junk: see the module."""
        raw, writer = self.data[at], self.writer[at]
        if self.watches_reads:
            self._note_readers(at, threads)
        if not (writer >= 0).any():
            return raw
        foreign = self.order.is_foreign(writer, threads)
        if cached and foreign.any():
            raise Fault("stale: a plain load of what another program of the launch stored")
        races = self.check_order(at, threads)
        return np.where(races, self.junk.integers(256, size=raw.shape, dtype=np.uint8), raw)

    def check_order(self, at: Places, threads: Places) -> Array:
        """Bytes whose writers nothing orders before these threads. Faults if another program wrote."""
        races = ~self.order.precedes(self.writer[at], self.written[at], threads)
        if (races & self.order.is_foreign(self.writer[at], threads)).any():
            raise Fault(
                "race: a load of what another program stored, with nothing that orders them"
            )
        return races

    def _note_readers(self, at: Places, threads: Places) -> None:
        programs = self.order.program_of(threads)
        self.was_read[at] = True
        for program in np.unique(programs).tolist():
            read = self.read_by.setdefault(program, np.zeros(len(self.data), np.int32))
            read[at[programs == program]] = self.order.epoch[program]

    def store(self, address: Bits, values: Bits, threads: Places) -> None:
        """values: [n, count]"""
        raw = _bytes_of(values)
        at = self.place(address, raw.shape[1], "store")[:, None] + np.arange(raw.shape[1])
        self.write(at, raw, threads)

    def write(self, at: Places, raw: Array, threads: Places) -> None:
        changes = self.data[at] != raw
        if (differs := changes & (self.writer[at] >= 0)).any():
            fine = self.order.precedes(self.writer[at], self.written[at], threads)
            if not fine[differs].all():
                raise Fault(
                    "race: two threads store different values, with nothing that orders them"
                )
        if (read := changes & self.was_read[at]).any():
            self._check_readers(at, read, threads)
        self.data[at] = raw
        if (self.data[at] != raw).any():
            raise Fault("race: threads of one instruction store different values in one place")
        self.mark(at, threads[:, None])

    def _check_readers(self, at: Places, differs: Array, threads: Places) -> None:
        """What another program has read may change once an acquire has put that before."""
        for program, epochs in self.read_by.items():
            reader = np.full(at.shape, program * self.order.threads)
            others = (self.order.program_of(threads) != program)[:, None]
            if not self.order.precedes(reader, epochs[at], threads)[differs & others].all():
                raise Fault("race: a store over what another program may still read")

    def mark(self, at: Places | slice, threads: Places) -> None:
        self.writer[at] = threads
        self.written[at] = self.order.epoch_of(threads)

    def release(self, place: int, thread: int) -> None:
        """Publish what this thread's program wrote before its last barrier, and its own writes."""
        epoch = self.order.epoch[thread // self.order.threads]
        self.written[(self.writer == thread) & (self.written == epoch)] = epoch - 1
        self.order.release(place, thread)


class SharedMemory:
    """One area per program, full of 0xCD; accesses of different threads need a barrier between them.

    size   bytes of one program
    first  number of the first of these programs in the launch
    """

    SEVERAL = -2  # readers of several warps; of several threads of warp w: SEVERAL - 1 - w

    def __init__(self, programs: int, size: int, order: Order, first: int) -> None:
        self.size, self.order, self.first = max(size, 16), order, first
        self.data = np.full(programs * self.size, 0xCD, np.uint8)
        self.writer = np.full(len(self.data), -1, np.int32)
        self.written, self.warp_written = (np.zeros(len(self.data), np.int32) for _ in range(2))
        self.reader = np.full(len(self.data), -1, np.int32)
        self.read, self.warp_read = (np.zeros(len(self.data), np.int32) for _ in range(2))
        self.unfenced = np.zeros(len(self.data), bool)  # stored, and unseen by asynchronous reads
        self.in_use = np.zeros(len(self.data), bool)  # read by a product that nobody has waited for

    def place(self, address: Bits, size: int, threads: Places) -> Places:
        """[n, size] indices into `data`."""
        at = address.astype(np.int64) & 0xFFFFFFFF
        if (at % size).any():
            raise Fault(
                f"misaligned: shared access of {size} bytes at {int(at[at % size != 0][0])}"
            )
        if (at + size > self.size).any():
            raise Fault(
                f"outside of the program's shared memory: byte {int(at.max())} of {self.size}"
            )
        program = self.order.program_of(threads) - self.first
        return (program * self.size + at)[:, None] + np.arange(size)

    def fence(self, threads: Places) -> None:
        """fence.proxy.async: what these threads stored, or what a barrier put before them."""
        first = self.order.program_of(threads) - self.first
        for program in np.unique(first):
            area = slice(program * self.size, (program + 1) * self.size)
            before = self.written[area] < self.order.epoch[self.first + program]
            seen = before | np.isin(self.writer[area], threads)
            self.unfenced[area] &= ~seen

    def load(self, at: Places, threads: Places, asynchronous: bool = False) -> Array:
        """Bytes [n, size] at indices. asynchronous: read by wgmma, which needs a proxy fence."""
        me = self._check_load(at, threads, asynchronous)
        self._note_reader(at, me)
        return self.data[at]

    def load_for_product(self, at: Places, threads: Places) -> Array:
        """As an asynchronous load, for a product that goes on after it: see `tensor_memory`."""
        self._check_load(at, threads, asynchronous=True)
        self.in_use[at] = True
        return self.data[at]

    def _check_load(self, at: Places, threads: Places, asynchronous: bool) -> Array:
        """Fault if a store is not ordered before this load; return the reader of each byte."""
        if asynchronous and self.unfenced[at].any():
            raise Fault("race: no proxy fence between a store and an asynchronous product")
        me = np.broadcast_to(threads[:, None], at.shape)
        self._check(self.writer[at], self.written[at], self.warp_written[at], me, "load")
        return me

    def store(self, at: Places, raw: Array, threads: Places) -> None:
        me = np.broadcast_to(threads[:, None], at.shape)
        if self.in_use[at].any():
            raise Fault("race: a store over what a product that nobody waited for reads")
        changes = self.data[at] != raw
        if changes.any():
            place, mine = at[changes], me[changes]
            what = "store"
            self._check(
                self.writer[place], self.written[place], self.warp_written[place], mine, what
            )
            self._check(self.reader[place], self.read[place], self.warp_read[place], mine, what)
        self.data[at] = raw
        if (self.data[at] != raw).any():
            raise Fault("race: threads of one instruction store different values in one place")
        self.writer[at], self.unfenced[at] = me, True
        self.written[at] = self.order.epoch_of(threads)[:, None]
        self.warp_written[at] = self.order.warp_epoch_of(threads)[:, None]

    def _check(self, other: Array, epoch: Array, warp_epoch: Array, me: Array, what: str) -> None:
        """Faults if `other` (threads, or codes of several) is not separated from `me` by a barrier."""
        warp = np.where(other >= 0, other // 32, self.SEVERAL - 1 - other)
        same_warp = (warp == me // 32) & (other != self.SEVERAL)
        now = np.where(same_warp, self.order.warp_epoch_of(me), self.order.epoch_of(me))
        then = np.where(same_warp, warp_epoch, epoch)
        races = (other != -1) & (other != me) & (then == now)
        if races.any():
            raise Fault(f"race: a shared {what}, with no barrier behind another thread's access")

    def _note_reader(self, at: Places, me: Array) -> None:
        now, warp_now = self.order.epoch_of(me), self.order.warp_epoch_of(me)
        for _ in range(2):  # the second round joins threads of this instruction that read one byte
            old = self.reader[at]
            old = np.where(self.read[at] == now, old, -1)
            warp = np.where(old >= 0, old // 32, self.SEVERAL - 1 - old)
            one_warp = (warp == me // 32) & (old != self.SEVERAL)
            joined = np.where(one_warp, self.SEVERAL - 1 - me // 32, self.SEVERAL)
            self.reader[at] = np.where((old == -1) | (old == me), me, joined)
            self.read[at], self.warp_read[at] = now, warp_now
