"""Shape of the largest micro-batch that settings allow, and tasks that read no data.

    text                 batch_size / micro_batches rows of sequence_length
    table                the same rows, or as many as fill the token budget; as wide as the longest
                         allowed example
    images               the same rows; as wide as the number of patches
    packing              rows of `packing` tokens with two documents each, and a [width, width] mask

For a table, the width is max_length or the model's number of positions. Batches of real tables are
narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge import data
from narrowgauge.data.rows import round_up
from narrowgauge.train.model import CAUSAL_LM, ModelClass
from narrowgauge.train.tasks import task_class
from narrowgauge.train.tasks.image_classification import ImageTask
from narrowgauge.train.tasks.reading import longest_example
from narrowgauge.train.tasks.table import TableTask
from narrowgauge.train.tasks.text import TextTask

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.tasks.task import TrainTask

SOMEWHERE = 2048  # tokens of an example if neither settings nor model define a limit


@dataclass(frozen=True)
class Vocabulary:
    """Stand-in for a tokenizer, with the largest vocabulary that the settings allow."""

    words: int
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0
    model_max_length: int = 10**30

    def __len__(self) -> int:
        return self.words

    def get_vocab(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Shape:
    """Shape of a micro-batch, and a note if real batches may be smaller."""

    rows: int
    width: int
    note: str = ""

    @property
    def tokens(self) -> int:
        return self.rows * self.width


def task_of(config: TrainConfig) -> tuple[TrainTask, ModelClass]:
    """(task without data, model class); the task builds models, objectives and batches only."""
    # A pretrained model's own vocabulary size is used.
    words = (
        0
        if config.model
        else len(data.load(config.tokenizer))
        if config.tokenizer
        else config.vocab_size
    )
    tokenizer: Any = Vocabulary(words)
    if config.task == "text":
        return TextTask(config, tokenizer, [], None), CAUSAL_LM  # type: ignore[arg-type]
    kind = task_class(config.task)
    if issubclass(kind, ImageTask):
        images = kind.without_data(config)
        return images, images.model_class
    assert issubclass(kind, TableTask)
    config = kind.config_without_data(config)
    _, model_class = kind.columns_and_model(config, tokenizer)
    longest = longest_example(config, model_class, tokenizer)
    nothing: Any = None
    return kind(config, tokenizer, [], model_class, nothing, nothing, longest, {}), model_class


def largest(config: TrainConfig, task: TrainTask, parts: int) -> Shape:
    """Shape of the largest of a step's `parts` micro-batches."""
    if not isinstance(task, TableTask):
        width = task.patches if isinstance(task, ImageTask) else config.sequence_length
        return Shape(-(-config.batch_size // parts), width)
    longest = task.longest
    note = f"as wide as an example may be, {longest or SOMEWHERE} tokens: set max_length to plan for shorter ones"
    if longest is None:
        note = f"the settings tell no longest example, {SOMEWHERE} tokens are taken: set max_length"
    if config.packing:
        rows = config.token_budget // config.packing if config.token_budget else config.batch_size
        return Shape(max(1, -(-rows // parts)), config.packing)
    width, several = round_up(longest or SOMEWHERE, config.pad_multiple), task.rows_per_example
    if not config.token_budget:
        return Shape(-(-config.batch_size // parts) * several, width, note)
    # An example wider than the budget is never batched.
    width = min(width, config.token_budget)
    # Multiple choice: whole questions only, each with `several` rows.
    return Shape(max(1, config.token_budget // width // parts // several) * several, width, note)


def batch_of(config: TrainConfig, task: TrainTask, shape: Shape) -> Batch:
    """A micro-batch of this shape before `task.align`, with meaningless contents."""
    rows, width = shape.rows, shape.width
    if isinstance(task, ImageTask):
        return task.dummy_batch(rows)
    if not isinstance(task, TableTask):
        both = torch.ones(rows, width, dtype=torch.int64)
        return {"input_ids": both, "labels": both.clone()}
    example, collate = task.dummy_example(width), data.Collator(pad_id=0, widths=(width,))
    if config.packing:
        # Two documents in each row, so that the block-diagonal attention mask is built.
        halves = [
            {name: part[:size] for name, part in example.items()}
            for size in (width // 2, width - width // 2)
        ]
        return collate([halves] * rows)
    return collate([example] * max(1, rows // task.rows_per_example))
