"""Catalog of the tasks, and the tables `[model]`, `[data]`, `[task]` and `[batch]`. Imports no torch.

A new task is one entry in `TASKS` here, the settings that only it reads, and its file in
`narrowgauge/train/tasks/`, whose name is the task's with underscores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from narrowgauge.train.config.rules import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    Check,
    OneOf,
    Range,
    is_set,
    setting,
)


def _no_checks(c: "DataSettings") -> list[Check]:
    return []


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Facts about a task that are needed where its file, which imports torch, is not imported.

    name            value of the setting `task`
    source          training data: running text, a table of examples, or a folder of images
    generates       the model generates text: evaluations show samples, and batches are shuffled
    metrics         metrics of an evaluation besides the loss, each a possible value of `best`
    default_metric  metric that selects the best weights if `best` is empty; '' saves none
    loss_unit       unit of the loss in reports
    f1_over         the items over which F1 is computed, for its title in reports
    checks          rules between the task's settings: (is broken, its keys, message). The error's
                    code is "config." and the first key
    """

    name: str
    source: Literal["text", "table", "images"] = "table"
    generates: bool = False
    metrics: tuple[str, ...] = ()
    default_metric: str = "loss"
    loss_unit: str = "nats/token"
    f1_over: str = ""
    checks: Callable[["DataSettings"], list[Check]] = _no_checks


CLASS_METRICS = ("accuracy", "mcc", "f1", "f1_binary")


def _question_checks(c: "DataSettings") -> list[Check]:
    return [
        *((not getattr(c, key), key, f"data.columns.{key.removesuffix('_column')} = '': question-answering needs the column of both, "
                                     "question and context.")
          for key in ("question_column", "context_column")),
        (c.too_long == "truncate", "too_long task",
         "data.too_long = 'truncate': question-answering reads long contexts in windows and cuts none; what is too long is a question that "
         "leaves no room for its context. Take 'error' or 'skip'."),
    ]  # fmt: skip


def _choice_checks(c: "DataSettings") -> list[Check]:
    return [
        (not c.question_column and not c.context_column, "question_column context_column",
         "data.columns.question = '': data.columns.context is empty too, so nothing is asked. Name one of them."),
    ]  # fmt: skip


def _tag_checks(c: "DataSettings") -> list[Check]:
    return [
        (c.classes.strip().isdecimal(), "classes",
         f"task.classes = {c.classes!r}: tags have names, as 'O,B-PER,I-PER'. List them, or leave classes out."),
        (not c.spans_column and is_set(c, "text_column"), "text_column",
         f"data.columns.text = {c.text_column!r}: needs data.columns.spans, the column with what is marked in the text."),
        *((c.spans_column and is_set(c, key), f"{key} spans_column",
           f"data.columns.{key.removesuffix('_column')} = {getattr(c, key)!r}: has no effect with data.columns.spans = "
           f"{c.spans_column!r}. Remove one of them.")
          for key in ("tokens_column", "tags_column")),
    ]  # fmt: skip


TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(name="text", source="text", generates=True, default_metric=""),
        TaskEntry(name="causal-lm", generates=True),
        TaskEntry(
            name="classification",
            metrics=CLASS_METRICS,
            default_metric="mcc",
            loss_unit="nats/example",
            f1_over="mean over classes",
        ),
        # Measured on the rows that `translate` selects.
        TaskEntry(name="seq2seq", generates=True, metrics=("bleu", "chrf")),
        TaskEntry(
            name="regression",
            metrics=("pearson", "spearman"),
            default_metric="pearson",
            loss_unit="squared error",
        ),
        TaskEntry(
            name="image-classification",
            source="images",
            metrics=CLASS_METRICS,
            default_metric="accuracy",
            loss_unit="nats/example",
            f1_over="mean over classes",
        ),
        TaskEntry(
            name="question-answering",
            metrics=("exact_match", "f1"),
            default_metric="f1",
            loss_unit="nats/border",
            f1_over="words of answers",
            checks=_question_checks,
        ),
        # Over spans; accuracy over words.
        TaskEntry(
            name="tagging",
            metrics=("f1", "precision", "recall", "accuracy"),
            default_metric="f1",
            loss_unit="nats/word",
            f1_over="spans",
            checks=_tag_checks,
        ),
        TaskEntry(
            name="multiple-choice",
            metrics=("accuracy",),
            default_metric="accuracy",
            loss_unit="nats/question",
            checks=_choice_checks,
        ),
    )
}


def _names(*sources: str) -> tuple[str, ...]:
    return tuple(entry.name for entry in TASKS.values() if entry.source in sources)


TEXT, TABLES, IMAGES = _names("text"), _names("table"), _names("images")
TOKENIZED, EXAMPLES = _names("text", "table"), _names("table", "images")
GENERATING = tuple(entry.name for entry in TASKS.values() if entry.generates)
BEST = (
    "",
    "none",
    "loss",
    *dict.fromkeys(name for entry in TASKS.values() for name in entry.metrics),
)

