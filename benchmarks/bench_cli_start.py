"""Which library should read the command line: what does each cost at start-up, and what does it let pass?

cyclopts, tyro and jsonargparse, with argparse of the standard library beside them, read the flags of the same `TrainConfig` in
a fresh process each; `narrowgauge` is the real command line. The time is the wall time of a whole process. The baseline
is an interpreter that does nothing, so a ratio of 5 is five starts of Python.

    pip install tyro jsonargparse      # the project needs neither; without them their cases are left out
    python -m benchmarks.bench_cli_start [--rounds 20]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

from benchmarks.environment import ROOT
from benchmarks.harness import RESULTS, measure, record, rows, table

SETTINGS = """
import inspect, sys
from dataclasses import fields
from typing import Annotated
from narrowgauge.train.config.settings import TABLE, TrainConfig
"""
PROGRAMS = {
    "argparse": """
import argparse
parser = argparse.ArgumentParser(allow_abbrev=False)
for each in fields(TrainConfig):
    kind = {"action": argparse.BooleanOptionalAction} if each.type is bool else {"type": str if each.type is TABLE else each.type}
    parser.add_argument("--" + each.name.replace("_", "-"), default=argparse.SUPPRESS, help=each.metadata["help"], **kind)
print(vars(parser.parse_args()))
""",
    "cyclopts": """
from cyclopts import App, Parameter
def train(**flags): print(flags)
train.__signature__ = inspect.Signature([inspect.Parameter(
    each.name, inspect.Parameter.KEYWORD_ONLY, default=None if each.type is TABLE else each.default,
    annotation=Annotated[list[str] if each.type is TABLE else each.type, Parameter(help=each.metadata["help"])])
    for each in fields(TrainConfig)])
app = App(help_format="plaintext", version_flags=[], result_action="return_value")
app.default(train)
app()
""",
    "tyro": """
import tyro
print(tyro.cli(TrainConfig))
""",
    "jsonargparse": """
from jsonargparse import ArgumentParser
parser = ArgumentParser()
parser.add_class_arguments(TrainConfig)
print(parser.parse_args())
""",
}
# What a slip leaves on a command line; the library should refuse each.
SLIPS = {
    "typo": ["--learnin-rate=1e-3"],
    "abbreviation": ["--learn=1e-3"],
    "fraction for a whole number": ["--layers=2.5"],
    "flag given twice": ["--layers=2", "--layers=3"],
    "word too many": ["stray"],
}


def installed() -> list[str]:
    return [name for name in PROGRAMS if importlib.util.find_spec(name)]


def start(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def with_library(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return start("-c", SETTINGS + PROGRAMS[name], *arguments)


def cases() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {"python": lambda: start("-c", "pass")}
    for name in installed():
        found[f"{name}: import"] = lambda name=name: start("-c", f"import {name}")
        found[f"{name}: --help"] = lambda name=name: with_library(name, "--help")
        found[f"{name}: --steps 3"] = lambda name=name: with_library(name, "--steps=3")
    found["narrowgauge --help"] = lambda: start("-m", "narrowgauge", "--help")
    found["narrowgauge train --help"] = lambda: start("-m", "narrowgauge", "train", "--help")
    found["narrowgauge train --layers 0"] = lambda: start(
        "-m", "narrowgauge", "train", "--layers", "0"
    )
    return found


def answer(name: str, arguments: list[str]) -> str:
    """What a library makes of a slip; a suggestion is a sentence such as "did you mean", with the right flag in it."""
    done = with_library(name, *arguments)
    if done.returncode == 0:
        return "accepted"
    said = done.stdout + done.stderr
    return "refused, suggests" if " mean" in said and "--learning-rate" in said else "refused"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Start-up time and strictness of command-line libraries."
    )
    parser.add_argument("--rounds", type=int, default=20)
    timings = measure(cases(), rounds=parser.parse_args().rounds, warmup=2)
    print(table(timings, baseline="python"))
    answers = [
        {
            "case": f"{name}: {slip}",
            "library": name,
            "version": "" if name == "argparse" else version(name),
            "answer": said,
        }
        for slip, arguments in SLIPS.items()
        for name in installed()
        if (said := answer(name, arguments))
    ]
    print("\n".join(f"{row['case']:45} {row['answer']}" for row in answers))
    record("cli_start", [*rows(timings, baseline="python"), *answers], RESULTS / "cli_start.jsonl")


if __name__ == "__main__":
    main()
