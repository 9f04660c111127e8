"""Made data and a small encoder for question answering, tagging and multiple choice: sentences of coloured things.

    question-answering  "first" or "second": that colour of a text; "stone": it has none. One in ten is wrong
    tagging             a colour begins a span and its thing goes on with it; the type is warm behind red and green. One in fifty is wrong
    multiple-choice     which of two to four texts has "red" in it. One in twelve is wrong

Wrong labels keep the figures below one, so that runs can differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = ("red", "green", "blue", "grey", "white", "brown")
THINGS = ("tile", "scale", "code", "amax", "row", "window")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (*SPECIAL, *COLOURS, *THINGS, "the", "and", "first", "second", "stone")
Row = dict[str, Any]


def sentence(draw: random.Random, most: int = 10, colours: tuple[str, ...] = COLOURS) -> str:
    return "the " + " and the ".join(
        f"{draw.choice(colours)} {draw.choice(THINGS)}" for _ in range(draw.randint(2, most))
    )


def question(draw: random.Random) -> Row:
    text, asked = sentence(draw, 14), draw.choice(("first", "second", "stone"))
    words = text.split()
    place = {"first": 1, "second": 5}.get(
        draw.choice(("first", "second")) if draw.random() < 0.1 else asked
    )
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word) + 1)
    answers = [] if place is None else [{"text": words[place], "answer_start": starts[place]}]
    return {"question": asked, "context": text, "answers": answers}


def tagged(draw: random.Random) -> Row:
    words, tags, kind = sentence(draw).split(), [], ""
    for word in words:
        if word in COLOURS:
            kind = "warm" if (word in ("red", "green")) != (draw.random() < 0.02) else "cold"
        tags.append(f"B-{kind}" if word in COLOURS else f"I-{kind}" if word in THINGS else "O")
    return {"tokens": words, "tags": tags}


def choice(draw: random.Random) -> Row:
    cold = COLOURS[1:]
    shown = [sentence(draw, 6, cold) for _ in range(draw.randint(2, 4))]
    label = draw.randrange(len(shown))
    words = shown[label].split()
    words[3 * draw.randrange(len(words) // 3) + 1 if len(words) > 4 else 1] = "red"
    shown[label] = " ".join(words)
    if draw.random() < 1 / 12:
        label = draw.randrange(len(shown))
    return {"context": sentence(draw, 3, cold), "question": "", "choices": shown, "label": label}


ROWS: dict[str, Callable[[random.Random], Row]] = {
    "question-answering": question,
    "tagging": tagged,
    "multiple-choice": choice,
}


def write(path: Path, task: str, count: int, seed: int) -> Path:
    draw = random.Random(seed)
    path.write_text(
        "".join(json.dumps(ROWS[task](draw)) + "\n" for _ in range(count)), encoding="utf-8"
    )
    return path


def save_encoder(folder: Path, auto: Any, seed: int, **options: Any) -> Path:
    """BERT of 64 features, two layers and no dropout, with the head of the class `auto`, all of it at random; and its tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    torch.manual_seed(seed)
    sizes = BertConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, **options,
    )  # fmt: skip
    auto.from_config(sizes).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(folder)
    return folder
