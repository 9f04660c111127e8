"""Bad input as typed: one sentence each, with the flag, the key or the file to change; no traceback, nothing trained."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from narrowgauge import cli
from narrowgauge.cli import flags
from narrowgauge.train.config.rules import Matching, OneOf, OneOrPair, Range
from narrowgauge.train.config.settings import TrainConfig, key_of, path_of
from narrowgauge.train.run_folder import RunFolder

# One line for each: the command, and the words of the message that say where to look.
INPUTS = """
train --resume                                                    | --resume
train --data missing.txt                                          | --data 'missing.txt'
train --data empty.txt                                            | empty.txt
train --data short.txt                                            | short.txt, --data.validation-fraction
train --data latin.txt                                            | latin.txt:1
train --data binary.txt                                           | binary.txt:1
train --data folder                                               | --data 'folder'
train --data sheet.xlsx                                           | sheet.xlsx, .csv
train --data pack.zip                                             | pack.zip, unzip
train --data junk.parquet                                         | junk.parquet
train --data broken.jsonl                                         | broken.jsonl:2
train --data list.jsonl                                           | list.jsonl:1
train --data mixed.jsonl                                          | mixed.jsonl:2
train --data types.jsonl                                          | types.jsonl:1
train --data hf:no/such-name                                      | hf:no/such-name
train --data text.txt --data.tokenizer missing                    | --data.tokenizer 'missing'
train --data text.txt --model missing                             | --model 'missing'
train --data text.txt --model folder                              | --model 'folder'
train --data text.txt --model half-a-model                        | --model 'half-a-model'
train --data text.txt --model broken-model                        | --model 'broken-model'
train --data text.txt --model ./nowhere                           | --model './nowhere'
train --data text.txt --recipe fp9                                | --recipe 'fp9'
train --data text.txt --recipe.switch 10:                         | --recipe.switch '10:'
train --data text.txt --recipe.layers nothing=int8                | --recipe.layers, 'nothing'
train --data text.txt --output text.txt                           | --output, text.txt
train --data text.txt --output half-a-model                       | --output 'half-a-model'
train --data text.txt --output /proc/run                          | --output, /proc/run
train --data text.txt --from missing@3                            | --from 'missing@3'
train --resume --output folder                                    | --resume, 'folder'
train missing.toml                                                | missing.toml
train bad.toml                                                    | bad.toml:1
train unknown-key.toml                                            | unknown-key.toml:2, layerz
train unknown-table.toml                                          | unknown-table.toml:1, modle
train wrong-type.toml                                             | wrong-type.toml:2, model.layers
train out-of-range.toml                                           | out-of-range.toml:2, training.steps
train twice.toml                                                  | twice.toml:3
train recipe.toml                                                 | recipe = 'fp9'
train folder                                                      | folder
train --layerz 2                                                  | --layerz
train --quantize 8                                                | --quantize
train text.txt extra words                                        | extra
train --training.steps ten                                        | --training.steps
train --training.steps 1.5                                        | --training.steps
train --optimizer.betas 0.9                                       | --optimizer.betas
train --parallel fsdp=x                                           | --parallel 'fsdp=x'
train --guard every=ten                                           | --guard 'every=ten'
train --guard every=2000 --compare bf16                           | --guard, --compare
train --lora r=8                                                  | --lora 'r=8'
train --base int8                                                 | --base 'int8'
train --recipe.save fp8                                           | --recipe.save 'fp8'
train --optimizer lion --optimizer.states 8bit/fp8                | --optimizer.states '8bit/fp8'
train --model.hidden-size 100 --model.heads 3                     | --model.hidden-size 100
train --batch.size 8 --batch.micro-batches 3                      | --batch.micro-batches 3
train --optimizer.master bf16-remainder                           | --optimizer.master
train --device.cuda-graph --memory.checkpointing full             | --device.cuda-graph
train --task classification --data rows.csv                       | --task 'classification', model
train --task translate                                            | --task 'translate'
train --task regression --data rows.csv --model missing           | --model 'missing'
train --task classification --data repeated.csv --model folder    | repeated.csv:1
train --task classification --data rows.csv --model folder --data.columns.label nolabel | --data.columns.label 'nolabel'
train --data rows.csv --data.columns.text body                    | --data.columns.text 'body'
train --data text.txt --log-to nowhere                            | --log.to 'nowhere'
plan --card h1000                                                 | --card 'h1000'
plan --card                                                       | --card
plan --memory lots                                                | --memory 'lots'
plan --memory -3GiB                                               | --memory
plan --recipe auto --card h100                                    | --recipe 'auto'
plan --recipe fp9 --card h100                                     | --recipe 'fp9'
plan missing.toml --card h100                                     | missing.toml
plan --picture x.bmp --card h100                                  | --picture 'x.bmp'
plan --model missing --card h100                                  | --model 'missing'
plan --nonsense                                                   | --nonsense
study --recipes                                                   | --recipes
study --recipes fp9,bf16 --data text.txt                          | --recipes 'fp9'
study --recipes bf16 --data text.txt                              | --recipes 'bf16'
study --recipes bf16,bf16 --data text.txt                         | --recipes 'bf16,bf16'
study --recipes bf16,int8 --seeds x --data text.txt               | --seeds 'x'
study --recipes bf16,int8 --seeds 0 --data text.txt               | --seeds '0'
study --recipes bf16,int8 --data missing.txt                      | --data 'missing.txt'
study --recipes bf16,int8 --metric f9 --data text.txt             | --metric 'f9'
study --recipes bf16,int8 --margin lots --data text.txt           | --margin 'lots'
study --compare bf16                                              | --compare
study missing.toml                                                | missing.toml
evaluate missing                                                  | 'missing'
evaluate folder                                                   | 'folder'
evaluate text.txt                                                 | 'text.txt'
evaluate folder --checkpoint 3                                    | --checkpoint
generate missing                                                  | 'missing'
generate folder                                                   | 'folder'
generate folder --temperature hot                                 | --temperature
generate folder --max-new-tokens -1                               | --max-new-tokens -1
generate folder --max-new-tokens=many                             | --max-new-tokens
export missing --format int8 --output out                         | 'missing'
export folder --format int8 --output out                          | 'folder'
export folder --format int9 --output out                          | --format 'int9'
export folder --output out                                        | --format
report missing                                                    | missing
report folder                                                     | folder
report text.txt                                                   | text.txt
report folder missing                                             | folder/run.json
compare missing                                                   | two runs
compare missing folder                                            | missing
blame missing --at 3                                              | missing
blame folder --at 3                                               | folder
debug folder                                                      | --at
debug folder --at x                                               | --at
debug missing --at 2                                              | missing
recipes fp9                                                       | 'fp9'
recipes fp8-current fp9                                           | 'fp9'
completion tcsh                                                   | 'tcsh'
completion                                                        | SHELL
trane                                                             | 'trane'
--help-me                                                         | '--help-me'
card-report --read missing                                        | missing
card-report --read text.txt                                       | text.txt
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"red {number},a\nblue {number},b\n" for number in range(30))
    texts = {
        "empty.txt": "", "short.txt": "hi\n", "text.txt": "the cat sat on the mat\n\n" * 400, "rows.csv": f"text,label\n{rows}",
        "repeated.csv": "text,text\nred,a\n", "broken.jsonl": '{"text": "a"}\n{"text": \n', "list.jsonl": "[1, 2]\n",
        "mixed.jsonl": '{"text": "a"}\n{"other": "b"}\n', "types.jsonl": '{"text": 5}\n',
        "bad.toml": "[model\nlayers = 2\n", "unknown-key.toml": "[model]\nlayerz = 2\n", "unknown-table.toml": "[modle]\nlayers = 2\n",
        "wrong-type.toml": '[model]\nlayers = "two"\n', "out-of-range.toml": "[training]\nsteps = -3\n",
        "twice.toml": "[training]\nsteps = 1\nsteps = 2\n", "recipe.toml": 'recipe = "fp9"\n',
        "half-a-model/config.json": json.dumps({}), "broken-model/config.json": '{"model_type": ',
    }  # fmt: skip
    content = {
        "latin.txt": b"caf\xe9 au lait\n" * 200, "binary.txt": bytes(range(256)) * 40, "sheet.xlsx": b"PK\x03\x04",
        "pack.zip": b"PK\x03\x04", "junk.parquet": b"PAR1junk",
    }  # fmt: skip
    for name, written in {
        **{name: text.encode() for name, text in texts.items()},
        **content,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(written)
    (tmp_path / "folder").mkdir()
    return tmp_path


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command says, without the lines of its progress."""
    code = cli.main(arguments)
    printed = capsys.readouterr().err
    assert code not in (0, 1) and "Traceback" not in printed, f"{arguments}: {code}\n{printed}"
    lines = printed.splitlines()
    begin = max(place for place, line in enumerate(lines) if line.startswith("narrowgauge: "))
    # A further line of an error is a further broken rule.
    message = "\n".join(lines[begin:]).removeprefix("narrowgauge: ")
    assert message.rstrip().endswith((".", "?")), message
    return message


@pytest.mark.slow
@pytest.mark.long
def test_each_is_answered_in_a_sentence_that_names_what_to_change(files, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = [line for line in INPUTS.splitlines() if line]
    wrong = []
    for line in lines:
        command, _, expected = line.rpartition(" | ")
        message = said(shlex.split(command), capsys)
        wrong += [
            f"{command.strip()}: no {words!r} in: {message}"
            for words in expected.strip().split(", ")
            if words not in message
        ]
    assert not wrong, "\n".join(wrong)
    assert not any(RunFolder(each).has_run() for each in files.glob("runs/*"))


def refused_values() -> list[tuple[str, str, str]]:
    """(flag, key in a file, a value that breaks the rule of the setting), of every setting with a rule."""
    found = []
    for each in fields(TrainConfig):
        rule = each.metadata["rule"]
        kind = {int: "many", float: "much", bool: "perhaps"}.get(type(each.default))
        of_rule = {Range: "-7", OneOf: "no-such-name", OneOrPair: "no-such-name"}.get(type(rule))
        if isinstance(rule, Matching) and rule.refuse("?"):
            of_rule = "?"
        for value in {kind, of_rule} - {None}:
            found.append((flags.flag(key_of(each)), path_of(each), str(value)))
    return sorted(found)


@pytest.mark.slow
def test_every_setting_that_has_a_rule_names_its_flag(files, capsys):
    """As typed: --training.steps many, --training.steps=-7, --device.compile=perhaps."""
    values = refused_values()
    assert len(values) > 100
    wrong = []
    for flag, _, value in values:
        message = said(["train", f"{flag}={value}"], capsys)
        wrong += [message] if flag not in message else []
    assert not wrong, "\n".join(wrong)
