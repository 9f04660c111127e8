"""Turns a source and a tokenizer into two cached streams of token ids, for training and validation.

    1. read the source: content hash, number of documents, split; errors in the data appear here
    2. open the cache entry of (content, tokenizer, split); done if it is complete
    3. read the source again: split, tokenize in batches, append an end-of-text id to each
       document, write

Every call reads the source once even if the tokens are cached, because only the content shows if it
has changed. Memory holds one batch of BATCH_CHARS and a few copies of one document.

The split is a pure function of the seed and the text. There are two ways:

    by document    a document validates if hash(seed, text) / 2**64 < fraction, so adding, removing
                   or reordering documents moves no other, and copies are on the same side
    by tail        the last `fraction` of each document validates, cut at a line end if one is near

The second way is used if there are fewer than FEW_DOCUMENTS, or if a side would be empty.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.data.cache import Append, TokenStream, cached, key_of, token_dtype
from narrowgauge.data.sources import documents
from narrowgauge.data.text import PIECE_CHARS, Document, pieces, shown
from narrowgauge.data.tokenizer import end_of_text, fingerprint, plain_backend
from narrowgauge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FEW_DOCUMENTS = 20  # below this number, documents are split by tail
# Limits of one call of the tokenizer. The second bounds memory for many small documents: each piece
# returns an object of about 1 kB.
BATCH_CHARS = 16 * PIECE_CHARS
BATCH_PIECES = 8192
TRAIN, VALIDATION = SIDES = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """The training and validation streams.

    summary        JSON values for run.json: source, documents, train_documents,
                   validation_documents, train_tokens, validation_tokens, unigram_entropy (nats per
                   training token), split (a clause), tokenizer, tokenizer_fingerprint, vocab_size,
                   content_hash, notes (sentences for the user)
    largest_token  largest token id in either stream
    """

    train: TokenStream
    validation: TokenStream
    summary: dict[str, Any]
    largest_token: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split of one corpus.

    fraction     share held out for validation
    seed         seed of the split
    by_document  True: whole documents; False: the tail of each document
    """

    fraction: float
    seed: int
    by_document: bool

    @property
    def words(self) -> str:
        if self.fraction == 0:
            return "none: all text trains"
        if self.by_document:
            return "by document"
        share = f"{self.fraction:.4g}"
        return f"by tail: the last {share} of each document validates, because there are too few documents to split by"

    def parts(self, text: str, digest: bytes) -> Iterator[tuple[str, str]]:
        """Yields (side, text) of each non-blank part: one part by document, two by tail."""
        if self.by_document:
            yield (
                VALIDATION if validates(digest, fraction=self.fraction, seed=self.seed) else TRAIN,
                text,
            )
            return
        cut = tail_cut(text, self.fraction)
        for side, part in zip(SIDES, (text[:cut], text[cut:]), strict=True):
            if part and not part.isspace():
                yield side, part


def validates(digest: bytes, *, fraction: float, seed: int) -> bool:
    """True if the document with this SHA-256 validates, in a split by document."""
    draw = hashlib.sha256(b"%d:" % seed + digest).digest()
    # Python compares int and float exactly, without rounding the 64-bit integer.
    return int.from_bytes(draw[:8], "big") < fraction * 2**64


def tail_cut(text: str, fraction: float) -> int:
    """Index of the first validation character.

    It is the nearest line start that holds out half to twice the fraction, else a position inside a
    line.
    """
    share = int(len(text) * fraction)
    target = len(text) - share
    starts = text.rfind("\n", 0, target) + 1, text.find("\n", max(target - 1, 0)) + 1
    # Candidates that hold out between half and twice the share.
    near = [
        start for start in starts if start > 0 and share <= 2 * (len(text) - start) <= 4 * share
    ]
    return min(near, key=lambda start: abs(start - target), default=target)


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
    """Tokenizes `source` (see `documents`) with `tokenizer`, cached in the folder `cache`.

    Special tokens that the text spells out become special ids, as in `tokenizer(text)`; a note
    counts them. A damaged cache entry is rebuilt, and a note says so. Raises DataError for faulty
    data or tokenizers, ConfigError for an invalid fraction, StorageError if the cache cannot be
    written.
    """
    if not 0 <= validation_fraction < 1:
        raise ConfigError(
            f"validation_fraction: {validation_fraction} is not in [0, 1). 0 holds nothing out.",
            code="corpus.validation-fraction",
        )
    read = partial(documents, source, column=column, separator=separator)
    job = _CorpusJob(shown(source), read, tokenizer, validation_fraction, seed)
    arrays = dict.fromkeys(SIDES, token_dtype(job.vocabulary - 1))
    entry, notes = cached(Path(cache) / f"tokens-{key_of(job.facts)}", arrays, job.fill)
    train, validation = (TokenStream(side, entry.arrays[side]) for side in SIDES)
    facts, name = entry.facts, tokenizer.name_or_path or type(tokenizer).__name__
    if unknown := facts["unknown_tokens"]:
        notes.append(
            f"{unknown} of {len(train) + len(validation)} tokens are {tokenizer.unk_token}: the tokenizer does not fit this text."
        )
    if special := facts["special_tokens_in_text"]:
        notes.append(
            f"The text itself spells out special tokens, {special} times; they became special ids."
        )
    summary = {
        "source": job.source,
        "documents": job.documents,
        **{f"{side}_documents": facts["documents"][side] for side in SIDES},
        "train_tokens": len(train),
        "validation_tokens": len(validation),
        "unigram_entropy": facts["unigram_entropy"],
        "split": job.split.words,
        "tokenizer": Path(name).name if Path(name).is_dir() else name,
        "tokenizer_fingerprint": job.facts["tokenizer"],
        "vocab_size": len(tokenizer),
        "content_hash": job.facts["content_hash"],
        "notes": notes,
    }
    return Corpus(train, validation, summary, facts["largest_token"])


