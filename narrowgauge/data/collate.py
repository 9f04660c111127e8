"""Examples to one batch of tensors: padded on the right to a planned width, or several in a row.

    input_ids       [rows, width] int64, `pad_id` behind each example
    labels          the same, -100 behind it; class ids [rows] for classification; the decoder's own width for seq2seq
    attention_mask  [rows, width] int64, 1 on the example, from its length and never from its ids: pad may equal end of text
    position_ids    [rows, width] int64, counting on through the padding
    token_type_ids  as the examples have them

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

    pad_id           any id of the vocabulary; what stands there is never looked at (see `pad_id_of`)
    widths           widths to pad to, those of the sampler; None pads to the longest of the batch, rounded up
    multiple         without widths, what is rounded up to
    tokens_multiple  rows x width is a multiple of it
    position_ids     whether padded batches have them; models without absolute positions from outside need none
    attention        what keeps the documents of a packed row apart:
                     "mask", a block-diagonal attention_mask [rows, 1, width, width] of bool, for sdpa;
                     "positions", position_ids alone, from which transformers derives the same for the models that look at
                     them, and use_cache False, without which none does;
                     "varlen", all rows in one and cu_seq_lens, for variable-length kernels
    causal           whether the block-diagonal mask is causal; False for encoders
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
            raise DataError("Collator: a batch without examples. Draw at least one.")
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
        labels = _filled(
            [np.concatenate([_from_second(one["labels"], len(one["input_ids"])) for one in row]) for row in rows],
            width,
            IGNORED,
        )
        both = [positions(row, width) for row in sizes]
        position, document = (torch.stack(part) for part in zip(*both, strict=True))
        batch = {"input_ids": ids, "labels": labels, "position_ids": position}
        if self.attention == "mask":
            batch["attention_mask"] = block_mask(document, causal=self.causal)
        elif self.attention == "positions":
            # transformers 5 (masking_utils) looks at position_ids only where there is no cache, and makes one by default.
            batch["use_cache"] = False  # type: ignore[assignment]
        elif self.attention == "varlen":
            batch = {name: values.reshape(1, -1) for name, values in batch.items()}
            bounds, longest = cumulative_lengths(document)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}  # type: ignore[dict-item]  # numbers, as kernels want
        return batch


def _from_second(labels: Any, tokens: int) -> np.ndarray[Any, Any]:
    """Labels of a document without its first token, which the shift would make a target of the document before."""
    found = np.array(labels)
    if found.shape != (tokens,):
        raise ConfigError(
            f"Collator: labels of shape {list(found.shape)} for {tokens} tokens cannot be packed: only causal-lm examples are. "
            "Leave row_length out."
        )
    found[:1] = IGNORED
    return found


def _filled(rows: Sequence[Any], width: int, filler: int) -> Tensor:
    """[len(rows), width] int64, each row followed by the filler."""
    found = np.full((len(rows), width), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return torch.from_numpy(found)


def pad_id_of(tokenizer: Any) -> int:
    """The tokenizer's pad id, else its end-of-text id, else 0. Any will do where masks come from lengths."""
    for id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if id is not None:
            return int(id)
    return 0
