"""Does a Vision Transformer learn in few bits? scikit-learn's 1,797 handwritten digits, from scratch, accuracy on a fifth.

    python -m benchmarks.digits

A ViT of 4 layers and width 64 on 2x2 patches of 8x8 pixels; every Linear but the classifier follows the recipe (the patch
projection is a convolution and stays), the rest is float32. The split is the same for all seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize

RECIPES = (
    "fp32",
    "bf16",
    "fp8-current",
    "int8",
    "int4-hq-bs",
    "int4-hq-lss",
    "int4-lsq-luq",
    "nvfp4",
    "mxfp4",
)
METRICS = ("accuracy", "loss")
HELD_OUT = 360


def main() -> None:
    options = _options()
    settings = {
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
    }
    experiment = Experiment(train, options.recipes, options.seeds, settings, options.output)
    rows = summarize(experiment.results(options.jobs), METRICS, options.recipes[0])
    record("digits", [row | {"settings": settings} for row in rows], options.results)
    print(markdown(rows, METRICS))


def train(
    recipe: Any, seed: int, epochs: int, batch_size: int, learning_rate: float
) -> dict[str, float]:
    """One run from scratch; accuracy and cross entropy on the held-out digits. recipe: "fp32", a name or a Recipe."""
    import torch
    from torch.nn.functional import cross_entropy

    import narrowgauge as ng

    torch.set_num_threads(1)
    pixels, labels = load()
    torch.manual_seed(seed)
    model = build()
    if recipe != "fp32":
        ng.convert(model, recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.05, fused=True
    )
    order = torch.Generator().manual_seed(seed)
    training = len(pixels) - HELD_OUT
    steps = training // batch_size * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    for _ in range(epochs):
        shuffled = torch.randperm(training, generator=order)
        for first in range(0, training - batch_size + 1, batch_size):
            chosen = shuffled[first : first + batch_size]
            cross_entropy(model(pixel_values=pixels[chosen]).logits, labels[chosen]).backward()
            optimizer.step()
            ng.advance(model)
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(pixel_values=pixels[training:]).logits
    truth = labels[training:]
    return {
        "accuracy": float((logits.argmax(-1) == truth).double().mean()),
        "loss": float(cross_entropy(logits, truth)),
    }


def load() -> tuple[Any, Any]:
    """Pixels [1797, 1, 8, 8] from -1 to 1 and labels, in a fixed random order."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return pixels[order], torch.tensor(digits.target)[order]


def build() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.digits", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help="the first is the reference of the pairs",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    parser.add_argument("--results", type=Path, default=RESULTS / "digits.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
