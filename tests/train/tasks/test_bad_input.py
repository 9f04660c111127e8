"""What is wrong with data, models and settings is told in words that end in the next step, or follows a policy that counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from narrowgauge.errors import ConfigError, DataError, NarrowgaugeError
from narrowgauge.train import loop
from narrowgauge.train.config.settings import TrainConfig
from tests.raising import coded, raises, require, with_code
from tests.train import tiny
from tests.train.tasks import folders

TEXTS = folders.texts()


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def masked(path):
    return "completion", {
        "data": folders.jsonl(path, [{"prompt": text, "completion": ""} for text in TEXTS])
    }


def ragged(path):
    return "classification", {"data": write(path.with_suffix(".csv"), "text,label", "a,b", "a,b,c")}


def column(path):
    return "classification", {"data": write(path.with_suffix(".csv"), "text,class", "a,b", "c,d")}


def unknown_label(path):
    rows = [*(f"{text},{place % 2}" for place, text in enumerate(TEXTS)), "the red row,2"]
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *rows),
        "classes": "2",
    }


def unnamed_label(path):
    rows = [f"{text},warm" for text in TEXTS]
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *rows),
        "classes": "cold,wram",
    }


def one_class(path):
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *(f"{text},a" for text in TEXTS))
    }


def no_classes(path):
    rows = [{"text": text, "label": 0.5} for text in TEXTS]
    return "classification", {"data": folders.jsonl(path, rows)}


def long(path):
    return "completion", {"data": folders.prompts(path), "max_length": 6}


def beyond_the_model(path):
    return "completion", {"data": folders.prompts(path), "max_length": 500}


def above_the_budget(path):
    return "completion", {"data": folders.prompts(path), "token_budget": 16}


def above_the_row(path):
    return "completion", {"data": folders.prompts(path), "packing": 16}


def nothing_below_the_budget(path):
    rows = [{"prompt": f"{text} {TEXTS[0]} {TEXTS[1]}", "completion": text} for text in TEXTS]
    return "completion", {"data": folders.jsonl(path, rows), "token_budget": 16, "too_long": "skip"}


def doubled(path):
    rows = [{"text": f"[CLS] {text}", "label": place % 2} for place, text in enumerate(TEXTS)]
    return "classification", {"data": folders.jsonl(path, rows)}


def frozen(path):
    return "completion", {"data": folders.prompts(path), "freeze": "*"}


def one_row(path):
    return "completion", {"data": folders.prompts(path, 1)}


def no_chat(path):
    rows = [{"messages": [{"role": "user", "content": "a"}]}] * 4
    return "chat", {"data": folders.jsonl(path, rows)}


def header_named_twice(path):
    rows = [f"{text},{place % 2}" for place, text in enumerate(TEXTS)]
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *rows),
        "header": "text,label",
    }


def empty_label(path):
    rows = [f"{text},{'ab'[place % 2]}" for place, text in enumerate(TEXTS)]
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *rows, "a row,")
    }


def spaced_label(path):
    rows = [f"{text},{'ab'[place % 2]}" for place, text in enumerate(TEXTS)]
    return "classification", {
        "data": write(path.with_suffix(".csv"), "text,label", *rows, "a row, b")
    }


def empty_text(path):
    rows = [f"{text},{'ab'[place % 2]}" for place, text in enumerate(TEXTS)]
    return "classification", {"data": write(path.with_suffix(".csv"), "text,label", *rows, ",b")}


def header_alone(path):
    return "classification", {"data": write(path.with_suffix(".csv"), "text,label")}


def empty_file(path):
    return "classification", {"data": write(path.with_suffix(".csv"))}


def empty_folder(path):
    path.mkdir()
    return "classification", {"data": path}


def answer_of_nothing(path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    return "chat", {"data": folders.jsonl(path, [{"messages": turns}] * 4)}


CASES = {
    header_named_twice: r"\.csv:1: the first row repeats the names given for the columns.*Leave them out",
    empty_label: r"\.csv:62: the label in column 'label' is empty. Correct the row",
    spaced_label: r"\.csv:62: label ' b' in column 'label' is 'b' but for its spaces.*Correct the row",
    empty_text: r"1 of 61 rows have no text; the first is .*:62",
    header_alone: r"\.csv: has no rows",
    empty_file: r"\.csv: has no rows",
    empty_folder: coded("source.empty-folder"),
    answer_of_nothing: r":1: message 1 is an answer without content.*remove the row",
    masked: r"60 of 60 rows have no target, all their labels are masked; the first is .*:1. Correct them",
    ragged: r"\.csv:3: .*",
    column: r"label.*\.",
    unknown_label: r"\.csv:62: label '2' in column 'label' is not a class from 0 to 1.*Correct the row",
    unnamed_label: r"label 'warm' in column 'label' is none of the 2 classes. Closest: 'wram'",
    one_class: r"column 'label' has one label, 'a'. Pass data with two at least",
    no_classes: r":1: label 0.5 in column 'label' is neither text nor a whole number",
    long: r"rows are longer than max_length 6; the longest has \d+ tokens, the first is",
    beyond_the_model: r"data.max_length = 500: the model knows positions up to 128. Set it to 128 or less",
    above_the_budget: r"do not fit token_budget 16, which holds 16 tokens; the longest has \d+",
    above_the_row: r"do not fit row_length 16",
    nothing_below_the_budget: coded("feed.none-left", "token_budget"),
    doubled: r":1: begins with \[CLS\] twice.*Take it out of the text",
    frozen: r"freeze.*\.",
    one_row: r"1 rows with one text cannot be split. Pass validation_data",
    no_chat: coded("chat.no-answer", ":1", "'assistant'"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_is_refused_in_words(make, tmp_path, case):
    job, settings = case(tmp_path / "own.jsonl")
    expected = CASES[case]
    with pytest.raises(NarrowgaugeError) as caught:
        loop.run(make(job, **settings))
    if isinstance(expected, str):
        assert re.search(f"(?s){expected}", str(caught.value)), caught.value
    else:
        require(caught.value, expected.code, *expected.values)
    assert caught.value.exit_code in (2, 3) and str(caught.value).endswith(".")
    assert not Path(make(job, **settings).output, "final").exists()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            {"too_long": "truncate", "max_length": 12},
            r"\d+ of 60 rows were longer than max_length 12 .* and were cut",
        ),
        (
            {"too_long": "skip", "max_length": 12},
            r"\d+ of 60 rows were longer than max_length 12 .* and were left out",
        ),
        (
            {"too_long": "skip", "token_budget": 16},
            r"\d+ examples are longer than the budget and are left out",
        ),
    ],
)
def test_a_policy_counts_what_it_does(make, capfd, policy, words):
    import re

    assert (
        loop.run(make("chat", **{"token_budget": 256, "no_target": "skip", **policy}, steps=1)) == 0
    )
    assert re.search(words, capfd.readouterr().err)


def test_padding_that_is_the_end_of_text_does_not_hide_the_last_target(make, tmp_path, place, told):
    """The same loss as with a padding token of its own: masks come from lengths. (A scale for a whole tensor sees padding.)"""
    losses = []
    for pad in ("</s>", "<pad>"):
        name = pad.strip("</>")
        model = folders.llama(tmp_path / f"pad-{name}", folders.byte_tokenizer(pad))
        config = make(
            "completion", f"run-{name}", model=model, steps=2, recipe="bf16", precision="fp32"
        )
        assert loop.run(config) == 0
        losses.append(tiny.losses(Path(config.output)))
    assert losses[0] == losses[1]
    assert len(with_code(told, "tokenizer.padding-is-end")) == 1


@pytest.mark.slow
def test_a_slow_tokenizer_is_refused(make, copy_of):
    folder = copy_of("bert")
    (folder / "tokenizer.json").unlink()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            (folder / name).write_text(
                json.dumps({"tokenizer_class": "CanineTokenizer"}), encoding="utf-8"
            )
    with raises(DataError, "tokenizer.slow"):
        loop.run(make("classification", model=folder))


def test_a_tokenizer_whose_ids_have_gaps_beyond_the_model(make, copy_of):
    """It has no more entries than the model embeds, and yet an id that the model has no row for."""
    folder = copy_of("bert")
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text("utf-8"))
    state["model"]["vocab"]["red"] = 4000
    path.write_text(json.dumps(state), encoding="utf-8")
    with raises(DataError, "model.vocabulary", "4000", "embeds 96"):
        loop.run(make("classification", model=folder))


def test_a_language_model_is_no_translator(make, place):
    with raises(ConfigError, "model.unloadable"):
        loop.run(make("t5", model=place / "llama"))


def test_half_an_encoder_is_not_filled_up_with_noise(make, copy_of):
    from safetensors.torch import load_file, save_file

    folder = copy_of("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with raises(ConfigError, "model.missing-weights"):
        loop.run(make("classification", model=folder))


def test_a_head_that_starts_at_random_is_told(make, capfd):
    assert loop.run(make("classification", steps=1)) == 0
    assert "so at random to begin with: bert.pooler.dense.bias" in capfd.readouterr().err


def test_a_trained_classifier_keeps_the_order_of_its_classes(make, place, tmp_path):
    first = make("classification", "first", steps=1, classes="warm,cold")
    assert loop.run(first) == 0
    model = Path(first.output, "final")
    second = make("classification", "second", steps=1, model=model)
    assert loop.run(second) == 0
    found = transformers.AutoConfig.from_pretrained(Path(second.output, "final"))
    assert found.id2label == {0: "warm", 1: "cold"} and found.label2id == {"warm": 0, "cold": 1}


def test_a_table_without_a_header_row(make, tmp_path):
    """CoLA's form: names of the columns in a setting."""
    rows = [f"src\t{place % 2}\t*\t{text}" for place, text in enumerate(TEXTS)]
    data = write(tmp_path / "train.tsv", *rows)
    config = make(
        "classification",
        data=data,
        header="source,label,mark,sentence",
        columns={"text": "sentence"},
        validation_data=data,
    )
    assert loop.run(config) == 0
    facts = json.loads(Path(config.output, "run.json").read_text("utf-8"))["data"]
    assert not any("validation_fraction" in note for note in facts["notes"])
    assert facts["train_examples"] == facts["validation_examples"] == 60 and facts["classes"] == [
        "0",
        "1",
    ]


