"""What `narrowgauge debug` finds of planted faults: one product in E2M1 with a scale for the whole tensor, and none.

A small Llama learns Python's sources (or --data FILE) with the fault in the planted layers and fp8-row elsewhere; the ladder is taken from
a checkpoint in the middle. Right is: the planted product alone is named, or, of a healthy run, that it is not the number format. One line
per run is appended to results/debug_ladder.jsonl as soon as it is known.

    python -m benchmarks.debug_ladder --steps 160 --data tinyshakespeare.txt
    python -m benchmarks.debug_ladder --steps 160 --data tinyshakespeare.txt --layers 4 --planted '*layers.2.*' --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from narrowgauge import recipes
from narrowgauge.diagnose.verdict import EQUIVALENT
from narrowgauge.formats import E2M1
from narrowgauge.lab.debug import debug
from narrowgauge.recipe import GEMMS, Cast, Gemm, Recipe
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig

RESULTS = Path(__file__).parent / "results" / "debug_ladder.jsonl"
COARSE = Gemm(lhs=Cast(format=E2M1), rhs=Cast(format=E2M1))


def sick(product: str) -> Recipe:
    """fp8-row with one product in E2M1 per tensor."""
    return dataclasses.replace(
        recipes.FP8_ROW.with_gemm(**{product: COARSE}), name=f"sick-{product}", save="original"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--faults", nargs="+", default=[*GEMMS, "none"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--planted", default="*", help="pattern of the layers with the fault")
    arguments = parser.parse_args()
    planted = {each: sick(each) for each in GEMMS}
    recipes.ALL = (*recipes.ALL, *planted.values())  # of this process alone
    for seed in arguments.seeds:
        for fault in [each.replace("none", "") for each in arguments.faults]:
            with tempfile.TemporaryDirectory() as folder:
                line = judged(fault, seed, arguments, Path(folder))
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"seed {seed}, fault {fault or 'none':12}: {'right' if line['right'] else 'WRONG'}; {line['conclusion']}",
                flush=True,
            )


def judged(fault: str, seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    steps, planted = arguments.steps, arguments.planted
    middle = steps // 2
    recipe = f"sick-{fault}" if fault else "fp8-row"
    by_layer = {} if planted == "*" else {planted: recipe}
    config = TrainConfig(
        data=arguments.data, output=str(folder / "run"), cache=str(Path(tempfile.gettempdir()) / "debug-ladder-cache"), seed=seed,
        recipe="fp8-row" if by_layer else recipe, layers_recipe=by_layer, hidden_size=64,
        layers=arguments.layers, heads=2, intermediate_size=160, sequence_length=64, vocab_size=512, batch_size=8, steps=steps,
        warmup_steps=20, learning_rate=3e-3, checkpoint_every=middle, keep=9, eval_every=0, eval_tokens=4096, sample_tokens=0,
        tensor_every=0, log_every=steps, plan="never", device="cpu",
    )  # fmt: skip
    assert loop.run(config) == 0
    began_at_s = time.monotonic()
    found = debug(folder / "run", middle, min(100, steps - middle))
    own = found.ladder.against_bf16()
    alone = [
        name.partition(":")[2] for name in found.ladder.mended() if name.startswith("product:")
    ]
    return {
        "fault": fault, "planted": planted, "layers": arguments.layers, "seed": seed, "steps": steps, "verdict": own.event(),
        "mended_by": found.ladder.mended(),
        "right": alone == [fault] if fault else own.outcome == EQUIVALENT and not found.fix,
        "conclusion": found.ladder.conclusion(), "rungs": {
            name: found.ladder.against_bf16(name).difference for name, rung in found.ladder.rungs.items() if not rung.refused
        },
        "spent_s": round(time.monotonic() - began_at_s, 1), "torch": torch.__version__,
        "command": ["python", "-m", "benchmarks.debug_ladder", *sys.argv[1:]],
    }  # fmt: skip


if __name__ == "__main__":
    main()
