"""Where does the time of a block go? torch.profiler of one Llama block, eager and compiled, for each recipe.

`kernels_s` is the sum over kernels of a forward and backward pass, `wall_s` the host's clock around it, device idle before: what is left is
the host. The table of the kernels lies beside the lines, one file for each. --once: one eager pass of each recipe, for ncu.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness
from benchmarks.gpu.bench import MODES, Bench
from benchmarks.gpu.floor import Floor
from benchmarks.gpu.models import converted, llama
from narrowgauge.conversion.measure import compiled_alone
from narrowgauge.train.attention import use_attention_of_whole_rows

RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "fp8-delayed-fused")
ROWS, SEQUENCE = 2, 4096


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.profile_block", description="Where a block's time goes."
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument(
        "--once", action="store_true", help="one eager pass of each recipe, nothing is recorded"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "profile_block: torch.cuda.is_available() is False, and this is about kernels.",
            file=sys.stderr,
        )
        return 1
    bench = Bench(torch.device("cuda", 0), False, Floor(1, 1, 1), None)
    for mode in reversed(MODES):
        for name in options.recipes:
            call = _pass(bench, name, mode)
            call()
            if options.once:
                continue
            call()
            line, table = _profiled(call)
            print(
                f"{name:18} {mode:9} kernels {line['kernels_s'] * 1e3:8.3f} ms  wall {line['wall_s'] * 1e3:8.3f} ms",
                flush=True,
            )
            options.results.mkdir(parents=True, exist_ok=True)
            (options.results / f"kernels-{name}-{mode}.txt").write_text(table, encoding="utf-8")
            harness.record(
                "gpu-profile",
                [{"case": name, "mode": mode, **line}],
                options.results / "gpu_profile.jsonl",
            )
        if options.once:
            break
    return 0


def _pass(bench: Bench, name: str, mode: str) -> Callable[[], None]:
    model = llama(bench, 1)
    ids = torch.randint(model.config.vocab_size, (ROWS, SEQUENCE), device=bench.device)
    use_attention_of_whole_rows(model, {"input_ids": ids})
    model = converted(model, name, bench, ids.numel())
    body: Any = model.model
    forward = compiled_alone(body) if mode == "compiled" else body

    def call() -> None:
        forward(input_ids=ids).last_hidden_state.sum().backward()
        model.zero_grad()

    return call


def _profiled(call: Callable[[], None]) -> tuple[dict[str, float], str]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        began_at_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began_at_s
    averages = found.key_averages()
    kernels_s = sum(each.self_device_time_total for each in averages) / 1e6
    return {"kernels_s": kernels_s, "wall_s": wall_s}, averages.table(
        sort_by="self_device_time_total", row_limit=60
    )


if __name__ == "__main__":
    sys.exit(main())
