"""From a source and a tokenizer to two streams of token ids, kept on disk and checked whenever they are opened.

    read the source once: content hash, number of documents, how to split       (an error in the data shows here)
    open the cache entry for (content, tokenizer, split); done if it is whole
    read the source again: split, tokenize in batches, append an end-of-text id to each document, write

Costs one read of the source per call even when the tokens are cached, since only the content can say whether it has
changed. Memory holds one batch of BATCH_CHARS and a few copies of one document, whatever the size of the source.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.data import cache as disk
from narrowgauge.data.cache import TokenStream, TokenWriter
from narrowgauge.data.pieces import PIECE_CHARS, pieces
from narrowgauge.data.sources import documents
from narrowgauge.data.split import FEW_DOCUMENTS, SIDES, TRAIN, VALIDATION, Split, check_fraction, validates
from narrowgauge.data.text import Document, shown
from narrowgauge.data.tokenizer import end_of_text, fingerprint, plain_backend
from narrowgauge.errors import DataError, StorageError
from narrowgauge.storage import storage

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

BATCH_CHARS = 16 * PIECE_CHARS  # handed to the tokenizer's threads at once
BATCH_PIECES = 8192  # likewise: each comes back as an object of about a kilobyte, however short it is


@dataclass(frozen=True)
class Corpus:
    """What a run trains and validates on.

    summary  facts for run.json, all plain JSON values: source, documents, train_documents, validation_documents,
             train_tokens, validation_tokens, unigram_entropy (nats per token of the training tokens), split (in words),
             tokenizer, tokenizer_fingerprint, vocab_size, content_hash, notes (what the user should know, in sentences).
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
    """The corpus of `source` (see `documents`) in the ids of `tokenizer`, from the folder `cache` or made and put there.

    Special tokens that the text itself spells out become special ids, as `tokenizer(text)` does it; a note counts them.
    Raises DataError for what is wrong with the data or the tokenizer, ConfigError for an impossible fraction, StorageError
    if the cache cannot be written. A damaged cache entry is made again, and a note says so.
    """
    check_fraction(validation_fraction)

    def read() -> Iterator[Document]:
        return documents(source, column=column, separator=separator)

    census = _take_census(read(), fraction=validation_fraction, seed=seed)
    split = Split(fraction=validation_fraction, seed=seed, by_document=census.by_document)
    job = _Job(tokenizer, split, census.content_hash)
    folder, notes = Path(cache), []
    try:
        with storage(folder):
            entry = disk.open_entry(folder, job.key)
    except disk.Damaged as damage:
        entry = None
        notes.append(f"The token cache was damaged and has been made again: {damage}.")
    streams, index = entry or _build(job, read, folder, shown(source))
    return Corpus(
        streams[TRAIN],
        streams[VALIDATION],
        _summary(shown(source), census, split, tokenizer, index, notes),
        index["largest_token"],
    )


def check_vocabulary(corpus: Corpus, model_vocabulary: int) -> None:
    """Raises DataError if the corpus holds a token id for which a model of so many vocabulary entries has no row."""
    largest = corpus.largest_token
    if largest >= model_vocabulary:
        raise DataError(
            f"{corpus.summary['source']}: the data holds token id {largest}, but the model's vocabulary has "
            f"{model_vocabulary} entries, ids 0 to {model_vocabulary - 1}. Use the tokenizer that belongs to the model, or "
            f"a model with vocab_size {largest + 1} or more."
        )


@dataclass(frozen=True)
class _Census:
    documents: int
    content_hash: str  # SHA-256 over the documents' SHA-256 in reading order
    by_document: bool


def _take_census(found: Iterable[Document], *, fraction: float, seed: int) -> _Census:
    content, count, held_out = hashlib.sha256(), 0, 0
    for document in found:
        digest = _digest(document)
        content.update(digest)
        count += 1
        held_out += validates(digest, fraction=fraction, seed=seed)
    both_sides = 0 < held_out < count
    return _Census(count, content.hexdigest(), count >= FEW_DOCUMENTS and (both_sides or fraction == 0))


