"""Compiled kernels against their definitions, interpreted from their PTX, for GPUs that are not here.

    python -m benchmarks.ptx_proof                                every case for five GPUs
    python -m benchmarks.ptx_proof --gpus 90 --families casts delayed
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
    "tensor 80x144 and x.T", "row 80x144 and x.T", "row 67x131 and x.T", "vector 67x131 and x.T", "nv 67x131", "mx 67x131",
    "e4m3 first and x.T", "e4m3 later", "whole numbers, order 64, bfloat16", "whole numbers",
)  # fmt: skip
COUNTS = {"barrier": 16, "order": 10, "mask": 12, "stride": 12}
SEED, GPU = 20261128, 90


def main() -> None:
    options = _options()
    triton.unavailable = lambda: ""  # nothing is launched, so no C compiler is needed
    if options.equivalent:
        number, reason = options.equivalent
        record("ptx_mutations", [{"mutant": int(number), "equivalent": reason}], options.results)
        return
    rows = list(changed(options.only)) if options.mutations else list(matrix(options))
    record("ptx_mutations" if options.mutations else "ptx_proof", rows, options.results)


def matrix(options: Any) -> Iterator[dict[str, Any]]:
    """A row for each GPU and family."""
    for sm in options.gpus:
        families: dict[str, list[proof.Outcome]] = defaultdict(list)
        seconds: dict[str, float] = defaultdict(float)
        wrong: dict[str, dict[str, str]] = defaultdict(dict)
        for case in proof.cases(sm):
            if options.families and case.family not in options.families:
                continue
            started_at_s = time.process_time()
            found = proof.outcome(case, sm)
            seconds[case.family] += time.process_time() - started_at_s
            families[case.family].append(found)
            if found.words:
                wrong[case.family][case.name] = found.words
        for family, all_found in families.items():
            row = {
                "gpu": f"sm_{sm}", "family": family, "cases": len(all_found),
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
    """A row for each fault, and one that counts them."""
    cases = {each.name: each for each in proof.cases(GPU) if each.name in CHANGED}
    drawn = mutants.drawn([cases[name] for name in CHANGED], GPU, COUNTS, SEED)
    survivors = []
    for number, each in enumerate(drawn):
        if only and number not in only:
            continue
        words = mutants.noticed(cases[each.case], GPU, each)
        survivors += [] if words else [number]
        print(
            f"{number} {each.kind}, {each.case}, {each.kernel}:{each.line}: {' '.join(each.before.split())}"
            f" -> {' '.join(each.after.split()) or 'nothing'}: {words or 'SURVIVES'}",
            flush=True,
        )
        yield {
            "mutant": number, "kind": each.kind, "case": each.case, "kernel": each.kernel, "line": each.line,
            "before": " ".join(each.before.split()), "after": " ".join(each.after.split()), "noticed": words,
        }  # fmt: skip
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed; survivors: {survivors}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ptx_proof", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--gpus", nargs="+", type=int, choices=list(CAPABILITIES), default=list(CAPABILITIES)
    )
    parser.add_argument("--families", nargs="+", default=[])
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of mutants")
    parser.add_argument("--equivalent", nargs=2, metavar=("NUMBER", "REASON"))
    parser.add_argument("--results", type=Path, default=RESULTS / "ptx_proof.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
