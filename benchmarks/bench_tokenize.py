"""How fast does text become ids: one row per call, in Python, or thousands of rows per call in Rust?

The rows are pieces of the standard library of about a sentence's length, the tokenizer a WordPiece like BERT's, trained on them,
so that a Python and a Rust tokenizer with the same vocabulary exist in transformers; their ids are compared before anything is
timed. The cases, all with the special tokens:

    slow            transformers' BertTokenizerLegacy, in Python, one row after another
    fast, per row   the Rust tokenizer, one row per call: what a `map` without `batched` does
    fast, batched   the same, all rows in one call of transformers' tokenizer
    encoder         narrowgauge's Encoder, all rows in one call, ids as arrays
    prepared        prepare_examples from JSONL, the cache written, opened and checked
    cached          prepare_examples when the cache is there

    python -m benchmarks.bench_tokenize [--rows 500] [--rounds 4]

The Rust cases use as many threads as RAYON_NUM_THREADS says, or as there are cores; the line says which.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, measure, record, rows, table
from narrowgauge.data import Classification, Encoder, documents, prepare_examples
from narrowgauge.data.text import pieces

ROW_CHARS = 120
VOCABULARY = 8000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def sentences(count: int) -> list[str]:
    found = (
        piece.strip() for document in documents() for piece in pieces(document.text, ROW_CHARS)
    )
    return list(islice((piece for piece in found if len(piece) > ROW_CHARS // 4), count))


def tokenizers_of(texts: list[str], folder: Path) -> tuple[Any, Any]:
    """(slow, fast) with one vocabulary."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False
    )
    trained.save_model(str(folder))
    fast = BertTokenizerFast(vocab=trained.get_vocab(), do_lower_case=True)
    return BertTokenizerLegacy(str(folder / "vocab.txt"), do_lower_case=True), fast


def cases(texts: list[str], folder: Path) -> dict[str, Callable[[], object]]:
    slow, fast = tokenizers_of(texts, folder)
    encoder, task = Encoder(fast), Classification(classes=2)
    expected = [slow(text)["input_ids"] for text in texts]
    if expected != fast(texts)["input_ids"] or expected != [
        item["input_ids"].tolist() for item in encoder.ids(texts)
    ]:
        raise SystemExit(
            "The slow and the fast tokenizer give other ids for these rows: there is nothing to compare."
        )
    source = folder / "rows.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text, "label": 1}) + "\n" for text in texts), encoding="utf-8"
    )
    prepare_examples(source, task, fast, cache=folder / "cache")

    def prepared() -> object:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            return prepare_examples(source, task, fast, cache=cache)

    return {
        "slow": lambda: [slow(text)["input_ids"] for text in texts],
        "fast, per row": lambda: [fast(text)["input_ids"] for text in texts],
        "fast, batched": lambda: fast(texts)["input_ids"],
        "encoder": lambda: encoder.ids(texts),
        "prepared": prepared,
        "cached": lambda: prepare_examples(source, task, fast, cache=folder / "cache"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenization, one row per call and batched.")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    texts = sentences(arguments.rows)
    threads = os.environ.get("RAYON_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        timings = measure(cases(texts, Path(folder)), rounds=arguments.rounds, warmup=2)
    work = dict.fromkeys(timings, (float(len(texts)), "row"))
    print(f"{len(texts)} rows of about {ROW_CHARS} characters, {threads} Rust threads")
    print(table(timings, baseline="slow", work=work))
    facts = {"texts": len(texts), "rust_threads": threads}
    record(
        "tokenize",
        [{**row, **facts} for row in rows(timings, baseline="slow")],
        RESULTS / "tokenize.jsonl",
    )


if __name__ == "__main__":
    main()
