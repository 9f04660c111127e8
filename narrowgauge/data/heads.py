"""Converts model outputs to scores that labels index directly.

    one class for each label   logits [..., classes]        labels [...]
    question-answering         scores [rows, 2, width]      labels [rows, 2], positions of the first
                                                            and last token of the answer
    multiple-choice            scores [total, total]        labels [total]; at a question's first
                                                            row the row number of its right choice

Impossible targets (padding, other questions' choices) get a score of minus infinity. They receive
no probability, so the loss does not depend on the padded width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED

NEVER = float("-inf")


def span_scores(output: Any, mask: Tensor | None = None) -> Tensor:
    """Start and end scores [rows, 2, width] from start_logits and end_logits.

    mask  [rows, width], 0 on padding
    """
    scores = torch.stack((output.start_logits, output.end_logits), dim=1)
    # transformers' own heads include padding in the softmax: a window's loss then depends on the
    # width of its batch (docs/log.md, "Answers, tags and choices").
    return (
        scores if mask is None else scores.masked_fill(mask.to(scores.device)[:, None] == 0, NEVER)
    )


def choice_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Scores [total, total]: row i holds the logits of the choices of row i's question.

    logits  [total, 1], one for each choice
    labels  [total], not IGNORED at the first choice of each question

    Questions may have different numbers of choices. No shape depends on a value, so a GPU is not
    synchronized. Memory: total^2 elements.
    """
    # A cumulative sum numbers the questions without a host sync.
    question = (labels.to(logits.device) != IGNORED).cumsum(0)
    same = question[:, None] == question[None, :]
    return logits.view(1, -1).expand(len(same), -1).masked_fill(~same, NEVER)
