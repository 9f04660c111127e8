"""The pretraining benchmark runs from end to end at toy sizes, on sources that it gathers itself."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import pretraining

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]


def test_sources_are_gathered_once_and_each_text_once(tmp_path, capsys):
    folder = tmp_path / "packages"
    (folder / "b").mkdir(parents=True)
    texts = {
        "a.py": "x = 1\n",
        "b/copy.py": "x = 1\n",
        "b/latin.py": "# -*- coding: latin-1 -*-\n# \xe9\n",
        "b/empty.py": " \n",
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode("latin-1"))
    (folder / "broken.py").write_bytes(b"# \xff\n")
    (folder / "notes.txt").write_text("not a source", encoding="utf-8")
    target = pretraining.gathered(folder, tmp_path / "text.jsonl", quick=False)
    lines = [json.loads(line)["text"] for line in target.read_text(encoding="utf-8").splitlines()]
    assert lines == [texts["a.py"], texts["b/latin.py"]]
    assert "2 different texts of 5 files" in capsys.readouterr().out
    target.write_text("kept", encoding="utf-8")
    assert pretraining.gathered(folder, target, quick=False).read_text(encoding="utf-8") == "kept"


def test_a_quick_run_has_a_row_for_each_recipe(tmp_path, monkeypatch, capsys):
    source = tmp_path / "text.txt"
    source.write_text(
        "\f".join(f"The number {n} is one more than {n - 1}. " * 20 for n in range(60)),
        encoding="utf-8",
    )
    recipes = ["bf16", "fp8-current", "bf16-in-halves"]
    words = [
        "pretraining",
        "--quick",
        f"--data={source}",
        f"--output={tmp_path / 'runs'}",
        "--recipes",
        *recipes,
    ]
    monkeypatch.setattr(sys, "argv", words)
    pretraining.main()
    printed = capsys.readouterr().out
    lines = (
        (tmp_path / "runs" / "quick" / "pretraining.jsonl").read_text(encoding="utf-8").splitlines()
    )
    rows = {row["recipe"]: row for row in map(json.loads, lines)}
    assert list(rows) == recipes and all(
        row["steps"] == 10 and row["tokens"] == 1280 for row in rows.values()
    )
    assert rows["bf16"]["difference"] == 0 and all(row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["fp8-current"]["validation_loss"] != rows["bf16"]["validation_loss"]
    assert "| `bf16-in-halves` |" in printed
    pretraining.main()  # finished runs are not repeated
    assert "step 10/10" not in capsys.readouterr().out


def test_bf16_must_be_among_the_recipes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretraining", "--recipes", "fp8-row"])
    with pytest.raises(SystemExit):
        pretraining.main()
    assert "must include bf16" in capsys.readouterr().err
