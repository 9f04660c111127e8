"""Trains a byte-level BPE tokenizer, loads a model's tokenizer, and fingerprints both.

All are fast tokenizers (Rust, package `tokenizers`) in the format of `transformers`.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from narrowgauge.data import hub
from narrowgauge.data.cache import new_folder
from narrowgauge.data.text import pieces, reason, shown
from narrowgauge.errors import ConfigError, DataError, Reason, closest
from narrowgauge.storage import reading

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1  # all bytes and the end-of-text token: any text can be encoded
SAMPLE_BYTES = 16 * 2**20  # bounds time and memory; exceeds the whole standard library
MINIMUM_FREQUENCY = 2  # of a merged pair in the sample
OF_TOKENIZERS = reading.Kind(
    most_bytes=reading.GIB,
    error=DataError,
    follow_links=True,
    step="Pass a folder with tokenizer.json, or a model's name on the Hub.",
)
SEAL = "narrowgauge-bpe.json"  # file with the fingerprint of the saved tokenizer


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer trained on the user's text.

    tokenizer  the tokenizer
    folder     folder from which AutoTokenizer loads it
    notes      sentences for the user
    """

    tokenizer: PreTrainedTokenizerFast
    folder: Path
    notes: list[str]

    @property
    def vocab_size(self) -> int:
        """Number of entries; below the requested number if the text is too small."""
        return len(self.tokenizer)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    folder: str | os.PathLike[str],
    *,
    sample_bytes: int = SAMPLE_BYTES,
) -> TrainedTokenizer:
    """Trains a byte-level BPE on `texts`, cached in `folder` by content, size and library version.

    Reads `texts` once and holds about sample_bytes in memory. The sample consists of the pieces
    (see `pieces`) with the smallest hashes. The result is deterministic for any number of threads.
    Raises ConfigError for a vocabulary below 257, DataError without text, StorageError if the
    folder cannot be written.
    """
    import tokenizers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size: {vocab_size} is below {SMALLEST_VOCABULARY}, the 256 bytes and {END_OF_TEXT}.",
            code="tokenizer.vocabulary-size",
        )
    sample, digest, total_bytes = _sample(texts, sample_bytes)
    if not sample:
        raise DataError(
            "train_bpe: there is no text to train a tokenizer on. Pass a source that holds text.",
            code="tokenizer.no-text",
        )
    recipe = [digest, vocab_size, sample_bytes, MINIMUM_FREQUENCY, tokenizers.__version__]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    path = Path(folder) / f"bpe-{vocab_size}-{key}"
    notes: list[str] = []
    if (used_bytes := sum(len(text.encode()) for text in sample)) < total_bytes:
        notes.append(
            Reason(
                "tokenizer.sample",
                f"The tokenizer was trained on a sample of {used_bytes} of {total_bytes} bytes.",
            )
        )
    tokenizer = _sealed(path)
    if tokenizer is None:
        if path.exists():
            notes.append(
                Reason(
                    "tokenizer.changed",
                    f"The cached tokenizer {path.name} had changed on disk and was made again.",
                )
            )
        _train(sample, vocab_size, path)
        tokenizer = load(path)
    if len(tokenizer) < vocab_size:
        notes.append(
            Reason(
                "tokenizer.few-entries",
                f"The text yields {len(tokenizer)} vocabulary entries, fewer than the {vocab_size} asked for.",
            )
        )
    return TrainedTokenizer(tokenizer, path, notes)


def _sample(texts: Iterable[str], sample_bytes: int) -> tuple[list[str], str, int]:
    """Returns (pieces in reading order, SHA-256 of all texts, bytes of all texts)."""
    everything, total_bytes, kept_bytes, order = hashlib.sha256(), 0, 0, 0
    # A heap with the largest hash (negated) on top. Selection by hash depends neither on the order
    # of the texts nor on a seed.
    kept: list[tuple[int, int, str]] = []
    for text in texts:
        raw = text.encode()
        # The length prefix makes the hash unambiguous for the borders of texts.
        everything.update(b"%d:" % len(raw) + raw)
        total_bytes += len(raw)
        for part in pieces(text):
            raw = part.encode()
            order += 1
            heapq.heappush(
                kept, (-int.from_bytes(hashlib.sha256(raw).digest()[:8], "big"), order, part)
            )
            kept_bytes += len(raw)
            while kept_bytes > sample_bytes and len(kept) > 1:
                kept_bytes -= len(heapq.heappop(kept)[2].encode())
    return (
        [part for _, _, part in sorted(kept, key=lambda item: item[1])],
        everything.hexdigest(),
        total_bytes,
    )


