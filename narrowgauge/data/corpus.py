"""Turns a source and a tokenizer into two cached streams of token ids.

    read the source once: content hash, number of documents, split       (errors in the data appear here)
    open the cache entry of (content, tokenizer, split); done if it is whole
    read the source again: split, tokenize in batches, append an end-of-text id to each document, write

Every call reads the source once even if the tokens are cached, because only the content tells whether it has changed. Memory
holds one batch of BATCH_CHARS and a few copies of one document.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.data.cache import Append, TokenStream, cached, key_of, token_dtype
from narrowgauge.data.pieces import PIECE_CHARS, pieces
from narrowgauge.data.sources import documents
from narrowgauge.data.split import FEW_DOCUMENTS, SIDES, TRAIN, VALIDATION, Split, check_fraction, validates
from narrowgauge.data.text import Document, shown
from narrowgauge.data.tokenizer import end_of_text, fingerprint, plain_backend
from narrowgauge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARS = 16 * PIECE_CHARS  # per call of the tokenizer
BATCH_PIECES = 8192  # likewise: each piece returns an object of about a kilobyte
Piece = tuple[str, str, bool]  # side, text, whether it ends its document


@dataclass(frozen=True)
class Corpus:
    """The training and validation streams.

    summary  JSON values for run.json: source, documents, train_documents, validation_documents, train_tokens,
             validation_tokens, unigram_entropy (nats per training token), split (a clause), tokenizer, tokenizer_fingerprint,
             vocab_size, content_hash, notes (sentences for the user)
    """

    train: TokenStream
    validation: TokenStream
    summary: dict[str, Any]
    largest_token: int


def prepare(
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    cache: str | os.PathLike[str],
    validation_fraction: float = 0.05,
    seed: int = 0,
    column: str | None = None,
    separator: str | None = None,
) -> Corpus:
    """The corpus of `source` (see `documents`) in the ids of `tokenizer`, cached in the folder `cache`.

    Special tokens that the text spells out become special ids, as in `tokenizer(text)`; a note counts them. A damaged cache
    entry is made again, and a note says so. Raises DataError for faulty data or tokenizers, ConfigError for a bad
    fraction, StorageError if the cache cannot be written.
    """
    check_fraction(validation_fraction)
    read = partial(documents, source, column=column, separator=separator)
    count, content_hash, split = _census(read(), validation_fraction, seed)
    job = _Job(shown(source), tokenizer, split, content_hash)
    ids = token_dtype(job.vocabulary - 1)
    entry, notes = cached(
        Path(cache) / f"tokens-{key_of(job.facts)}", dict.fromkeys(SIDES, ids), lambda append: job.fill(read(), append)
    )
    streams = {side: TokenStream(side, entry.arrays[side]) for side in SIDES}
    facts, name = entry.facts, tokenizer.name_or_path or type(tokenizer).__name__
    tokens = sum(map(len, streams.values()))
    if unknown := facts["unknown_tokens"]:
        notes.append(f"{unknown} of {tokens} tokens are {tokenizer.unk_token}: the tokenizer does not fit this text.")
    if special := facts["special_tokens_in_text"]:
        notes.append(f"The text itself spells out special tokens, {special} times; they became special ids.")
    summary = {
        "source": job.source,
        "documents": count,
        **{f"{side}_documents": facts["documents"][side] for side in SIDES},
        **{f"{side}_tokens": len(streams[side]) for side in SIDES},
        "unigram_entropy": facts["unigram_entropy"],
        "split": split.words,
        "tokenizer": Path(name).name if Path(name).is_dir() else name,
        "tokenizer_fingerprint": job.facts["tokenizer"],
        "vocab_size": len(tokenizer),
        "content_hash": content_hash,
        "notes": notes,
    }
    return Corpus(streams[TRAIN], streams[VALIDATION], summary, facts["largest_token"])


def check_vocabulary(corpus: Corpus, model_vocabulary: int) -> None:
    """Raises DataError if the corpus holds a token id outside the model's vocabulary."""
    largest = corpus.largest_token
    if largest >= model_vocabulary:
        raise DataError(
            f"{corpus.summary['source']}: the data holds token id {largest}, but the model's vocabulary has "
            f"{model_vocabulary} entries, ids 0 to {model_vocabulary - 1}. Use the tokenizer that belongs to the model, or "
            f"a model with vocab_size {largest + 1} or more."
        )


