"""A tokenizer as metadata of GGUF: byte-level BPE, as of GPT-2, Llama 3, Qwen2 and our own runs.

    tokenizer.ggml.model            gpt2, or none
    tokenizer.ggml.pre              how text is split before the merges, by llama.cpp's name
    tokenizer.ggml.tokens           by id; ids of the embedding without a token are [PADn], unused
    tokenizer.ggml.token_type       ordinary, special, added, unused
    tokenizer.ggml.merges           "a b", in order
    tokenizer.ggml.*_token_id, add_bos_token, tokenizer.chat_template

llama.cpp knows rules for splitting by their names, and reads no expression from the file. The rule of
tokenizer.json is looked up, and an unknown one refused: text would be split otherwise.

Left out: SentencePiece (Llama 2), WordPiece, Unigram. llama.cpp ignores normalizers (Qwen2's NFC).

Source: llama.cpp, src/llama-vocab.cpp, its names and expressions; tokenizer.json of the models named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.errors import ConfigError

# gguf.TokenType
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Expressions of `Split` -> llama.cpp's name of the rule.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    _WORDS.replace("NUMBER", r"\p{N}{1,3}"): "llama-bpe",
    _WORDS.replace("NUMBER", r"\p{N}"): "qwen2",
}
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def metadata(tokenizer: Any, config: Any, rows: int) -> dict[str, Any]:
    """Key -> value of the tokenizer's part of the metadata.

    tokenizer  an object of transformers, a folder with its files, or None
    rows       of the embedding

    Raises ConfigError if llama.cpp would split text otherwise.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = _of_folder(Path(tokenizer))
    if tokenizer is None:
        # llama.cpp then takes and gives ids alone.
        return {"tokenizer.ggml.model": "none"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        _refuse("has no tokenizer.json, which names its rules")
    state = json.loads(backend.to_str())
    if is_sentencepiece(state):
        _refuse(
            "is one of SentencePiece, and the scores by which llama.cpp merges its pieces are not in tokenizer.json"
        )
    if changed := _changes(state):
        _refuse(f"{changed}, which llama.cpp does not")
    rule = split_rule(state)
    if not rule:
        _refuse(f"is no byte-level BPE that is known here ({state['model'].get('type')})")
    tokens, types = _tokens(state, rows)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            each if isinstance(each, str) else " ".join(each) for each in state["model"]["merges"]
        ],
    }
    for role, name in ROLES.items():
        token = getattr(tokenizer, f"{role}_token_id", None)
        if token is None:
            token = getattr(config, f"{role}_token_id", None)
        if isinstance(token, list):  # several ends: the first is the one of texts
            token = token[0] if token else None
        # Older configurations write -1 for a token that they do not have.
        if token is not None and 0 <= int(token) < rows:
            found[f"tokenizer.ggml.{name}_token_id"] = int(token)
    # What the tokenizer does, however its files say it.
    bos = found.get("tokenizer.ggml.bos_token_id")
    found["tokenizer.ggml.add_bos_token"] = bos is not None and tokenizer("a").input_ids[:1] == [
        bos
    ]
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        found["tokenizer.chat_template"] = template
    return found


def is_sentencepiece(state: Mapping[str, Any]) -> bool:
    """True for a tokenizer.json that was made from a SentencePiece model, as of Llama 2, Mistral and T5."""
    # Bytes as pieces of their own, or spaces as U+2581.
    model, text = state["model"], json.dumps([state.get("normalizer"), state.get("pre_tokenizer")])
    return model.get("type") == "Unigram" or model.get("byte_fallback", False) or "\\u2581" in text


def _changes(state: Mapping[str, Any]) -> str:
    """What a tokenizer.json does to words beside splitting and merging, a clause, or ''."""
    normalizer = state.get("normalizer") or {}
    parts = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    other = [each["type"] for each in parts if each.get("type", "NFC") != "NFC"]
    if other:
        return f"normalizes text by {', '.join(other)}"
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if added := state["model"].get(name):
            return f"adds {added!r} to words ({name})"
    return ""


def split_rule(state: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule by which a tokenizer.json splits text, or '' if it has none."""
    split = state.get("pre_tokenizer") or {}
    parts = split["pretokenizers"] if split.get("type") == "Sequence" else [split]
    kinds = [each.get("type") for each in parts]
    if state["model"].get("type") != "BPE" or not kinds or kinds[-1] != "ByteLevel":
        return ""
    last = parts[-1]
    if last.get("add_prefix_space"):
        return ""
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm" if last.get("use_regex", True) else ""
    if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        first = parts[0]
        # Otherwise the matches would be dropped, joined, or taken as what is between the words.
        if first.get("behavior", "Isolated") != "Isolated" or first.get("invert"):
            return ""
        return SPLITS.get(first.get("pattern", {}).get("Regex", ""), "")
    return ""


def _tokens(state: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    words = {number: word for word, number in state["model"]["vocab"].items()}
    added = {each["id"]: each for each in state.get("added_tokens", ())}
    count = max([*words, *added], default=-1) + 1
    if count > rows:
        _refuse(f"has {count} ids, and the embedding {rows} rows")
    tokens, types = [], []
    for number in range(rows):
        extra = added.get(number)
        if extra is not None:
            tokens.append(extra["content"])
            types.append(CONTROL if extra.get("special") else USER_DEFINED)
        elif number in words:
            tokens.append(words[number])
            types.append(NORMAL)
        else:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
    return tokens, types


def _of_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of files that are damaged, many classes
        words = (str(error).strip().splitlines() or [""])[0]
        _refuse(f"in {folder} cannot be loaded ({type(error).__name__}: {words[:200]})")


def _refuse(why: str) -> NoReturn:
    raise ConfigError(
        f"format = 'gguf': the tokenizer {why}. Export bf16, which llama.cpp's convert_hf_to_gguf.py takes with its tokenizer.",
        code="export.gguf-tokenizer",
    )
