"""Fingerprints of tensors: whether memory that was cast before still holds the same bytes, whoever wrote to it.

`Tensor._version` counts writes by PyTorch's in-place operators on the tensor and its views. It stays the same for writes
through `.data`, `torch._foreach_*` on `.data`, NumPy views, flat buffers of optimizers, other processes and raw pointers.

    Exact     CPU: reads all bytes at each comparison, so it detects every write
              with a C++ compiler: two 64-bit sums (cpp/fingerprint.cpp), 16 bytes kept. Reads 56 GB/s within the caches of a Zen 3,
              as fast as torch's own sum of float32
              without one: a copy of the tensor, compared bit by bit
    Sampled   other devices: compares 1,024 elements on the device, and never waits for it; `changed` is read later.
              It detects writes to a whole weight. It misses most writes to a few elements.

Two different contents of one tensor have equal sums with a probability of about 2^-64; contents that differ in one
64-bit word never do.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on, wrapper
from narrowgauge.ops.cpp import ELEMENTS_PER_THREAD, Library

BLOCK = 8192  # 64-bit words of a row, as in fingerprint.cpp
BYTES_PER_SHARE = 1 << 22  # of a thread: 0.07 ms within the caches, 0.3 ms beyond
SAMPLE = 1024
_MASK = (1 << 64) - 1
_Sums = ctypes.c_uint64 * 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LIBRARY = Library(
    ("fingerprint.cpp",),
    "fingerprints of weights",
    {"fingerprint": (ctypes.c_void_p, ctypes.c_int64, _Sums)},
    instead="go on without it, which compares weights with a copy",
)


class Exact:
    """The bytes of a tensor on the CPU, strided, at the time of construction. Holds the memory of the tensor.

    tensor   its own object: `.data` of a Parameter may point to another memory later, so pass what `detach` returns
    is_same  for small weights takes 5 to 10 us within a training step, whose code and data are in no cache, and 2 us when repeated at
             once. Nearly all of the time is Python, so there are few calls.
    """

    is_exact = True
    changed: Tensor | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.is_counted = dry_run_on() is not None  # of a fake tensor, whose bytes nobody writes
        if self.is_counted:
            return
        self.tensor, self.storage = tensor, tensor.untyped_storage()
        self.storage_bytes = self.storage.nbytes()
        self.is_dense = tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())
        self.seen = _bits(tensor).clone() if LIBRARY.missing else sums(self._dense())

    def is_same(self) -> bool:
        """Return True if the tensor still holds the same bytes, with one read.

        False if its storage was freed or resized.
        """
        if self.is_counted:
            return True
        if self.storage.nbytes() != self.storage_bytes:
            return False
        if isinstance(self.seen, Tensor):
            return torch.equal(_bits(self.tensor), self.seen)
        return sums(self._dense()) == self.seen

    def _dense(self) -> Tensor:
        return self.tensor if self.is_dense else self.tensor.contiguous()


class Sampled:
    """1,024 elements of a contiguous tensor on any device at the time of construction, and whether one changed since."""

    is_exact = False

    def __init__(self, tensor: Tensor) -> None:
        self.changed: Tensor | None = None  # bool [], on the device
        self.is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.is_captured:  # a CUDA graph would repeat the comparison with a sample of its own
            return
        self.tensor = tensor.detach()
        flat = _bits(self.tensor.view(-1))
        # An odd step visits all columns of a weight whose row length is a power of two.
        self.sample = flat[:: max(flat.numel() // SAMPLE, 1) | 1]
        self.seen = self.sample.clone()

    def is_same(self) -> bool:
        """True, at once. The comparison runs on the device and ends up in `changed`."""
        if self.is_captured:
            return True
        found = (self.sample != self.seen).any()
        self.changed = found if self.changed is None else self.changed | found
        return True


Fingerprint = Exact | Sampled


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of a strided tensor as it is now; None where its memory cannot be read, or is not sampled."""
    if dry_run_on() is None and wrapper(tensor):
        return None
    if tensor.device.type == "cpu":
        return Exact(tensor)
    return Sampled(tensor) if tensor.is_contiguous() and not tensor.is_meta else None


def sums(x: Tensor) -> tuple[int, int]:
    """The two sums of cpp/fingerprint.cpp over the memory of x, dense, on the CPU, not a wrapper."""
    start, nbytes, out = x.data_ptr(), x.numel() * x.element_size(), _Sums()
    rows = -(-nbytes // (8 * BLOCK))
    if nbytes < 2 * BYTES_PER_SHARE:  # nearly always, where `call` would take as long again
        LIBRARY.loaded.narrowgauge_fingerprint(0, rows, start, nbytes, out)
    else:
        work = nbytes // BYTES_PER_SHARE * ELEMENTS_PER_THREAD
        LIBRARY.call("fingerprint", rows, work, start, nbytes, out)
    return out[0], out[1]


def _bits(x: Tensor) -> Tensor:
    """x as integers of the same size: NaN equals itself there, and 0 is not -0."""
    return x.view(_INTEGERS[x.element_size()])


class Readback:
    """A bool [] of a device on its way to the host, which never waits for it."""

    def __init__(self, flag: Tensor) -> None:
        self.host, self.event = flag, None
        if flag.is_cuda:
            self.host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.host.copy_(flag, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    @property
    def is_here(self) -> bool:
        return self.event is None or bool(self.event.query())

    @property
    def value(self) -> bool:
        """Result of the device; valid once `is_here` is True."""
        return bool(self.host)
