"""What a command-line library costs at start-up, and how strict it is: cyclopts, tyro, jsonargparse, beside argparse.

Each reads the flags of the same `TrainConfig` in a fresh process; `front` and `train` are narrowgauge's own. Printed: median and
range of the wall time of a whole process, interpreter included. Strictness: what each makes of arguments that a
typo or a copied command leaves behind.

    python benchmarks/cli_start.py              # prints, and writes results/cli_start.jsonl
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "cli_start.jsonl"
RUNS = 21

COMMON = f"""
import sys
from dataclasses import fields
sys.path.insert(0, {str(ROOT)!r})
from narrowgauge.train.config import TABLE, TrainConfig, key_of
"""
PROGRAMS = {
    "argparse": COMMON
    + """
import argparse
parser = argparse.ArgumentParser(allow_abbrev=False)
for each in fields(TrainConfig):
    flag = "--" + key_of(each).replace("_", "-")
    kind = {"action": argparse.BooleanOptionalAction} if each.type is bool else {"type": each.type if each.type is not TABLE else str}
    parser.add_argument(flag, default=argparse.SUPPRESS, help=each.metadata["help"], **kind)
print(vars(parser.parse_args()))
""",
    "cyclopts": COMMON
    + """
import inspect
from typing import Annotated
from cyclopts import App, Parameter
app = App(help_format="plaintext", version_flags=[], result_action="return_value")
def train(**flags): print(flags)
train.__signature__ = inspect.Signature([inspect.Parameter(
    each.name, inspect.Parameter.KEYWORD_ONLY, default=None if each.type is TABLE else each.default,
    annotation=Annotated[list[str] if each.type is TABLE else each.type, Parameter(help=each.metadata["help"])])
    for each in fields(TrainConfig)])
app.default(train)
app()
""",
    "tyro": COMMON + "import tyro\nprint(tyro.cli(TrainConfig))\n",
    "jsonargparse": COMMON
    + "from jsonargparse import ArgumentParser\nparser = ArgumentParser()\nparser.add_class_arguments(TrainConfig)\nprint(parser.parse_args())\n",
}
STRICTNESS = (
    ["--learnin-rate=1e-3"],
    ["--learn=1e-3"],
    ["--layers=2.5"],
    ["--layers=2", "--layers=3"],
    ["stray"],
)


def elapsed_ms(command: list[str]) -> list[float]:
    """Sorted wall times of RUNS processes, after one that warms the page cache."""
    times = []
    for _ in range(RUNS + 1):
        started_at_s = time.perf_counter()
        subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
        times.append(1000 * (time.perf_counter() - started_at_s))
    return sorted(times[1:])


def measure(name: str, case: str, command: list[str]) -> dict:
    times = elapsed_ms(command)
    row = {
        "library": name, "case": case, "median_ms": round(statistics.median(times), 1),
        "min_ms": round(times[0], 1), "max_ms": round(times[-1], 1), "runs": RUNS,
    }  # fmt: skip
    print(f"{name:13} {case:9} {row['median_ms']:6.0f} ms ({row['min_ms']:.0f} to {row['max_ms']:.0f})", flush=True)
    return row


def strictness(name: str, arguments: list[str]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[name], *arguments], capture_output=True, text=True, check=False
    )
    row = {"library": name, "case": " ".join(arguments), "refused": done.returncode != 0}
    row["suggests"] = (
        "learning-rate" in done.stderr + done.stdout if "learnin" in arguments[0] and done.returncode else None
    )
    print(
        f"{name:13} {row['case']:25} {'refused' if row['refused'] else 'ACCEPTED'}{' + suggestion' if row['suggests'] else ''}"
    )
    return row


def main() -> None:
    rows = [measure("python", "pass", [sys.executable, "-c", "pass"])]
    for name, program in PROGRAMS.items():
        rows.append(measure(name, "import", [sys.executable, "-c", f"import {name}"]))
        rows.append(measure(name, "--help", [sys.executable, "-c", program, "--help"]))
        rows.append(measure(name, "parse", [sys.executable, "-c", program, "--steps=3"]))
    ours = [sys.executable, "-m", "narrowgauge"]
    rows.append(measure("front", "--help", [*ours, "--help"]))
    rows.append(measure("train", "--help", [*ours, "train", "--help"]))
    rows.append(measure("train", "refusal", [*ours, "train", "--layers=0"]))
    rows += [strictness(name, arguments) for name in PROGRAMS for arguments in STRICTNESS]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    machine = {
        "command": "python benchmarks/cli_start.py", "commit": commit.stdout.strip(), "python": platform.python_version(),
        "cpu": cpu(), "versions": {name: version(name) for name in PROGRAMS if name != "argparse"},
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in [machine, *rows]))


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.machine()


if __name__ == "__main__":
    main()
