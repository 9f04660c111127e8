"""Tables `[model]`, `[data]`, `[task]` and `[batch]`. Imports no torch."""

from dataclasses import dataclass
from functools import partial

from narrowgauge.train.config import augment_syntax
from narrowgauge.train.config.rules import (
    COUNT,
    COUNT_OR_ZERO,
    NOT_EMPTY,
    TABLE,
    OneOf,
    Range,
    setting,
)
from narrowgauge.train.config.task_entries import TASKS, column_help


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
CHATS, PAIRS, ANSWERS, TAGS = (
    ("causal-lm",),
    ("seq2seq",),
    ("question-answering",),
    ("tagging",),
)

# Declare a setting of one table.
MODEL, DATA, TASK, BATCH = (partial(setting, name) for name in ("model", "data", "task", "batch"))


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
    header: str = DATA("", "Names, with commas, of the columns of CSV and TSV without a header row.", tasks=EXAMPLES)
    columns: TABLE = DATA(dict,  # noqa: RUF009 (it returns a dataclasses.field)
        "Names in the table of the columns that the task reads, as text=sentence.", parts=column_help())
    max_length: int = DATA(0, "Tokens of an example, at most; 0: as many as the model knows.", COUNT_OR_ZERO, tasks=TABLES)
    too_long: str = DATA("error", "Examples above max_length or the token budget.", OneOf(("error", "truncate", "skip")),
        tasks=TABLES)
    no_target: str = DATA("error", "Examples of which nothing is learnt.", OneOf(("error", "skip")), tasks=TABLES)
    image_size: int = DATA(0, "Height and width that pictures are resized to; 0: the model's, or 224.", Range(0, 2**14),
        tasks=IMAGES)
    augment: str = DATA("",
        "Random changes of pictures: crop=4, 4 pixels of black around them before their size is cut out; flip, left to right; or "
        "crop=4,flip. Empty: none.", augment_syntax.RULE, tasks=IMAGES)
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
class DataSettings(BatchSettings, TaskTable, DataTable, ModelSettings):
    """The tables of model, data and task, which `data_checks` reads; a base of `TrainConfig`."""

    def column_of(self, name: str) -> str:
        """Name in the table of a column that the task reads; '' reads none.

        Raises KeyError for a column that the task's entry does not declare.
        """
        return self.columns.get(name, TASKS[self.task].columns[name].default)

    def renames(self, name: str) -> bool:
        """True if the configuration gives a column another name than its default."""
        return self.column_of(name) != TASKS[self.task].columns[name].default

    @property
    def names_columns(self) -> bool:
        """True if the configuration names a column of the table, so that no form is looked for."""
        return any(map(self.renames, TASKS[self.task].columns))
