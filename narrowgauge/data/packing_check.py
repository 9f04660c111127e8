"""Does this model keep packed documents apart? Perturb one, and look whether another's logits move.

Nothing in a model raises when its attention ignores the mask it is given, or when a convolution or a recurrence runs on from
document to document; the loss only gets a little worse. So it is tried, on a row of three short documents, before training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.data.collate import Collator
from narrowgauge.errors import ConfigError

DOCUMENT_TOKENS = (11, 13, 8)  # 32 positions, odd borders


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """Largest change of a logit, as a share of the largest logit.

    noise   between two equal calls
    leak    in the other documents when one changes
    alone   between a document in the row and the same document alone
    """

    noise: float
    leak: float
    alone: float


def check_packing(model: Any, collator: Collator, *, vocabulary: int | None = None, seed: int = 0) -> PackingCheck:
    """Tries the model with rows as this collator packs them; about as long as five forward passes of 32 tokens.

    vocabulary  ids below it are drawn; that of the model's config if None

    Raises ConfigError if another document's logits move by more than equal calls differ, or if a document in a row has other
    logits than alone. Products that share one scale over all rows (a recipe with per-tensor scales) tie documents together by
    rounding: suspend the recipe for the check. The model's training mode is put back.
    """
    vocabulary = vocabulary or int(model.config.get_text_config().vocab_size)
    draw = torch.Generator().manual_seed(seed)
    documents = [torch.randint(vocabulary, (size,), generator=draw).numpy() for size in DOCUMENT_TOKENS]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = _measure(model, collator, documents, vocabulary)
    finally:
        model.train(training)
    _judge(found, model, collator)
    return found


def _measure(model: Any, collator: Collator, documents: list[Any], vocabulary: int) -> PackingCheck:
    first, rest = DOCUMENT_TOKENS[0], slice(DOCUMENT_TOKENS[0], sum(DOCUMENT_TOKENS))
    straight = _logits(model, collator, documents)
    size = float(straight.abs().max()) or 1.0
    noise = float((_logits(model, collator, documents) - straight).abs().max()) / size
    changed_first = [(documents[0] + 1) % vocabulary, *documents[1:]]
    changed_last = [*documents[:2], (documents[2] + 1) % vocabulary]
    forward = (_logits(model, collator, changed_first)[rest] - straight[rest]).abs().max()
    backward = (_logits(model, collator, changed_last) - straight)[: first + DOCUMENT_TOKENS[1]].abs().max()
    alone = _logits(model, collator, [documents[1]])[: DOCUMENT_TOKENS[1]]
    apart = (alone - straight[first : first + DOCUMENT_TOKENS[1]]).abs().max()
    return PackingCheck(noise, float(max(forward, backward)) / size, float(apart) / size)


def _logits(model: Any, collator: Collator, documents: list[Any]) -> Tensor:
    """[positions, vocabulary] float32 of one packed row."""
    row = [{"input_ids": document, "labels": document} for document in documents]
    batch = collator([row])
    batch.pop("labels")
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return model(**inputs).logits[0].float()


def _judge(found: PackingCheck, model: Any, collator: Collator) -> None:
    kind = getattr(model.config, "_attn_implementation", "unknown")
    what = f"{type(model).__name__} with {kind} attention and collator attention {collator.attention!r}"
    step = "Use the collator's attention='mask' with sdpa, a variable-length attention, or pad instead of packing."
    # Equal calls are equal, or differ by the noise of unordered sums; a leak in a model at its random start is far above 1e-5.
    if not found.leak <= 1e-5 + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} mixes packed documents: changing one moves another's logits by {found.leak:.2g} of the "
            f"largest (equal calls: {found.noise:.2g}). {step}"
        )
    # Another shape takes other kernels: rounding of the weights' dtype, some layers deep. Wrong positions are far above.
    dtype = next(model.parameters()).dtype
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    if not found.alone <= tolerance + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} sees a packed document otherwise than alone: its logits differ by {found.alone:.2g} of the "
            f"largest, more than {tolerance:g}. Its positions may not restart. {step}"
        )
