"""Are runs that cannot tell recipes apart called so? Designs of tiny real runs, judged with and without the rule of assay sensitivity.

    python -m benchmarks.sensitivity
    python -m benchmarks.sensitivity --designs "as it should be" --recipes fp8-current --seeds 8

Each design trains bf16, two recipes and the positive control with three seeds: a Llama of 37,000 parameters on made text. The verdict is
that of `narrowgauge study` on the same folders; beside it the name that the t tests alone give, without the rule. `can_tell` says what
each design was made for: of those that cannot, no verdict may be one of no difference.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose import seeds, seeds_text
from narrowgauge.diagnose.paired_tests import ALPHA, p_above, p_equivalent
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL
from narrowgauge.diagnose.verdict import BETTER, EQUIVALENT, IDENTICAL, NOT_WORSE, UNKNOWN, WORSE
from narrowgauge.errors import NumericsError
from narrowgauge.report.groups import gather
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig

SEEDS = 3
RECIPES = ("fp8-current", "int4-minmax-sr")
GREEN = (EQUIVALENT, NOT_WORSE, IDENTICAL, BETTER)
SIZES: dict[str, Any] = {
    "hidden_size": 32, "layers": 2, "heads": 2, "intermediate_size": 48, "sequence_length": 16, "vocab_size": 300, "batch_size": 4,
    "steps": 120, "warmup_steps": 5, "learning_rate": 3e-3, "eval_every": 0, "eval_tokens": 4096, "eval_wide": False,
    "checkpoint_every": 0, "tensor_every": 0, "sample_tokens": 0, "log_every": 1000, "threads": 1, "device": "cpu",
}  # fmt: skip
WORDS = [
    "scale",
    "tile",
    "amax",
    "codes",
    "the",
    "of",
    "and",
    "a",
    "rounds",
    "stores",
    "narrow",
    "wide",
    "exact",
]
# Name -> (whether it can tell, the text, settings).
DESIGNS: dict[str, tuple[bool, str, Mapping[str, Any]]] = {
    "three steps at a learning rate of 1e-6": (
        False,
        "words",
        {"steps": 3, "warmup_steps": 0, "learning_rate": 1e-6},
    ),
    "one step": (False, "words", {"steps": 1, "warmup_steps": 0}),
    "two steps": (False, "words", {"steps": 2, "warmup_steps": 0}),
    "40 steps at 1e-9": (False, "words", {"learning_rate": 1e-9, "steps": 40}),
    "40 steps at 1e-6": (False, "words", {"learning_rate": 1e-6, "steps": 40}),
    "warm-up longer than the run": (
        False,
        "words",
        {"steps": 12, "warmup_steps": 4000, "learning_rate": 1e-4},
    ),
    "letters at random": (False, "noise", {}),
    "all but the norms frozen": (False, "words", {"freeze": "*proj*,embed*,lm_head*"}),
    "an evaluation of 48 tokens": (False, "words", {"eval_tokens": 48, "steps": 40}),
    "a rising loss": (False, "words", {"learning_rate": 1.0, "clip": 0.0, "steps": 30}),
    "as it should be": (True, "words", {"steps": 80}),
    "as it should be, longer": (True, "words", {"steps": 240}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sensitivity", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--results", type=Path, default=RESULTS / "sensitivity.jsonl")
    parser.add_argument(
        "--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS), metavar="NAME"
    )
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), help="beside bf16 and the positive control"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    loop._write_report = lambda folder: None  # a third of such a run
    with TemporaryDirectory() as root:
        texts = {kind: write_text(Path(root) / kind, kind) for kind in ("words", "noise")}
        rows = []
        for name in options.designs:
            found = study(name, Path(root), texts, options.recipes, options.seeds)
            record("sensitivity", found, options.results)
            rows += found
    wrong = [row for row in rows if not row["can_tell"] and row["verdict"] in GREEN]
    print(f"{len(rows)} verdicts, {len(wrong)} of them of no difference where nothing can be told.")


def write_text(folder: Path, kind: str) -> Path:
    """Sentences of WORDS, or letters without any order: nothing but their frequencies can be learnt of these."""
    folder.mkdir()
    for number in range(60):
        draw = random.Random(number)
        lines = [" ".join(draw.choices(WORDS, k=8)) + ".\n" for _ in range(30 + number)]
        text = (
            "".join(lines) if kind == "words" else "".join(draw.choices("abcdefghijklmnop", k=3000))
        )
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return folder


def study(
    name: str, root: Path, texts: Mapping[str, Path], recipes: Sequence[str], seed_count: int
) -> list[dict[str, Any]]:
    """The verdict on each recipe of one design."""
    can_tell, kind, changes = DESIGNS[name]
    folders = []
    for seed in range(seed_count):
        for recipe in ("bf16", *recipes, POSITIVE_CONTROL):
            folder = root / name.replace(" ", "-") / f"{recipe}-seed{seed}"
            values = {**SIZES, **changes, "data": str(texts[kind]), "cache": str(root / "cache")}
            try:
                loop.run(TrainConfig(**values, recipe=recipe, seed=seed, output=str(folder)))
            except NumericsError:
                print(f"{name}: {recipe}, seed {seed}: not finite")
            folders.append(folder)
    return [row_of(name, can_tell, verdict) for verdict in gather(folders).verdicts()]


def row_of(name: str, can_tell: bool, verdict: seeds.SeedComparison) -> dict[str, Any]:
    margin = verdict.assay.asked
    harm = [verdict.sign * each for each in verdict.differences]
    tests = {
        WORSE: p_above(harm, margin),
        BETTER: p_above([-each for each in harm], margin),
        EQUIVALENT: p_equivalent(harm, margin),
        NOT_WORSE: p_above([-each for each in harm], -margin),
    }
    without = next((kind for kind, p in tests.items() if p < ALPHA), UNKNOWN)
    print(
        f"{name}: {verdict.runs.name}: {seeds_text.heading(verdict)} (tests alone: {without}). {seeds_text.sentences(verdict)}"
    )
    return {
        "design": name, "can_tell": can_tell, "recipe": verdict.runs.name, "verdict": verdict.name, "outcome": verdict.outcome,
        "tests_alone": without, "heading": seeds_text.heading(verdict), "differences": list(verdict.differences),
        "margin": verdict.absolute_margin, **verdict.assay.facts(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
