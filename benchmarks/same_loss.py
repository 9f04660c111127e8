"""Did a change leave the numbers alone? Trains 50 steps with this tree and with another commit and compares every loss.

    make same-loss BASE=main
    python -m benchmarks.same_loss --base main --recipe fp8-delayed

A small Llama on a generated text, one CPU thread, same seed. The losses must be equal to the last bit: any difference is a
change of numerics and has to be meant. Exit code 0: equal. 1: they differ, with the first step that does. 2: a run failed.

Uncommitted changes of this tree count. BASE is checked out into a temporary git worktree.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environment import ROOT

SETTINGS = {
    "steps": 50, "hidden_size": 64, "layers": 2, "heads": 2, "sequence_length": 64, "batch_size": 8, "vocab_size": 512,
    "seed": 0, "device": "cpu", "threads": 1,
}  # fmt: skip

LINES, WORDS_PER_LINE = 4000, 12  # about 200 KB: more tokens than 50 steps of 8 x 64 read


class RunFailed(Exception):
    """A tree could not be trained; the message is for the person at the terminal."""


def generated_text(seed: int = 0) -> str:
    """Lines of made-up words, the frequent ones more likely, so that there is something to learn."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 6))) for _ in range(300)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    return "".join(
        " ".join(draw.choices(words, weights, k=WORDS_PER_LINE)) + ".\n" for _ in range(LINES)
    )


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of `commit`, removed again whatever happens."""
    tree = folder / "base"
    done = _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
    if done.returncode:
        raise RunFailed(f"same-loss: cannot check out BASE={commit}: {done.stderr.strip()}")
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, encoding="utf-8"
    )


def losses_of(tree: Path, text: Path, output: Path, recipe: str) -> dict[int, float]:
    """Step -> training loss of a run with the code of `tree`."""
    settings = {
        **SETTINGS,
        "recipe": recipe,
        "data": text,
        "output": output,
        "cache": output.parent / f"{output.name}-cache",
    }
    flags = [
        word
        for key, value in settings.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "narrowgauge", "train", *flags]
    # `-m` looks into the working directory first, so the code is this tree's and not the installed one's.
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise RunFailed(
            f"same-loss: the run in {tree} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return read_losses(output / "metrics.jsonl")


def read_losses(path: Path) -> dict[int, float]:
    """The `step` events of a run, see docs/architecture.md."""
    with path.open(encoding="utf-8") as file:
        events = [json.loads(line) for line in file]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def difference(base: dict[int, float], here: dict[int, float]) -> str:
    """The first step whose loss differs, in words; '' if every bit is equal."""
    if base.keys() != here.keys():
        return f"the runs have different steps: {len(base)} at BASE, {len(here)} here"
    differing = [step for step in base if base[step].hex() != here[step].hex()]
    if not differing:
        return ""
    step = differing[0]
    return (
        f"{len(differing)} of {len(base)} losses differ, first at step {step}: "
        f"{base[step]!r} at BASE, {here[step]!r} here ({here[step] - base[step]:+.3g})"
    )


def compare(commit: str, recipe: str) -> str:
    """Train both trees; what differs, in words."""
    with tempfile.TemporaryDirectory(prefix="same-loss-") as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(generated_text(), encoding="utf-8")
        with checked_out(commit, folder) as tree:
            base = losses_of(tree, text, folder / "run-base", recipe)
        here = losses_of(ROOT, text, folder / "run-here", recipe)
    if not base:
        raise RunFailed("same-loss: the runs recorded no step.")
    return difference(base, here)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="main", help="commit to compare with (default: main)")
    parser.add_argument(
        "--recipe", default="fp8-current", help="recipe of the runs (default: fp8-current)"
    )
    options = parser.parse_args()
    try:
        differs = compare(options.base, options.recipe)
    except RunFailed as failed:
        print(failed, file=sys.stderr)
        return 2
    verdict = f"CHANGED: {differs}." if differs else "Same loss: all equal to the last bit."
    print(f"same-loss {options.recipe}, {SETTINGS['steps']} steps, BASE={options.base}. {verdict}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