def _train(sample: list[str], vocab_size: int, path: Path) -> None:
    """Trains the tokenizer and saves it at `path` for AutoTokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MINIMUM_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, or unseen bytes would be dropped silently.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    with new_folder(path, lambda path: _sealed(path) is not None) as draft:
        try:
            tokenizer.save_pretrained(draft)
        except OSError:
            raise
        # The Rust code raises a bare Exception if the disk is full; the errno is in its text.
        except Exception as error:
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from error
        (draft / SEAL).write_text(
            json.dumps({"fingerprint": fingerprint(tokenizer)}), encoding="utf-8"
        )


def _sealed(path: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer at `path` if it is there and unchanged, else None."""
    try:
        tokenizer = load(path)
        is_whole = reading.json_of(path / SEAL, OF_TOKENIZERS)["fingerprint"] == fingerprint(
            tokenizer
        )
        return tokenizer if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def load(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of a local folder or of a model on the Hub.

    Never runs a model's code. Raises DataError for any fault.
    """
    from transformers import AutoTokenizer

    name = os.fspath(path)
    # A path that does not exist would otherwise be looked up on the Hub, with a confusing error.
    if not os.path.isdir(name) and (
        isinstance(path, os.PathLike) or name.startswith((".", "/", "~")) or name.count("/") > 1
    ):
        raise DataError(
            f"{shown(name)}: no such folder. {_closest_folder(name)}Pass a folder with tokenizer.json, or a name on the Hub.",
            code="tokenizer.no-folder",
        )
    if os.path.isdir(name):
        # transformers opens the files itself, and would block on a named pipe.
        reading.refuse_special_files(Path(name), OF_TOKENIZERS)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, **hub.options(name)
        )
    except DataError:
        raise
    except Exception as error:  # the libraries raise a bare Exception for malformed files
        raise DataError(
            f"{shown(name)}: {'' if os.path.isdir(name) else 'no folder here, and on the Hub '}no usable tokenizer: "
            f"{type(error).__name__}: {reason(error)} {_closest_folder(name)}Pass a folder with tokenizer.json, or a model's name on "
            "the Hub.",
            code="tokenizer.unusable",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{shown(name)}: {type(tokenizer).__name__} is a slow tokenizer, without tokenizer.json. "
            "Pass a model with a fast tokenizer, or train one on the data.",
            code="tokenizer.slow",
        )
    special = {*tokenizer.all_special_tokens, *map(str, tokenizer.added_tokens_decoder.values())}
    # Without tokenizer files, transformers builds an empty tokenizer from the model's config.
    # ▁ and Ġ mark spaces; a vocabulary of such marks alone is empty.
    if not any(entry.strip("▁Ġ \t\n") for entry in set(tokenizer.get_vocab()) - special):
        raise DataError(
            f"{shown(name)}: no tokenizer is there. transformers makes a {type(tokenizer).__name__} without a vocabulary of the model's "
            "configuration, in which all text is unknown. Name the model's tokenizer with --data.tokenizer, or copy its files into the "
            "folder.",
            code="tokenizer.empty",
        )
    return cast("PreTrainedTokenizerFast", tokenizer)


def _closest_folder(name: str) -> str:
    """A sentence with the name of a similar folder; '' if there is none or `name` is a folder."""
    parent, own = os.path.split(name)
    try:
        beside = (
            []
            if os.path.isdir(name)
            else [each.name for each in os.scandir(parent or ".") if each.is_dir()]
        )
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return ""
    near = closest(own, beside, limit=1)
    return f"The folder with the closest name is {near}. " if near else ""


def plain_backend(
    tokenizer: PreTrainedTokenizerFast, *, trim_offsets: bool = True
) -> tokenizers.Tokenizer:
    """Copy of the Rust tokenizer without truncation, padding and dropout.

    trim_offsets  False keeps leading spaces in the offsets of tokens
    """
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}
    if "dropout" in state["model"]:
        state["model"]["dropout"] = None
    if not trim_offsets:
        # A textual replacement, because the option can be nested in a sequence of post-processors.
        raw = json.dumps(state["post_processor"]).replace(
            '"trim_offsets": true', '"trim_offsets": false'
        )
        state["post_processor"] = json.loads(raw)
    return Tokenizer.from_str(json.dumps(state))


def spaced(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Copy that puts a space before every pre-split word, if the vocabulary marks word starts."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    split = state["pre_tokenizer"] or {}
    for part in (split, *split.get("pretokenizers", ())):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = True
        elif part.get("type") == "Metaspace":
            part["prepend_scheme"] = "always"
    return Tokenizer.from_str(json.dumps(state))


def end_of_text(tokenizer: PreTrainedTokenizerFast) -> int:
    """End-of-text id. Raises DataError if the tokenizer has none."""
    if tokenizer.eos_token_id is None and tokenizer.mask_token_id is not None:
        raise DataError(
            f"{shown(tokenizer.name_or_path or 'tokenizer')}: it is the tokenizer of an encoder (with {tokenizer.mask_token!r}, without "
            "an eos_token), and running text trains a model that writes. Name a decoder with --model, "
            "or a --task of encoders with a table.",
            code="tokenizer.encoder",
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{shown(tokenizer.name_or_path or 'tokenizer')}: it has no end-of-text token (eos_token). "
            "Set one of its special tokens as eos_token, or train a tokenizer on the data.",
            code="tokenizer.no-end-of-text",
        )
    return int(tokenizer.eos_token_id)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 (hex) of vocabulary, merges, added tokens, normalizer, pre-tokenizer, special ids.

    Options that are off are left out, so that a new option of a library version does not change it.
    Names and chat templates are left out as well.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    decides = {
        part: state[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")
    }
    special = {
        name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")
    }
    plain = json.dumps({**_switched_on(decides), "special": special}, sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def _switched_on(state: Any) -> Any:
    if isinstance(state, dict):
        # None and False are the defaults of new options.
        return {
            key: _switched_on(value)
            for key, value in state.items()
            if value is not None and value is not False
        }
    return [_switched_on(value) for value in state] if isinstance(state, list) else state
