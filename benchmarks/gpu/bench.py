"""What the questions share: sizes, clock, budgets, sets of inputs, peers that may be missing, and records.

A case is built only when its turn comes. One that fails, of a peer that is not installed or a kernel that does not compile, is named
with its reason and recorded with it; the others go on. Cases of one comparison are timed together, see benchmarks/harness.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.floor import Floor

# What begins or ends a contender's name -> the module that it needs, and what to install.
PEERS = {
    "-liger": ("liger_kernel", "liger-kernel (pip install liger-kernel)"),
    "te-": ("transformer_engine", "TransformerEngine (transformer-engine[pytorch]; at 276 MB its wheel is not carried)"),
}  # fmt: skip
Case = Callable[[], object]
Build = Callable[[], Case]
MODES = ("compiled", "eager")  # compiled first: it is what a budget must not leave out
SETS = 3  # of inputs, used in turn: no cache holds them all


@dataclass
class Bench:
    """One run of the suite.

    dry       toy sizes, two rounds, nothing recorded
    modes, contenders   of `layer` and `step`, in this order; without contenders all
    ends_at_s when the question at hand has used its budget (time.monotonic)
    failures  "question: case: reason"
    """

    device: torch.device
    dry: bool
    floor: Floor
    results: Path | None
    ends_at_s: float = 0.0
    modes: tuple[str, ...] = MODES
    contenders: tuple[str, ...] = ()
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def size(self, real: int, toy: int) -> int:
        return toy if self.dry else real

    def has_time(self, what: str) -> bool:
        """Whether the budget lasts; notes what was left out if it does not. A dry run leaves nothing out."""
        if self.dry or time.monotonic() < self.ends_at_s:
            return True
        self.left_out.append(what)
        return False

    def present(self, contenders: Iterable[str]) -> list[str]:
        """Those that are asked for and can be had."""
        return [
            each
            for each in contenders
            if (not self.contenders or each in self.contenders) and self.has_peer(each)
        ]

    def has_peer(self, contender: str) -> bool:
        """Whether what a contender is made of can be had here; says so if not. Peers in Triton, and TransformerEngine, need a GPU."""
        peers = [
            (name, peer)
            for name, peer in PEERS.items()
            if contender.startswith(name) or contender.endswith(name)
        ]
        for _, (module, package) in peers:
            if self.device.type != "cuda":
                return False
            if importlib.util.find_spec(module) is None:
                print(f"{contender}: {package} is not installed, its line is left out.", flush=True)
                return False
        return True

    def compare(
        self,
        question: str,
        builds: Mapping[str, Build],
        baseline: str,
        *,
        work: Mapping[str, tuple[float, str]] | None = None,
        facts: Mapping[str, Any] | None = None,
        rounds: int = 6,
        sample_s: float = 0.02,
    ) -> dict[str, harness.Timing]:
        """Times what could be built, prints a table and records a line per case.

        work   case -> (amount per call, the rate of the floor that bounds it: "copy", "bf16" or "fp8")
        facts  sizes, for every line
        """
        cases = {}
        for name, build in builds.items():  # one may compile for a minute
            if name != baseline and not self.has_time(f"{question}, {name}"):
                continue
            if (case := self._built(question, name, build)) is not None:
                cases[name] = case
        if baseline not in cases:
            return {}
        timings = self._timed(question, cases, baseline, rounds, sample_s)
        print(
            f"\n{question}  "
            + "  ".join(f"{name}={value}" for name, value in (facts or {}).items())
        )
        units = {"copy": "B", "bf16": "FLOP", "fp8": "FLOP"}
        known = {
            name: (amount, units[bound])
            for name, (amount, bound) in (work or {}).items()
            if name in timings
        }
        print(harness.table(timings, baseline, known), flush=True)
        lines = harness.rows(timings, baseline)
        for line in lines:
            if work and line["case"] in work:
                amount, bound = work[line["case"]]
                line |= {
                    "work": amount,
                    "bound": bound,
                    "share_of_floor": amount / line["median_s"] / self.floor.rate(bound),
                }
        self.write(question, [line | dict(facts or {}) for line in lines])
        return timings

    def write(self, question: str, lines: Iterable[Mapping[str, Any]]) -> None:
        if self.results is not None:
            harness.record(
                f"gpu-{question}",
                [{**line, **self.floor.facts()} for line in lines],
                self.results / f"gpu_{question}.jsonl",
            )

    def _built(self, question: str, name: str, build: Build) -> Case | None:
        try:
            case = build()
            case()
            self._finish()
        except Exception as error:
            self.fail(question, name, error)
            return None
        return case

    def _timed(
        self, question: str, cases: dict[str, Case], baseline: str, rounds: int, sample_s: float
    ) -> dict[str, harness.Timing]:
        clock = harness.cuda_clock if self.device.type == "cuda" else None
        if self.dry:
            rounds, sample_s = 2, 0.0
        return harness.measure(cases, rounds=rounds, warmup=2, sample_s=sample_s, clock=clock)

    def fail(self, question: str, name: str, error: BaseException) -> None:
        """Names a case that could not run. Memory of the device is given back."""
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self.failures.append(f"{question}: {name}: {reason}")
        print(f"{question}: {name} failed: {reason}", flush=True)
        self.write(question, [{"case": name, "error": reason}])
        if self.device.type == "cuda":
            # A fault stays in the process: whatever is asked of the device raises it again.
            try:
                torch.cuda.empty_cache()
            except RuntimeError as lost:
                print(f"{question}: the device answers no more: {lost}", flush=True)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def rotating(call: Callable[[Any], object], sets: Iterable[Any]) -> Case:
    """A case that uses the next set of inputs at each call."""
    turn = itertools.cycle(list(sets))
    return lambda: call(next(turn))
