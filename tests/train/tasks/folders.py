"""Models of a few thousand parameters with tokenizers trained here, saved as users have them; and tables to fine-tune them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.config.task_entries import TASKS

# Tasks whose tests share the jobs of conftest.py; any other brings its own, `job(place)`.
SHARED = (
    "classification", "causal-lm", "seq2seq", "question-answering", "tagging", "multiple-choice", "image-classification",
)  # fmt: skip
WITH_OWN_JOB = sorted(set(TASKS) - {"text", *SHARED})
COLOURS = ["red", "green", "blue", "grey"]
THINGS = ["tile", "scale", "code", "amax", "row"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL: dict[str, Any] = {
    "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 0, "eval_wide": False, "checkpoint_every": 0, "tensor_every": 0,
    "sample_tokens": 0, "threads": 1, "device": "cpu", "validation_fraction": 0.2, "recipe": "fp8-current",
}  # fmt: skip


def sentence(draw: random.Random) -> str:
    words = [f"{draw.choice(COLOURS)} {draw.choice(THINGS)}" for _ in range(draw.randint(1, 6))]
    return "the " + " and the ".join(words)


def texts(count: int = 60) -> list[str]:
    draw = random.Random(0)
    return [sentence(draw) for _ in range(count)]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words in BERT's form: [CLS] text [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts(), trainers.WordPieceTrainer(vocab_size=96, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=64,
    )  # fmt: skip


def byte_tokenizer(pad: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE that ends a text with </s>; with a chat template, and with `pad` as its padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts(),
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet),
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", pad_token=pad
    )
    found.chat_template = TEMPLATE
    return found


def ending_tokenizer() -> PreTrainedTokenizerFast:
    """The same for encoder-decoders: </s> stands behind every text."""
    found = byte_tokenizer("<pad>")
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return found


def save(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def llama(folder: Path, tokenizer: Any = None, **changes: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": 336, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "eos_token_id": 1,
    }  # fmt: skip
    return save(folder, LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})), tokenizer)


def bert(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return save(folder, BertForMaskedLM(sizes), word_tokenizer())


def t5(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = T5Config(
        vocab_size=336, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
    )  # fmt: skip
    return save(folder, T5ForConditionalGeneration(sizes), ending_tokenizer())


def marian(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = MarianConfig(
        vocab_size=336, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    return save(folder, MarianMTModel(sizes), ending_tokenizer())


def classes_csv(path: Path, count: int = 60) -> Path:
    """Texts, and which of two classes they are: whether 'red' stands in them."""
    rows = [f"{text},{'warm' if 'red' in text else 'cold'}\n" for text in texts(count)]
    path.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts(path: Path, count: int = 60) -> Path:
    rows = [{"prompt": f"{text}:", "completion": f" {text.split()[1]}"} for text in texts(count)]
    return jsonl(path, rows)


def chats(path: Path, count: int = 60) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": text.split()[1]},
            ]
        }
        for text in texts(count)
    ]
    return jsonl(path, rows)


def pairs(path: Path, count: int = 60) -> Path:
    return jsonl(
        path,
        [{"source": text, "target": " ".join(reversed(text.split()))} for text in texts(count)],
    )


def two_texts(path: Path, count: int = 60) -> Path:
    """Three classes as numbers."""
    found = texts(count)
    return jsonl(
        path,
        [{"text": text, "other": found[0], "label": row % 3} for row, text in enumerate(found)],
    )


def scores(path: Path, count: int = 60) -> Path:
    """Two numbers: whether 'red' stands in a text, in halves and with what 'green' adds; and 'green' alone."""
    rows = [
        {
            "text": text,
            "score": 1.5 * ("red" in text) + 0.5 * ("green" in text),
            "green": str(int("green" in text)),
        }
        for text in texts(count)
    ]
    return jsonl(path, rows)


def vit(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_labels": 5,
    }  # fmt: skip
    ViTForImageClassification(ViTConfig(**{**sizes, **changes})).save_pretrained(folder)
    known = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "resample": 3,
             "image_mean": [0.4, 0.5, 0.6], "image_std": [0.25, 0.25, 0.25]}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(known), encoding="utf-8")
    return folder


def pictures(folder: Path, count: int = 60) -> Path:
    """Noise of 10 x 12 pixels in which one of three channels is louder, by the name of its folder."""
    draw = np.random.default_rng(0)
    for place in range(count):
        pixels = draw.integers(0, 120, (12, 10, 3))
        pixels[..., place % 3] += 100
        path = folder / ("red", "green", "blue")[place % 3] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return folder


def asked(text: str, draw: random.Random) -> dict[str, Any]:
    """A question on a sentence, whose answer is the colour of the one thing that it names."""
    pairs = text[4:].split(" and the ")
    one = draw.choice(pairs)
    thing = one.split()[1]
    known = [pair for pair in pairs if pair.endswith(thing)]
    start = text.index(known[0])
    return {
        "question": f"which {thing} ?", "context": text,
        "answers": {"text": [known[0].split()[0]], "answer_start": [start]},
    }  # fmt: skip


def questions(path: Path, count: int = 60, unanswerable: int = 0) -> Path:
    """Colours of things; every so many-th question is on a thing that the text does not name."""
    draw = random.Random(1)
    rows = [asked(text, draw) for text in texts(count)]
    for row in rows[:: unanswerable or count + 1]:
        row["question"], row["answers"] = "which stone ?", {"text": [], "answer_start": []}
    return jsonl(path, rows)


def first_things(path: Path, count: int) -> Path:
    """The colour that a sentence begins with; every fourth sentence has things without colours, and no answer."""
    rows = []
    for place, text in enumerate(texts(count)):
        answers = [{"text": text.split()[1], "answer_start": 4}]
        if place % 4 == 0:
            text, answers = " ".join(word for word in text.split() if word not in COLOURS), []
        rows.append({"question": "row", "context": text, "answers": answers})
    return jsonl(path, rows)


def tagged(path: Path, count: int = 60) -> Path:
    """A colour and its thing are a span, and so are "and" and the "the" behind it; the first "the" is outside."""
    marks = {
        **dict.fromkeys(COLOURS, "B-hue"),
        **dict.fromkeys(THINGS, "I-hue"),
        "and": "B-join",
        "the": "I-join",
    }
    rows = []
    for text in texts(count):
        _, *words = text.split()
        rows.append({"tokens": ["the", *words], "tags": ["O", *(marks[word] for word in words)]})
    return jsonl(path, rows)


def choices(path: Path, count: int = 60) -> Path:
    """Which of two to four colours the text begins with."""
    draw, rows = random.Random(2), []
    for text in texts(count):
        right = text.split()[1]
        others = draw.sample([colour for colour in COLOURS if colour != right], draw.randint(1, 3))
        shown = draw.sample([right, *others], len(others) + 1)
        rows.append(
            {
                "context": text,
                "question": "the first was",
                "choices": shown,
                "label": shown.index(right),
            }
        )
    return jsonl(path, rows)


def red_ones(path: Path, count: int) -> Path:
    """Which of two to four sentences has "red" in it; the others do not."""
    draw, rows = random.Random(3), []
    warm, cold = ([text for text in texts(1000) if ("red" in text) == has] for has in (True, False))
    for _ in range(count):
        shown = draw.sample(cold, draw.randint(1, 3))
        label = draw.randint(0, len(shown))
        shown.insert(label, draw.choice(warm))
        rows.append(
            {"context": draw.choice(cold), "question": "", "choices": shown, "label": label}
        )
    return jsonl(path, rows)


def settings(output: Path, **changes: Any) -> TrainConfig:
    values = {**SMALL, "cache": str(output.parent / "cache"), "output": str(output), **changes}
    for key in ("token_budget", "epochs", "validation_data"):
        if changes.get(key):
            values.pop(
                {"token_budget": "batch_size", "epochs": "steps"}.get(key, "validation_fraction"),
                None,
            )
    if not TASKS[values["task"]].generates:
        values.pop("sample_tokens")
    return TrainConfig(
        **{key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    )
