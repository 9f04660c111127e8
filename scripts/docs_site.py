"""What `make docs` adds to the pages of docs/: pages of the API, and the repository's files that pages link to.

mkdocs calls `on_files` and `on_page_markdown` (mkdocs.yml, hooks). A link from a page to a file outside of docs/ works in
the repository as it stands. On the site the file is copied to repository/, Markdown as a page, and the link leads there.

The pages of the API follow tests/project/surface.txt: one for each public name, by its docstring. Docstrings line up their
columns with spaces; `AlignedText` shows such paragraphs as they are written.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
COPIED = "repository"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_ITEM = re.compile(r"([-*+]|\d+\.) ")
_COLUMNS = re.compile(r"^\s{4}|\S\s{2,}\S", re.M)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the pages of the API in the navigation."""
    for part in config.nav:
        if part == {"API": "api/index.md"}:
            part["API"] = [{"Contents": "api/index.md"}, *(f"api/{name}.md" for name in public())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the linked files, and those that they link to, and the pages of the API."""
    sys.path.insert(0, str(ROOT))
    for path, text in api_pages():
        files.append(File.generated(config, path, content=text))
    waiting = [
        ROOT / "docs" / file.src_uri for file in files.documentation_pages() if file.abs_src_path
    ]
    waiting += sorted((ROOT / "decisions").glob("*.md"))
    seen = set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        place = uri(source)
        if place.startswith(COPIED):
            files.append(File.generated(config, place, abs_src_path=str(source)))
        if source.suffix == ".md":
            waiting += [each for each in linked(source) if each.is_file()]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page, from where they lead in the repository to where that stands on the site."""
    if not page.file.abs_src_path:
        return markdown
    source = Path(page.file.abs_src_path)

    def on_site(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / found[1]))
        if target.is_dir() or not target.is_relative_to(ROOT):
            return found[0]
        return posixpath.relpath(uri(target), posixpath.dirname(page.file.src_uri)) + (
            found[2] or ""
        )

    return _LINK.sub(on_site, separated(markdown))


def separated(markdown: str) -> str:
    """The same text for Python-Markdown, which wants more than code hosts do.

    It wants an empty line before a list and behind a table, and what belongs to an item four spaces in.
    """
    lines: list[str] = []
    fenced = in_list = False
    for line in markdown.split("\n"):
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        before = lines[-1].strip() if lines else ""
        if not fenced:
            if _ITEM.match(text) and (in_list or indent == 0):
                lines += [""] if before and not in_list else []
                in_list = True
            elif text and indent == 0 and (not before or text.startswith(("#", "|", "```"))):
                in_list = False
            if text and before.startswith("|") and not text.startswith("|"):
                lines.append("")
        if text.startswith("```"):
            fenced = not fenced
        lines.append(" " * indent + line if in_list and text else line)
    return "\n".join(lines)


def linked(source: Path) -> Iterator[Path]:
    """The files of the repository to which a page links."""
    for found in _LINK.finditer(source.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(source.parent / found[1]))
        if target.is_relative_to(ROOT):
            yield target


def uri(path: Path) -> str:
    """Where a file of the repository stands among the sources of the site."""
    docs = ROOT / "docs"
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    return f"{COPIED}/{path.relative_to(ROOT).as_posix()}"


def api_pages() -> Iterator[tuple[str, str]]:
    """(path, Markdown) of a page for each public name, and of their table."""
    package = importlib.import_module("narrowgauge")
    rows = []
    for name in public():
        found = getattr(package, name)
        if isinstance(found, ModuleType):
            home, options = found.__name__, "    options:\n      members: " + repr(members(found))
        else:
            home, options = f"{found.__module__}.{found.__qualname__}", ""
        first = (found.__doc__ or "").strip().partition("\n")[0].replace("|", "\\|")
        rows.append(f"| [`{name}`]({name}.md) | {first} |")
        yield f"api/{name}.md", f"---\ntitle: {name}\nhide: [toc]\n---\n\n::: {home}\n{options}\n"
    head = "# API\n\nThe public names of `import narrowgauge as ng`. A name that is not here may change without notice.\n"
    yield "api/index.md", "\n".join([head, "| name | what it does |", "|---|---|", *rows, ""])


def public() -> list[str]:
    """The public names, as tests/project/surface.txt lists them."""
    surface = (ROOT / "tests/project/surface.txt").read_text(encoding="utf-8")
    return surface.partition("[narrowgauge.__all__]")[2].partition("[")[0].split()


def members(module: ModuleType) -> list[str]:
    """The public names that a public module defines and that have a docstring."""
    names = getattr(module, "__all__", None) or [
        each for each in vars(module) if not each.startswith("_")
    ]
    return [
        name
        for name in names
        if getattr(getattr(module, name), "__module__", "").startswith(module.__name__)
        and getattr(module, name).__doc__
    ]


class AlignedText(griffe.Extension):
    """Paragraphs of docstrings whose columns are lined up become blocks of text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            parts = re.split(r"\n{2,}", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(_shown, parts))


def _shown(part: str) -> str:
    return (
        f"```text\n{part}\n```"
        if _COLUMNS.search(part)
        else re.sub(r"([<*_])", r"\\\1", part)
        if "`" not in part
        else part
    )
