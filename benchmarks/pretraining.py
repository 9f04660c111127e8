"""Does a Llama of 124 million parameters end where BF16 ends, after a tenth of a billion tokens of real text? On one GPU.

    make pretraining                                     the Python sources of all packages that are installed, each recipe in turn
    make pretraining ARGS="--data FOLDER"                any other text, as `narrowgauge train --data`
    make pretraining ARGS="--recipes bf16 fp8-delayed --compile"
    make pretraining ARGS="--quick"                      a toy on a CPU: to see that it works

Hidden 768, 12 layers of 12 heads, a BPE of 25,600 tokens trained on the text, 64 sequences of 1024 in a step. The recipes see the same
batches from the same start. "bf16-in-halves" is the control: bf16 with each batch in two micro-batches, which changes nothing but the
order of sums; what lies within its distance from bf16 is noise. One run follows the other in this process, so that the device is the
run's alone. An interrupted run goes on from its last checkpoint when the command is given again; finished ones are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

from benchmarks.convergence import CONTROL, markdown, summarize, train
from benchmarks.harness import RESULTS, record

INSTALLED = "installed"
RECIPES = ("bf16", "fp8-current", "fp8-delayed", CONTROL, "fp8-block", "fp8-row")
SIZES: dict[str, Any] = {
    "hidden_size": 768, "layers": 12, "heads": 12, "sequence_length": 1024, "vocab_size": 25_600, "batch_size": 64,
    "micro_batches": 1, "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 100, "eval_every": 250,
    "eval_tokens": 2**20, "validation_fraction": 0.02, "checkpoint_every": 250, "keep": 1, "log_every": 50, "threads": 0,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "hidden_size": 32, "layers": 1, "heads": 2, "sequence_length": 32, "vocab_size": 512, "batch_size": 4, "warmup_steps": 2,
    "eval_every": 5, "eval_tokens": 1024, "checkpoint_every": 5, "threads": 1,
}  # fmt: skip


def main() -> None:
    options = _options()
    sizes = SIZES | (QUICK if options.quick else {}) | {"compile": options.compile}
    sizes |= {"batch_size": options.batch_size or sizes["batch_size"]}
    of_step = sizes["batch_size"] * sizes["sequence_length"]
    steps = max(1, -(-options.tokens // of_step))
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.data
    if data == INSTALLED:
        data = str(
            gathered(
                Path(sysconfig.get_paths()["purelib"]),
                options.output / "installed.jsonl",
                options.quick,
            )
        )
    results = []
    for recipe in options.recipes:
        result = train(data, recipe, options.seed, steps, options.output, sizes)
        folder = options.output / Path(data).stem / f"{recipe}-seed{options.seed}"
        results.append(result | speed(folder))
        print(f"pretraining: {recipe}: {results[-1]}", flush=True)
    rows = [
        {
            **row,
            **{key: result[key] for key in ("train_loss_last_100", "tokens_per_s", "device_run")},
        }
        for row, result in zip(summarize(results), results, strict=True)
    ]
    facts = {"data": options.data, "steps": steps, "tokens": steps * of_step, **sizes}
    record("pretraining", [row | facts for row in rows], options.results)
    print(markdown(rows))


def gathered(folder: Path, target: Path, quick: bool) -> Path:
    """The Python sources below the folder as one file of JSON lines, in the order of their paths, each text once.

    Left out: what is not text in the encoding that it declares. A few of them where quick.
    """
    if target.exists():
        return target
    texts: dict[bytes, str] = {}
    files = 0
    for path in sorted(folder.rglob("*.py")):
        if quick and len(texts) == 200:
            break
        files += 1
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if text.strip():
            texts.setdefault(hashlib.sha256(text.encode("utf-8", "replace")).digest(), text)
    draft = target.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts.values())
    draft.replace(target)
    size = sum(len(text) for text in texts.values())
    print(
        f"pretraining: {len(texts)} different texts of {files} files below {folder}, {size / 1e6:.1f} million characters"
    )
    return target


def speed(folder: Path) -> dict[str, Any]:
    """Tokens per second, the median of the steps after the first tenth, and the device that the run says it had."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "step"]
    settled = [event["tokens_per_s"] for event in events[len(events) // 10 :]]
    device = json.loads((folder / "run.json").read_text(encoding="utf-8"))["device"]
    return {"tokens_per_s": statistics.median(settled), "device_run": device}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.pretraining", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--data", default=INSTALLED, help="installed, or as `narrowgauge train --data`"
    )
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=0, help="sequences of a step; 0: 64")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs/pretraining"))
    parser.add_argument("--results", type=Path, default=RESULTS / "pretraining.jsonl")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.tokens = min(options.tokens, 1280)
        options.output = options.output / "quick"
        options.results = options.output / "pretraining.jsonl"
    if "bf16" not in options.recipes:
        parser.error("--recipes must include bf16, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
