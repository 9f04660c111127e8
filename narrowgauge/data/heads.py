"""What the heads of models compute, as rows of logits that labels are compared with.

    one class for each label   logits [..., classes]        labels [...]
    question-answering         scores [rows, 2, width]      labels [rows, 2], positions of the first and last token of an answer
    multiple-choice            scores [total, total]        labels [total], of the first choice of a question the row of the right one

Scores of what cannot be chosen (padding, another question's choices) are minus infinity, so no softmax gives it a share, and a loss
does not depend on how wide a batch is padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED

NEVER = float("-inf")


def span_scores(output: Any, mask: Tensor | None = None) -> Tensor:
    """[rows, 2, width] of the first and last token, from start_logits and end_logits; mask [rows, width]: 0 on padding."""
    scores = torch.stack((output.start_logits, output.end_logits), dim=1)
    return scores if mask is None else scores.masked_fill(mask.to(scores.device)[:, None] == 0, NEVER)


def choice_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """[total, total] float: row i has the logits of the choices of its question. logits [total, 1], labels as in a batch.

    Questions may have different numbers of choices. No shape depends on a value, so that a GPU is not waited for. total**2 elements.
    """
    question = (labels.to(logits.device) != IGNORED).cumsum(0)
    same = question[:, None] == question[None, :]
    return logits.view(1, -1).expand(len(same), -1).masked_fill(~same, NEVER)
