"""Rows to examples, exactly: which tokens are learnt, what is refused with its file and line, what the cache keeps."""

import json
import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from narrowgauge.data import examples as module
from narrowgauge.data.batches import IGNORED
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.examples import Limits, coloured_sample, prepare_examples
from narrowgauge.data.sources import records
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.tasks.causal_lm import Chat, Completion
from narrowgauge.train.tasks.classification import Classification
from narrowgauge.train.tasks.seq2seq import Seq2Seq
from tests.raising import coded, raises

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
FORGETFUL = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)
CHAT = [
    {"role": "user", "content": "What is a tile?"},
    {"role": "assistant", "content": "A block of größe 4."},
    {"role": "user", "content": "And amax?"},
    {"role": "assistant", "content": "Its largest magnitude."},
]


@pytest.fixture(scope="session")
def llama_like(texts):
    """Byte-level BPE that begins a text with <s>, as Llama's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def chat_tokenizer(llama_like):
    return PreTrainedTokenizerFast(
        tokenizer_object=llama_like.backend_tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=PLAIN,
    )


@pytest.fixture
def write(tmp_path):
    def jsonl(rows, name="rows.jsonl"):
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        return path

    return jsonl


def learnt(tokenizer, item):
    return tokenizer.decode(item["labels"][item["labels"] != IGNORED])


# Completions


def test_a_completion_alone_is_learnt(write, llama_like, tmp_path):
    rows = [
        {"prompt": "scale of", "completion": " a tile"},
        {"prompt": "", "completion": "amax"},
    ]
    found = prepare_examples(write(rows), Completion(), llama_like, cache=tmp_path)
    assert [learnt(llama_like, item) for item in found] == [" a tile</s>", "amax</s>"]
    assert [llama_like.decode(item["input_ids"]) for item in found] == [
        "<s>scale of a tile</s>",
        "<s>amax</s>",
    ]
    assert found.lengths.tolist() == [len(item["input_ids"]) for item in found]
    assert found.summary["targets"] == sum((item["labels"] != IGNORED).sum() for item in found)
    assert found.notes == []


def test_a_token_across_the_border_counts_as_prompt_and_is_told(write, llama_like, tmp_path):
    """ " tile" is one token; a prompt that ends in its space ends otherwise at inference."""
    path = write(
        [
            {"prompt": "scale of a ", "completion": "tile"},
            {"prompt": "the", "completion": " tile"},
        ]
    )
    found = prepare_examples(path, Completion(), llama_like, cache=tmp_path)
    assert learnt(llama_like, found[1]) == " tile</s>"
    [note] = found.notes
    assert note.startswith(
        "1 examples have a token across the border of prompt and completion; it counts as prompt, and"
    )


def test_a_doubled_beginning_is_refused(write, llama_like, tmp_path):
    path = write([{"prompt": "a", "completion": "b"}, {"prompt": "<s>the", "completion": " tile"}])
    with raises(DataError, "tokenizer.doubled-token", "<s>", "jsonl:2"):
        prepare_examples(path, Completion(), llama_like, cache=tmp_path)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_rows_without_a_target(write, llama_like, tmp_path, policy):
    path = write([{"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}])
    options = {"cache": tmp_path, "limits": Limits(no_target=policy)}
    if policy == "error":
        with raises(DataError, "examples.no-target", "of 2", "2 rows", "jsonl:1"):
            prepare_examples(path, Completion(), llama_like, **options)
        assert not list(tmp_path.glob("*examples*"))
    else:
        found = prepare_examples(path, Completion(), llama_like, **options)
        assert len(found) == 1
        assert found.notes == ["1 of 2 rows had no target and were left out."]


@pytest.mark.parametrize("policy", ["error", "truncate", "skip"])
def test_rows_that_are_too_long(write, llama_like, tmp_path, policy):
    path = write([{"prompt": "a", "completion": "b" * 50}, {"prompt": "a", "completion": "b"}])
    options = {"cache": tmp_path, "limits": Limits(max_length=8, too_long=policy)}
    if policy == "error":
        with raises(DataError, "examples.too-long", "of 2", "max_length 8", "has 53"):
            prepare_examples(path, Completion(), llama_like, **options)
    else:
        found = prepare_examples(path, Completion(), llama_like, **options)
        assert found.lengths.tolist() == ([8, 4] if policy == "truncate" else [4])
        assert "1 of 2 rows were longer than max_length 8" in found.notes[0]


# Chats


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["incremental", "marked"])
def test_the_answers_of_a_chat_are_learnt(write, chat_tokenizer, tmp_path, template):
    chat_tokenizer.chat_template = template
    found = prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    answers = ["A block of größe 4.<|im_end|>\n", "Its largest magnitude.<|im_end|>\n"]
    assert learnt(chat_tokenizer, found[0]) == "".join(answers)
    whole = chat_tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert chat_tokenizer.decode(found[0]["input_ids"]) == whole
    assert found.notes == []
    last = prepare_examples(
        write([{"messages": CHAT}]), Chat(train_on="last"), chat_tokenizer, cache=tmp_path
    )
    assert learnt(chat_tokenizer, last[0]) == answers[1]


def test_the_mask_of_a_marked_template_is_that_of_transformers(write, chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = MARKED
    found = prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    theirs = chat_tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found[0]["input_ids"].tolist() == theirs["input_ids"]
    assert (found[0]["labels"] != IGNORED).tolist() == [
        bool(each) for each in theirs["assistant_masks"]
    ]


def test_a_template_that_changes_earlier_answers_is_refused(write, chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = FORGETFUL
    thinking = [*CHAT[:1], {"role": "assistant", "content": "<think>hm</think>A block."}, *CHAT[2:]]
    path = write([{"messages": thinking}])
    with raises(DataError, "chat.unstable-template", "answer 1", "jsonl:1", "1 differently"):
        prepare_examples(path, Chat(), chat_tokenizer, cache=tmp_path)
    found = prepare_examples(path, Chat(train_on="last"), chat_tokenizer, cache=tmp_path)
    assert learnt(chat_tokenizer, found[0]) == "Its largest magnitude.<|im_end|>\n"


def test_a_template_that_doubles_the_beginning_is_refused(write, chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = "{{ bos_token }}{{ bos_token }}" + PLAIN
    with raises(DataError, "tokenizer.doubled-token", "<s>", "jsonl:1"):
        prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    chat_tokenizer.chat_template = "{{ bos_token }}" + PLAIN
    found = prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    assert found[0]["input_ids"][:2].tolist() == [0, 3]


@pytest.mark.parametrize("end", ["<|im_end|>", "{eos}"])
def test_a_template_without_an_end_is_told(write, chat_tokenizer, tmp_path, end):
    chat_tokenizer.chat_template = PLAIN.replace("<|im_end|>", "")
    chat_tokenizer.add_special_tokens({"eos_token": end})
    found = prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    assert f"1 chats end without the end-of-text token {end}" in found.notes[0]


def test_a_template_whose_prompt_ends_in_a_space_is_told(write, chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = PLAIN.replace("{{ m.role }}\n", "{{ m.role }} ").replace(
        "assistant\n", "assistant "
    )
    chat = [CHAT[0], {"role": "assistant", "content": "tile"}]
    found = prepare_examples(write([{"messages": chat}]), Chat(), chat_tokenizer, cache=tmp_path)
    [note] = found.notes
    assert note.startswith(
        "1 chats have a token across the border of a prompt and its answer; it counts as prompt, and"
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", coded("chat.messages", "rows.jsonl:2", "str")),
        ([{"content": "a"}], coded("chat.no-role", "rows.jsonl:2", "message 0")),
        (CHAT[:1], coded("chat.no-answer", "rows.jsonl:2", "'assistant'")),
    ],
)
def test_what_is_no_chat_is_refused_with_its_line(
    write, chat_tokenizer, tmp_path, messages, expected
):
    path = write([{"messages": CHAT}, {"messages": messages}])
    with raises(DataError, expected):
        prepare_examples(path, Chat(), chat_tokenizer, cache=tmp_path)


def test_a_template_may_refuse_and_must_exist(write, chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with raises(DataError, "chat.template-refuses", "roles must alternate", "jsonl:1"):
        prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)
    chat_tokenizer.chat_template = None
    with raises(ConfigError, "chat.no-template"):
        prepare_examples(write([{"messages": CHAT}]), Chat(), chat_tokenizer, cache=tmp_path)


# Classification and seq2seq


def test_classes_by_name_and_by_number(write, llama_like, tmp_path):
    path = write("label\ttext\nbad\ta tile\ngood\tan amax\n", "rows.tsv")
    task = Classification(classes=("bad", "good"))
    found = prepare_examples(path, task, llama_like, cache=tmp_path)
    assert [item["labels"] for item in found] == [0, 1]
    assert found[0]["input_ids"].tolist() == llama_like("a tile")["input_ids"]
    headless = write("x\t1\t\tThe sailors\nx\t0\t*\tAs you eat\n", "cola.tsv")
    found = prepare_examples(
        headless,
        Classification(classes=2),
        llama_like,
        cache=tmp_path,
        header=["source", "label", "mark", "text"],
    )
    assert [item["labels"] for item in found] == [1, 0]


@pytest.mark.parametrize(
    "label", ["2", "-1", "1.5", "good", "--1", pytest.param("9" * 5000, id="long")]
)
def test_a_label_outside_the_classes_is_refused_with_its_line(write, llama_like, tmp_path, label):
    path = write(f"label,text\n1,a\n{label},b\n", "rows.csv")
    with raises(DataError, "classification.number", label):
        prepare_examples(path, Classification(classes=2), llama_like, cache=tmp_path)


def test_a_name_that_is_no_class_is_refused_with_the_nearest(write, llama_like, tmp_path):
    path = write([{"text": "a", "label": "goood"}])
    with raises(DataError, "classification.label", "'goood'", "jsonl:1", "'good'"):
        prepare_examples(path, Classification(classes=("bad", "good")), llama_like, cache=tmp_path)


def test_a_pair_is_joined_and_cut_by_the_tokenizer(write, llama_like, tmp_path):
    path = write([{"a": "the scale of a tile", "b": "amax", "label": 1}])
    task = Classification(classes=2, text="a", pair="b")
    found = prepare_examples(path, task, llama_like, cache=tmp_path)
    assert found[0]["input_ids"].tolist() == llama_like("the scale of a tile", "amax")["input_ids"]
    assert "token_type_ids" not in found[0]
    llama_like.model_input_names = ["input_ids", "token_type_ids"]
    with_types = prepare_examples(path, task, llama_like, cache=tmp_path)
    llama_like.model_input_names = ["input_ids", "attention_mask"]
    expected = llama_like("the scale of a tile", "amax", return_token_type_ids=True)[
        "token_type_ids"
    ]
    assert with_types[0]["token_type_ids"].tolist() == expected
    assert set(expected) == {0, 1}
    cut = prepare_examples(
        path, task, llama_like, cache=tmp_path, limits=Limits(max_length=6, too_long="truncate")
    )
    assert (
        cut[0]["input_ids"].tolist()
        == llama_like("the scale of a tile", "amax", truncation=True, max_length=6)["input_ids"]
    )


def test_seq2seq_has_two_sides(write, llama_like, tmp_path):
    path = write([{"source": "a tile", "target": "the amax of a tile and more"}])
    found = prepare_examples(path, Seq2Seq(), llama_like, cache=tmp_path)
    assert found[0]["labels"].tolist() == llama_like("the amax of a tile and more")["input_ids"]
    assert found.lengths.tolist() == [len(found[0]["labels"])]


# Rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "prompt,completion\na,b\nc\n",
            coded("table.fields", "1 fields", "has 2", "csv:3"),
        ),
        (
            "a.csv",
            "promt,completion\na,b\n",
            coded("table.no-column", "'prompt'", "csv:1", "'promt'"),
        ),
        ("a.tsv", "prompt\tcompletion\na\tb\tc\n", coded("table.fields", "3 fields", "tsv:2")),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
            coded("table.no-column", "'completion'", "jsonl:2"),
        ),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": 3}\n',
            coded("table.cell", "'completion'", "a number (3)", "jsonl:1"),
        ),
        ("a.jsonl", '{"prompt": \n', coded("table.json", "jsonl:1")),
        ("a.txt", "prompt\n", coded("source.no-table")),
        ("a.csv", "prompt,completion\n", coded("examples.none-left", "of 0")),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(
    write, llama_like, tmp_path, name, text, message
):
    with raises(DataError, message):
        prepare_examples(write(text, name), Completion(), llama_like, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_the_same_rows_from_every_format(write, tmp_path):
    rows = [{"text": "größe", "label": "1"}, {"text": "a\nb", "label": "0"}]
    paths = [
        write(rows),
        write('text,label\ngröße,1\n"a\nb",0\n', "rows.csv"),
        tmp_path / "rows.parquet",
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[2])
    for path, lines in zip(paths, ([1, 2], [2, 3], [1, 2]), strict=True):
        found = list(records(path, ["label", "text"]))
        assert [record.values for record in found] == rows
        assert [record.origin for record in found] == [f"{path}:{line}" for line in lines]


def test_a_parquet_column_of_messages(chat_tokenizer, tmp_path):
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": CHAT}]), path)
    found = prepare_examples(path, Chat(), chat_tokenizer, cache=tmp_path)
    assert "largest magnitude" in learnt(chat_tokenizer, found[0])
    with raises(DataError, "table.no-column", "'chat'"):
        list(records(path, ["chat"]))


# The cache


def test_the_second_time_nothing_is_tokenized(write, llama_like, tmp_path, monkeypatch):
    path = write([{"prompt": "a", "completion": "b"}])
    first = prepare_examples(path, Completion(), llama_like, cache=tmp_path)
    monkeypatch.setattr(module._ExamplesJob, "fill", None)
    second = prepare_examples(path, Completion(), llama_like, cache=tmp_path)
    assert second.summary == first.summary
    copy = pickle.loads(pickle.dumps(second))  # as a DataLoader's spawned worker gets it
    assert copy[0]["input_ids"].tolist() == first[0]["input_ids"].tolist()


def test_data_tokenizer_options_and_template_each_change_the_key(write, chat_tokenizer, tmp_path):
    rows = [{"messages": CHAT, "prompt": "a", "completion": "b"}]

    def key(rows=rows, task=None, tokenizer=chat_tokenizer, limits=None):
        return module._ExamplesJob(
            write(rows), task or Chat(), Encoder(tokenizer), limits or Limits(), None
        ).key

    keys = [
        key(),
        key(rows * 2),
        key(task=Chat(train_on="last")),
        key(task=Completion()),
        key(limits=Limits(max_length=99)),
    ]
    chat_tokenizer.chat_template = MARKED
    keys.append(key())
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["input_ids.bin", "targets.lengths.bin", "index.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_entry_is_made_again_and_told(write, llama_like, tmp_path, name, damage):
    path = write([{"prompt": "the scale", "completion": " of a tile"}])
    cache = tmp_path / "cache"
    first = prepare_examples(path, Completion(), llama_like, cache=cache)[0]["input_ids"].tolist()
    (file,) = cache.rglob(name)
    raw = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw if damage == "flip" else raw[:-1])
    again = prepare_examples(path, Completion(), llama_like, cache=cache)
    assert again[0]["input_ids"].tolist() == first
    assert again.notes[0].code == "cache.made-again"
    assert not list(cache.glob(".*"))


def test_an_entry_that_others_made_meanwhile_is_used(write, llama_like, tmp_path, monkeypatch):
    """Another process publishes the same entry at the same time, under another name of the same data."""
    rows = [{"prompt": "the scale", "completion": " of a tile"}]
    mine, theirs = write(rows, "mine.jsonl"), write(rows, "theirs.jsonl")
    fill = module._ExamplesJob.fill

    def beside(job, append):
        monkeypatch.setattr(module._ExamplesJob, "fill", fill)
        prepare_examples(theirs, Completion(), llama_like, cache=tmp_path)
        return fill(job, append)

    monkeypatch.setattr(module._ExamplesJob, "fill", beside)
    assert prepare_examples(mine, Completion(), llama_like, cache=tmp_path).summary[
        "source"
    ] == str(mine)
    monkeypatch.setattr(module._ExamplesJob, "fill", None)
    assert prepare_examples(theirs, Completion(), llama_like, cache=tmp_path).summary[
        "source"
    ] == str(theirs)


def test_selected_rows_are_those_examples_in_that_order(write, llama_like, tmp_path):
    """Also selected from a selection, and in another process."""
    path = write(
        [{"source": "the scale " * size, "target": "amax " * (9 - size)} for size in range(1, 9)]
    )
    found = prepare_examples(path, Seq2Seq(), llama_like, cache=tmp_path)
    part = pickle.loads(pickle.dumps(found.select(np.array([7, 1, 4])).select(np.array([2, 0]))))
    assert len(part) == 2 and part.lengths.tolist() == found.lengths[[4, 7]].tolist()
    for mine, theirs in zip(part, (found[4], found[7]), strict=True):
        assert {name: ids.tolist() for name, ids in mine.items()} == {
            name: ids.tolist() for name, ids in theirs.items()
        }
    assert len(found) == 8


# Tokenizers


class Slow:
    """A tokenizer in Python: one text at a time, no offsets."""

    is_fast, name_or_path, model_input_names = False, "slow", ["input_ids"]
    bos_token_id = cls_token_id = None
    eos_token_id = 1

    def get_vocab(self):
        return {chr(code): code for code in range(128)}

    def save_pretrained(self, folder):
        pass

    def __call__(self, text=None, pair="", text_target=None, truncation=False, max_length=None):
        return {"input_ids": [ord(letter) for letter in (text_target or text) + pair][:max_length]}


def test_a_slow_tokenizer_is_refused_for_many_rows_unless_asked_for(write, tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.data.encoder.SLOW_ROWS", 3)
    task = Classification(classes=2)
    few = write([{"text": "abc", "label": 1}] * 3, "few.jsonl")
    assert prepare_examples(few, task, Slow(), cache=tmp_path)[2]["input_ids"].tolist() == [
        97,
        98,
        99,
    ]
    many = write([{"text": "abc", "label": 1}] * 4, "many.jsonl")
    with raises(ConfigError, "tokenizer.slow", "allow_slow=True", "Slow", "than 3", "3 texts"):
        prepare_examples(many, task, Slow(), cache=tmp_path)
    assert len(prepare_examples(many, task, Slow(), cache=tmp_path, allow_slow=True)) == 4
    chat = write([{"prompt": "a", "completion": "b"}], "completion.jsonl")
    with raises(ConfigError, "tokenizer.no-offsets"):
        prepare_examples(chat, Completion(), Slow(), cache=tmp_path)


def test_truncation_and_padding_of_the_files_do_not_count(llama_like):
    backend = Tokenizer.from_str(llama_like.backend_tokenizer.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=20)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    ids = Encoder(tokenizer).ids(["the scale of a tile"])[0]["input_ids"]
    assert ids.tolist() == llama_like("the scale of a tile")["input_ids"]


@pytest.mark.parametrize("options", [{"max_length": 1}, {"too_long": "cut"}, {"no_target": "keep"}])
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError):
        Limits(**options)


# The sample


def test_the_sample_shows_what_is_learnt(write, chat_tokenizer, tmp_path):
    item = prepare_examples(
        write([{"messages": CHAT[:2]}]), Chat(), chat_tokenizer, cache=tmp_path
    )[0]
    text = coloured_sample(chat_tokenizer, item["input_ids"], item["labels"])
    plain = text.plain.replace("|", "")
    assert plain.count("⟦") == plain.count("⟧") == 1
    before, _, after = plain.partition("⟦")
    assert before.endswith("assistant↵\n")
    assert after.startswith("A block of gr")
    assert any("green" in str(span.style) and "reverse" in str(span.style) for span in text.spans)
    short = coloured_sample(chat_tokenizer, item["input_ids"], None, tokens=3)
    assert short.plain.endswith(f" ... {len(item['input_ids']) - 3} more")
    assert np.ndim(item["input_ids"]) == 1


@pytest.mark.parametrize(
    ("ids", "labels", "expected"),
    [
        ([1, 2], None, "a|↵"),
        ([1, 2], [-100, 2], "a⟦↵⟧"),
        ([2, 1], None, "↵\n|a"),
        ([1, 2, 1], [1, 2, 1], "⟦a|↵⟧ ... 1 more"),
        ([], None, ""),
    ],
)
def test_a_coloured_sample_ends_without_a_line_end(ids, labels, expected):
    """Whoever prints it adds one, so that neither an empty line follows nor the next text on the same line."""

    class Words:
        all_special_ids = ()

        def decode(self, ids):
            return {1: "a", 2: "\n"}[ids[0]]

    assert coloured_sample(Words(), ids, labels, tokens=2).plain == expected


def test_the_sample_shows_control_characters_and_never_prints_them():
    """Text from the data could else clear the terminal, or ring its bell."""
    tokens = ["\x1b[2J", "\x07\r", "\x9b\x7f", "größe\t", "数\n"]
    tokenizer = SimpleNamespace(all_special_ids=[], decode=lambda ids: tokens[ids[0]])
    shown = coloured_sample(tokenizer, range(len(tokens)), None).plain
    assert shown == "␛[2J|␇␍|\\x9b␡|größe→\t|数↵"
