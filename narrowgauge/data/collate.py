"""Collates examples into one batch of tensors: padded on the right to a planned width, or several packed in a row.

    input_ids       [rows, width] int64, padded with `pad_id`
    labels          the same, padded with -100; class ids [rows] for classification; the decoder's width for seq2seq
    attention_mask  [rows, width] int64, 1 on the example, from its length (not its ids: pad may equal end of text)
    position_ids    [rows, width] int64, continued through the padding
    token_type_ids  as in the examples

Packed rows (items are lists of examples) have no attention_mask of this shape; see `Collator.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED, Batch
from narrowgauge.data.packing import block_mask, cumulative_lengths, positions
from narrowgauge.data.widths import round_up, width_of
from narrowgauge.errors import ConfigError, DataError

Example = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Collator:
    """A collate_fn for DataLoader and Trainer. Examples are dicts of input_ids, labels and perhaps token_type_ids.

    pad_id           any id of the vocabulary; attention ignores these positions (see `pad_id_of`)
    widths           widths to pad to, from the sampler; None rounds the longest example up to `multiple`
    tokens_multiple  rows x width is a multiple of it
    position_ids     True adds position_ids to padded batches
    attention        how packed documents are kept apart:
                     "mask": a block-diagonal attention_mask [rows, 1, width, width] of bool, for sdpa;
                     "positions": position_ids and use_cache=False, from which transformers derives the mask for models that
                     support it;
                     "varlen": all rows as one, with cu_seq_lens, for variable-length kernels
    causal           True if the block-diagonal mask is causal; False for encoders
    """

    pad_id: int
    widths: tuple[int, ...] | None = None
    multiple: int = 8
    tokens_multiple: int = 16
    position_ids: bool = False
    attention: Literal["mask", "positions", "varlen"] = "mask"
    causal: bool = True

    def __post_init__(self) -> None:
        if self.attention not in ("mask", "positions", "varlen"):
            raise ConfigError(f"Collator: attention {self.attention!r}. Pass 'mask', 'positions' or 'varlen'.")
        if self.pad_id < 0:
            raise ConfigError(f"Collator: pad_id {self.pad_id} is no token id. Pass pad_id_of(tokenizer).")

    def __call__(self, items: Sequence[Example | Sequence[Example]]) -> Batch:
        if not items:
            raise DataError("Collator: the batch is empty. Pass at least one example.")
        packed = [item for item in items if not isinstance(item, dict)]
        if packed:
            return self._packed(packed)
        return self._padded([item for item in items if isinstance(item, dict)])

    def _padded(self, examples: Sequence[Example]) -> Batch:
        sizes = [len(example["input_ids"]) for example in examples]
        width = self._width(max(sizes), len(examples))
        ids = _filled([example["input_ids"] for example in examples], width, self.pad_id)
        batch = {"input_ids": ids}
        batch["attention_mask"] = (torch.arange(width) < torch.tensor(sizes)[:, None]).long()
        if self.position_ids:
            batch["position_ids"] = torch.arange(width).expand(len(examples), width).contiguous()
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = _filled([example["token_type_ids"] for example in examples], width, 0)
        if "labels" in examples[0]:
            batch["labels"] = self._labels(examples, sizes, width)
        return batch

    def _width(self, longest: int, rows: int) -> int:
        widths = self.widths if self.widths is not None else (round_up(max(1, longest), self.multiple),)
        return width_of(longest, rows, widths, self.tokens_multiple)

    def _labels(self, examples: Sequence[Example], sizes: list[int], width: int) -> Tensor:
        labels = [example["labels"] for example in examples]
        if np.ndim(labels[0]) == 0:
            return torch.tensor([int(label) for label in labels])
        lengths = [len(label) for label in labels]
        if lengths != sizes:  # the decoder's side
            width = self._width(max(lengths), len(examples))
        return _filled(labels, width, IGNORED)

    def _packed(self, rows: Sequence[Sequence[Example]]) -> Batch:
        sizes = [[len(example["input_ids"]) for example in row] for row in rows]
        width = self._width(max(map(sum, sizes)), len(rows))
        ids = _filled([np.concatenate([one["input_ids"] for one in row]) for row in rows], width, self.pad_id)
        targets = [np.concatenate([_from_second(one["labels"], len(one["input_ids"])) for one in row]) for row in rows]
        labels = _filled(targets, width, IGNORED)
        both = [positions(row, width) for row in sizes]
        position, document = (torch.stack(part) for part in zip(*both, strict=True))
        batch = {"input_ids": ids, "labels": labels, "position_ids": position}
        if self.attention == "mask":
            batch["attention_mask"] = block_mask(document, causal=self.causal)
        elif self.attention == "positions":
            # transformers 5 (masking_utils) reads position_ids only without a cache, and makes one by default.
            batch["use_cache"] = False  # type: ignore[assignment]
        elif self.attention == "varlen":
            batch = {name: values.reshape(1, -1) for name, values in batch.items()}
            bounds, longest = cumulative_lengths(document)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}  # type: ignore[dict-item]  # numbers, as kernels want
        return batch


def _from_second(labels: Any, tokens: int) -> np.ndarray[Any, Any]:
    """Labels without the first token, which after the shift would be a target of the document before."""
    found = np.array(labels)
    if found.shape != (tokens,):
        raise ConfigError(
            f"Collator: labels of shape {list(found.shape)} for {tokens} tokens cannot be packed; only causal-lm examples can. "
            "Leave row_length out."
        )
    found[:1] = IGNORED
    return found


def _filled(rows: Sequence[Any], width: int, filler: int) -> Tensor:
    """[len(rows), width] int64, each row padded with the filler."""
    found = np.full((len(rows), width), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return torch.from_numpy(found)


def pad_id_of(tokenizer: Any) -> int:
    """The tokenizer's pad id, else its end-of-text id, else 0: masks come from lengths, so any id serves."""
    return next((int(id) for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0)