def _census(found: Iterable[Document], fraction: float, seed: int) -> tuple[int, str, Split]:
    """(documents, SHA-256 over the documents' SHA-256 in reading order, the split)."""
    content, count, held_out = hashlib.sha256(), 0, 0
    for document in found:
        digest = _digest(document)
        content.update(digest)
        count += 1
        held_out += validates(digest, fraction=fraction, seed=seed)
    by_document = count >= FEW_DOCUMENTS and (0 < held_out < count or fraction == 0)
    return count, content.hexdigest(), Split(fraction=fraction, seed=seed, by_document=by_document)


def _digest(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()


class _Job:
    """Everything that determines the bytes of a cache entry."""

    def __init__(self, source: str, tokenizer: PreTrainedTokenizerFast, split: Split, content_hash: str):
        from tokenizers import __version__

        self.source, self.split, self.unknown = source, split, tokenizer.unk_token_id
        self.backend, self.end_of_text = plain_backend(tokenizer), end_of_text(tokenizer)
        self.vocabulary = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        self.facts = {
            "content_hash": content_hash,
            "tokenizer": fingerprint(tokenizer),
            "tokenizers": __version__,
            "end_of_text": self.end_of_text,
            "piece_chars": PIECE_CHARS,
            "split": [split.by_document, split.fraction, split.seed],
        }

    def fill(self, found: Iterable[Document], append: Append) -> dict[str, Any]:
        """Writes the ids of both sides. Raises DataError if a side that should have text has none."""
        counts, ends = _tokenize(self, found, append)
        for side, name in ((TRAIN, "training"), (VALIDATION, "validation")):
            if int(counts[side].sum()) == ends[side] and (side == TRAIN or self.split.fraction > 0):
                raise DataError(
                    f"{self.source}: 0 {name} tokens with validation_fraction {self.split.fraction} (split "
                    f"{self.split.words}). Pass more text, or another validation_fraction."
                )
        total = counts[TRAIN] + counts[VALIDATION]
        share = counts[TRAIN][counts[TRAIN] > 0] / counts[TRAIN].sum()
        unknown = self.unknown if self.unknown != self.end_of_text else None
        added = self.backend.get_added_tokens_decoder().items()
        spelled_out = [id for id, token in added if token.special and id != unknown]
        return {
            "documents": ends,
            "largest_token": int(np.flatnonzero(total)[-1]),
            "unigram_entropy": float(-(share * np.log(share)).sum()),
            "unknown_tokens": 0 if unknown is None else int(total[unknown]),
            "special_tokens_in_text": int(total[spelled_out].sum())
            - (sum(ends.values()) if self.end_of_text in spelled_out else 0),
        }


def _tokenize(
    job: _Job, found: Iterable[Document], append: Append
) -> tuple[dict[str, np.ndarray[Any, np.dtype[np.int64]]], dict[str, int]]:
    """(how often each id was written, documents) by side."""
    content = hashlib.sha256()
    counts = {side: np.zeros(job.vocabulary, np.int64) for side in SIDES}
    ends = dict.fromkeys(SIDES, 0)

    def parts() -> Iterator[Piece]:
        for document in found:
            content.update(digest := _digest(document))
            for side, text in job.split.parts(document.text, digest):
                *body, last = pieces(text)
                yield from ((side, piece, False) for piece in body)
                yield side, last, True

    for batch in _batches(parts()):
        encodings = job.backend.encode_batch_fast([piece for _, piece, _ in batch], add_special_tokens=False)
        taken: dict[str, list[list[int]]] = {side: [] for side in SIDES}
        for (side, _, ends_document), encoding in zip(batch, encodings, strict=True):
            taken[side].append([*encoding.ids, job.end_of_text] if ends_document else encoding.ids)
            ends[side] += ends_document
        for side in SIDES:
            ids = np.fromiter(chain.from_iterable(taken[side]), np.int64)
            counts[side] += np.bincount(ids, minlength=job.vocabulary)
            append(side, ids)
    if content.hexdigest() != job.facts["content_hash"]:
        raise DataError(
            f"{job.source}: the data changed while it was being read. Start again when nothing writes to it."
        )
    return counts, ends


def _batches(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for part in parts:
        batch.append(part)
        chars += len(part[1])
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
