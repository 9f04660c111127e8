"""Collates examples into a batch of tensors, padded on the right to a planned width, or packed.

    input_ids       [rows, width] int64, padded with `pad_id`
    labels          the same shape, padded with -100; [rows] class ids for classification; the
                    decoder's width for seq2seq; [rows, 2] for spans; [rows, columns] float32 for
                    regression; [pairs, 1] float32 for sentence similarity
    attention_mask  [rows, width] int64, 1 on tokens of the example; from lengths, not from ids,
                    because the padding id may equal the end-of-text id
    position_ids    [rows, width] int64, continued through the padding
    token_type_ids  as in the examples

Multiple-choice examples have one row per choice: inputs [choices of all, 1, width], labels [choices
of all] (see `heads`). Examples of texts to compare have one row per text: inputs [texts of all,
width], labels one row per example.

Packed rows (items are lists of examples) have another attention_mask or none; see
`Collator.attention`. `check_packing` tests if a model respects the borders between packed
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED, Batch
from narrowgauge.data.rows import block_mask, cumulative_lengths, positions, round_up, width_of
from narrowgauge.errors import ConfigError, DataError

Example = dict[str, Any]
# Document lengths in `check_packing`: 16 positions in total, with borders at odd positions.
CHECKED_TOKENS = (5, 7, 4)


@dataclass(frozen=True, kw_only=True)
class Collator:
    """A collate_fn for DataLoader and Trainer.

    Examples are dicts of input_ids, labels and optionally token_type_ids.

    pad_id           any id of the vocabulary; attention ignores these positions (see
                     `pad_id_of`)
    widths           widths to pad to, from the sampler; None rounds the longest example up to
                     `multiple`
    multiple         see `widths`
    tokens_multiple  rows x width is a multiple of this
    position_ids     True adds position_ids to padded batches
    attention        how attention separates packed documents:
                     "mask": block-diagonal attention_mask [rows, 1, width, width], bool, for
                     sdpa attention;
                     "positions": position_ids and use_cache=False, from which transformers
                     derives the mask for models that support it;
                     "varlen": all rows as one, with cu_seq_lens, for variable-length kernels
    causal           True if the block-diagonal mask is causal; False for encoders
    shifted          True if the loss compares labels with the previous position's logits; the
                     first token of a packed document is then no target
    """

    pad_id: int
    widths: tuple[int, ...] | None = None
    multiple: int = 8
    tokens_multiple: int = 16
    position_ids: bool = False
    attention: Literal["mask", "positions", "varlen"] = "mask"
    causal: bool = True
    shifted: bool = True

    def __post_init__(self) -> None:
        if self.attention not in ("mask", "positions", "varlen"):
            raise ConfigError(
                f"Collator: attention {self.attention!r}. Pass 'mask', 'positions' or 'varlen'.",
                code="collator.attention",
            )
        if self.pad_id < 0:
            raise ConfigError(
                f"Collator: pad_id {self.pad_id} is no token id. Pass pad_id_of(tokenizer).",
                code="collator.pad-id",
            )

    def __call__(self, items: Sequence[Example | Sequence[Example]]) -> Batch:
        if not items:
            raise DataError(
                "Collator: the batch is empty. Pass at least one example.", code="collator.empty"
            )
        packed = [item for item in items if not isinstance(item, dict)]
        if 0 < len(packed) < len(items):
            raise DataError(
                "Collator: the batch mixes examples with packed rows. Pass one kind.",
                code="collator.mixed",
            )
        if packed:
            return self._packed(packed)
        examples = [item for item in items if isinstance(item, dict)]
        first = examples[0]["input_ids"]
        if not len(first) or not np.ndim(first[0]):
            return self._padded(examples)
        # The kind of task shows in the labels: floats = a score of several texts, else a choice.
        is_scored = np.asarray(examples[0].get("labels", 0)).dtype.kind == "f"
        return self._text_rows(examples) if is_scored else self._choice_rows(examples)

    def _padded(self, examples: Sequence[Example]) -> Batch:
        sizes = [len(example["input_ids"]) for example in examples]
        width = self._width(max(sizes), len(examples))
        ids = _padded_rows([example["input_ids"] for example in examples], width, self.pad_id)
        batch = {"input_ids": ids}
        batch["attention_mask"] = (torch.arange(width) < torch.tensor(sizes)[:, None]).long()
        if self.position_ids:
            batch["position_ids"] = torch.arange(width).expand(len(examples), width).contiguous()
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = _padded_rows(
                [example["token_type_ids"] for example in examples], width, 0
            )
        if "labels" in examples[0]:
            batch["labels"] = self._labels(examples, sizes, width)
        return batch

    def _choice_rows(self, examples: Sequence[Example]) -> Batch:
        """Batch with one row per choice.

        The label at an example's first row is the row number of its right choice; other rows have
        IGNORED.
        """
        counts = [len(example["input_ids"]) for example in examples]
        rows = _rows_of(examples)
        batch = {name: values[:, None] for name, values in self._padded(rows).items()}
        firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)
        batch["labels"] = torch.full((len(rows),), IGNORED)
        if "labels" in examples[0]:
            batch["labels"][firsts] = firsts + torch.tensor(
                [int(example["labels"]) for example in examples]
            )
        return batch

    def _text_rows(self, examples: Sequence[Example]) -> Batch:
        """Batch with one row per text of an example, and one row of labels per example."""
        return self._padded(_rows_of(examples)) | {"labels": self._labels(examples, [], 0)}

    def _width(self, longest: int, rows: int) -> int:
        widths = (
            self.widths if self.widths is not None else (round_up(max(1, longest), self.multiple),)
        )
        return width_of(longest, rows, widths, self.tokens_multiple)

    def _labels(self, examples: Sequence[Example], sizes: list[int], width: int) -> Tensor:
        labels = [example["labels"] for example in examples]
        # The kind of task shows in the labels: scalar = class, float = regression, tuple = span.
        if np.ndim(labels[0]) == 0:
            return torch.tensor([int(label) for label in labels])
        if np.asarray(labels[0]).dtype.kind == "f":
            return torch.from_numpy(np.stack(labels).astype(np.float32))
        if isinstance(labels[0], tuple):
            return torch.tensor(labels)
        lengths = [len(label) for label in labels]
        if lengths != sizes:  # seq2seq: labels have the target's length
            width = self._width(max(lengths), len(examples))
        return _padded_rows(labels, width, IGNORED)

    def _targets(self, labels: Any, tokens: int) -> np.ndarray[Any, Any]:
        """Labels of a packed document.

        If labels are shifted, the first is ignored: it would be predicted from the previous
        document.
        """
        found = np.array(labels)
        if found.shape != (tokens,):
            raise ConfigError(
                f"Collator: labels {list(found.shape)} for {tokens} tokens cannot be packed, only one for "
                f"each token. Leave row_length out.",
                code="collator.labels",
            )
        if self.shifted:
            found[:1] = IGNORED
        return found

    def _packed(self, rows: Sequence[Sequence[Example]]) -> Batch:
        sizes = [[len(example["input_ids"]) for example in row] for row in rows]
        width = self._width(max(map(sum, sizes)), len(rows))
        ids = _padded_rows(
            [np.concatenate([one["input_ids"] for one in row]) for row in rows], width, self.pad_id
        )
        targets = [
            np.concatenate([self._targets(one["labels"], len(one["input_ids"])) for one in row])
            for row in rows
        ]
        labels = _padded_rows(targets, width, IGNORED)
        both = [positions(row, width) for row in sizes]
        position, document = (torch.stack(part) for part in zip(*both, strict=True))
        batch = {"input_ids": ids, "labels": labels, "position_ids": position}
        if self.attention == "mask":
            batch["attention_mask"] = block_mask(document, causal=self.causal)
        elif self.attention == "positions":
            # transformers 5.23 derives the packed mask from position_ids only without a cache, and
            # models create one by default, also in training. With position_ids alone, documents
            # leaked: changing one moved another's logits by 15 % (decisions/training.md).
            batch["use_cache"] = False  # type: ignore[assignment]
        elif self.attention == "varlen":
            batch = {name: values.reshape(1, -1) for name, values in batch.items()}
            bounds, longest = cumulative_lengths(document)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}  # type: ignore[dict-item]  # numbers, as kernels want
        return batch


def _rows_of(examples: Sequence[Example]) -> list[Example]:
    """Each text of each example as an example of its own, without labels."""
    return [
        {name: parts[place] for name, parts in example.items() if name != "labels"}
        for example in examples
        for place in range(len(example["input_ids"]))
    ]


def _padded_rows(rows: Sequence[Any], width: int, filler: int) -> Tensor:
    """[len(rows), width] int64, each row padded with `filler`."""
    found = np.full((len(rows), width), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return torch.from_numpy(found)


def pad_id_of(tokenizer: Any) -> int:
    """The tokenizer's padding id, else its end-of-text id, else 0.

    Any id works, because masks are computed from lengths.
    """
    return next(
        (int(id) for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0
    )


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """Largest change of a logit, relative to the largest logit.

    noise  between two equal calls; 0 and not measured if `leak` is 0 and `alone` within
           tolerance
    leak   in other documents when one document changes
    alone  between a packed document and the same document by itself
    """

    noise: float
    leak: float
    alone: float


def check_packing(
    model: Any, collator: Collator, *, vocabulary: int | None = None, seed: int = 0
) -> PackingCheck:
    """Checks that a model separates packed documents: changes one, and compares the others' logits.

    vocabulary  upper limit of the random ids; None means the model config's

    Costs three forward passes of at most 32 tokens, four if the logits differ at all. Restores the
    model's training mode. Raises ConfigError if another document's logits move by more than equal
    calls differ, or if a packed document has other logits than by itself. Recipes with per-tensor
    scales couple documents through rounding: suspend the recipe for the check.
    """
    vocabulary = vocabulary or int(model.config.get_text_config().vocab_size)
    draw = torch.Generator().manual_seed(seed)
    documents = [
        torch.randint(vocabulary, (size,), generator=draw).numpy() for size in CHECKED_TOKENS
    ]
    # Accumulated rounding in the weights' dtype, since other positions use other kernels. Wrong
    # positions cause far larger differences.
    tolerance = 1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # The sampler's widths can be hundreds of times wider than three short documents.
            found = _compared(
                model, replace(collator, widths=None), documents, vocabulary, tolerance
            )
    finally:
        model.train(training)
    kind = getattr(model.config, "_attn_implementation", "unknown")
    what = f"{type(model).__name__} with {kind} attention and collator attention {collator.attention!r}"
    step = "Use the collator's attention='mask' with sdpa, a variable-length attention, or pad instead of packing."
    # Equal calls agree up to the order of sums; a leak is far above 1e-5 even with random weights.
    if not found.leak <= 1e-5 + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} mixes packed documents: changing one moves another's logits by {found.leak:.2g} of the "
            f"largest (equal calls: {found.noise:.2g}). {step}",
            code="packing.mixes",
        )
    if not found.alone <= tolerance + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} sees a packed document otherwise than alone: its logits differ by {found.alone:.2g} of the "
            f"largest, more than {tolerance:g}. Its positions may not restart. {step}",
            code="packing.positions",
        )
    return found


def _compared(
    model: Any, collator: Collator, documents: list[Any], vocabulary: int, tolerance: float
) -> PackingCheck:
    """Measures the three differences.

    Compared calls have the same shape, so that the same kernels compute a position in both.
    """
    device = next(model.parameters()).device

    def logits(rows: list[list[Any]]) -> Tensor:
        """[rows, positions, vocabulary] float32 of packed rows, without padding."""
        batch = collator(
            [[{"input_ids": document, "labels": document} for document in row] for row in rows]
        )
        inputs = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        del inputs["labels"]
        found: Tensor = model(**inputs).logits.float()
        return found.reshape(len(rows), -1, found.shape[-1])[
            :, : max(sum(map(len, row)) for row in rows)
        ]

    first, second, last = documents
    start, end = len(first), len(first) + len(second)
    straight = logits([documents, documents])
    moved = (
        logits([[(first + 1) % vocabulary, second, last], [first, second, (last + 1) % vocabulary]])
        - straight
    )
    alone = logits([[second], [second]])[0, : len(second)] - straight[0, start:end]
    size = float(straight.abs().max()) or 1.0
    leak = float(torch.maximum(moved[0, start:].abs().max(), moved[1, :end].abs().max())) / size
    alone_change = float(alone.abs().max()) / size
    noise = 0.0
    if not (leak == 0 and alone_change <= tolerance):
        noise = float((logits([documents, documents]) - straight).abs().max()) / size
    return PackingCheck(noise, leak, alone_change)