def _digest(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()


class _Job:
    """What decides every byte of a cache entry."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, split: Split, content_hash: str):
        from tokenizers import __version__

        self.split, self.content_hash = split, content_hash
        self.backend: tokenizers.Tokenizer = plain_backend(tokenizer)
        self.end_of_text = end_of_text(tokenizer)
        self.unknown = tokenizer.unk_token_id
        self.special = [id for id, token in self.backend.get_added_tokens_decoder().items() if token.special]
        self.vocabulary = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        self.facts = {
            "content_hash": content_hash,
            "tokenizer": fingerprint(tokenizer),
            "tokenizers": __version__,
            "end_of_text": self.end_of_text,
            "piece_chars": PIECE_CHARS,
            "split": [split.by_document, split.fraction, split.seed],
        }
        self.key = disk.key_of(self.facts)


_Entry = tuple[dict[str, TokenStream], dict[str, Any]]


def _build(job: _Job, read: Callable[[], Iterator[Document]], folder: Path, source: str) -> _Entry:
    """Tokenizes the source into a new cache entry and opens it."""
    dtype = disk.token_dtype(job.vocabulary - 1)
    writers: dict[str, TokenWriter] = {}
    try:
        with storage(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for side in SIDES:
                writers[side] = TokenWriter(folder, job.key, side, dtype, job.vocabulary)
            _tokenize(job, read(), writers, source)
            _check_filled(job, writers, source)
            disk.write(folder, job.key, writers, {**job.facts, **_facts(job, writers)})
    finally:
        for writer in writers.values():
            writer.discard()
    try:
        entry = disk.open_entry(folder, job.key)
    except disk.Damaged as damage:
        raise StorageError(
            f"{damage}, though it was just written. Check the disk, or pass another cache folder."
        ) from damage
    if entry is None:
        raise disk.gone(folder)
    return entry


def _tokenize(job: _Job, found: Iterable[Document], writers: Mapping[str, TokenWriter], source: str) -> None:
    content = hashlib.sha256()

    def parts() -> Iterator[tuple[str, str, bool]]:
        """(side, piece, whether it ends its document)"""
        for document in found:
            content.update(digest := _digest(document))
            for side, text in job.split.parts(document.text, digest):
                *body, end = pieces(text)
                yield from ((side, piece, False) for piece in body)
                yield side, end, True

    for batch in _batches(parts()):
        encodings = job.backend.encode_batch_fast([piece for _, piece, _ in batch], add_special_tokens=False)
        for (side, _, ends), encoding in zip(batch, encodings, strict=True):
            writers[side].append([*encoding.ids, job.end_of_text] if ends else encoding.ids, ends_document=ends)
        for writer in writers.values():
            writer.drain()
    if content.hexdigest() != job.content_hash:
        raise DataError(f"{source}: the data changed while it was being read. Start again when nothing writes to it.")


def _batches(parts: Iterable[tuple[str, str, bool]]) -> Iterator[list[tuple[str, str, bool]]]:
    batch, chars = [], 0
    for part in parts:
        batch.append(part)
        chars += len(part[1])
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _check_filled(job: _Job, writers: Mapping[str, TokenWriter], source: str) -> None:
    """Raises DataError if a side that should have text has no token but ends of text."""
    for side, name in ((TRAIN, "training"), (VALIDATION, "validation")):
        writer = writers[side]
        empty = int(writer.counts.sum()) == len(writer.document_lengths)
        if empty and (side == TRAIN or job.split.fraction > 0):
            raise DataError(
                f"{source}: 0 {name} tokens with validation_fraction {job.split.fraction} (split {job.split.words}). "
                "Pass more text, or another validation_fraction."
            )


def _facts(job: _Job, writers: Mapping[str, TokenWriter]) -> dict[str, Any]:
    counts = writers[TRAIN].counts + writers[VALIDATION].counts
    share = writers[TRAIN].counts[writers[TRAIN].counts > 0] / writers[TRAIN].counts.sum()
    unknown = job.unknown if job.unknown != job.end_of_text else None
    ends = sum(len(writer.document_lengths) for writer in writers.values())
    spelled_out = [id for id in job.special if id != unknown]
    return {
        "largest_token": int(np.flatnonzero(counts)[-1]),
        "unigram_entropy": float(-(share * np.log(share)).sum()),
        "unknown_tokens": 0 if unknown is None else int(counts[unknown]),
        "special_tokens_in_text": int(counts[spelled_out].sum()) - (ends if job.end_of_text in spelled_out else 0),
    }


def _summary(
    source: str,
    census: _Census,
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    index: Mapping[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    tokens = index[TRAIN]["tokens"] + index[VALIDATION]["tokens"]
    if unknown := index["unknown_tokens"]:
        notes.append(
            f"{unknown} of {tokens} tokens are {tokenizer.unk_token}: the tokenizer does not know this text well."
        )
    if special := index["special_tokens_in_text"]:
        notes.append(f"The text itself spells out special tokens, {special} times; they became special ids.")
    name = tokenizer.name_or_path or type(tokenizer).__name__
    return {
        "source": source,
        "documents": census.documents,
        "train_documents": len(index[TRAIN]["document_lengths"]),
        "validation_documents": len(index[VALIDATION]["document_lengths"]),
        "train_tokens": index[TRAIN]["tokens"],
        "validation_tokens": index[VALIDATION]["tokens"],
        "unigram_entropy": index["unigram_entropy"],
        "split": split.words,
        "tokenizer": Path(name).name if Path(name).is_dir() else name,
        "tokenizer_fingerprint": index["tokenizer"],
        "vocab_size": len(tokenizer),
        "content_hash": index["content_hash"],
        "notes": notes,
    }