def check_vocabulary(corpus: Corpus, model_vocabulary: int) -> None:
    """Raises DataError if the corpus has a token id outside of the model's vocabulary."""
    largest = corpus.largest_token
    if largest >= model_vocabulary:
        raise DataError(
            f"{corpus.summary['source']}: the data holds token id {largest}, but the model's vocabulary has {model_vocabulary} "
            f"entries. Use the tokenizer that belongs to the model, or a model with vocab_size {largest + 1} or more.",
            code="corpus.vocabulary",
        )


class _CorpusJob:
    """Collects everything that determines the bytes of a cache entry. Reads the source once."""

    def __init__(
        self,
        source: str,
        read: Callable[[], Iterator[Document]],
        tokenizer: PreTrainedTokenizerFast,
        fraction: float,
        seed: int,
    ):
        from tokenizers import __version__

        content, held_out, self.documents = hashlib.sha256(), 0, 0
        for document in read():
            content.update(digest := _digest(document))
            held_out += validates(digest, fraction=fraction, seed=seed)
            self.documents += 1
        by_document = self.documents >= FEW_DOCUMENTS and (
            0 < held_out < self.documents or fraction == 0
        )
        self.split = Split(fraction=fraction, seed=seed, by_document=by_document)
        self.source, self.read, self.unknown = source, read, tokenizer.unk_token_id
        self.backend, self.end_of_text = plain_backend(tokenizer), end_of_text(tokenizer)
        # Not len(): added tokens can leave gaps in the ids.
        self.vocabulary = 1 + max(self.backend.get_vocab(with_added_tokens=True).values())
        self.facts = {
            "content_hash": content.hexdigest(),  # hash of the documents' hashes, in reading order
            "tokenizer": fingerprint(tokenizer),
            "tokenizers": __version__,
            "end_of_text": self.end_of_text,
            "piece_chars": PIECE_CHARS,
            "split": [by_document, fraction, seed],
        }

    def fill(self, append: Append) -> dict[str, Any]:
        """Writes the ids of both sides and returns the entry's facts.

        Raises DataError if the data have changed, or if a side that should have text has none.
        """
        counts = {side: np.zeros(self.vocabulary, np.int64) for side in SIDES}  # of each id
        ends = dict.fromkeys(SIDES, 0)
        for batch in _batches(self._pieces()):
            encodings = self.backend.encode_batch_fast(
                [piece for _, piece, _ in batch], add_special_tokens=False
            )
            ids_of_side: dict[str, list[list[int]]] = {side: [] for side in SIDES}
            for (side, _, is_last), encoding in zip(batch, encodings, strict=True):
                ids_of_side[side].append(
                    [*encoding.ids, self.end_of_text] if is_last else encoding.ids
                )
                ends[side] += is_last
            for side in SIDES:
                ids = np.fromiter(chain.from_iterable(ids_of_side[side]), np.int64)
                counts[side] += np.bincount(ids, minlength=self.vocabulary)
                append(side, ids)
        for side, name in ((TRAIN, "training"), (VALIDATION, "validation")):
            if int(counts[side].sum()) == ends[side] and (side == TRAIN or self.split.fraction > 0):
                raise DataError(
                    f"{self.source}: 0 {name} tokens with data.validation_fraction {self.split.fraction} (split {self.split.words}). "
                    "Pass more text, or another data.validation_fraction.",
                    code="corpus.no-tokens",
                )
        total = counts[TRAIN] + counts[VALIDATION]
        share = counts[TRAIN][counts[TRAIN] > 0] / counts[TRAIN].sum()
        # GPT-2's unk_token is its end-of-text token, which is no sign of unknown text.
        unknown = self.unknown if self.unknown != self.end_of_text else None
        added = self.backend.get_added_tokens_decoder().items()
        special = [id for id, token in added if token.special and id != unknown]
        # End-of-text ids that this function appended are not in the text.
        own = sum(ends.values()) if self.end_of_text in special else 0
        return {
            "documents": ends,
            "largest_token": int(np.flatnonzero(total)[-1]),
            "unigram_entropy": float(-(share * np.log(share)).sum()),
            "unknown_tokens": 0 if unknown is None else int(total[unknown]),
            "special_tokens_in_text": int(total[special].sum()) - own,
        }

    def _pieces(self) -> Iterator[tuple[str, str, bool]]:
        """Yields (side, text, True for a document's last piece).

        Raises DataError at the end if the content has changed since the first reading.
        """
        content = hashlib.sha256()
        for document in self.read():
            content.update(digest := _digest(document))
            for side, text in self.split.parts(document.text, digest):
                *body, last = pieces(text)
                yield from ((side, piece, False) for piece in body)
                yield side, last, True
        if content.hexdigest() != self.facts["content_hash"]:
            raise DataError(
                f"{self.source}: the data changed while it was read. Start again when nothing writes to it.",
                code="data.changed",
            )


def _batches(found: Iterable[tuple[str, str, bool]]) -> Iterator[list[tuple[str, str, bool]]]:
    batch, chars = list[tuple[str, str, bool]](), 0
    for piece in found:
        batch.append(piece)
        chars += len(piece[1])
        if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _digest(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()
