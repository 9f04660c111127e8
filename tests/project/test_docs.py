"""The pages of docs/tasks run as a reader pastes them, and the site has no dead link (exact).

The blocks of a page run in their order, in one folder that is empty before, with the comments of tests/project/test_readme.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, run, run_ok
from tests.project.test_readme import blocks, commands, run_command

PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/tasks").glob("*.md"))]
TASKS = PAGES[1:]


def shown(page: Path) -> str:
    return page.stem


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_the_blocks_of_a_page_run_in_an_empty_folder(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    found = sorted(blocks(text, "sh") + blocks(text, "python"), key=lambda block: block.line)
    assert found
    for block in found:
        where = f"{page.name}:{block.line}"
        if block.skips:
            assert block.note, f"{where}: not run, without a reason"
        elif block.kind == "python":
            program = tmp_path / f"line{block.line}.py"
            program.write_text(f"{block.note}\n{block.text}", encoding="utf-8")
            run_ok([PYTHON, program.name], cwd=tmp_path)
        else:
            for words in commands(block):
                run_command(words, tmp_path, where)


@pytest.mark.parametrize("page", TASKS, ids=shown)
def test_a_page_begins_with_what_its_reader_can_do_and_has_a_command_that_runs(page):
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
    assert lines[0].startswith("# ") and lines[1].startswith("After this page ")
    assert len(lines) < 90, "a page by task is short: what was measured stands on another"
    text = "\n".join(lines)
    assert any(not block.skips for block in blocks(text, "sh") + blocks(text, "python"))


def test_commands_in_tables_and_sentences_name_verbs_and_recipes_that_exist():
    from narrowgauge import recipes
    from narrowgauge.cli import VERBS

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        verbs = set(
            re.findall(
                r"\bnarrowgauge ([a-z][\w-]+)(?= )", "\n".join(re.findall(r"`([^`]+)`", prose))
            )
        )
        assert verbs <= set(VERBS), page
        asked = re.findall(r"--(?:recipe|base) ([a-z][\w-]*)", text)
        assert set(asked) <= {*recipes.names(), "none", "auto"}, page


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the site alone, to be broken."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "decisions", "benchmarks/results", "scripts", "narrowgauge"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests/project").mkdir(parents=True)
    shutil.copy(ROOT / "tests/project/surface.txt", folder / "tests/project")
    for name in ("mkdocs.yml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(folder: Path):
    return run([PYTHON, "-m", "mkdocs", "build", "--strict"], cwd=folder, import_from=folder)


@pytest.mark.slow
def test_the_site_has_no_dead_link_and_a_page_for_each_public_name(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr
    surface = (ROOT / "tests/project/surface.txt").read_text(encoding="utf-8")
    names = surface.partition("[narrowgauge.__all__]")[2].partition("[")[0].split()
    for name in names:
        page = (copy / f"site/api/{name}.html").read_text(encoding="utf-8")
        assert 'class="doc doc-contents' in page, name
    assert (copy / "site/search/search_index.json").exists()
    outside = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    assert not outside, "the site fetches nothing from elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize(
    "link",
    [
        "nowhere.md",
        "recipes.md#nowhere",
        "../benchmarks/results/nowhere.jsonl",
        "../decisions/cpu.md#nowhere",
    ],
)
def test_a_dead_link_ends_the_build(copy, link):
    page = copy / "docs/index.md"
    before = page.read_text(encoding="utf-8")
    page.write_text(f"{before}\n[a link]({link})\n", encoding="utf-8")
    try:
        assert build(copy).returncode
    finally:
        page.write_text(before, encoding="utf-8")
