"""Catalog of the tasks: what is needed of a task where its file, which imports torch, is not imported.

A new task is one entry in `TASKS` here with its columns, the settings that only it reads in
`data_settings`, and its file in `narrowgauge/train/tasks/`, whose name is the task's with
underscores.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from narrowgauge.errors import closest
from narrowgauge.train.config.rules import Check, is_set, shown


class Settings(Protocol):
    """The part of `DataSettings` that the rules of a task read; it is declared with the entries."""

    @property
    def classes(self) -> str: ...
    @property
    def too_long(self) -> str: ...
    @property
    def train_on(self) -> str: ...
    def column_of(self, name: str) -> str: ...
    def renames(self, name: str) -> bool: ...


def _no_checks(c: Settings) -> list[Check]:
    return []


@dataclass(frozen=True)
class Column:
    """A column of the table of examples that a task reads.

    default   name of the column in the table unless `columns` gives another; '' reads none
    help      content of the column, as a clause for --help
    optional  the column may be left out with ''
    """

    default: str
    help: str
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskEntry:
    """Facts about a task that are needed where its file, which imports torch, is not imported.

    name            value of the setting `task`
    source          training data: running text, a table of examples, or a folder of images
    columns         columns of a row, by the names that the setting `columns` gives them
    may_be_several  those of them that may be several columns, with commas
    generates       the model generates text: evaluations show samples, and batches are shuffled
    metrics         metrics of an evaluation besides the loss, each a possible value of `best`
    default_metric  metric that selects the best weights if `best` is empty; '' saves none
    loss_unit       unit of the loss in reports
    f1_over         the items over which F1 is computed, for its title in reports
    reads           names of `columns` that the settings ask for; by default those that are named
    checks          rules between the task's settings: (is broken, its keys, message). The error's
                    code is "config." and the first key
    """

    name: str
    source: Literal["text", "table", "images"] = "table"
    columns: Mapping[str, Column] = field(default_factory=dict)
    may_be_several: tuple[str, ...] = ()
    generates: bool = False
    metrics: tuple[str, ...] = ()
    default_metric: str = "loss"
    loss_unit: str = "nats/token"
    f1_over: str = ""
    reads: Callable[[Settings], tuple[str, ...]] | None = None
    checks: Callable[[Settings], list[Check]] = _no_checks

    def columns_read(self, c: Settings) -> dict[str, str]:
        """{name: column of the table} of the columns that a run reads.

        Several columns of one name, as several choices, are columns of their own: "choices 2".
        """
        names = self.reads(c) if self.reads else tuple(self.columns)
        found = {}
        for name in names:
            parts = [part.strip() for part in c.column_of(name).split(",")]
            several = parts if name in self.may_be_several else [c.column_of(name)]
            for number, column in enumerate(filter(None, several)):
                found[f"{name} {number + 1}" if number else name] = column
        return found


CLASS_METRICS = ("accuracy", "mcc", "f1", "f1_binary")


def _chat_checks(c: Settings) -> list[Check]:
    chats = shown(c.column_of("messages"))
    return [
        (not c.column_of("messages") and is_set(c, "train_on"), "train_on",
         f"task.train_on = {c.train_on!r}: needs data.columns.messages, the column with chats."),
        *((c.column_of("messages") and c.renames(name), f"columns.{name}",
           f"data.columns.{name} = {shown(c.column_of(name))}: has no effect with data.columns.messages = {chats}. Remove one of them, or "
           "give the one that a file sets its default.")
          for name in ("prompt", "completion")),
    ]  # fmt: skip


def _chat_reads(c: Settings) -> tuple[str, ...]:
    return ("messages",) if c.column_of("messages") else ("prompt", "completion")


def _tag_reads(c: Settings) -> tuple[str, ...]:
    return ("text", "spans") if c.column_of("spans") else ("tokens", "tags")


def _question_checks(c: Settings) -> list[Check]:
    return [
        (c.too_long == "truncate", "too_long task",
         "data.too_long = 'truncate': question-answering reads long contexts in windows and cuts none; what is too long is a question that "
         "leaves no room for its context. Take 'error' or 'skip'."),
    ]  # fmt: skip


def _choice_checks(c: Settings) -> list[Check]:
    return [
        (not c.column_of("question") and not c.column_of("context"), "columns.question columns.context",
         "data.columns.question = '': data.columns.context is empty too, so nothing is asked. Name one of them."),
    ]  # fmt: skip


def _tag_checks(c: Settings) -> list[Check]:
    spans = c.column_of("spans")
    return [
        (c.classes.strip().isdecimal(), "classes",
         f"task.classes = {c.classes!r}: tags have names, as 'O,B-PER,I-PER'. List them, or leave classes out."),
        (not spans and c.renames("text"), "columns.text",
         f"data.columns.text = {shown(c.column_of('text'))}: needs data.columns.spans, the column with what is marked in the text."),
        *((spans and c.renames(name), f"columns.{name} columns.spans",
           f"data.columns.{name} = {shown(c.column_of(name))}: has no effect with data.columns.spans = {shown(spans)}. Remove one of "
           "them.")
          for name in ("tokens", "tags")),
    ]  # fmt: skip


# Columns that several tasks read alike.
_LABEL = Column("label", "the class")
_TEXTS = {
    "text": Column("text", "the text"),
    "pair": Column("", "a second text", optional=True),
}

TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(name="text", source="text", generates=True, default_metric=""),
        TaskEntry(
            name="causal-lm",
            generates=True,
            columns={
                "prompt": Column("prompt", "the prompt"),
                "completion": Column("completion", "what follows the prompt"),
                "messages": Column(
                    "", "chats, in the place of prompts and completions", optional=True
                ),
            },
            reads=_chat_reads,
            checks=_chat_checks,
        ),
        TaskEntry(
            name="classification",
            columns={**_TEXTS, "label": _LABEL},
            metrics=CLASS_METRICS,
            default_metric="mcc",
            loss_unit="nats/example",
            f1_over="mean over classes",
        ),
        # Measured on the rows that `translate` selects.
        TaskEntry(
            name="seq2seq",
            generates=True,
            metrics=("bleu", "chrf"),
            columns={
                "source": Column("source", "what is read"),
                "target": Column("target", "what is written"),
            },
        ),
        TaskEntry(
            name="regression",
            may_be_several=("label",),
            columns={
                **_TEXTS,
                "label": Column("label", "the number; several columns with commas"),
            },
            metrics=("pearson", "spearman"),
            default_metric="pearson",
            loss_unit="squared error",
        ),
        TaskEntry(
            name="sentence-similarity",
            columns={
                "text": _TEXTS["text"],
                "pair": Column("pair", "the text to compare with"),
                "score": Column("score", "how alike both are, from 0 to 1"),
            },
            metrics=("pearson", "spearman"),
            default_metric="spearman",
            loss_unit="squared error",
        ),
        TaskEntry(
            name="image-classification",
            columns={
                "image": Column("image", "paths from the table's folder, or bytes"),
                "label": _LABEL,
            },
            source="images",
            metrics=CLASS_METRICS,
            default_metric="accuracy",
            loss_unit="nats/example",
            f1_over="mean over classes",
        ),
        TaskEntry(
            name="question-answering",
            columns={
                "question": Column("question", "the question"),
                "context": Column("context", "the text that answers it"),
                "answers": Column("answers", "the answers, texts and where they begin"),
            },
            metrics=("exact_match", "f1"),
            default_metric="f1",
            loss_unit="nats/border",
            f1_over="words of answers",
            checks=_question_checks,
        ),
        # Over spans; accuracy over words.
        TaskEntry(
            name="tagging",
            columns={
                "tokens": Column("tokens", "a list of words"),
                "tags": Column("tags", "a list of their tags"),
                "text": Column("text", "the text of spans"),
                "spans": Column(
                    "", "spans (start, end, label), in the place of words and tags", optional=True
                ),
            },
            metrics=("f1", "precision", "recall", "accuracy"),
            default_metric="f1",
            loss_unit="nats/word",
            f1_over="spans",
            reads=_tag_reads,
            checks=_tag_checks,
        ),
        TaskEntry(
            name="multiple-choice",
            may_be_several=("choices",),
            columns={
                "question": Column("question", "the question", optional=True),
                "context": Column("context", "what the question is about", optional=True),
                "choices": Column(
                    "choices", "a list of choices, or columns of one each, with commas"
                ),
                "label": Column("label", "the right choice"),
            },
            metrics=("accuracy",),
            default_metric="accuracy",
            loss_unit="nats/question",
            checks=_choice_checks,
        ),
    )
}


def tasks_with(column: str) -> list[str]:
    """Names of the tasks that read a column of this name."""
    return [entry.name for entry in TASKS.values() if column in entry.columns]


def column_help() -> dict[str, str]:
    """Help text of each column: its content in the tasks that read it, and its default."""
    names = dict.fromkeys(name for entry in TASKS.values() for name in entry.columns)
    return {name: _column_help(name) for name in names}


def _column_help(name: str) -> str:
    contents: dict[str, list[str]] = {}
    columns = {task: TASKS[task].columns[name] for task in tasks_with(name)}
    for task, column in columns.items():
        words = f"{column.help}, or '' for none" if column.optional else column.help
        contents.setdefault(words, []).append(task)
    listed = "; ".join(f"{', '.join(tasks)}: {words}" for words, tasks in contents.items())
    defaults = dict.fromkeys(column.default for column in columns.values() if column.default)
    return f"{listed}. [{' or '.join(defaults)}]" if defaults else f"{listed}."


def column_checks(task: str, given: Mapping[str, str]) -> Iterator[Check]:
    """Rules for the setting `columns`: (broken, key, message) for each entry.

    An entry of another task is accepted at its default there, as any setting without effect is:
    former runs wrote the columns of all tasks into config.toml.
    """
    known = TASKS[task].columns
    for name, value in given.items():
        if name in known:
            is_empty = not value and not known[name].optional
            yield (
                is_empty,
                f"columns.{name}",
                f"data.columns.{name} = {value!r}: must be not empty.",
            )
        elif value not in [TASKS[other].columns[name].default for other in tasks_with(name)]:
            yield True, f"columns.{name}", _no_column(task, name, value)


def _no_column(task: str, name: str, value: str) -> str:
    """Message for a column that the task does not read."""
    known, others = TASKS[task].columns, tasks_with(name)
    own = (
        f"Columns of {task} are {', '.join(known)}."
        if known
        else "Running text has no such columns; data.column names the one with the text."
    )
    near = closest(name, known, limit=1)
    theirs = f" It is a column of {', '.join(others)}." if others else ""
    remove = "Remove it, or name one of the task." if known else "Remove it."
    end = f"Closest: {near}." if near and not others else remove
    return f"data.columns.{name} = {shown(value)}: has no effect with task = {task!r}. {own}{theirs} {end}"
