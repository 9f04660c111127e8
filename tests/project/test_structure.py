"""scripts/structure.py: what it counts in planted packages, and when its check fails. exact"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "structure.py"


@pytest.fixture(scope="module")
def structure():
    spec = importlib.util.spec_from_file_location("structure_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def package(tmp_path):
    """Four files in a row, the last edge inside a function, and a fifth for type checkers alone."""
    root = tmp_path / "pkg"
    (root / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "a.py": "from pkg import b\nimport json\n\n\nclass Kind: ...\n",
        "b.py": "from pkg.deep.c import Kind, value\n",
        "deep/__init__.py": "",
        "deep/c.py": "value = 1\n\n\nclass Kind: ...\n\n\ndef f():\n    from pkg import d\n",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg import e\n",
        "e.py": "\n" * 60,
    }
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def test_chains_imports_and_names_are_counted(structure, package):
    found = structure.read(package)
    assert structure.longest_chain(found.eager) == ["pkg.a", "pkg.b", "pkg.deep.c"]
    assert structure.longest_chain(found.every) == ["pkg.a", "pkg.b", "pkg.deep.c", "pkg.d"]
    assert found.shared_names() == {"Kind": ["pkg.a", "pkg.deep.c"]}
    assert found.figures() == {
        "floors": 3, "lazy floors": 4, "imports": 0.4, "most imports": 1, "small files": 6, "shared names": 1,
    }  # fmt: skip


def test_a_cycle_ends(structure, package):
    (package / "d.py").write_text("from pkg import a\n")
    assert len(structure.longest_chain(structure.read(package).every)) == 4


def test_a_figure_above_its_limit_fails(structure):
    assert structure.failures({"floors": 24, "imports": 4.4}, {"floors": 24, "imports": 4.4}) == []
    assert (
        len(structure.failures({"floors": 25, "imports": 4.4}, {"floors": 24, "imports": 4.4})) == 1
    )
