"""Benchmarks whose question is answered: what each asked, and the same run again, from the commit that has them all.

    python -m benchmarks.closed                       their names and questions
    python -m benchmarks.closed NAME [ARGUMENT ...]   the benchmark, with the package of that commit

Their rows stay in `results/`, and the documents that cite them name this command. A run checks the commit out in a temporary
work tree, and appends the rows that it records there to the files here: lines hold that commit, whose code they measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT

COMMIT = "7609ebab"  # the last one that has them
CLOSED = {
    "cpu_time_to_loss": "Seconds of a processor until a language model reaches a loss",
    "ablation": "4-bit training taken apart: which forward, which backward, how many bits?",
    "adapters": "Adapters over a narrow frozen base beside the same adapters over a bf16 base",
    "attention_convergence": "Does training with attention in FP8 end where bf16 ends? A tiny Llama, several seeds.",
    "batch_order": "Does a model learn less from batches by length, and why? One plain loop, the orders of its batches side by side.",
    "bench_cli_start": "Which library should read the command line: what does each cost at start-up, and what does it let pass?",
    "checkpointing": "What each policy of checkpointing needs and computes again",
    "debug_ladder": "What `narrowgauge debug` finds of planted faults",
    "digits": "Does a Vision Transformer learn in few bits?",
    "distributed_convergence": "Do gradients that travel in FP8 end where 16-bit messages end?",
    "distributed_scale": "What would 8, 64 and 1,024 GPUs send in a step of FSDP2, and how long would that take?",
    "export_limits": "Memory of exports and of a base read as codes, at the shape of 1.1 B parameters; and kill -9 while they run.",
    "fast_accumulation": "Does training end elsewhere where FP8 tensor cores add all three products in 14 bits?",
    "frontier": "4 bits at the frontier: errors of casts, and how far a gradient in 4 bits lies from float32's.",
    "guard_cost": "What a guard costs a run besides the steps of its checks: copying the state, putting it back.",
    "held_gradients": "How exact is a gradient that is held in FP8 while micro-batches add up?",
    "mixture_convergence": "Do mixtures of experts in low precision end where bf16 ends?",
    "mixture_step": "What a recipe costs a training step of a mixture of experts on the CPU: a small Mixtral, forward and backward.",
    "optimizer_shards": "How even are an optimizer's states over ranks?",
    "pipeline_messages": "What do messages of 8 bits between the stages of a pipeline cost in quality?",
    "plan_answers": "How long does `narrowgauge plan` take, first and again, and what does the road to a small card look like?",
    "recipes_by_tasks": "Every recipe on every task, in small: the difference to bf16 over seeds, in one table.",
    "rotation_signs": "Do random signs before the Hadamard matrix of int4-hq spread outliers better?",
    "saved_in_fp8": "What keeping activations in 8 bits does to gradients and to training",
    "second_moment": "How far is an 8-bit second moment from the exact one after 60 steps?",
    "sensitivity": "Are runs that cannot tell recipes apart called so?",
    "study_translation": "A study of three recipes and five seeds on Multi30k",
    "tensor_parallel": "What does DTensor cost a step of tensor parallelism, and how many bytes do its messages take?",
    "translate": "Does an encoder-decoder learn to translate in few bits?",
    "weight_reuse": "The cost of comparing a weight with the one that was cast",
    "wheel_kernels": "Are the C++ kernels that a wheel carries as fast as those of a checkout, and do they give the same bits?",
    "dead_weights": "How far do weights go whose gradient has stopped, and what do units cost that wake again?",
    "spike_rates": "How often does the rule for loss spikes err on sound runs, and how small a spike does it find?",
}


def appended(before: Path, after: Path) -> list[str]:
    """Names of the files of rows in `before` to which the lines that `after` has more were appended."""
    grown = []
    for file in sorted(after.glob("*.jsonl")):
        known = before / file.name
        old = known.read_bytes() if known.exists() else b""
        recorded = subprocess.run(
            ["git", "show", f"HEAD:benchmarks/results/{file.name}"], cwd=after, capture_output=True
        ).stdout
        new = file.read_bytes()[len(recorded) :]
        if new:
            known.write_bytes(old + new)
            grown.append(file.name)
    return grown


def run(name: str, arguments: list[str]) -> int:
    """The exit code of the closed benchmark, run in a work tree of COMMIT."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", str(tree), COMMIT]).returncode:
            sys.exit(f"closed: no work tree of {COMMIT}. Run it in a clone with its whole history.")
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"benchmarks.{name}", *arguments],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
            )
            for file in appended(RESULTS, tree / "benchmarks" / "results"):
                print(f"rows appended to {RESULTS / file}")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)])
        return done.returncode


def main() -> None:
    if len(sys.argv) == 1:
        for name, question in CLOSED.items():
            print(f"{name:24} {question}")
        return
    name, *arguments = sys.argv[1:]
    if name not in CLOSED:
        sys.exit(f"closed: {name!r} is none of {', '.join(CLOSED)}. `make help` has the others.")
    sys.exit(run(name, arguments))


if __name__ == "__main__":
    main()