# Tasks that read a setting.
CHATS, PAIRS, ANSWERS = ("causal-lm",), ("seq2seq",), ("question-answering",)
TAGS, CHOICES = ("tagging",), ("multiple-choice",)

# Declare a setting of one table.
MODEL, DATA, COLUMNS, TASK, BATCH = (
    partial(setting, name) for name in ("model", "data", "data.columns", "task", "batch")
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Table `[model]`: architecture and weights."""

    # fmt: off
    model: str = MODEL("", "Local folder or hub name of a model; empty: a Llama, or for images a ViT, of the sizes below.",
        key="name", short=True)
    from_scratch: bool = MODEL(False, "With model: take its configuration, but start from random weights.")
    hidden_size: int = MODEL(320, "Width of the residual stream.", Range(2, 2**20))
    layers: int = MODEL(6, "Transformer blocks.", Range(1, 4096))
    heads: int = MODEL(8, "Attention heads.", Range(1, 4096))
    kv_heads: int = MODEL(0, "Heads of keys and values; 0: as many as heads.", Range(0, 4096), tasks=TOKENIZED)
    intermediate_size: int = MODEL(0,
        "Width of the MLP; 0: 8/3 of hidden_size, rounded up to a multiple of 64; of a ViT 4 times.", Range(0, 2**22))
    sequence_length: int = MODEL(256, "Tokens of a sequence.", Range(2, 2**22), tasks=TEXT)
    patch_size: int = MODEL(16, "Without model: height and width of a patch.", Range(1, 2**14), tasks=IMAGES)
    freeze: str = MODEL("", "Patterns of layers and parameters that do not train, as embed*,layers.0-3; empty: none.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """Table `[data]`: source, columns and limits of the examples."""

    # fmt: off
    data: str = DATA("stdlib",
        "Text to learn: a file, a folder or a data set's name; stdlib: Python's own sources. With a task: a table, "
        "or for images a folder with one folder for each class.",
        NOT_EMPTY, key="source", short=True)
    column: str = DATA("", "Column or JSON key that holds the text; empty: the only one, or 'text'.", tasks=TEXT)
    tokenizer: str = DATA("", "Folder or hub name of a tokenizer; empty: the model's, or a BPE trained here.", tasks=TOKENIZED)
    vocab_size: int = DATA(4096, "Size of the BPE that is trained here.", Range(257, 2**24), tasks=TEXT)
    validation_data: str = DATA("", "Table, or folder, to validate on; empty: validation_fraction of the rows of data.",
        tasks=EXAMPLES)
    validation_fraction: float = DATA(0.05, "Share of the documents held out for validation.", Range(0, 0.5, open_low=True))
    cache: str = DATA("", "Folder of tokenized data; empty: `cache` beside the run folder.")
    columns: str = DATA("", "Names, with commas, of the columns of CSV and TSV without a header row.", key="header",
        tasks=EXAMPLES)
    max_length: int = DATA(0, "Tokens of an example, at most; 0: as many as the model knows.", COUNT_OR_ZERO, tasks=TABLES)
    too_long: str = DATA("error", "Examples above max_length or the token budget.", OneOf(("error", "truncate", "skip")),
        tasks=TABLES)
    no_target: str = DATA("error", "Examples of which nothing is learnt.", OneOf(("error", "skip")), tasks=TABLES)
    image_size: int = DATA(0, "Height and width that pictures are resized to; 0: the model's, or 224.", Range(0, 2**14),
        tasks=IMAGES)
    crop_padding: int = DATA(0, "Pixels of black around a picture, of which its size is cut out at random; 0: none.",
        Range(0, 2**14), tasks=IMAGES)
    flip: bool = DATA(False, "Pictures are turned left to right at random.", tasks=IMAGES)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """Table `[data.columns]`: which column of a table of examples holds what."""

    # fmt: off
    prompt_column: str = COLUMNS("prompt", "causal-lm: column with the prompt.", NOT_EMPTY, key="prompt", tasks=CHATS)
    completion_column: str = COLUMNS("completion", "causal-lm: column with what follows it.", NOT_EMPTY, key="completion", tasks=CHATS)
    messages_column: str = COLUMNS("", "causal-lm: column with chats; empty: prompts and completions.", key="messages", tasks=CHATS)
    text_column: str = COLUMNS("text", "classification, regression: column with the text; tagging: that of spans.",
        NOT_EMPTY, key="text", tasks=("classification", "regression", *TAGS))
    pair_column: str = COLUMNS("", "classification, regression: column with a second text; empty: none.",
        key="pair", tasks=("classification", "regression"))
    label_column: str = COLUMNS("label",
        "Column with the class or the right choice; regression: with the number, or more with commas.", NOT_EMPTY,
        key="label", tasks=("classification", "regression", *CHOICES, *IMAGES))
    image_column: str = COLUMNS("image", "image-classification: column of a table with paths from its folder, or with bytes.",
        NOT_EMPTY, key="image", tasks=IMAGES)
    source_column: str = COLUMNS("source", "seq2seq: column with what is read.", NOT_EMPTY, key="source", tasks=PAIRS)
    target_column: str = COLUMNS("target", "seq2seq: column with what is written.", NOT_EMPTY, key="target", tasks=PAIRS)
    question_column: str = COLUMNS("question",
        "question-answering, multiple-choice: column with the question; empty: no question.", key="question", tasks=(*ANSWERS, *CHOICES))
    context_column: str = COLUMNS("context",
        "question-answering, multiple-choice: column with what it is about; empty: no context.", key="context", tasks=(*ANSWERS, *CHOICES))
    answers_column: str = COLUMNS("answers", "question-answering: column with the answers, texts and where they begin.",
        NOT_EMPTY, key="answers", tasks=ANSWERS)
    tokens_column: str = COLUMNS("tokens", "tagging: column with a list of words.", NOT_EMPTY, key="tokens", tasks=TAGS)
    tags_column: str = COLUMNS("tags", "tagging: column with a list of their tags.", NOT_EMPTY, key="tags", tasks=TAGS)
    spans_column: str = COLUMNS("",
        "tagging: column with spans (start, end, label) in the column text, instead of words and tags; empty: "
        "none.", key="spans", tasks=TAGS)
    choices_column: str = COLUMNS("choices",
        "multiple-choice: column with a list of choices, or columns of one each, with commas.", NOT_EMPTY, key="choices", tasks=CHOICES)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """Table `[task]`: objective and its metrics."""

    # fmt: off
    task: str = TASK("text", "What is learnt: running text, or the examples of a table.", OneOf(tuple(TASKS)), key="name", short=True)
    train_on: str = TASK("answers", "Of a chat: all answers, or the last.", OneOf(("answers", "last")), tasks=CHATS)
    classes: str = TASK("", "Names of the classes or tags with commas, or the number of classes; empty: those of the data.",
        tasks=("classification", *TAGS, *IMAGES))
    translate: int = TASK(0,
        "seq2seq: rows of the validation data, the first, that are translated at each evaluation for BLEU and chrF; "
        "0: none.",
        COUNT_OR_ZERO, tasks=PAIRS)
    beams: int = TASK(1, "Beams of these translations; 1: greedily.", Range(1, 64), tasks=PAIRS)
    bleu_words: str = TASK("13a", "How sacrebleu cuts words for BLEU; none: at spaces, of tokenized data.",
        OneOf(("13a", "none", "intl", "zh", "char")), tasks=PAIRS)
    stride: int = TASK(128, "question-answering: tokens of a long context that neighbouring windows share.", COUNT_OR_ZERO,
        tasks=ANSWERS)
    answer_tokens: int = TASK(30, "question-answering: tokens of an answer that is given, at most.", COUNT, tasks=ANSWERS)
    best: str = TASK("",
        "Metric whose best checkpoint is kept and exported; empty: the task's own, none of text; none: the last is exported.",
        OneOf(BEST))
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Table `[batch]`: rows and widths of a step."""

    # fmt: off
    batch_size: int = BATCH(16, "Sequences or examples of an optimizer step.", Range(1, 2**20), key="size")
    micro_batches: int = BATCH(1, "Parts into which a batch, or what a rank has of it, is cut to save memory.", Range(1, 2**20))
    token_budget: int = BATCH(0, "Positions (rows x width) of an optimizer step; 0: batch_size rows instead.", COUNT_OR_ZERO,
        tasks=TABLES)
    packing: int = BATCH(0, "causal-lm, tagging: tokens of a row that several examples fill; 0: pad each.", COUNT_OR_ZERO,
        tasks=("causal-lm", *TAGS))
    length_buckets: int = BATCH(10, "Widths that batches are padded to, at most.", Range(1, 512), tasks=TABLES)
    batch_order: str = BATCH("",
        "length: examples of a step are of one length. shuffled: a step is a random sample, micro-batches are of about one length each. "
        "Empty: shuffled where a model learns to write (causal-lm, seq2seq), else length.",
        OneOf(("", "length", "shuffled")), key="order", tasks=TABLES)
    stratify: bool = BATCH(True,
        "Every batch has the data's share of each class, of answered windows, or of each quarter of a number.", tasks=TABLES)
    pad_multiple: int = BATCH(8, "Widths are multiples of it.", OneOf((1, 2, 4, 8, 16, 32, 64, 128)), tasks=TABLES)
    # fmt: on


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class DataSettings(BatchSettings, TaskTable, ColumnSettings, DataTable, ModelSettings):
    """The tables of model, data and task, which `data_checks` reads; a base of `TrainConfig`."""