def test_copies_of_a_row_are_on_one_side_and_new_rows_move_none(make, tmp_path, place):
    from narrowgauge import data
    from narrowgauge.train.tasks.reading import split_rows

    tokenizer = data.load(place / "llama")

    def held_out(rows):
        path = folders.jsonl(
            tmp_path / "rows.jsonl", [{"prompt": row, "completion": "x"} for row in rows]
        )
        examples = data.prepare_examples(path, data.Completion(), tokenizer, cache=tmp_path)
        train, validation = split_rows(examples, 0.3)
        texts = [
            {tokenizer.decode(part[row]["input_ids"]) for row in range(len(part))}
            for part in (train, validation)
        ]
        assert not texts[0] & texts[1]
        return texts[1]

    few = held_out([*TEXTS[:30], *TEXTS[:30]])
    assert few and few <= held_out(list(reversed(TEXTS)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "causal-lm", "data": "a.csv"}, "needs model"),
        ({"task": "causal-lm", "model": "m"}, "needs data,"),
        ({"task": "seq2seq", "model": "m", "data": "a.csv", "packing": 64}, "batch.packing = 64: has no effect with task = 'seq2seq'"),
        ({"columns": {"text": "body"}}, "data.columns.text = 'body': has no effect with task = 'text'"),
        ({"task": "causal-lm", "model": "m", "data": "a", "sequence_length": 64}, "model.sequence_length = 64: has no effect"),
        ({"task": "causal-lm", "model": "m", "data": "a", "packing": 40}, "batch.packing = 40: must be a multiple of 16"),
        ({"task": "causal-lm", "model": "m", "data": "a", "packing": 64, "token_budget": 32}, "holds no row of batch.packing = 64"),
        ({"task": "causal-lm", "model": "m", "data": "a", "token_budget": 32, "batch_size": 4}, "batch.size = 4: has no effect"),
        ({"task": "causal-lm", "model": "m", "data": "a", "train_on": "last"}, "needs data.columns.messages"),
        ({"task": "causal-lm", "model": "m", "data": "a", "best": "mcc"}, "is measured by classification and image-classification alone"),
        ({"epochs": 2, "steps": 9}, "training.steps = 9: has no effect with training.epochs = 2"),
        ({"task": "causal-lm", "model": "m", "data": "a", "columns": {"messages": "m", "prompt": "p"}}, "data.columns.prompt = 'p'"),
        ({"task": "clasification"}, "Closest: 'classification'"),
        ({"task": "causal-lm", "model": "m", "data": "a", "pad_multiple": 3}, "batch.pad_multiple = 3: must be one of 1, 2, 4"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_together(settings, words):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**settings)
    assert words in str(caught.value)


