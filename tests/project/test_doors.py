"""CONTRIBUTING.md, CHANGELOG.md, the hooks of pre-commit and the forms of .github/ name what is there (exact)."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import narrowgauge
from benchmarks import closed
from tests.processes import ROOT

DOORS, CHANGES = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")
)
KINDS = (
    "A format", "A recipe", "A kernel", "An optimizer rule", "A task", "A module type", "A framework adapter",
)  # fmt: skip
# Stand for a name of the reader's own.
PLACEHOLDERS = re.compile(r"(?<![A-Z])(NAME|OP|TASK)(?![A-Z])")
FOLDERS = ("narrowgauge/", "tests/", "docs/", "scripts/", "benchmarks/")


def section(title: str) -> str:
    """The text below a heading of CONTRIBUTING.md, up to the next."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOORS, re.S | re.M)
    assert found is not None, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_files_an_example_and_tests(kind):
    text = section(kind)
    assert re.search(r"^\|.*`(narrowgauge|tests)/", text, re.M)
    assert re.search(r"^- Example: `git show [0-9a-f]{8}`", text, re.M)
    assert re.search(r"^- Tests: `python -m pytest -n 2 ", text, re.M)


def test_every_path_exists():
    """In backticks, or named in a command; placeholders and documents beside it included."""
    words = re.findall(r"[\w./-]+", " ".join(re.findall(r"`([^`\n]+)`", DOORS)))
    paths = [word for word in words if word.startswith(FOLDERS) and not PLACEHOLDERS.search(word)]
    assert len(set(paths)) > 40
    assert not [path for path in sorted(set(paths)) if not (ROOT / path).exists()]


@pytest.mark.parametrize("text", [DOORS, CHANGES], ids=["contributing", "changelog"])
def test_every_commit_is_in_the_history(text):
    named = set(re.findall(r"`(?:git show )?([0-9a-f]{8})`", text))
    assert named
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "cat-file", "--batch-check=%(objecttype)"]
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True
    )
    if shallow.stdout.strip() == "true":
        pytest.skip("a shallow clone has no history")
    asked = "".join(f"{commit}\n" for commit in sorted(named))
    kinds = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, text=True)
    assert kinds.stdout.split() == ["commit"] * len(named)


def test_the_newest_release_is_the_version():
    """And sections of the changelog go from new to old, with their dates."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", CHANGES, re.M)
    assert released[0] == project["version"] == narrowgauge.__version__
    numbers = [tuple(map(int, version.split("."))) for version in released]
    assert numbers == sorted(numbers, reverse=True)
    assert CHANGES.index("## [Unreleased]") < CHANGES.index(f"## [{released[0]}]")


def test_the_hooks_are_commands_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0][
        "hooks"
    ]
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M)
    checks = recipe[1].replace("\t$(BIN)/", "").splitlines()
    entries = [hook["entry"].replace(".venv/bin/", "") for hook in hooks]
    assert len(entries) >= 4
    assert not [
        entry for entry in entries if entry not in [check.removesuffix(" .") for check in checks]
    ]


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_form_can_be_read(form: Path):
    """GitHub shows no form that lacks a name, a description or a body, or has an id twice."""
    given = yaml.safe_load(form.read_text("utf-8"))
    if form.stem == "config":
        assert given["blank_issues_enabled"] is True
        return
    assert given["name"] and given["description"]
    ids = [field["id"] for field in given["body"]]
    assert len(set(ids)) == len(ids) > 1
    assert any(field.get("validations", {}).get("required") for field in given["body"])


def test_at_most_thirty_benchmarks_stand_each_with_its_question():
    """Every file of benchmarks/ is one of these, a part of one, or says what became of the closed ones."""
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| `(make|python -m) ", line)]
    assert 16 <= len(rows) <= 30
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for row in rows:
        command = re.match(r"\| `(?:make|python -m) ([\w.-]+)", row)[1]
        there = (ROOT / f"{command.replace('.', '/')}.py").exists()
        assert there or re.search(rf"^{command}:.*##", makefile, re.M), row
    named = set(re.findall(r"`(\w+\.(?:py|cpp))`", page))
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*.cpp")]
    assert {path.name for path in files} - named == {"__init__.py"}


def test_a_closed_benchmark_is_in_its_commit_and_its_rows_are_here(tmp_path):
    """By git alone, without a run: each name is a module of that commit, and none is here."""
    here = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(closed.CLOSED) > 30 and here.isdisjoint(closed.CLOSED)
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", closed.COMMIT, "benchmarks/"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("no history")
    then = {Path(name).stem for name in listed.stdout.split()}
    assert closed.CLOSED.keys() <= then


def test_rows_of_a_closed_benchmark_are_appended(tmp_path):
    """Of a work tree whose file has two lines more than its commit, those two; of a new file, all."""
    tree, results = tmp_path / "tree" / "benchmarks" / "results", tmp_path / "results"
    tree.mkdir(parents=True)
    results.mkdir()
    (tree / "old.jsonl").write_text("1\n")
    git = ["git", "-C", str(tmp_path / "tree"), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (tree / "old.jsonl").write_text("1\n2\n3\n")
    (tree / "new.jsonl").write_text("4\n")
    (results / "old.jsonl").write_text("1\n9\n")
    assert closed.appended(results, tree) == ["new.jsonl", "old.jsonl"]
    assert (results / "old.jsonl").read_text() == "1\n9\n2\n3\n"
    assert (results / "new.jsonl").read_text() == "4\n"
