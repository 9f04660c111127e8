"""noise: the random numbers of stochastic rounding, as a function of (key, element) with a key from torch's generator.

    uniform[i] = (mix(mix(i + low) ^ high) >> 8) / 2^24, in [0, 1);    low, high 32 bits each, i modulo 2^32

A draw costs two numbers of the generator however large the tensor is, so repeating a forward pass repeats it, and a checkpoint
that holds the generator's state holds it. A kernel computes the number where it rounds instead of reading it from memory. mix
is the 32-bit finalizer with the constants of Chris Wellons' hash-prospector ("lowbias32"); two of them, one per half of the key,
so that two draws are not each other's stretches.

Who trains on several ranks draws by name instead of by turn (`Stream`): the key is a function of the micro-batch, the layer and what is
drawn, so each rank draws what one process would.

In eager mode, on the CPU and on GPUs with Triton. There the key stays in the GPU's memory, drawn by its own generator: nothing
waits for it, and a CUDA graph draws another one at every replay. Elsewhere, and under torch.compile, `draw` is torch.rand, which
is fast or fused there.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from narrowgauge.addresses import cached, dry_run_on, wrapper
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton import refuse as refuse_triton

MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Key:
    """Noise that is not in memory yet. words: (low, high), or in the memory of a GPU an int64 tensor [2] of them."""

    words: tuple[int, int] | Tensor

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """float32 in [0, 1) of `shape`, multiples of 2^-24: the numbers of the elements, row by row."""
        if isinstance(self.words, Tensor):
            return reference(self.words[0], self.words[1], tuple(shape), self.words.device)
        from narrowgauge.ops.cpp import int4 as cpp

        if cpp.refuse("cpu") is None and (not wrapper() or dry_run_on() is not None):
            return cpp.uniform(tuple(shape), self.words)
        return reference(*self.words, tuple(shape))

    def after(self, elements: int) -> Key:
        """The key whose element 0 has the number that this one gives the element after so many."""
        if isinstance(self.words, Tensor):
            return Key(torch.stack(((self.words[0] + elements) & MASK, self.words[1])))
        return Key(((self.words[0] + elements) & MASK, self.words[1]))

    def on_device(self, device: torch.device) -> Tensor:
        """The words as int64 [2] on `device`, which is theirs if they are in its memory."""
        return torch.as_tensor(self.words, dtype=torch.int64, device=device)


@dataclass(frozen=True, eq=False)
class Stream:
    """The random numbers of one layer in one micro-batch, each draw by its name.

    name   of the layer
    words  of the micro-batch: two whole numbers below 2**32, or int64 [2] in the memory of a GPU
    shard  what tells this rank's part of a sharded tensor from the others', by role; a role without one is the same on all ranks
    """

    name: str
    words: tuple[int, int] | Tensor
    shard: dict[str, str] = field(default_factory=dict)

    def key(self, role: str, which: str) -> Key:
        """The key of a draw for the tensor of a role ("x", "w" or "gy"), or for a product."""
        low, high = hashed(self.name, role, which, self.shard.get(role, ""))
        if isinstance(self.words, Tensor):
            return Key(self.words ^ _on_device(low, high, self.words.device))
        return Key((self.words[0] ^ low, self.words[1] ^ high))


@cache
def hashed(*names: str | int) -> tuple[int, int]:
    """Two whole numbers below 2**32 that stand for these names."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@cached
def _on_device(low: int, high: int, device: torch.device) -> Tensor:
    return torch.tensor((low, high), dtype=torch.int64, device=device)


def reference(
    low: int | Tensor, high: int | Tensor, shape: tuple[int, ...], device: torch.device | None = None
) -> Tensor:
    """The definition in plain torch. low, high: whole numbers, or int64 without axes."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    bits = _mix(_mix((index + low) & MASK) ^ high)
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def draw(shape: tuple[int, ...], device: torch.device, stream: Stream | None = None, *names: str) -> Key | Tensor:
    """Noise for a tensor of `shape` on `device`: from torch's generator, or the draw of a stream with these names (role, which)."""
    facts = device_facts(device.type, device.index)
    is_dry_run = not torch.compiler.is_compiling() and dry_run_on() is not None
    cuda = facts.type == "cuda" and refuse_triton("cuda", facts.capability) is None
    if stream is not None and not torch.compiler.is_compiling():
        key = stream.key(*names)
        return key if (cuda or facts.type == "cpu") and (is_dry_run or not wrapper()) else key.uniform(shape).to(device)
    if wrapper() and not is_dry_run:  # a key that is fake has no numbers
        return torch.rand(shape, dtype=torch.float32, device=device)
    if cuda:
        return Key(torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device))
    if is_dry_run and facts.type == "cpu":
        return Key((0, 0))
    if facts.type != "cpu" or torch.compiler.is_compiling():
        return torch.rand(shape, dtype=torch.float32, device=device)
    low, high = torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu").tolist()
    return Key((low, high))


def uniform(shape: tuple[int, ...], device: torch.device, stream: Stream | None, *names: str) -> Tensor:
    """float32 in [0, 1) from torch's generator, or the draw of a stream with these names."""
    if stream is None:
        return torch.rand(shape, device=device, dtype=torch.float32)
    return stream.key(*names).uniform(shape).to(device)


def draws_keys(device: torch.device) -> bool:
    """Whether `draw` gives a key there, in eager mode, and not a number for each element."""
    if torch.compiler.is_compiling() or (wrapper() and dry_run_on() is None):
        return False
    facts = device_facts(device.type, device.index)
    return facts.type == "cpu" or (facts.type == "cuda" and refuse_triton("cuda", facts.capability) is None)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