def test_classes_are_told_with_their_counts_and_held_out_examples_of_one(make, tmp_path, capfd):
    """60 texts of two classes in turn; and 30 of which those that are held out are all of one."""
    rows = [f"{text},{'ab'[place % 2]}" for place, text in enumerate(TEXTS)]
    held_out = write(tmp_path / "held.csv", "text,label", *(f"{text},a" for text in TEXTS[:7]))
    settings = {"data": write(tmp_path / "own.csv", "text,label", *rows), "steps": 1}
    assert loop.run(make("classification", **settings, validation_data=held_out)) == 0
    said = capfd.readouterr().err
    assert "The validation loss is of 7 examples alone" in said
    assert "Note: Classes, with examples to train on and held out: a 30 and 7, b 30 and 0." in said
    assert (
        "Every held-out example (7) is of class a, so mcc is 0 whatever the model says. Pass data.validation_data"
        in said
    )


def test_a_model_of_transposed_layers_trains_with_a_recipe_and_without(make, tmp_path):
    """GPT-2's Linears are Conv1D: their weights stay as they are stored, and the export has them so."""
    torch.manual_seed(0)
    tokenizer = folders.byte_tokenizer("<pad>")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    sizes = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=32,
        n_layer=1,
        n_head=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.GPT2LMHeadModel(sizes).save_pretrained(tmp_path / "gpt2")
    given = {
        "model": str(tmp_path / "gpt2"),
        "data": folders.prompts(tmp_path / "own.jsonl"),
        "steps": 1,
    }
    narrow = make("completion", **given)
    assert loop.run(narrow) == 0 and Path(narrow.output, "final").exists()
    reread = transformers.AutoModelForCausalLM.from_pretrained(Path(narrow.output, "final"))
    assert reread.transformer.h[0].attn.c_attn.weight.shape == (32, 96)
    config = make("completion", "without", **given, recipe="none")
    assert loop.run(config) == 0 and Path(config.output, "final").exists()


@pytest.mark.slow
def test_a_model_of_another_kind_is_told_without_a_list_of_all(make):
    config = make("t5")
    with raises(ConfigError, "model.unloadable") as caught:
        loop.run(make("completion", model=config.model))
    assert len(str(caught.value)) < 600
