"""Encodes thousands of texts per call of the Rust tokenizer, which uses all cores.

Slow tokenizers (written in Python, one text at a time) are refused beyond SLOW_ROWS texts unless
allow_slow=True.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from narrowgauge.data.text import shown
from narrowgauge.data.tokenizer import fingerprint, plain_backend, spaced
from narrowgauge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from narrowgauge.data.cache import Values
    from narrowgauge.data.tables import Record

BATCH_ROWS = 4096  # texts per call; each returns an object of a few kB
SLOW_ROWS = 2000  # texts; one or two seconds with a slow tokenizer
Text = str | tuple[str, str]


class Encoder:
    """A tokenizer for batches of texts or text pairs.

    The truncation and padding settings in the tokenizer's files are ignored.

    tokenizer   the transformers tokenizer
    name        its name, for error messages
    vocabulary  largest token id + 1
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, allow_slow: bool = False):
        self.tokenizer: Any = tokenizer
        self.name = shown(tokenizer.name_or_path or type(tokenizer).__name__)
        self.allow_slow = allow_slow
        self.vocabulary = 1 + max(tokenizer.get_vocab().values(), default=0)
        self._slow_texts = 0
        self._of_words: Any = None  # Rust tokenizer of pre-split words, created on first use
        self._backend = self._target = None  # Rust tokenizers of sources and of seq2seq targets
        if getattr(tokenizer, "is_fast", False):
            # trim_offsets=False: trimmed offsets leave out a token's leading space, so a token
            # across the border of a prompt that ends in a space would seem to start behind it.
            self._backend = self._target = plain_backend(self.tokenizer, trim_offsets=False)
            # Translation tokenizers add another language code to targets.
            if hasattr(tokenizer, "_switch_to_target_mode"):
                tokenizer._switch_to_target_mode()
                try:
                    self._target = plain_backend(self.tokenizer, trim_offsets=False)
                finally:
                    self.tokenizer._switch_to_input_mode()

    def facts(self) -> dict[str, Any]:
        """Everything that determines the ids of a text or chat, for a cache key."""
        if self._backend is not None and self._target is not None:
            from tokenizers import __version__

            both = [
                json.loads(backend.to_str())["post_processor"]
                for backend in (self._backend, self._target)
            ]
            return {
                "tokenizer": fingerprint(self.tokenizer),
                "tokenizers": __version__,
                "post_processors": both,
                "special": {
                    name: str(token) for name, token in self.tokenizer.special_tokens_map.items()
                },
                "template": self.tokenizer.chat_template,
            }
        from transformers import __version__ as transformers_version

        kind = type(self.tokenizer)
        digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}".encode())
        with tempfile.TemporaryDirectory() as folder:
            # A slow tokenizer has no state to serialize; hash the files that it would save.
            self.tokenizer.save_pretrained(folder)
            for path in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
                digest.update(path.name.encode() + path.read_bytes())
        return {"slow": digest.hexdigest(), "transformers": transformers_version}

    def rows(
        self, rows: Sequence[Record], text: str, pair: str | None, max_length: int | None = None
    ) -> Iterator[dict[str, Values]]:
        """Yields the encoding of a text column, or of pairs with a second one.

        A row without text gets no ids, not even special tokens.
        """
        texts: list[Text] = [row.text(text) for row in rows]
        if pair is not None:
            texts = [(str(first), row.text(pair)) for first, row in zip(texts, rows, strict=True)]
        for row, given, found in zip(
            rows, texts, self.ids(texts, max_length=max_length), strict=True
        ):
            self.check_start(found["input_ids"], row.origin)
            yield found if "".join(given).strip() else found | {"input_ids": found["input_ids"][:0]}

    def ids(
        self, texts: Sequence[Text], *, target: bool = False, max_length: int | None = None
    ) -> list[dict[str, Values]]:
        """Encodes each text with the tokenizer's special tokens, as input_ids and token_type_ids.

        target      True encodes the target text of a seq2seq model
        max_length  truncates to this length (the longer text of a pair first) and keeps special
                    tokens; None does not truncate
        """
        backend = self._target if target else self._backend
        if backend is None:
            return self._slow_ids(texts, target, max_length)
        if max_length is not None:
            backend.enable_truncation(max_length)
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=True)
        backend.no_truncation()
        return [
            {
                "input_ids": np.array(found.ids, np.int64),
                "token_type_ids": np.array(found.type_ids, np.int64),
            }
            for found in encodings
        ]

    def _slow_ids(
        self, texts: Sequence[Text], target: bool, max_length: int | None
    ) -> list[dict[str, Values]]:
        self._slow_texts += len(texts)
        if self._slow_texts > SLOW_ROWS and not self.allow_slow:
            raise ConfigError(
                f"{self.name}: {type(self.tokenizer).__name__} is a slow tokenizer, written in Python, and the data has more "
                f"than {SLOW_ROWS} texts. Pass one with tokenizer.json, or allow_slow=True to wait for it.",
                code="tokenizer.slow",
            )
        cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
        found = []
        for text in texts:
            pair = text if isinstance(text, tuple) else (text,)
            encoded = (
                self.tokenizer(text_target=pair[0], **cut)
                if target
                else self.tokenizer(*pair, **cut)
            )
            ids = np.array(encoded["input_ids"], np.int64)
            types = encoded.get("token_type_ids", np.zeros(len(ids)))
            found.append({"input_ids": ids, "token_type_ids": np.array(types, np.int64)})
        return found

    def spans(self, texts: Sequence[str], *, special: bool) -> list[tuple[Values, Values]]:
        """Encodes each text with character spans. Refuses slow tokenizers.

        special  add special tokens
        ->       (ids, [tokens, 2] start and end character; -1, -1 for added special tokens)
        """
        if self._backend is None:
            raise self._no_spans("prompts and chats")
        found = []
        for encoding in self._backend.encode_batch(list(texts), add_special_tokens=special):
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            # The mask also marks special tokens that the text spells out. Those cover characters.
            if special:
                places[
                    np.array(encoding.special_tokens_mask, bool) & (places[:, 0] == places[:, 1])
                ] = -1
            found.append((np.array(encoding.ids, np.int64), places))
        return found

    def words(
        self, rows: Sequence[Sequence[str]], *, max_length: int | None = None
    ) -> list[dict[str, Values]]:
        """Encodes rows that are split into words.

        ->  input_ids, token_type_ids, and `words`: each token's word number, or -1

        Every word is encoded as if it followed a space, also by byte-level tokenizers that would
        otherwise join it to the previous word.
        """
        if self._backend is None:
            raise self._no_spans("tags")
        if self._of_words is None:
            self._of_words = spaced(self._backend)
        return [
            {
                "input_ids": np.array(found.ids, np.int64),
                "token_type_ids": np.array(found.type_ids, np.int64),
                "words": np.array(
                    [-1 if word is None else word for word in found.word_ids], np.int64
                ),
            }
            for found in self._cut(
                self._of_words,
                list(map(list, rows)),
                {"max_length": max_length},
                is_pretokenized=True,
            )
        ]

    def windows(
        self, pairs: Sequence[tuple[str, str]], *, max_length: int | None, stride: int
    ) -> list[list[dict[str, Values]]]:
        """Encodes windows over the second text of each pair, each with the whole first text.

        stride  tokens of the second text that neighbouring windows share
        ->      for each pair a list of windows, with input_ids, token_type_ids and `offsets`

        `offsets` [tokens, 2] are start and end character in the second text, -1 for all other
        tokens. If the first text leaves no more room than `stride`, the pair gets one window,
        longer than max_length.
        """
        if self._backend is None:
            raise self._no_spans("answers")
        # Encoded once without truncation, to find pairs whose first text leaves room for windows.
        whole = self._cut(self._backend, list(pairs), {"max_length": None})
        if max_length is None:
            return [[_window(found)] for found in whole]
        special = self._backend.num_special_tokens_to_add(True)
        firsts = [sum(part == 0 for part in found.sequence_ids) for found in whole]
        result = [[_window(found)] for found in whole]
        cut = [
            place for place, found in enumerate(whole)
            if len(found.ids) > max_length and max_length - special - firsts[place] > stride
        ]  # fmt: skip
        options = {"max_length": max_length, "stride": stride, "strategy": "only_second"}
        for place, found in zip(
            cut, self._cut(self._backend, [pairs[each] for each in cut], options), strict=True
        ):
            result[place] = [_window(each) for each in (found, *found.overflowing)]
        return result

    def _cut(
        self, backend: Any, texts: list[Any], truncation: dict[str, Any], **options: Any
    ) -> list[Any]:
        """Encodings with special tokens, truncated by `truncation` unless max_length is None."""
        if truncation["max_length"] is not None:
            backend.enable_truncation(**truncation)
        try:
            return list(backend.encode_batch(texts, add_special_tokens=True, **options))
        finally:
            # Truncation is state of the shared backend; leaving it on would cut later calls.
            backend.no_truncation()

    def _no_spans(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: a slow tokenizer does not know which characters a token covers, but {what} need that. "
            "Load it with its tokenizer.json.",
            code="tokenizer.no-offsets",
        )

    def check_start(self, ids: Values, origin: str) -> None:
        """Raises DataError if the ids begin with the same beginning-of-text token twice."""
        if len(ids) < 2 or ids[0] != ids[1]:
            return
        if int(ids[0]) in (
            getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "cls")
        ):
            token = self.tokenizer.convert_ids_to_tokens(int(ids[0]))
            raise DataError(
                f"{origin}: begins with {token} twice, because the text or template holds it and the tokenizer adds it too. "
                "Take it out of the text, or out of the chat template.",
                code="tokenizer.doubled-token",
            )


def _window(found: Any) -> dict[str, Values]:
    """Arrays of one encoded pair; see `Encoder.windows`."""
    offsets = np.array(found.offsets, np.int64).reshape(-1, 2)
    offsets[[part != 1 for part in found.sequence_ids]] = -1
    ids, types = np.array(found.ids, np.int64), np.array(found.type_ids, np.int64)
    return {"input_ids": ids, "token_type_ids": types, "offsets": offsets}
