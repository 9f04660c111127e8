"""Measures the language of docstrings and comments, folder by folder, against limits that only fall.

    python scripts/language.py                      one row for each folder of narrowgauge/
    python scripts/language.py --worst 40 nn        the indirect sentences themselves, with file and line
    python scripts/language.py --check              exit 1 where a folder is above its limit; `make check` runs this
    python scripts/language.py --lower              rewrite the limits to today's figures, where they are lower

A docstring sentence is *indirect* if a clause or a pronoun stands where a noun should stand: it begins with What, Who, Whether,
Where, How, Why, Which or When (questions are left out), or it contains "of what", "that of", "of it", "of them" and the like.
In seven other training libraries 0.3 to 2.1 % of the sentences are indirect. The measure is a thermometer: a page can pass
it and still be hard to read.

Comments are the share of all lines that are nothing but a comment. Long lines are those above LONG columns.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "narrowgauge"
LIMITS = Path(__file__).with_name("language_limits.json")
LONG = 100
INDIRECT = (
    r"^(What|Who|Whoever|Whether|Where|How|Why|Which|When)\b(?!.*\?)",
    r"\b(of|by|to|in|with|from|and|for|than|after|is|are) what\b",
    r"\b(that|those|one) of\b|\bof (it|them|which|these|those)\b",
)
SHORTEST, LONGEST = 5, 199  # words of a sentence; shorter pieces are names or headings
# No limit is stricter than its target: a folder at its target may change freely.
TARGETS = {"indirect": 2.0, "comments": 3.0, "long": 4.0}
# Room for small changes, where a folder has not reached its target.
SPARE = 0.2


@dataclass
class Measured:
    """The language of one folder's Python files, with those of its subfolders."""

    lines: int = 0
    comments: int = 0
    long_lines: int = 0
    sentences: int = 0
    indirect: list[tuple[Path, int, str]] = field(default_factory=list)

    @property
    def indirect_percent(self) -> float:
        return round(100 * len(self.indirect) / max(self.sentences, 1), 1)

    @property
    def comment_percent(self) -> float:
        return round(100 * self.comments / max(self.lines, 1), 1)

    @property
    def long_percent(self) -> float:
        return round(100 * self.long_lines / max(self.lines, 1), 1)

    def add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        self.lines += len(lines)
        self.comments += sum(line.lstrip().startswith("#") for line in lines)
        self.long_lines += sum(len(line) > LONG for line in lines)
        for number, sentence in docstring_sentences(text):
            self.sentences += 1
            if is_indirect(sentence):
                self.indirect.append((path, number, sentence))


def is_indirect(sentence: str) -> bool:
    return any(re.search(pattern, sentence) for pattern in INDIRECT)


def sentences(text: str) -> Iterator[str]:
    """Sentences of running text: split at full stops, blank lines, list items and aligned columns."""
    for piece in re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*|] |\n {4,}", text):
        words = piece.split()
        if SHORTEST <= len(words) <= LONGEST:
            yield " ".join(words)


def docstring_sentences(source: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of every docstring of a module, class or function."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring:
            yield from ((node.body[0].lineno, each) for each in sentences(docstring))


def measure(package: Path) -> dict[str, Measured]:
    """Folder name -> its figures; "." has the files directly in `package`, "all" everything."""
    found: dict[str, Measured] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        for name in (parts[0] if len(parts) > 1 else ".", "all"):
            found.setdefault(name, Measured()).add(path)
    return found


def figures(found: dict[str, Measured]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "indirect": each.indirect_percent,
            "comments": each.comment_percent,
            "long": each.long_percent,
        }
        for name, each in sorted(found.items())
    }


def failures(now: dict[str, dict[str, float]], limits: dict[str, dict[str, float]]) -> list[str]:
    """One sentence for each figure on the wrong side of its limit. A new folder has the limits of "all"."""
    problems = []
    for name, figure in now.items():
        limit = limits.get(name, limits["all"])
        for what in ("indirect", "long"):
            if figure[what] > limit[what] + SPARE:
                problems.append(
                    f"narrowgauge/{name}: {what} {figure[what]} %, at most {limit[what]} %. "
                    f"Rewrite: python scripts/language.py --worst 20 {name}."
                )
        if figure["comments"] < limit["comments"] - SPARE:
            problems.append(
                f"narrowgauge/{name}: {figure['comments']} % of the lines are comments, at least {limit['comments']} %. "
                "Comment the lines that a careful reader would get wrong."
            )
    return problems


def lowered(
    now: dict[str, dict[str, float]], limits: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """The stricter of today's figure and the limit, for each figure, but never stricter than its target."""
    result = {}
    for name, figure in now.items():
        limit = limits.get(name, figure)
        result[name] = {
            "indirect": max(min(figure["indirect"], limit["indirect"]), TARGETS["indirect"]),
            "comments": min(max(figure["comments"], limit["comments"]), TARGETS["comments"]),
            "long": max(min(figure["long"], limit["long"]), TARGETS["long"]),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", help="folders of narrowgauge/; all if none")
    parser.add_argument(
        "--worst",
        type=int,
        default=0,
        metavar="N",
        help="print N indirect sentences, longest first",
    )
    parser.add_argument(
        "--check", action="store_true", help="fail where a folder is above its limit"
    )
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's figures")
    options = parser.parse_args()
    found = measure(PACKAGE)
    unknown = sorted(set(options.folders) - set(found))
    if unknown:
        parser.error(
            f"no such folder of narrowgauge/: {', '.join(unknown)}. Known: {', '.join(sorted(found))}."
        )
    if options.worst:
        chosen = [each for name in options.folders or ["all"] for each in found[name].indirect]
        for path, number, sentence in sorted(chosen, key=lambda each: -len(each[2]))[
            : options.worst
        ]:
            print(f"{path.relative_to(ROOT)}:{number}: {sentence}")
        return
    now = figures(found)
    limits = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    if options.lower:
        LIMITS.write_text(json.dumps(lowered(now, limits), indent=2) + "\n", encoding="utf-8")
        return
    if options.check:
        problems = failures(now, limits)
        print(*problems, sep="\n", end="\n" if problems else "")
        sys.exit(1 if problems else 0)
    print(
        f"{'folder':16}{'sentences':>10}{'indirect':>11}{'comments':>11}{f'> {LONG} columns':>15}"
    )
    for name in options.folders or now:
        figure = now[name]
        print(
            f"{name:16}{found[name].sentences:10}{figure['indirect']:9} %{figure['comments']:9} %{figure['long']:13} %"
        )


if __name__ == "__main__":
    main()
