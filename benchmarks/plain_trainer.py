"""Question answering, tagging and multiple choice as a plain script on transformers.Trainer, without narrowgauge.

Rows are encoded, padded and scored as transformers' own examples do it: windows by the tokenizer's overflow, labels of words by
word_ids, transformers' collators, shuffled batches each as wide as its longest row, the twenty best starts and ends for an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

BEST = 20  # starts and ends that are tried for an answer
LONGEST_ANSWER = 30
Rows = list[dict[str, Any]]
AUTO = {
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "tagging": transformers.AutoModelForTokenClassification,
    "multiple-choice": transformers.AutoModelForMultipleChoice,
}


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Ordered(transformers.Trainer):
    """A Trainer whose batches are given; None: it shuffles."""

    batches: list[list[int]] | None = None

    def get_train_dataloader(self) -> Any:
        if self.batches is None:
            return super().get_train_dataloader()
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator  # type: ignore[arg-type]
        )  # fmt: skip


def train(
    task: str,
    folder: Path,
    data: Path,
    output: Path,
    settings: dict[str, Any],
    batches: list[list[int]] | None = None,
) -> Any:
    """The trained model. settings: of narrowgauge's run, as far as they say the same; batches: the examples of each step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AUTO[task].from_pretrained(folder)
    arguments = transformers.TrainingArguments(
        str(output), max_steps=settings["steps"], per_device_train_batch_size=settings["batch_size"], seed=settings["seed"],
        learning_rate=settings["learning_rate"], warmup_steps=settings["warmup_steps"], weight_decay=settings["weight_decay"],
        adam_beta2=settings["betas"][1], lr_scheduler_type="cosine", max_grad_norm=1.0, use_cpu=True, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    examples = ENCODE[task](read(data), tokenizer, settings, model.config)
    collators = {
        "question-answering": transformers.DataCollatorWithPadding,
        "tagging": transformers.DataCollatorForTokenClassification,
        "multiple-choice": transformers.DataCollatorForMultipleChoice,
    }
    trainer = transformers.Trainer(
        model, arguments, collators[task](tokenizer, pad_to_multiple_of=8), train_dataset=examples
    )
    trainer.batches = batches
    trainer.train()
    return model.eval()


def encode_questions(rows: Rows, tokenizer: Any, settings: dict[str, Any], config: Any) -> Rows:
    encoded = windows(rows, tokenizer, settings)
    offsets, owners = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
    found = []
    for place, owner in enumerate(owners):
        answers, first, last = rows[owner]["answers"], 0, 0
        parts = encoded.sequence_ids(place)
        inside = [token for token, part in enumerate(parts) if part == 1]
        if answers:
            start, end = (
                answers[0]["answer_start"],
                answers[0]["answer_start"] + len(answers[0]["text"]),
            )
            if offsets[place][inside[0]][0] <= start and offsets[place][inside[-1]][1] >= end:
                first = max(token for token in inside if offsets[place][token][0] <= start)
                last = min(token for token in inside if offsets[place][token][1] >= end)
        row = {name: values[place] for name, values in encoded.items()}
        found.append({**row, "start_positions": first, "end_positions": last})
    return found


def windows(rows: Rows, tokenizer: Any, settings: dict[str, Any]) -> Any:
    return tokenizer(
        [row["question"] for row in rows], [row["context"] for row in rows], truncation="only_second",
        max_length=settings["max_length"], stride=settings["stride"], return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip


def encode_tags(rows: Rows, tokenizer: Any, settings: dict[str, Any], config: Any) -> Rows:
    found = []
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True)
        before, labels = None, []
        for word in encoded.word_ids():
            labels.append(
                -100 if word is None or word == before else config.label2id[row["tags"][word]]
            )
            before = word
        found.append({**encoded, "labels": labels})
    return found


def encode_choices(rows: Rows, tokenizer: Any, settings: dict[str, Any], config: Any) -> Rows:
    """The collator wants as many choices of each question: shorter ones are filled up with empty ones."""
    most = max(len(row["choices"]) for row in rows)
    found = []
    for row in rows:
        texts = [*row["choices"], *[""] * (most - len(row["choices"]))]
        pairs = tokenizer([row["context"]] * most, [f"{row['question']} {text}" for text in texts])
        found.append({**pairs, "label": row["label"]})
    return found


ENCODE = {
    "question-answering": encode_questions,
    "tagging": encode_tags,
    "multiple-choice": encode_choices,
}


@torch.no_grad()
def score(task: str, model: Any, folder: Path, data: Path, settings: dict[str, Any]) -> float:
    """The metric of a model on a table: F1 of answers or of spans, or the accuracy of choices; one row after the other."""
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(folder), read(data)
    if task == "question-answering":
        return float(
            np.mean(
                [answer_f1(answer(model, row, tokenizer, settings), row["answers"]) for row in rows]
            )
        )
    if task == "multiple-choice":
        right = 0
        for row in rows:
            pairs = tokenizer([row["context"]] * len(row["choices"]), [f"{row['question']} {text}" for text in row["choices"]],
                padding=True, return_tensors="pt")  # fmt: skip
            logits = model(**{name: values[None] for name, values in pairs.items()}).logits
            right += int(logits[0].argmax()) == row["label"]
        return right / len(rows)
    hits = found = there = 0
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        predicted = model(**encoded).logits[0].argmax(-1).tolist()
        places = encoded.word_ids()
        tags = [
            model.config.id2label[predicted[places.index(word)]]
            for word in range(len(row["tokens"]))
        ]
        ours, theirs = spans(tags), spans(row["tags"])
        hits, found, there = hits + len(ours & theirs), found + len(ours), there + len(theirs)
    return 2 * hits / (found + there)


def answer(model: Any, row: dict[str, Any], tokenizer: Any, settings: dict[str, Any]) -> str:
    encoded = windows([row], tokenizer, settings)
    best, text, nothing = -np.inf, "", np.inf
    for place, offsets in enumerate(encoded["offset_mapping"]):
        inputs = {
            name: torch.tensor([encoded[name][place]])
            for name in ("input_ids", "attention_mask", "token_type_ids")
        }
        output = model(**inputs)
        starts, ends = output.start_logits[0].numpy(), output.end_logits[0].numpy()
        nothing = min(nothing, starts[0] + ends[0])
        for first in np.argsort(starts)[::-1][:BEST]:
            for last in np.argsort(ends)[::-1][:BEST]:
                inside = (
                    encoded.sequence_ids(place)[first] == 1 == encoded.sequence_ids(place)[last]
                )
                if (
                    inside
                    and first <= last < first + LONGEST_ANSWER
                    and starts[first] + ends[last] > best
                ):
                    best, text = (
                        starts[first] + ends[last],
                        row["context"][offsets[first][0] : offsets[last][1]],
                    )
    return "" if nothing > best else text


def answer_f1(text: str, answers: Rows) -> float:
    """Of made texts, which have neither articles in answers nor punctuation."""
    if not text or not answers:
        return float(not text and not answers)
    ours, theirs = [word for word in text.split() if word != "the"], answers[0]["text"].split()
    common = sum(min(ours.count(word), theirs.count(word)) for word in set(ours))
    return 2 * common / (len(ours) + len(theirs))


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    found, start = set(), 0
    for place, tag in enumerate([*tags, "O"]):
        before = tags[place - 1] if place else "O"
        if before != "O" and (tag == "O" or tag[0] == "B" or tag[2:] != before[2:]):
            found.add((start, place, before[2:]))
        if tag != "O" and (before == "O" or tag[0] == "B" or tag[2:] != before[2:]):
            start = place
    return found
