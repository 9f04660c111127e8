"""Task files of lm-eval that would run code: none runs without --trust-task-code (exact, over the ways that lm-eval has)."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import ConfigError, DataError, NarrowgaugeError
from narrowgauge.train.evaluation.lm_tasks import LmTasks
from tests.raising import raises

pytest.importorskip("lm_eval")

PLAIN = """task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
EVIL = (
    "open('ran', 'w').close()\ndef run(*_, **__):\n    open('ran', 'w').close()\n    return 'x'\n"
)
REACH = "{{ cycler.__init__.__globals__.os.system('touch ran') }}"

WAYS = {
    "a function for the text": PLAIN.replace('"{{question}}"', "!function evil.run"),
    "a function for the documents": PLAIN + "process_docs: !function evil.run\n",
    "a function as a metric": PLAIN.replace("metric: acc", "metric: !function evil.run"),
    "a function in a list": PLAIN + "fewshot_config: {samples: [!function evil.run]}\n",
    "a function as a key": PLAIN + "? !function evil.run\n: 1\n",
    "a function behind an alias": PLAIN + "a: &a !function evil.run\nprocess_docs: *a\n",
    "a function of the data": PLAIN + "custom_dataset: !function evil.run\n",
    "a filter": PLAIN
    + "filter_list: [{name: a, filter: [{function: custom, filter_fn: !function evil.run}]}]\n",
    "the class of a task": "task: words\nclass: !function evil.run\n",
    "the name of a class": "task: words\nclass: evil.run\n",
    "a Python object": PLAIN + "process_docs: !!python/object/apply:os.system ['touch ran']\n",
    "a Python name": PLAIN + "process_docs: !!python/name:os.system\n",
    "a tag of its own": PLAIN + "process_docs: !evil run\n",
    "an included file": "include: other.yaml\ntask: words\n",
    "a list of included files": "include: [other.yaml]\ntask: words\n",
    "a file that an included one includes": "include: third.yaml\ntask: words\n",
    "a group": "group: g\ntask:\n  - task: words\n    process_docs: !function evil.run\n",
    "a group that includes": "group: g\ntask:\n  - include: other.yaml\n    task: words\n",
    "a metric of a script": PLAIN.replace("metric: acc", "metric: ./evil_metric"),
    "a metric of the Hub": PLAIN.replace("metric: acc", "metric: somebody/metric"),
    "hf_evaluate": PLAIN.replace("metric: acc", "metric: acc, hf_evaluate: true"),
    "a loading script": PLAIN.replace("dataset_path: json", "dataset_path: ./evil.py"),
    "a pickle": PLAIN.replace("dataset_path: json", "dataset_path: pandas"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": "a", "choices": ["b", "c"], "gold": 0}] * 3
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "evil_metric").mkdir()
    (tmp_path / "evil_metric" / "evil_metric.py").write_text(EVIL)
    (tmp_path / "other.yaml").write_text(WAYS["a function for the documents"])
    (tmp_path / "third.yaml").write_text("include: other.yaml\n")
    return tmp_path


def load(folder: Path, text: str, **options: Any) -> LmTasks:
    (folder / "t.yaml").write_text(text)
    return LmTasks([str(folder / "t.yaml")], 0, 1, **options)


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_run_code_is_taken(folder: Path, way: str) -> None:
    with raises(ConfigError, "lm-eval.code", "t.yaml", "--trust-task-code"):
        load(folder, WAYS[way])
    assert not (folder / "ran").exists()


def test_a_file_without_code_is_loaded_and_one_with_code_if_trusted(folder: Path) -> None:
    assert [*load(folder, PLAIN).loaded] == ["words"]
    assert [*load(folder, WAYS["a function for the text"], trust_code=True).loaded] == ["words"]
    assert (folder / "ran").exists()


def test_a_template_cannot_reach_python(folder: Path) -> None:
    """Rendered when the task is loaded, which tries the first example."""
    from lm_eval import utils

    plain = utils.env
    with pytest.raises((ConfigError, DataError), match=r"SecurityError|reaches for Python"):
        load(folder, PLAIN.replace('"{{question}}"', json.dumps(REACH)))
    assert not (folder / "ran").exists() and utils.env is plain


def test_a_template_that_cannot_reach_python_may_use_filters(folder: Path) -> None:
    text = PLAIN.replace('"{{question}}"', "\"{{question | regex_replace('a', 'b') | upper}}\"")
    task = load(folder, text).loaded["words"]
    assert task.config.doc_to_text


@pytest.mark.slow
def test_an_endless_include_and_a_deep_file_are_sentences(folder: Path) -> None:
    (folder / "loop.yaml").write_text("include: t.yaml\n")
    for text in (
        "include: loop.yaml\ntask: a\n",
        "task: " + "[" * 5000,
        "include: absent.yaml\ntask: a\n",
    ):
        with pytest.raises(NarrowgaugeError):
            load(folder, text)


def test_evaluate_names_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyyaml as without lm-eval. Scores of the run's own data need neither."""
    imported = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
        return imported(name, *rest, **options)

    for name in [
        each for each in sys.modules if each.startswith(("narrowgauge.train.evaluation", "yaml"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    from narrowgauge.train.evaluation import command, lm_tasks

    assert command.evaluate
    with raises(ConfigError, "lm-eval.missing-package", "yaml", "'narrowgauge[evaluate]'"):
        lm_tasks.LmTasks(["t.yaml"], 0, 1)
