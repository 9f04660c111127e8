"""scripts/language.py: which sentences it calls indirect, and when its check fails. exact"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "language.py"


@pytest.fixture(scope="module")
def language():
    spec = importlib.util.spec_from_file_location("language_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("What a run saves is here.", True),
        ("A layer gets a copy of what the weight was.", True),
        ("The scale is that of the last step.", True),
        ("One window, or a list of them.", True),
        ("Checkpoint files of a run.", False),
        ("Which kernel computes this call?", False),
        ("The amax history of each layer.", False),
    ],
)
def test_indirect_sentences(language, sentence, expected):
    assert language.is_indirect(sentence) is expected


def test_a_folder_is_measured_with_its_subfolders(language, tmp_path):
    (tmp_path / "ops" / "mm").mkdir(parents=True)
    (tmp_path / "top.py").write_text('"""Whether the file at the top is read."""\n')
    (tmp_path / "ops" / "mm" / "deep.py").write_text(
        '"""The contract of a matrix product."""\n\n# Why.\n' + f"x = '{'y' * 100}'\n"
    )
    now = language.figures(language.measure(tmp_path))
    assert now["."] == {"indirect": 100.0, "comments": 0.0, "long": 0.0}
    assert now["ops"] == {"indirect": 0.0, "comments": 25.0, "long": 25.0}
    assert now["all"] == {"indirect": 50.0, "comments": 20.0, "long": 20.0}


def test_a_figure_beyond_its_limit_fails_and_limits_only_fall(language):
    limit = {"indirect": 4.0, "comments": 3.0, "long": 4.0}
    worse = {"indirect": 4.3, "comments": 2.7, "long": 4.3}
    better = {"indirect": 1.0, "comments": 5.0, "long": 0.5}
    half = {"indirect": 3.0, "comments": 3.5, "long": 4.5}
    limits = {"nn": limit, "all": limit}
    assert language.failures({"nn": limit, "a-new-folder": better}, limits) == []
    assert len(language.failures({"nn": worse}, limits)) == 3
    assert len(language.failures({"a-new-folder": worse}, limits)) == 3
    assert language.lowered({"nn": better}, limits) == {"nn": language.TARGETS}
    assert language.lowered({"nn": half}, limits) == {
        "nn": {"indirect": 3.0, "comments": 3.0, "long": 4.0}
    }
    assert language.lowered({"nn": worse}, limits) == {"nn": limit}
