"""Rules between the settings of model, data and task, checked after each value on its own."""

from narrowgauge.train.config.data_settings import DataSettings
from narrowgauge.train.config.rules import Check, is_set
from narrowgauge.train.config.task_entries import TASKS, column_checks

MOST_CLASSES = 1_000_000  # a float32 head with 1,000,000 rows of width 4096 takes 16 GB


def task_checks(c: DataSettings) -> list[Check]:
    """Rules for model and data: (broken, keys, message) each."""
    entry = TASKS[c.task]
    is_table, is_images = entry.source != "text", entry.source == "images"
    return [
        (c.from_scratch and not c.model, "from_scratch",
         "model.from_scratch = true: needs model. Without it the model always starts from random weights."),
        # Rotary embeddings rotate pairs of features, so a head's width must be even.
        (not c.model and c.hidden_size % (2 * c.heads), "hidden_size heads",
         f"model.hidden_size = {c.hidden_size}: must be a multiple of {2 * c.heads}, twice model.heads."),
        (not c.model and c.kv_heads and c.heads % c.kv_heads, "kv_heads heads",
         f"model.kv_heads = {c.kv_heads}: must divide model.heads = {c.heads}."),
        (c.best not in ("", "none", "loss", *entry.metrics), "best",
         f"task.best = {c.best!r}: is measured by {_who_measures(c.best)} alone. Take task.best = "
         f"{', '.join(map(repr, ('loss', *entry.metrics)))}."),
        (c.best in TASKS["seq2seq"].metrics and not c.translate, "best translate",
         f"task.best = {c.best!r}: needs translations. Set translate, how many rows are translated at each evaluation, as "
         "task.translate = 500."),
        (not c.translate and (is_set(c, "beams") or is_set(c, "bleu_words")), "beams bleu_words translate",
         f"task.beams = {c.beams}, task.bleu_words = {c.bleu_words!r}: have no effect with task.translate = 0. Set translate, or remove "
         "them."),
        (is_table and not c.model and not is_images, "task",
         f"task = {c.task!r}: needs model, a folder or hub name of the model to train."),
        (is_table and not is_set(c, "data"), "data task",
         f"task = {c.task!r}: needs data, a table with examples (JSONL, CSV, TSV or Parquet)"
         f"{', or a folder with one folder for each class' if is_images else ''}."),
        (is_table and c.max_length == 1, "max_length", "data.max_length = 1: leaves no token to predict. Set at least 2, or 0."),
        # [:20] first: int() of more than 4,300 digits raises ValueError since Python 3.11.
        (c.classes.strip().isdecimal() and int(c.classes.strip()[:20]) > MOST_CLASSES, "classes",
         f"task.classes = {c.classes!r}: at most {MOST_CLASSES:,} classes. Give their number, or their names with commas."),
        *column_checks(c.task, c.columns),
        *entry.checks(c),
        (is_table and c.packing % 16, "packing", f"batch.packing = {c.packing}: must be a multiple of 16, as 8-bit products want."),
        (is_table and c.packing and 0 < c.token_budget < c.packing, "token_budget packing",
         f"batch.token_budget = {c.token_budget}: holds no row of batch.packing = {c.packing}. Raise it, or shorten rows."),
    ]  # fmt: skip


def _who_measures(metric: str) -> str:
    return " and ".join(entry.name for entry in TASKS.values() if metric in entry.metrics)
