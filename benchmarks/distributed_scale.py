"""What would 8, 64 and 1,024 GPUs send in a step of FSDP2, and how long would that take? Counted on one rank, the time on paper.

    python -m benchmarks.distributed_scale

Counted: one rank of a world whose other ranks are not there (torch's "fake" process group) trains a model of two blocks. Each collective is
caught where torch hands it to the group: calls, and bytes of whole messages (gathered, scattered, exchanged), per parameter.

On paper: the alpha-beta model of `narrowgauge.plan.messages`, whose rates are assumed. Nothing overlaps. The models are Llama 8B and 70B by
their numbers of parameters and blocks; each block is gathered twice and reduced once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.harness import RESULTS, record
from narrowgauge.plan import messages

WORLDS = (8, 64, 1024)
CASES: dict[str, dict[str, str]] = {
    "bf16 gathers, float32 reduce": {"reduce_dtype": "float32"},
    "bf16": {},
    "fp8 gradients": {"gradients": "fp8"},
    "fp8-lm gradients": {"gradients": "fp8-lm"},
    "codes, fp8 gradients": {"weights": "codes", "gradients": "fp8"},
}
MODELS = {"8B": (8.03e9, 32), "70B": (70.6e9, 80)}


def counted(world: int, case: str) -> dict[str, Any]:
    """Calls and bytes per parameter of one step on rank 0 of `world`, in this process: one may be made in each."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    import narrowgauge as ng

    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.namespace == "c10d":
                kind = function.__name__.split(".")[0].strip("_")
                whole = max(_bytes(each) for each in args[:2])
                sent[kind] += whole
                calls[kind] += 1
            return function(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.manual_seed(0)
    width = 1024
    blocks = [
        nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        for _ in range(2)
    ]
    options = dict(CASES[case])
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=getattr(torch, options.pop("reduce_dtype", "bfloat16")),
    )
    model = ng.convert(nn.Sequential(*blocks), "fp8-current")
    for module in [*blocks, model]:
        fully_shard(module, mp_policy=policy)
    ng.distribute(model, **options)  # type: ignore[arg-type]
    parameters = sum(each.numel() for each in model.parameters())
    x = torch.randn(8, width)
    with Counting():
        model(x).sum().backward()
    return {
        "ranks": world,
        "calls": sum(calls.values()),
        "calls_by_kind": dict(calls),
        "bytes_per_parameter": round(sum(sent.values()) / parameters, 4),
        "bytes_per_parameter_by_kind": {
            kind: round(count / parameters, 4) for kind, count in sent.items()
        },
        "blocks": len(blocks),
    }


def _bytes(argument: Any) -> int:
    import torch

    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    if isinstance(argument, (list, tuple)):
        return sum(_bytes(each) for each in argument)
    return 0


def seconds(message_bytes: float, calls: float, world: int) -> float:
    """By the alpha-beta model of the module, of so many calls with so many bytes together."""
    return calls * messages.collective(message_bytes / calls, world)


def on_paper(found: dict[str, Any]) -> dict[str, float]:
    """Model -> milliseconds of a step's collectives."""
    per_block = found["calls"] / found["blocks"]
    return {
        name: round(
            1e3
            * seconds(
                found["bytes_per_parameter"] * parameters, per_block * blocks, found["ranks"]
            ),
            1,
        )
        for name, (parameters, blocks) in MODELS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs=2,
        metavar=("RANKS", "CASE"),
        help="count one case in this process and print it as JSON",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=RESULTS / "distributed_scale.jsonl",
        help="append rows to this file",
    )
    options = parser.parse_args()
    if options.only:
        print(json.dumps(counted(int(options.only[0]), options.only[1])))
        return
    rows = []
    for world in WORLDS:
        for case in CASES:
            command = [
                sys.executable,
                "-m",
                "benchmarks.distributed_scale",
                "--only",
                str(world),
                case,
            ]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            row = {
                "case": case,
                **found,
                "collectives_ms": on_paper(found),
                "assumed": {"node": asdict(messages.NODE), "network": asdict(messages.NETWORK)},
            }
            rows.append(row)
            times = ", ".join(f"{name} {ms:,.0f} ms" for name, ms in row["collectives_ms"].items())
            print(
                f"{world:5} ranks  {case:30} {row['calls']:3} calls  {row['bytes_per_parameter']:.3f} bytes per parameter  {times}"
            )
    record("distributed_scale", rows, options.json)


if __name__ == "__main__":
    main()
