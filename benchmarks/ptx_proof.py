"""Compiled kernels against their definitions, interpreted from their PTX, for GPUs that are not here.

    python -m benchmarks.ptx_proof                                every case for five GPUs
    python -m benchmarks.ptx_proof --gpus 90 --families casts delayed
    python -m benchmarks.ptx_proof --triton 3.6.0 3.7.1           the same by other versions of Triton's compiler, installed apart
    python -m benchmarks.ptx_proof --mutations                    fifty faults in the PTX: are they noticed?
    python -m benchmarks.ptx_proof --mutations --equivalent 17 "the barrier before it is enough"

tests/ptx has the interpreter (`machine`), the cases (`proof`) and the faults (`mutants`). One row for
each GPU and family: cases, those that agree, instructions and processor seconds; those that do not
agree are named. A fault that survives is printed with its line; whether it is equivalent is for a
person to argue, with --equivalent, which adds a line to the results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from narrowgauge.ops.cpp.build import cache_folder

# Set before Triton is imported: the binaries of the tests.
os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "tests" / "triton"))

from narrowgauge.ops import triton
from tests.ptx import mutants, proof
from tests.ptx.launching import CAPABILITIES

# Cases whose kernels are changed: one of each kind of kernel, those that wait for each other first.
CHANGED = (
    "tensor 80x144 and x.T", "row 80x144 and x.T", "row 67x131 and x.T", "vector 131x259 and x.T", "nv 67x131", "mx 67x131",
    "e4m3 first and x.T", "e4m3 first", "whole numbers, order 64, bfloat16", "whole numbers",
)  # fmt: skip
COUNTS = {"barrier": 16, "order": 10, "mask": 12, "stride": 12}
SEED, GPU = 20261128, 90


def main() -> None:
    options, others = _options()
    if options.triton:
        for version in options.triton:
            by_other_triton(version, others)
        return
    triton.unavailable = lambda: ""  # nothing is launched, so no C compiler is needed
    if options.equivalent:
        number, reason = options.equivalent
        record("ptx_mutations", [{"mutant": int(number), "equivalent": reason}], options.results)
        return
    if options.mutations:
        faults = list(changed(options.only))
        noticed = sum(bool(each["noticed"]) for each in faults)
        row = {"gpu": f"sm_{GPU}", "faults": len(faults), "noticed": noticed, "each": faults}
        record("ptx_mutations", [row], options.results)
        return
    for row in matrix(options):
        record("ptx_proof", [row], options.results)


def by_other_triton(version: str, arguments: list[str]) -> None:
    """Start this command anew with another version of Triton, in a folder of its own."""
    folder = cache_folder() / "tests" / f"triton-{version}"
    if not (folder / f"triton-{version}.dist-info").exists():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
        ]
        subprocess.run([*install, f"triton=={version}"], check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "benchmarks.ptx_proof", *arguments]
    subprocess.run(command, env=environment, check=True)


def matrix(options: Any) -> Iterator[dict[str, Any]]:
    """A row for each GPU and family."""
    for sm in options.gpus:
        families: dict[str, list[proof.Outcome]] = defaultdict(list)
        seconds: dict[str, float] = defaultdict(float)
        wrong: dict[str, dict[str, str]] = defaultdict(dict)
        seen: dict[str, int] = defaultdict(int)
        for case in proof.cases(sm):
            if options.families and case.family not in options.families:
                continue
            seen[case.family] += 1
            if (seen[case.family] - 1 + options.gpus.index(sm)) % options.share:
                continue
            started_at_s = time.process_time()
            found = proof.outcome(case, sm)
            seconds[case.family] += time.process_time() - started_at_s
            families[case.family].append(found)
            if found.words:
                wrong[case.family][case.name] = found.words
        for family, all_found in families.items():
            row = {
                "gpu": f"sm_{sm}", "family": family, "cases": len(all_found), "of": seen[family],
                "agree": sum(not each.words for each in all_found),
                "kernels": sorted({kernel for each in all_found for kernel in each.kernels}),
                "instructions": sum(each.instructions for each in all_found),
                "processor_s": round(seconds[family], 1), "differ": wrong[family],
            }  # fmt: skip
            print(
                f"sm_{sm} {family}: {row['agree']} of {row['cases']} agree, {row['processor_s']} s of a processor",
                *(f"\n    {name}: {words}" for name, words in wrong[family].items()),
                flush=True,
            )
            yield row


def changed(only: list[int]) -> Iterator[dict[str, Any]]:
    """What became of each fault."""
    cases = {each.name: each for each in proof.cases(GPU) if each.name in CHANGED}
    drawn = mutants.drawn([cases[name] for name in CHANGED], GPU, COUNTS, SEED)
    survivors = []
    for number, each in enumerate(drawn):
        if only and number not in only:
            continue
        words = mutants.noticed(cases[each.case], GPU, each)
        survivors += [] if words else [number]
        before, after = (
            " ".join(each.before[0].split()),
            " ".join(each.after[0].split()) or "nothing",
        )
        print(
            f"{number} {each.kind}, {each.case}, {each.kernel}:{[n + 1 for n in each.lines]}: {before} -> {after}: {words or 'SURVIVES'}",
            flush=True,
        )
        yield {
            "mutant": number, "kind": each.kind, "case": each.case, "kernel": each.kernel, "lines": [n + 1 for n in each.lines],
            "before": before, "after": after, "noticed": words,
        }  # fmt: skip
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed; survivors: {survivors}")


def _options() -> tuple[argparse.Namespace, list[str]]:
    """The options, and the arguments without --triton."""
    versions = argparse.ArgumentParser(add_help=False)
    versions.add_argument("--triton", nargs="+", default=[], help="versions, for instance 3.6.0")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ptx_proof", description=(__doc__ or "").partition("\n")[0],
        parents=[versions],
    )  # fmt: skip
    parser.add_argument(
        "--gpus", nargs="+", type=int, choices=list(CAPABILITIES), default=list(CAPABILITIES)
    )
    parser.add_argument("--families", nargs="+", default=[])
    parser.add_argument(
        "--share", type=int, default=1, help="every n-th case, from another one on each GPU"
    )
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of mutants")
    parser.add_argument("--equivalent", nargs=2, metavar=("NUMBER", "REASON"))
    parser.add_argument("--results", type=Path, default=RESULTS / "ptx_proof.jsonl")
    return parser.parse_args(), versions.parse_known_args()[1]


if __name__ == "__main__":
    main()
