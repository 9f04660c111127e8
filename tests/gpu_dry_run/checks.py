"""Checks of the empty CUDA runtime itself, run over it: small copies, waits, products, memory, graphs, bytes of Triton's kernels.

python -m tests.gpu_dry_run --run -m tests.gpu_dry_run.checks
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn

from tests.gpu_dry_run import binaries, log
from tests.gpu_dry_run.accesses import accesses

X = {"device": "cuda", "dtype": torch.bfloat16}


def small_values_survive_and_large_ones_are_zero() -> None:
    assert torch.tensor([1.5, -2.0]).cuda().tolist() == [1.5, -2.0]
    assert torch.ones(1 << 20).cuda().cpu().count_nonzero() == 0


def waits_and_copies_are_counted() -> None:
    x = torch.zeros(4, device="cuda")
    with log.recorded() as seen:
        x.cpu()
        torch.cuda.synchronize()
    assert seen.memcpys == {"device to host": [1, 16]} and seen.launches == 0
    assert seen.waits["device"] == 1 and seen.waits["stream"] == 1


def products_are_named() -> None:
    layer, x = nn.Linear(64, 128, **X), torch.zeros(32, 64, **X)
    with log.recorded() as seen, torch.no_grad():
        layer(x)
    assert seen.launches == 1 and seen.product_flop == 2 * 32 * 64 * 128
    assert next(iter(seen.products)).startswith("128x32x64 TN bf16*bf16->bf16 epilogue bias")


def memory_ends_where_the_device_ends() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    half = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(total // 2 + 1, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("more memory than there is")
    del half
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 1 << 30


def graphs_repeat_what_they_captured() -> None:
    x, graph = torch.zeros(256, 256, device="cuda"), torch.cuda.CUDAGraph()
    x @ x
    with log.recorded() as captured, torch.cuda.graph(graph):
        x.add_(1)
        x @ x
    with log.recorded() as replayed:
        graph.replay()
        graph.replay()
    assert captured.captured == 2 and captured.launches in (0, 2), (
        captured
    )  # torch 2.11 fills the random state first
    assert replayed.graph_launches == 2 and replayed.launches == 4, replayed


def events_and_streams_work() -> None:
    stream, start, end = (
        torch.cuda.Stream(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    with torch.cuda.stream(stream):
        start.record()
        torch.zeros(1 << 16, device="cuda")
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 1.0 and stream.query()


@triton.jit
def _axpy(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + tl.load(y_ptr + at, at < n), at < n)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, count_ptr, k, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    a, b = a_ptr + row * k + column, b_ptr + row * BLOCK + column
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(0, k, BLOCK):
        total += tl.dot(tl.load(a), tl.load(b))
        a += BLOCK
        b += BLOCK * BLOCK
    tl.store(c_ptr + row * BLOCK + column, total)
    if tl.load(count_ptr) > 0:
        tl.store(a_ptr + row, 0.0)
    tl.atomic_add(count_ptr, 1)


def triton_kernels_are_compiled_and_their_bytes_counted() -> None:
    x, y, out = (torch.zeros(1000, device="cuda") for _ in range(3))
    with log.recorded() as seen:
        _axpy[(4,)](x, y, out, 1000, BLOCK=256)
    kernel = seen.kernels["_axpy"]
    assert (kernel.read_bytes, kernel.written_bytes) == (8000, 4000), kernel
    (binary,) = kernel.binaries
    used = binaries.usage(log.path().parent / "cubins" / binary.cubin)
    assert (
        binary.piece == 256
        and 0 < used.registers < 64
        and 8 < used.instructions < 100
        and not used.spilled
    ), used
    a, c, count = (
        torch.zeros(64, 256, **X),
        torch.zeros(64, 64, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    with log.recorded() as seen:
        compiled = _product[(1,)](a, torch.zeros(256, 64, **X), c, count, 256, BLOCK=64)
    found = accesses(compiled.asm["ttir"])
    assert found == {"a_ptr": "Wr", "b_ptr": "r", "c_ptr": "w", "count_ptr": "rw"}, found


class _Pair(NamedTuple):
    data: Any
    length: Any
    scale: Any = None


@triton.jit
def _pairs(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out.data + at, tl.load(x.data + at, at < x.length), at < out.length)


def tensors_in_tuples_are_counted() -> None:
    x, out = torch.zeros(1000, **X), torch.zeros(500, **X)
    with log.recorded() as seen:
        _pairs[(1,)](_Pair(x, 1000), _Pair(out, 500), BLOCK=1024)
    assert (seen.kernels["_pairs"].read_bytes, seen.kernels["_pairs"].written_bytes) == (
        2000,
        1000,
    ), seen


def a_tensor_of_the_cpu_is_refused() -> None:
    try:
        _axpy[(4,)](torch.zeros(1000), torch.zeros(1000), torch.zeros(1000), 1000, BLOCK=256)
    except ValueError:
        return
    raise AssertionError("Triton took a tensor of the CPU")


@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["n"])
@triton.jit
def _tuned(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


def timing_for_autotuning_is_not_counted() -> None:
    x = torch.zeros(1000, device="cuda")
    with log.recorded() as seen:
        _tuned[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000)
    assert seen.launches == 1, seen


def compiled_code_is_counted() -> None:
    function = torch.compile(lambda x: torch.nn.functional.gelu(x) + 1)
    x = torch.zeros(1 << 16, device="cuda")
    function(x)
    with log.recorded() as seen:
        function(x)
    assert seen.launches == 1 and seen.total("read") == seen.total("written") == 4 << 16, seen


def kernels_within_compiled_code_are_counted() -> None:
    """Triton kernels that somebody wrote, which compiled code launches."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _axpy[(4,)](x, y, out, 1000, BLOCK=256)
        return out * 2

    function = torch.compile(add)
    x, y = (torch.zeros(1000, device="cuda") for _ in range(2))
    function(x, y)
    with log.recorded() as seen:
        function(x, y)
    own = next(kernel for name, kernel in seen.kernels.items() if name.startswith("_axpy"))
    assert seen.launches == 2 and (own.read_bytes, own.written_bytes) == (8000, 4000), seen


CHECKS = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", None) == {"return": "None"}
]

if __name__ == "__main__":
    for check in CHECKS:
        started_at_s = time.perf_counter()
        check()
        print(
            f"{check.__name__.replace('_', ' ')}: {time.perf_counter() - started_at_s:.1f} s",
            flush=True,
        )
