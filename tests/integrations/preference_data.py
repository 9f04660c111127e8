"""A tokenizer of 26 words, a tiny Llama in a folder, and prompts with answers, for trainers of TRL."""

from __future__ import annotations

import random
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = list(string.ascii_lowercase)
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def saved_model(folder: Path) -> Path:
    """Writes model and tokenizer. Weights are large, so that the error of casts shows in losses."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    ids = {"pad_token_id": 0, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_attention_heads=2))
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def answers(count: int) -> list[dict[str, str]]:
    """Rows with a prompt of 5 words and two answers of 6."""
    draw = random.Random(0)
    lengths = {"prompt": 5, "chosen": 6, "rejected": 6}
    return [
        {name: " " * (name != "prompt") + " ".join(draw.choices(WORDS, k=size)) for name, size in lengths.items()}
        for _ in range(count)
    ]  # fmt: skip
