"""Counts what training steps do on a GPU, without one, and says what rose since the committed counts.

    make dry-run                                        installs the CUDA build of torch, apart (gigabytes), and counts everything
    python -m tests.gpu_dry_run --only linear trainer   some parts, with a torch that is a CUDA build
    python -m tests.gpu_dry_run --only linear --cases "fp8-row" "fp8-block + bias"
    python -m tests.gpu_dry_run --update                writes the counts, after they fell or were meant to rise
    python -m tests.gpu_dry_run --run script.py         any Python program over the empty CUDA runtime; --no-log times the host

Exit status 1 if a number rose; 2 if nothing can be counted here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.gpu_dry_run import counts, runtime
from tests.gpu_dry_run.counts import PARTS
from tests.gpu_dry_run.tally import Numbers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_dry_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", help="of one part")
    parser.add_argument(
        "--update", action="store_true", help="write what is counted into the committed file"
    )
    parser.add_argument(
        "--log",
        type=Path,
        default=runtime.cache() / "log",
        help="folder of the logs, and of the binaries",
    )
    parser.add_argument(
        "--no-log",
        action="store_true",
        help="with --run: count nothing, to time what the host does",
    )
    parser.add_argument(
        "--gpu",
        choices=runtime.GPUS,
        default="h100",
        help="with --run: whose data sheet is played",
    )
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, help="a Python program and its arguments"
    )
    options = parser.parse_args(arguments)
    if options.cases and len(options.only) > 1:
        parser.error("--cases: of which part? Name it by --only.")
    if reason := runtime.refusal() or (not options.run and not options.update and counts.refusal()):
        print(f"gpu_dry_run: {reason}.", file=sys.stderr)
        return 2
    if options.run:
        variables = runtime.environment(None if options.no_log else options.log, options.gpu)
        return subprocess.run([sys.executable, *options.run], env=variables).returncode
    return max(_compared(part, options) for part in options.only)


def _compared(part: str, options: argparse.Namespace) -> int:
    new = counts.measured(part, options.log / part, options.cases)
    old = counts.committed()
    for case, numbers in new[part].items():
        print(f"{part}: {case}: {_shown(numbers)}")
    for kernel, numbers in new["kernels"].items():
        print(f"    {kernel}: {_shown(numbers)}")
    found = counts.differences(old, new)
    for kind, lines in found.items():
        for line in lines if old["kernels"] else ():
            print(f"{kind}: {line}")
    if options.update:
        counts.update(new)
        print(f"{part}: written to {counts.path()}", flush=True)
        return 0
    worse = len(found["rose"] + found["new"])
    if worse or found["fell"]:
        print(
            f"{part}: {'where it was meant' if worse else 'to keep what was gained'}: {counts.UPDATE} --only {part}"
        )
    print(f"{part}: {f'{worse} numbers rose or are new' if worse else 'nothing rose'}", flush=True)
    return 1 if worse else 0


def _shown(numbers: Numbers) -> str:
    return ", ".join(f"{name} {value}" for name, value in numbers.items()) or "nothing"


if __name__ == "__main__":
    raise SystemExit(main())
