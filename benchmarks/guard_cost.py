"""What a guard costs a run besides the steps of its checks: copying the state, putting it back.

    python -m benchmarks.guard_cost --data shakespeare.txt

A Llama trains with a guard, and the processor time of this process is taken apart: the steps of the run, the steps of stretches, and
everything else that the guard does (`Guard.before_step`, `after_step`, `state`). Processor time, since neighbours share the machine.
The audit works within the last steps of a check, which are the run's: `audit_steps` is what one of these takes more, in steps.
Without an alarm the losses must be those of the same run without a guard, to the bit. The state weighs more against a step the fewer
tokens a step has, so a run of few tokens is the dear case.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose.runs import read_metrics

CASES = [
    {"recipe": "fp8-current", "then": "warn", "tokens": 2048},
    {"recipe": "fp8-current", "then": "stay", "tokens": 2048},
    {"recipe": "fp8-current", "then": "stay", "tokens": 256},
]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "layers": 4,
    "heads": 4,
    "sequence_length": 128,
    "vocab_size": 1024,
}
GUARD = {"every": 100, "steps": 10}
STEPS = 220


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="text to learn")
    parser.add_argument(
        "--tokens", type=int, default=0, help="only the cases of so many tokens a step"
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "guard_cost.jsonl")
    options = parser.parse_args()
    rows = []
    for case in (each for each in CASES if options.tokens in (0, each["tokens"])):
        with tempfile.TemporaryDirectory() as folder:
            row = {**case, **measured(options.data, Path(folder), **case)}
        print(
            "{recipe}, then={then}, {tokens} tokens a step: {steps_share:.1%} of the run's steps did not count; beside them the guard took "
            "{rest_of_run:.2%} of the run's time and {rest_of_stretches:.1%} of the stretches'; an observed step took "
            "{audit_steps:.2f} steps more; same losses: {same}".format(**row)
        )
        rows.append(row)
    record(
        "guard_cost",
        [row | {"guard": GUARD, "steps": STEPS, "sizes": SIZES} for row in rows],
        options.results,
    )


def measured(data: Path, folder: Path, *, recipe: str, then: str, tokens: int) -> dict[str, Any]:
    from narrowgauge.lab import probe, run_guard, training
    from narrowgauge.lab.guard import audit
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.trainer import Trainer

    settings: dict[str, Any] = {
        **SIZES, "data": str(data), "cache": str(folder / "cache"), "recipe": recipe, "steps": STEPS, "threads": 1, "device": "cpu",
        "batch_size": tokens // SIZES["sequence_length"], "eval_every": 0, "tensor_every": 0, "sample_tokens": 0, "log_every": STEPS,
        "checkpoint_every": 50, "eval_tokens": 4096,
    }  # fmt: skip
    words = f"every={GUARD['every']},steps={GUARD['steps']},margin=20%,then={then}"
    spent: dict[str, float] = {"run": 0.0, "guard": 0.0, "stretches": 0.0, "audit": 0.0}
    guard = run_guard.RunGuard
    places = [(Trainer, "_optimizer_step", "run"), (probe, "_step", "stretches")]
    places += [(guard, name, "guard") for name in ("before_step", "after_step", "state")]
    places += [(audit._LayerAudit, name, "audit") for name in ("__call__", "multiplied")]
    guarded_run = TrainConfig(**settings, output=str(folder / "guarded"), guard=words)
    with timed(spent, places):
        training.run(guarded_run)
    training.run(TrainConfig(**settings, output=str(folder / "alone")))
    losses = [
        [
            event["loss"]
            for event in read_metrics(folder / name / "metrics.jsonl")
            if event["event"] == "step"
        ]
        for name in ("guarded", "alone")
    ]
    rest = spent["guard"] - spent["stretches"]
    checks = [
        event
        for event in read_metrics(folder / "guarded" / "metrics.jsonl")
        if event["event"] == "guard"
    ]
    did_not_count = sum(each["steps"] * (1 + (each["control"] is not None)) for each in checks)
    return {
        "steps_share": did_not_count / STEPS,
        "stretches_of_run": spent["stretches"] / spent["run"],
        "rest_of_run": rest / spent["run"],
        "rest_of_stretches": rest / spent["stretches"],
        "checks": len(checks),
        "audit_steps": spent["audit"] / (audit.STEPS * len(checks)) / (spent["run"] / STEPS),
        "same": losses[0] == losses[1],
        **{f"{name}_s": seconds for name, seconds in spent.items()},
    }


@contextmanager
def timed(spent: dict[str, float], places: list[tuple[Any, str, str]]) -> Iterator[None]:
    """Adds the processor time of what is called at these places."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def around(real: Callable[..., Any], key: str) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            began_at_s = time.process_time()
            try:
                return real(*given, **named)
            finally:
                spent[key] += time.process_time() - began_at_s

        return called

    try:
        for owner, name, key in places:
            setattr(owner, name, around(getattr(owner, name), key))
        yield
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)


if __name__ == "__main__":
    main()
