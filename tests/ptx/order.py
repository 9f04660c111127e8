"""Which accesses of a launch are ordered: barriers of a program, releases and acquires between programs.

A thread's time is counted in epochs of its program, which begin at barriers. `seen[p, q]` is the
last epoch of program q whose writes the threads of p may read. A release publishes what its program
wrote before its last barrier, and what its own thread wrote; an acquire takes that in, for its own
thread at once, for the program with the next barrier. This is causality order of the PTX memory
model (PTX ISA 8.10) as far as programs with barriers of all threads need it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Order:
    """threads: of one program."""

    def __init__(self, programs: int, threads: int) -> None:
        self.programs, self.threads = programs, threads
        self.epoch = np.ones(programs, np.int32)
        self.warp_epoch = np.ones(programs * threads // 32, np.int32)
        self.seen = np.zeros((programs, programs), np.int32)
        self._acquired: dict[int, Array] = {}  # thread -> what it has acquired since the barrier
        self._released: dict[int, Array] = {}  # place in global memory -> what was published there

    def program_of(self, threads: Array) -> Array:
        return threads // self.threads

    def epoch_of(self, threads: Array) -> Array:
        return self.epoch[threads // self.threads]

    def warp_epoch_of(self, threads: Array) -> Array:
        return self.warp_epoch[threads // 32]

    def is_foreign(self, writer: Array, threads: Array) -> Array:
        """Whether bytes [n, size] were written by another program. writer -1: by nobody."""
        return (writer >= 0) & (writer // self.threads != (threads // self.threads)[:, None])

    def precedes(self, writer: Array, epoch: Array, threads: Array) -> Array:
        """Whether writes of bytes [n, size] are ordered before what the threads [n] do now."""
        mine = (threads // self.threads)[:, None]
        fine = (writer < 0) | (writer == threads[:, None])
        fine |= self.seen[mine, np.maximum(writer, 0) // self.threads] >= epoch
        for thread, acquired in self._acquired.items() if not fine.all() else ():
            lines = threads == thread
            fine[lines] |= acquired[np.maximum(writer[lines], 0) // self.threads] >= epoch[lines]
        return fine

    def barrier(self, program: int) -> None:
        first = program * self.threads
        for thread in [each for each in self._acquired if first <= each < first + self.threads]:
            self.seen[program] = np.maximum(self.seen[program], self._acquired.pop(thread))
        self.seen[program, program] = self.epoch[program]
        self.epoch[program] += 1
        self.warp_epoch[first // 32 : (first + self.threads) // 32] += 1

    def warp_barrier(self, warp: int) -> None:
        self.warp_epoch[warp] += 1

    def release(self, place: int, thread: int) -> None:
        published = self._view(thread)
        if place in self._released:
            published = np.maximum(published, self._released[place])
        self._released[place] = published

    def acquire(self, place: int, thread: int) -> None:
        if place in self._released:
            self._acquired[thread] = np.maximum(self._view(thread), self._released[place])

    def _view(self, thread: int) -> Array:
        """What a thread may read, besides its own writes of this epoch."""
        seen = self.seen[thread // self.threads]
        return np.maximum(seen, self._acquired[thread]) if thread in self._acquired else seen.copy()
