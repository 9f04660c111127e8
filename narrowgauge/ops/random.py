"""Counter-based random numbers for stochastic rounding, keyed by torch's generator.

    uniform[i] = (mix(mix(i + low) ^ high) >> 8) / 2^24, in [0, 1)
    low, high    32 bits each: the key
    i            index of the element, modulo 2^32

A draw takes two numbers from torch's generator, whatever the size of the tensor. A repeated forward
pass therefore repeats the noise, and a checkpoint of the generator's state is sufficient to resume.
A kernel computes each number where it rounds, instead of reading it from memory.

mix is the 32-bit finalizer "lowbias32" of Chris Wellons' hash-prospector. It is applied twice, once
per half of the key, so that the sequences of two keys are not shifted copies of each other.

Training on several ranks draws by name (`Stream`) instead of in sequence. The key is then a
function of the micro-batch, the layer and the purpose. Each rank draws the numbers that a single
process would draw.

Keys exist in eager mode, on the CPU and on GPUs with Triton. On a GPU the key stays in device
memory, drawn by the device's generator: there is no host synchronization, and a CUDA graph draws a
new key at every replay. Elsewhere and under torch.compile `draw` calls torch.rand, which is fast or
fused there.
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
    """Noise that has not been materialized.

    words  (low, high), or on a GPU an int64 tensor [2] with both
    """

    words: tuple[int, int] | Tensor

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Materialize the numbers: float32 in [0, 1), multiples of 2^-24, in row-major order."""
        if isinstance(self.words, Tensor):
            return reference(self.words[0], self.words[1], tuple(shape), self.words.device)
        from narrowgauge.ops.cpp import int4 as cpp

        if cpp.refuse("cpu") is None and (not wrapper() or dry_run_on() is not None):
            return cpp.uniform(tuple(shape), self.words)
        return reference(*self.words, tuple(shape))

    def after(self, elements: int) -> Key:
        """Return the key whose element 0 equals element number `elements` of this key."""
        if isinstance(self.words, Tensor):
            return Key(torch.stack(((self.words[0] + elements) & MASK, self.words[1])))
        return Key(((self.words[0] + elements) & MASK, self.words[1]))

    def on_device(self, device: torch.device) -> Tensor:
        """Return the words as int64 [2] on `device`; no copy if they are there already."""
        return torch.as_tensor(self.words, dtype=torch.int64, device=device)


@dataclass(frozen=True, eq=False)
class Stream:
    """Random numbers of one layer in one micro-batch, each draw identified by its name.

    name   name of the layer
    words  words of the micro-batch: two integers below 2**32, or int64 [2] on a GPU
    shard  {role: text} that distinguishes this rank's part of a sharded tensor from other ranks'
           parts; roles that are missing here draw the same numbers on all ranks
    """

    name: str
    words: tuple[int, int] | Tensor
    shard: dict[str, str] = field(default_factory=dict)

    def key(self, role: str, which: str) -> Key:
        """Return the key of one draw.

        role   "x", "w" or "gy", or the name of a GEMM
        which  purpose of the draw within the role
        """
        # The shard is part of the name: ranks with different parts of a tensor must not repeat each
        # other's noise.
        low, high = hashed(self.name, role, which, self.shard.get(role, ""))
        if isinstance(self.words, Tensor):
            # Cached on the device: a copy from the host at every draw would synchronize.
            return Key(self.words ^ _on_device(low, high, self.words.device))
        return Key((self.words[0] ^ low, self.words[1] ^ high))


@cache
def hashed(*names: str | int) -> tuple[int, int]:
    """Return a hash of the names: two integers below 2**32."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@cached
def _on_device(low: int, high: int, device: torch.device) -> Tensor:
    return torch.tensor((low, high), dtype=torch.int64, device=device)


def reference(
    low: int | Tensor,
    high: int | Tensor,
    shape: tuple[int, ...],
    device: torch.device | None = None,
) -> Tensor:
    """Definition in plain torch. low and high are integers or 0-dimensional int64 tensors."""
    # int64, because torch has no uint32 arithmetic on all devices; MASK wraps to 32 bits.
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    bits = _mix(_mix((index + low) & MASK) ^ high)
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def draw(
    shape: tuple[int, ...], device: torch.device, stream: Stream | None = None, *names: str
) -> Key | Tensor:
    """Draw noise for a tensor of `shape` on `device`: a Key where kernels read one, else numbers.

    The source is torch's generator, or the stream with these names (role, which).
    """
    facts = device_facts(device.type, device.index)
    is_dry_run = not torch.compiler.is_compiling() and dry_run_on() is not None
    cuda = facts.type == "cuda" and refuse_triton("cuda", facts.capability) is None
    if stream is not None and not torch.compiler.is_compiling():
        key = stream.key(*names)
        return (
            key
            if (cuda or facts.type == "cpu") and (is_dry_run or not wrapper())
            else key.uniform(shape).to(device)
        )
    if wrapper() and not is_dry_run:  # no kernel can read the words of a fake key
        return torch.rand(shape, dtype=torch.float32, device=device)
    if cuda:
        # Stays on the device: Python integers would be constants of a CUDA graph, which would
        # repeat its noise.
        return Key(torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device))
    # A dry run must not advance the generator, and needs no values.
    if is_dry_run and facts.type == "cpu":
        return Key((0, 0))
    if facts.type != "cpu" or torch.compiler.is_compiling():
        return torch.rand(shape, dtype=torch.float32, device=device)
    low, high = torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu").tolist()
    return Key((low, high))


def uniform(
    shape: tuple[int, ...], device: torch.device, stream: Stream | None, *names: str
) -> Tensor:
    """Return float32 numbers in [0, 1) from torch's generator or from the stream."""
    if stream is None:
        return torch.rand(shape, device=device, dtype=torch.float32)
    return stream.key(*names).uniform(shape).to(device)


def draws_keys(device: torch.device) -> bool:
    """Return True if `draw` returns a Key on this device, which only eager mode does."""
    if torch.compiler.is_compiling() or (wrapper() and dry_run_on() is None):
        return False
    facts = device_facts(device.type, device.index)
    return facts.type == "cpu" or (
        facts.type == "cuda" and refuse_triton("cuda", facts.capability) is None
    )


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
