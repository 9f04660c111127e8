"""How long does `narrowgauge plan` take, first and again, and what does the road to a small card look like?

    python -m benchmarks.plan_answers

A Llama of 8 billion parameters from its settings alone (bf16-o3, one row of 4,096 tokens), each question in a process of its own over a
cache that is empty at first. Seconds are of the clock and of the processor; the second holds on a machine with other work too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record

LLAMA = (
    "--model.hidden-size=4096 --model.layers=32 --model.heads=32 --model.kv-heads=8 --model.intermediate-size=14336 "
    "--data.vocab-size=128256 --model.sequence-length=4096 "
    "--batch.size=1 --recipe.precision=bf16-o3"
)
QUESTIONS = {
    "fits": "--card h100 --optimizer.states 8bit",
    "does not fit": "--card h100",
    "table": "--card rtx-4090 --optimizer.states fp32 --table",
}


def asked(flags: str, cache: Path) -> tuple[float, float, dict[str, Any]]:
    """(seconds by the clock, of the processor, the answer)."""
    command = [
        sys.executable,
        "-m",
        "narrowgauge",
        "plan",
        *LLAMA.split(),
        *flags.split(),
        "--json",
        f"--output={cache / 'run'}",
    ]
    before, started_at_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=False,
    )
    clock_s, after = time.monotonic() - started_at_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return clock_s, used_s, json.loads(done.stdout)


def main() -> None:
    lines = []
    for name, flags in QUESTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            first, again = (asked(flags, Path(folder)) for _ in range(2))
        answer = first[2]
        assert answer == again[2]
        lines.append(
            {
                "case": name, "flags": flags, "allocated_gib": answer["allocated_bytes"] / 2**30, "fits": answer["fits"],
                "first_s": first[0], "first_processor_s": first[1], "again_s": again[0], "again_processor_s": again[1],
                "changes": [change["lines"] for change in answer.get("changes", [])],
                "table": [[row["name"], row["allocated_bytes"] / 2**30] for row in answer.get("table", [])],
            }
        )  # fmt: skip
        print(
            f"{name:14} {first[0]:6.1f} s first ({first[1]:.1f} of the processor), {again[0]:.2f} s again ({again[1]:.2f})",
            flush=True,
        )
        for row in lines[-1]["table"]:
            print(f"    {row[0]:26} {row[1]:7.2f} GiB")
    record("plan_answers", lines, RESULTS / "plan_answers.jsonl")


if __name__ == "__main__":
    main()
