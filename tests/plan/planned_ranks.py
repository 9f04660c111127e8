"""Does the planner know what one rank of several allocates?

    python -m tests.plan.planned_ranks                       every layout, some minutes
    python -m tests.plan.planned_ranks --only fsdp=2 pp=2

Each layout is planned (`narrowgauge.train.planning`, a CPU, every layer counted), and then run: two processes over gloo train four
steps of `narrowgauge train` on pseudo-English, and the events of each rank's allocator are summed. What counts is the largest moment
between the ends of the second and the third step, on the rank that needs most. error = planned / allocated - 1.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import RESULTS, record
from narrowgauge.ops.registry import device_facts
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig, replace, resolved
from narrowgauge.train.parallel import followers
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.planning.command import second_step
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.signals import StopRequest
from tests.train.tiny import WORDS

WORLD, STEPS, STEP_ENDS = 2, 4, "narrowgauge_step_ends"
SIZES: dict[str, Any] = {
    "hidden_size": 256, "layers": 8, "heads": 4, "intermediate_size": 704, "sequence_length": 64, "vocab_size": 300, "batch_size": 16,
    "steps": STEPS, "warmup_steps": 1, "eval_every": 0, "eval_tokens": 64, "checkpoint_every": 0, "tensor_every": 0, "sample_tokens": 0,
    "threads": 1, "device": "cpu",
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {}, "fsdp=2": {}, "tp=2": {}, "pp=2": {"micro_batches": 2}, "pp=2, four micro-batches": {"micro_batches": 4},
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"recipe": "none", "precision": "fp32"}, "fp8-current": {"recipe": "fp8-current", "precision": "fp32"},
}  # fmt: skip


def settings(folder: Path, layout: str, **changes: Any) -> TrainConfig:
    """Of a run on text that is written to `folder`."""
    text = folder / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for seed in range(40):
            draw = random.Random(seed)
            lines = [
                " ".join(draw.choices(WORDS, k=8)).capitalize() + ".\n" for _ in range(60 + seed)
            ]
            (text / f"{seed:02}.txt").write_text("".join(lines), encoding="utf-8")
    own = {
        "data": str(text),
        "cache": str(folder / "cache"),
        "output": str(folder / layout.replace("=", "-")),
    }
    return TrainConfig(**{**SIZES, **own, "parallel": layout, **changes})


def planned(config: TrainConfig) -> int:
    """Bytes of the second step, of the rank that needs most."""
    return second_step(Counts(device_facts("cpu", None), full=True).of(config))


def allocated(config: TrainConfig) -> int:
    """Bytes of this rank, of a process group that is there: the most between the ends of the second step and the third."""
    hook = register_optimizer_step_post_hook(lambda *given: _mark())
    own = Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        store=dist.distributed_c10d._get_default_store(),
        timeout_s=600,
    )
    gc.collect()
    gc.disable()  # it frees what a step has left behind, at any time
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            with StopRequest(patient=True) as stop, own.ending_together(), followers.silent(own):
                code = loop.run_of_rank(resolved(config), own, stop)
            assert code == 0, code
    finally:
        gc.enable()
        hook.remove()
    return _most(found.profiler.kineto_results.events())  # type: ignore[union-attr]


def _mark() -> None:
    with record_function(STEP_ENDS):
        pass


def _most(events: Any) -> int:
    ends = sorted(event.start_ns() for event in events if event.name() == STEP_ENDS)
    assert len(ends) >= STEPS and len(ends) % STEPS == 0, len(ends)
    per_step = len(ends) // STEPS
    begins, stops = ends[2 * per_step - 1], ends[3 * per_step - 1]
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    total = most = 0
    for at, nbytes in changes:
        total += nbytes
        if begins <= at <= stops:
            most = max(most, total)
    return most


def _serve(rank: int, store: str, config: TrainConfig, pipe: Any) -> None:
    os.environ["KINETO_LOG_LEVEL"] = "99"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    pipe.send(allocated(config))
    dist.destroy_process_group()


def on_ranks(config: TrainConfig) -> list[int]:
    """`allocated` of each rank, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, members = [], []
        for rank in range(WORLD):
            here, there = context.Pipe()
            member = context.Process(target=_serve, args=(rank, f"{folder}/store", config, there))
            member.start()
            there.close()
            pipes.append(here)
            members.append(member)
        found = [pipe.recv() for pipe in pipes]
        for member in members:
            member.join()
    return found


def row(layout: str, run: str, folder: Path) -> dict[str, Any]:
    changes = LAYOUTS[layout] | RUNS[run]
    config = settings(folder, layout.split(",")[0], **changes)
    plan = planned(config)
    found = on_ranks(replace(config, output=f"{config.output}-{run}"))
    error = 100 * (plan / max(found) - 1)
    return {
        "layout": layout, "run": run, "planned_bytes": plan, "allocated_bytes": found, "error_percent": round(error, 2),
        "whole_bytes": planned(replace(config, parallel="")),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.plan.planned_ranks", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--dry-run", action="store_true", help="print and write no rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for layout in options.only:
            for run in options.runs:
                lines.append(row(layout, run, Path(folder) / layout.replace(" ", "-") / run))
                line = lines[-1]
                print(
                    f"{layout:26} {run:12} planned {line['planned_bytes'] / 2**20:7.2f} MiB, allocated "
                    f"{[round(each / 2**20, 2) for each in line['allocated_bytes']]}, {line['error_percent']:+.2f} %",
                    flush=True,
                )
    if not options.dry_run:
        record("planned_ranks", lines, RESULTS / "planned_ranks.jsonl")


if __name__ == "__main__":
    main()
