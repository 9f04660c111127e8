"""Reading the log of the empty CUDA runtime: what was launched, copied, waited for and allocated.

with log.recorded() as seen:
    model(x).sum().backward()
print(seen.launches, seen.waits, seen.products)
"""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ELEMENT_BYTES = {
    "f64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "i8": 1, "u8": 1, "e2m1": 0.5, "c64": 8, "c128": 16,
}  # fmt: skip
EPILOGUES = {
    2: "relu", 4: "bias", 6: "relu, bias", 32: "gelu", 36: "gelu, bias", 256: "bias gradient of a", 512: "bias gradient of b",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A compiled kernel as it was launched. piece: elements that a program has at a time; 0: not known."""

    cubin: str
    threads: int
    shared_bytes: int
    piece: int


@dataclass
class Kernel:
    """All launches of one name; bytes are those of Triton's and Inductor's kernels, as `hooks` counts them."""

    launches: int = 0
    binaries: Counter[Binary] = field(
        default_factory=Counter
    )  # of Triton's kernels; of torch's own nothing is known
    read_bytes: int = 0
    written_bytes: int = 0
    conditional_bytes: int = 0  # not in those: what is read and written under an `if` of the kernel
    spanned_bytes: int = 0  # each tensor argument once and whole
    piece: int = 0

    @property
    def is_compiled(self) -> bool:
        return bool(self.binaries)


@dataclass
class Summary:
    """Sums over events; `add` one at a time.

    launches    kernels, and one for each product; those of a graph when the graph is launched, not when it is captured
    memcpys     kind -> [count, bytes]
    peak_bytes  largest sum of cudaMalloc'ed memory: what torch's allocator reserved, not what its tensors took
    remarks     functions that nothing stands in for, refusals, bytes that are not known
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    products: Counter[str] = field(default_factory=Counter)
    product_flop: int = 0
    product_bytes: int = 0
    memcpys: dict[str, list[int]] = field(default_factory=dict)
    memsets: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    graph_launches: int = 0
    launches_by_graphs: int = 0
    captured: int = 0
    peak_bytes: int = 0
    failed_allocations: int = 0
    remarks: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        launched = sum(kernel.launches for kernel in self.kernels.values()) + sum(
            self.products.values()
        )
        return launched - self.captured + self.launches_by_graphs

    def total(self, what: str) -> int:
        """The sum of one of Kernel's bytes over all kernels."""
        return sum(getattr(kernel, f"{what}_bytes") for kernel in self.kernels.values())

    def add(self, event: dict[str, Any]) -> None:
        what = event["e"]
        if what == "launch":
            self._launch(event)
        elif what == "bytes":
            self._bytes(event)
        elif what == "gemm":
            self._product(event)
        elif what == "memcpy":
            count = self.memcpys.setdefault(event["kind"], [0, 0])
            count[0] += 1
            count[1] += event["bytes"]
        elif what == "memset":
            self.memsets += 1
        elif what == "sync":
            self.waits[event["what"]] += 1
        elif what == "alloc":
            self.peak_bytes = max(self.peak_bytes, event["total"])
            self.failed_allocations += event["failed"]
        elif what == "graph_launch":
            self.graph_launches += 1
            self.launches_by_graphs += event["launches"]
        elif what in ("unknown", "missing", "refused"):
            self.remarks[f"{what}: {event.get('name', event.get('why'))}"] += 1

    def _launch(self, event: dict[str, Any]) -> None:
        kernel = self.kernels.setdefault(event["name"], Kernel())
        kernel.launches += 1
        self.captured += event["captured"]
        if event["cubin"]:
            x, y, z = event["block"]
            kernel.binaries[Binary(event["cubin"], x * y * z, event["shared"], kernel.piece)] += 1

    def _bytes(self, event: dict[str, Any]) -> None:
        kernel = self.kernels.setdefault(event["name"], Kernel())
        kernel.read_bytes += event["read"]
        kernel.written_bytes += event["written"]
        kernel.conditional_bytes += event["conditional"]
        kernel.spanned_bytes += event["spanned"]
        kernel.piece = event.get("piece", 0)
        if event.get("unknown", 0) > 0:
            self.remarks[
                f"bytes of {event['name']}: {event['unknown']} of its tensors are not known"
            ] += 1

    def _product(self, event: dict[str, Any]) -> None:
        self.products[described(event)] += 1
        self.captured += event["captured"]
        m, n, k, batch = (event[name] for name in ("m", "n", "k", "batch"))
        self.product_flop += 2 * m * n * k * batch
        a, b, c = (ELEMENT_BYTES.get(event[name], 0) for name in "abc")
        self.product_bytes += round(batch * (m * k * a + k * n * b + m * n * c))


def described(product: dict[str, Any]) -> str:
    """A product in one line, as cuBLAS sees it: column-major."""
    line = f"{product['m']}x{product['n']}x{product['k']} {product['trans']} {product['a']}*{product['b']}->{product['c']}"
    if product["batch"] > 1:
        line += f" batch {product['batch']}"
    if product.get("scale_a"):
        fast = ", fast accumulation" if product["fast"] else ""
        line += f" scales {product['scale_a']}*{product['scale_b']}{fast}"
    if product.get("epilogue", 1) != 1:
        line += f" epilogue {EPILOGUES.get(product['epilogue'], product['epilogue'])}"
    if "workspace" in product:
        line += f" workspace {product['workspace'] >> 20} MiB"
    return f"{line} {product['call']}"


def summed(events: Iterable[dict[str, Any]]) -> Summary:
    summary = Summary()
    for event in events:
        summary.add(event)
    return summary


def path() -> Path:
    """Of this process' log."""
    if "EMPTY_CUDA_LOG" not in os.environ:
        raise RuntimeError(
            "No log: start the process over the empty CUDA runtime (tests/gpu_dry_run/runtime.py)."
        )
    return Path(os.environ["EMPTY_CUDA_LOG"]) / f"events-{os.getpid()}.jsonl"


def read(log: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    with log.open(encoding="utf-8") as lines:
        lines.seek(start)
        for line in lines:
            if line.endswith("\n"):  # the last one is cut where a process was killed
                yield json.loads(line)


def mark(name: str) -> None:
    """A line of the log by which a part of it is found again."""
    ctypes.CDLL("libempty_cuda.so").empty_cuda_note(
        json.dumps({"e": "mark", "name": name}).encode()
    )


def between(first: str, last: str) -> Summary:
    """What this process did from one mark to another."""
    events = list(read(path()))
    at = {event["name"]: place for place, event in enumerate(events) if event["e"] == "mark"}
    return summed(events[at[first] : at[last]])


@contextmanager
def recorded() -> Iterator[Summary]:
    """What this process does within; filled when the block ends."""
    mark("recorded")
    start = path().stat().st_size
    summary = Summary()
    try:
        yield summary
    finally:
        for event in read(path(), start):
            summary.add(event)
