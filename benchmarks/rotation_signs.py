"""Random signs before the Hadamard matrix of int4-hq's forward pass: do they spread outliers better, and does the loss gain?

A small Llama learns --data from random weights under int4-hq-bs with no rotation, the plain one (the recipe), and signs that are fixed or
drawn anew at every product; seeds in pairs. Then the checkpoint of the last step is looked at with its next batch, each layer under each
rotation, whatever it was trained with:

    largest   of the channels' largest magnitudes over their median, after the rotation; of x and of w (0: one layer's weight is skipped)
    snr_db    of the product in INT4 with the recipe's steps, against the exact one

    python -m benchmarks.rotation_signs --data tinyshakespeare.txt --seeds 0 1 2 3
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize

ROTATIONS = ("no", "none", "fixed", "random")  # "no": none at all; else the signs
CACHE = Path(tempfile.gettempdir()) / "rotation-signs-cache"


def main() -> None:
    options = _options()
    settings = {
        "data": options.data,
        "steps": options.steps,
        "hidden_size": options.hidden_size,
        "base": options.base,
    }
    experiment = Experiment(
        train, ["bf16", *options.rotations], options.seeds, settings, options.output
    )
    found = experiment.results(options.jobs)
    rows = summarize(found, ["loss"], "none")
    layers = [
        {"seed": each["seed"], "trained": each["recipe"], "layers": each["layers"]}
        for each in found
    ]
    record(
        "rotation_signs", [row | {"settings": settings} for row in rows] + layers, options.results
    )
    print(markdown(rows, ["loss"]))
    print(table([each for one in layers if one["trained"] == "none" for each in one["layers"]]))


def recipe(rotation: str, base: str) -> Any:
    """The recipe `base` with another rotation of `output`; "none" is the recipe as it is."""
    from narrowgauge import recipes
    from narrowgauge.recipe import Hadamard

    found = recipes.get(base)
    block = found.output.rotate.block if found.output.rotate else 32
    turn = None if rotation == "no" else Hadamard(block=block, signs=rotation)  # type: ignore[arg-type]
    return replace(found, name=f"{base}-{rotation}", output=replace(found.output, rotate=turn))


def train(
    name: str, seed: int, data: str, steps: int, hidden_size: int, base: str
) -> dict[str, Any]:
    """One run: its validation loss, and what its layers look like at the end. name: of `ROTATIONS`, or bf16."""
    from narrowgauge import recipes
    from narrowgauge.diagnose.runs import read_metrics
    from narrowgauge.train import loop
    from narrowgauge.train.config.settings import TrainConfig

    variants = {each: recipe(each, base) for each in ROTATIONS}
    recipes.ALL = (*recipes.ALL, *variants.values())  # of this process alone
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            data=data, output=str(Path(folder) / "run"), cache=str(CACHE), seed=seed,
            recipe=variants[name].name if name in variants else name, hidden_size=hidden_size, layers=2, heads=2,
            intermediate_size=5 * hidden_size // 2, sequence_length=64, vocab_size=512, batch_size=8, steps=steps,
            warmup_steps=20, learning_rate=3e-3, checkpoint_every=steps, eval_every=steps, eval_tokens=16384,
            eval_wide=False, sample_tokens=0, tensor_every=0, log_every=steps, plan="never", device="cpu", threads=1,
        )  # fmt: skip
        assert loop.run(config) == 0
        events = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        [loss] = [each["loss"] for each in events if each["event"] == "eval"]
        return {"loss": loss, "layers": list(looks(Path(folder) / "run", steps, base))}


def looks(run: Path, steps: int, base: str) -> Iterator[dict[str, Any]]:
    """What each Linear but the head makes of the batch after the last, under each rotation."""
    import torch

    from narrowgauge.conversion import suspended
    from narrowgauge.lab.reopen import reopened
    from narrowgauge.nn.linear import QLinear
    from narrowgauge.train import checkpoint_ref
    from narrowgauge.train.preparation import prepare

    config, task = prepare(checkpoint_ref.settings_of(run))
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda layer, given: inputs.update({name: given[0].detach().flatten(0, -2).float()})

    with reopened(checkpoint_ref.at_or_before(run, steps), config, task) as trainer:
        layers = {
            name: each for name, each in trainer.model.named_modules() if isinstance(each, QLinear)
        }
        hooks = [each.register_forward_pre_hook(keep(name)) for name, each in layers.items()]
        [batch] = trainer.feed.draw(steps).batches
        with suspended(trainer.model), torch.no_grad():
            trainer.model(input_ids=batch["input_ids"])
        for hook in hooks:
            hook.remove()
        for name, x in inputs.items():
            if "lm_head" not in name:
                yield {
                    "layer": name,
                    **{
                        each: look(x, layers[name].weight.detach().float(), each, base)
                        for each in ROTATIONS
                    },
                }


def look(x: Any, weight: Any, rotation: str, base: str) -> dict[str, float]:
    """x [T, K] and weight [N, K] float32, under one rotation."""
    import torch

    from benchmarks.hadamard_blocks import rounded_product
    from narrowgauge.diagnose.spreads import channel_spread

    gemm = recipe(rotation, base).output
    torch.manual_seed(0)
    exact = x.double() @ weight.double().T
    error = rounded_product(x, weight, gemm, gemm.rotate).double() - exact
    peaks = {role: channel_spread(each, gemm.rotate) for role, each in (("x", x), ("w", weight))}
    side = "largest" if gemm.rotate is None else "rotated_largest"
    return {
        **{f"largest_{role}": found[side] for role, found in peaks.items()},  # type: ignore[literal-required]
        "snr_db": 10 * math.log10(float(exact.square().sum() / error.square().sum())),
    }


def table(layers: list[dict[str, Any]]) -> str:
    """Means over seeds by layer."""
    columns = [(each, key) for key in ("largest_x", "largest_w", "snr_db") for each in ROTATIONS]
    lines = [
        "| layer | " + " | ".join(f"{key} {each}" for each, key in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in dict.fromkeys(each["layer"] for each in layers):
        rows = [each for each in layers if each["layer"] == name]
        cells = [f"{sum(row[each][key] for row in rows) / len(rows):.2f}" for each, key in columns]
        lines.append(f"| {name.removeprefix('model.layers.')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--base", default="int4-hq-bs")
    parser.add_argument("--rotations", nargs="+", choices=ROTATIONS, default=list(ROTATIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/rotation-signs"))
    parser.add_argument("--results", type=Path, default=RESULTS / "rotation_signs.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
