"""The first hour on a card: three commands of at most nine minutes, each a list of pieces that were tried before.

    python -m benchmarks.gpu.first_hour truth        do the kernels compute what they must, and what can this card do at all
    python -m benchmarks.gpu.first_hour pieces       how fast is each piece: casts, layer, the profile of a block
    python -m benchmarks.gpu.first_hour end-to-end   whole steps, compiled ones first; then fused ones, graphs, the optimizer

`largest` and `sweep` are for another hour. Each piece is a process with seconds of its own; one that needs more is ended, and the next
begins. What the command brings back lies in --out: results (.jsonl, each line with the device's name), the output of each piece, power and
clocks every second, `pieces.jsonl` with what became of each. Where a self-check of `truth` fails, no performance work is worth doing: it
would time the definition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.environment import ROOT, environment
from benchmarks.gpu import caches

LIMIT_S = 540.0  # of a command
SPARE_S = 15.0  # at its end, to write what was found
SUITE = ("-m", "benchmarks.gpu")


@dataclass(frozen=True)
class Piece:
    """needs: a program on the PATH without which it is left out; OUT in its arguments is the folder of results."""

    name: str
    seconds: float
    arguments: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    needs: str = ""


def _suite(question: str, seconds: float, *more: str, mib: int = 0, name: str = "") -> Piece:
    """A question of the suite; the budget in which it may begin new comparisons is shorter than its life."""
    workspace = {"CUBLASLT_WORKSPACE_SIZE": str(mib * 1024)} if mib else {}
    budget = ("--budget-s", str(round(seconds * 0.75)))
    return Piece(
        name or question,
        seconds,
        (*SUITE, "--only", question, *budget, "--results", "OUT", *more),
        workspace,
    )


INFO = "from narrowgauge.diagnose import machine; print(machine.info())"  # as `narrowgauge info`, whose packages a borrowed card may lack
SANITIZED = ("-m", "tests.sanitized", "--tools", "memcheck", "racecheck")
NCU = (
    "ncu",
    "--set",
    "full",
    "--clock-control",
    "none",
    "--csv",
    "--target-processes",
    "all",
    "--launch-count",
    "12",
)
KERNELS = "regex:both|turn|cast|step|swiglu|glu"
COMMANDS: dict[str, tuple[Piece, ...]] = {
    "truth": (
        Piece("info", 60, ("-c", INFO)),
        _suite("gemms", 70, mib=1, name="gemms, workspace 1 MiB"),
        _suite("gemms", 70, mib=32, name="gemms, workspace 32 MiB"),
        Piece(
            "tests", 240,
            ("-m", "pytest", "-q", "-m", "gpu and not slow", "-n", "8", "--timeout=60", "--junitxml=OUT/junit.xml", "tests"),
        ),
        Piece("sanitizer", 75, SANITIZED, needs="compute-sanitizer"),
    ),
    "pieces": (
        _suite("layer", 110, "--modes", "eager", name="layer, eager"),
        _suite("casts", 50),
        _suite("layer", 150, "--modes", "compiled", name="layer, compiled"),
        Piece("profile", 80, ("-m", "benchmarks.gpu.profile_block", "--results", "OUT")),
        Piece(
            "ncu", 110, (*NCU, "-k", KERNELS, "--log-file", "OUT/ncu.csv", "PYTHON", "-m", "benchmarks.gpu.profile_block", "--once"),
            needs="ncu",
        ),
    ),
    "end-to-end": (
        _suite("step", 250, "--modes", "compiled", name="step, compiled"),
        _suite("step", 110, "--modes", "eager", name="step, eager and fused"),
        _suite("graphs", 60),
        _suite("adamw", 100),
    ),
}  # fmt: skip


def command_of(piece: Piece, out: Path) -> list[str]:
    """What is started: Python, or the program that it needs."""
    filled = [
        each.replace("OUT", str(out)).replace("PYTHON", sys.executable) for each in piece.arguments
    ]
    return filled if piece.needs and filled[0] == piece.needs else [sys.executable, *filled]


def run(
    pieces: Sequence[Piece], out: Path, limit_s: float, given: dict[str, str]
) -> list[dict[str, object]]:
    """Runs them in turn; what became of each. A line is written before the next one begins."""
    out.mkdir(parents=True, exist_ok=True)
    ends_at_s = time.monotonic() + limit_s - min(SPARE_S, limit_s / 4)
    found = []
    conditions = environment()
    for piece in pieces:
        left_s = min(piece.seconds, ends_at_s - time.monotonic())
        line = {
            "piece": piece.name,
            **_outcome(piece, out, left_s, given),
            "device": conditions["device"],
            "commit": conditions["commit"],
        }
        found.append(line)
        print(f"{piece.name:26} {line['outcome']}  {line['seconds']:.0f} s", flush=True)
        with (out / "pieces.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return found


def _outcome(piece: Piece, out: Path, left_s: float, given: dict[str, str]) -> dict[str, object]:
    command = command_of(piece, out)
    if piece.needs and shutil.which(piece.needs) is None:
        return {"outcome": f"left out: no {piece.needs} on the PATH", "seconds": 0.0}
    if left_s <= 0:
        return {"outcome": "left out for want of time", "seconds": 0.0}
    began_at_s = time.monotonic()
    log = out / f"{piece.name.replace(', ', '-').replace(' ', '-')}.txt"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | given | piece.variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(left_s)
            words = "done" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            words = "ended for want of time"
            _end(process)
        except BaseException:
            _end(process)
            raise
    return {
        "outcome": words,
        "seconds": time.monotonic() - began_at_s,
        "command": command,
        "output": log.name,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """And what it started: they have a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def power_log(path: Path) -> Iterator[None]:
    """Power, clocks and temperature, every second, where nvidia-smi is."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    asked = "timestamp,power.draw,clocks.sm,clocks.mem,temperature.gpu,clocks_event_reasons.active"
    with path.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv", "-l", "1"],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_hour", description="The first hour on a card."
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("first-hour"),
        help="folder of everything that is brought back",
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of the whole command")
    parser.add_argument("--piece-s", type=float, help="of each piece, in the place of its own")
    parser.add_argument(
        "--budget-s",
        type=float,
        help="in which a question may begin comparisons, in the place of its own",
    )
    parser.add_argument("--only", nargs="+", help="pieces by name")
    parser.add_argument("--caches", type=Path, help="what `benchmarks.gpu.caches pack` wrote")
    options = parser.parse_args(arguments)
    out = (options.out / options.command).absolute()
    out.mkdir(parents=True, exist_ok=True)
    given = {}
    if options.caches:
        kept = out / "caches"
        caches.unpack(options.caches, kept)
        given = caches.variables(kept)
    pieces = [
        _within(each, options.piece_s, options.budget_s)
        for each in COMMANDS[options.command]
        if not options.only or each.name in options.only
    ]
    with power_log(out / "power.csv"):
        found = run(pieces, out, options.limit_s, given)
    bad = [
        f"{line['piece']}: {line['outcome']}"
        for line in found
        if str(line["outcome"]).startswith("ended")
    ]
    print("\n".join(["", *bad, f"Everything: {out}"]))
    return 1 if bad else 0


def _within(piece: Piece, seconds: float | None, budget_s: float | None) -> Piece:
    """The same with other seconds, and another budget of a question."""
    arguments = list(piece.arguments)
    if budget_s is not None and "--budget-s" in arguments:
        arguments[arguments.index("--budget-s") + 1] = str(budget_s)
    return replace(
        piece, seconds=piece.seconds if seconds is None else seconds, arguments=arguments
    )


if __name__ == "__main__":
    sys.exit(main())
