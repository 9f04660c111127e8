"""Regression, images and translation as a plain script on transformers.Trainer, without narrowgauge; and their data.

regression            1.5 for red and 0.5 for green in a made sentence, and noise of deviation 0.3: at most 0.94 can be explained
image-classification  scikit-learn's 1,797 digits of 8 x 8 pixels as files; a ViT of two layers and width 64
seq2seq               made sentences whose colours and things change places and names; a Marian of two and two layers and width 64
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.made_tasks import COLOURS, THINGS, save_encoder, sentence

AUTO = {
    "regression": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}
OWN_METRIC = {"regression": "pearson", "image-classification": "accuracy", "seq2seq": "bleu"}
HELD_DIGITS = 397
TRANSLATED = 100  # rows that are scored
NAMES = {word: f"{word[::-1]}o" for word in (*COLOURS, *THINGS)} | {"the": "der", "and": "und"}
SPECIAL = ("[PAD]", "[UNK]", "</s>")


def prepare(task: str, place: Path, seed: int, settings: dict[str, Any]) -> tuple[Path, Path, Path]:
    """The folders of a model at random and of its data, to train on and held out."""
    if task == "image-classification":
        return _vit(place / "vit", seed), *_digits(place)
    write = {"regression": _numbers, "seq2seq": _sentences}[task]
    train = write(place / "train.jsonl", settings["rows"], 1000 + seed)
    held_out = write(place / "held.jsonl", settings["held_out"], 1)
    if task == "seq2seq":
        return _marian(place / "marian", seed), train, held_out
    options = {"num_labels": 1, "problem_type": "regression"}
    return save_encoder(place / "encoder", AUTO[task], seed, **options), train, held_out


def own_settings(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of narrowgauge's run, beside those that all tasks share."""
    return {"translate": TRANSLATED, "bleu_words": "none"} if task == "seq2seq" else {}


def train(task: str, folder: Path, data: Path, output: Path, settings: dict[str, Any]) -> Any:
    """The trained model. settings: of narrowgauge's run, as far as they say the same."""
    model = AUTO[task].from_pretrained(
        folder, **({"num_labels": 10} if task == "image-classification" else {})
    )
    arguments = transformers.TrainingArguments(
        str(output), max_steps=settings["steps"], per_device_train_batch_size=settings["batch_size"], seed=settings["seed"],
        learning_rate=settings["learning_rate"], warmup_steps=settings["warmup_steps"], weight_decay=settings["weight_decay"],
        adam_beta2=settings["betas"][1], lr_scheduler_type="cosine", max_grad_norm=1.0, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    if task == "image-classification":
        collate, examples = transformers.DefaultDataCollator(), _encoded_digits(folder, data)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        examples = [_encoded(task, tokenizer, row) for row in _rows(data)]
        padded = (
            transformers.DataCollatorForSeq2Seq
            if task == "seq2seq"
            else transformers.DataCollatorWithPadding
        )
        collate = padded(
            tokenizer, pad_to_multiple_of=8, **({"model": model} if task == "seq2seq" else {})
        )
    transformers.Trainer(model, arguments, collate, train_dataset=examples).train()
    return model.eval()


@torch.no_grad()
def score(task: str, model: Any, folder: Path, data: Path, settings: dict[str, Any]) -> float:
    """Pearson's correlation, accuracy, or BLEU of greedy translations."""
    if task == "image-classification":
        examples = _encoded_digits(folder, data)
        logits = model(pixel_values=torch.stack([each["pixel_values"] for each in examples])).logits
        found = logits.argmax(-1).tolist()
        return float(
            np.mean([one == each["labels"] for one, each in zip(found, examples, strict=True)])
        )
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(folder), _rows(data)
    if task == "regression":
        from scipy.stats import pearsonr

        found = [float(model(**tokenizer(row["text"], return_tensors="pt")).logits) for row in rows]
        return float(pearsonr(found, [row["label"] for row in rows]).statistic)
    import sacrebleu

    texts, rows = [], rows[:TRANSLATED]
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=64)
        texts.append(tokenizer.decode(written[0], skip_special_tokens=True))
    return float(
        sacrebleu.corpus_bleu(
            texts, [[row["target"] for row in rows]], tokenize="none", force=True
        ).score
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _encoded(task: str, tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    if task == "regression":
        return {**tokenizer(row["text"]), "label": float(row["label"])}
    return {
        **tokenizer(row["source"], return_token_type_ids=False),
        "labels": tokenizer(row["target"])["input_ids"],
    }


# Data and models


def _numbers(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    texts = [sentence(draw, 6) for _ in range(count)]
    rows = [
        {
            "text": text,
            "label": 1.5 * ("red" in text) + 0.5 * ("green" in text) + draw.gauss(0, 0.3),
        }
        for text in texts
    ]
    return _write(path, rows)


def _sentences(path: Path, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    return _write(
        path,
        [
            {"source": text, "target": _translated(text)}
            for text in (sentence(draw, 5) for _ in range(count))
        ],
    )


def _translated(text: str) -> str:
    words = text.split()
    for place, word in enumerate(text.split()):
        if word in COLOURS:
            words[place], words[place + 1] = words[place + 1], word
    return " ".join(NAMES[word] for word in words)


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _digits(place: Path) -> tuple[Path, Path]:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    for turn, index in enumerate(order):
        side = "held" if turn < HELD_DIGITS else "train"
        path = place / side / str(digits.target[index]) / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[index] * 15.9).astype(np.uint8)).save(path)
    return place / "train", place / "held"


def _encoded_digits(folder: Path, data: Path) -> list[dict[str, Any]]:
    from PIL import Image

    processor = transformers.models.vit.ViTImageProcessorPil.from_pretrained(folder)
    found = []
    for path in sorted(data.glob("*/*.png")):
        [pixels] = processor(Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"]
        found.append({"pixel_values": pixels, "labels": int(path.parent.name)})
    return found


def _vit(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    sizes = transformers.ViTConfig(
        image_size=8, patch_size=2, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.ViTForImageClassification(sizes).save_pretrained(folder)
    known = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 8, "width": 8},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(known), encoding="utf-8")
    return folder


def _marian(folder: Path, seed: int) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = (*SPECIAL, *NAMES, *NAMES.values())
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: place for place, word in enumerate(dict.fromkeys(words))}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    torch.manual_seed(seed)
    sizes = transformers.MarianConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0, forced_eos_token_id=None, dropout=0.0, init_std=64**-0.5, share_encoder_decoder_embeddings=True,
    )  # fmt: skip
    transformers.MarianMTModel(sizes).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="</s>",
        model_max_length=64,
    )
    fast.save_pretrained(folder)
    return folder
