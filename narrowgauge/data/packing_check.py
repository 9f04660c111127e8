"""Checks before training that a model keeps packed documents apart: changes one document and compares the logits of the others.

A model raises no error if its attention ignores the mask, or if a convolution or recurrence crosses documents; the loss only gets a
little worse. The check uses two rows of three short documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.data.collate import Collator
from narrowgauge.errors import ConfigError

DOCUMENT_TOKENS = (5, 7, 4)  # 16 positions, odd borders


@dataclass(frozen=True, slots=True)
class PackingCheck:
    """Largest change of a logit, as a share of the largest logit.

    noise   between two equal calls; 0, unmeasured, if `leak` is 0 and `alone` within its tolerance
    leak    in other documents when one changes
    alone   between a packed document and the same document alone
    """

    noise: float
    leak: float
    alone: float


def check_packing(model: Any, collator: Collator, *, vocabulary: int | None = None, seed: int = 0) -> PackingCheck:
    """Checks the model with short rows that this collator packs. Costs three forward passes of at most 32 tokens.

    vocabulary  upper limit of the random ids; None means the model config's

    Raises ConfigError if another document's logits move by more than equal calls differ, or if a packed document has other logits
    than alone. Recipes with one scale per tensor couple documents by rounding: suspend the recipe for the check. Restores the
    model's training mode.
    """
    vocabulary = vocabulary or int(model.config.get_text_config().vocab_size)
    draw = torch.Generator().manual_seed(seed)
    documents = [torch.randint(vocabulary, (size,), generator=draw).numpy() for size in DOCUMENT_TOKENS]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # The sampler's widths are hundreds of times what three short documents need.
            found = _measure(model, replace(collator, widths=None), documents, vocabulary)
    finally:
        model.train(training)
    _judge(found, model, collator)
    return found


def _measure(model: Any, collator: Collator, documents: list[Any], vocabulary: int) -> PackingCheck:
    """Calls compared for a leak have the same shape, so that the same kernels compute a position in both."""
    first, second, last = documents
    start, end = len(first), len(first) + len(second)
    straight = _logits(model, collator, [documents, documents])
    changed = [[(first + 1) % vocabulary, second, last], [first, second, (last + 1) % vocabulary]]
    moved = _logits(model, collator, changed) - straight
    alone = _logits(model, collator, [[second], [second]])
    size = float(straight.abs().max()) or 1.0
    leak = float(torch.maximum(moved[0, start:].abs().max(), moved[1, :end].abs().max())) / size
    apart = float((alone[0, : len(second)] - straight[0, start:end]).abs().max()) / size
    noise = 0.0
    if not (leak == 0 and apart <= _tolerance(model)):
        noise = float((_logits(model, collator, [documents, documents]) - straight).abs().max()) / size
    return PackingCheck(noise, leak, apart)


def _logits(model: Any, collator: Collator, rows: list[list[Any]]) -> Tensor:
    """[rows, positions, vocabulary] float32 of packed rows, without padding."""
    batch = collator([[{"input_ids": document, "labels": document} for document in row] for row in rows])
    batch.pop("labels")
    device = next(model.parameters()).device
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    logits = model(**inputs).logits.float()
    return logits.reshape(len(rows), -1, logits.shape[-1])[:, : max(sum(map(len, row)) for row in rows)]


def _tolerance(model: Any) -> float:
    """Rounding of the weights' dtype over some layers, as other positions use other kernels; wrong positions differ far more."""
    return 1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2


def _judge(found: PackingCheck, model: Any, collator: Collator) -> None:
    kind = getattr(model.config, "_attn_implementation", "unknown")
    what = f"{type(model).__name__} with {kind} attention and collator attention {collator.attention!r}"
    step = "Use the collator's attention='mask' with sdpa, a variable-length attention, or pad instead of packing."
    # Equal calls agree up to unordered sums; a leak in a randomly initialized model is far above 1e-5.
    if not found.leak <= 1e-5 + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} mixes packed documents: changing one moves another's logits by {found.leak:.2g} of the "
            f"largest (equal calls: {found.noise:.2g}). {step}"
        )
    tolerance = _tolerance(model)
    if not found.alone <= tolerance + 4 * found.noise:
        raise ConfigError(
            f"check_packing: {what} sees a packed document otherwise than alone: its logits differ by {found.alone:.2g} of the "
            f"largest, more than {tolerance:g}. Its positions may not restart. {step}"
        )
