"""What a compiled Llama layer and head do, by the log of the empty CUDA runtime: products by shape, bytes of Triton's kernels, launches.

    python RUNTIME/run.py --log LOG python RUNTIME/examples/compiled_layer.py --contenders bf16 torchao-tensorwise fp8-current ...
    python -m benchmarks.compiled_work LOG... [--torch 2.13.0]            rows appended to benchmarks/results/compiled_work.jsonl

The layer has 8B's shape, 8,192 tokens in two rows, a vocabulary of 32,000 and no optimizer; `planned_time` and `calibration` make whole
steps of it. Kernels of torch itself, attention among them, tell no bytes: they are counted as launches.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record

TYPES = {"e4m3": "fp8", "e5m2": "fp8", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "i8": "int8"}


def steps(log: Path) -> dict[str, list[dict[str, Any]]]:
    """Contender -> events of its second step."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(log.glob("events-*.jsonl")):
        name = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["e"] == "mark":
                name = (
                    event["name"].removeprefix("step ") if event["name"].startswith("step ") else ""
                )
            elif name:
                found.setdefault(name, []).append(event)
    return found


def sums(event: dict[str, Any]) -> str:
    if TYPES.get(event["a"]) != "fp8":
        return "fast"
    scale = event.get("scale_a", "")
    if "128" in scale:
        return "blocks"
    if "32" in scale or "16" in scale:
        return "mx"
    return "fast" if event.get("fast") else "split"


def rows(name: str, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    products: Counter[tuple[Any, ...]] = Counter()
    moved: Counter[tuple[int, int]] = Counter()
    launched = 0
    for event in events:
        if event["e"] == "gemm":
            products[
                event["m"], event["n"], event["k"], TYPES.get(event["a"], event["a"]), sums(event)
            ] += event["batch"]
        elif event["e"] == "bytes":
            moved[event["read"] + event["written"], event["spanned"]] += 1
        elif event["e"] == "launch":
            launched += 1
    yield {
        "case": name,
        "products": [[*each, count] for each, count in sorted(products.items())],
        "kernels": [
            [*each, count] for each, count in sorted(moved.items())
        ],  # bytes moved, bytes of arguments, times
        "triton_gb": round(sum(size * count for (size, _), count in moved.items()) / 1e9, 3),
        "other_launches": launched - sum(moved.values()),
        "launches": launched + sum(products.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--torch", default="", help="version in the runtime's environment")
    arguments = parser.parse_args()
    found = [
        {**row, "runtime_torch": arguments.torch}
        for log in arguments.logs
        for name, events in steps(log).items()
        for row in rows(name, events)
    ]
    for row in found:
        print(
            f"{row['case']:20} {row['launches']:4} launches, {row['triton_gb']:6.2f} GB of Triton's kernels"
        )
    record("compiled_work", found, RESULTS / "compiled_work.jsonl")


if __name__ == "__main__":
    main()
