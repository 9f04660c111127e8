"""Installs the sdist and the wheel in empty environments, and runs the README's first snippet in each.

    .venv/bin/python scripts/try_install.py python3.11 python3.12 python3.13

For each interpreter: an empty environment with torch at the version of constraints.txt (pip's configuration decides the build), the
wheel alone, then the sdist alone. README.md's first block of Python runs in an empty folder as pasted. A row for each of
these is appended to --rows with versions and commit; the first failure ends with exit code 1. Gigabytes where pip finds a CUDA build.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "installs.jsonl"
FILES = ("pyproject.toml", "README.md", "LICENSE")
# The backend writes into sys.argv, so the folder is read before.
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def first_snippet(readme: str) -> str:
    """The first block of Python; what a comment `<!-- test: ... -->` right before it asks to put in front of it, stands in front."""
    found = re.search(
        r"(?:<!-- test: (?P<before>.*?)-->\n)?^```python\n(?P<code>.*?)^```", readme, re.S | re.M
    )
    if found is None:
        raise SystemExit("try_install: README.md has no block of Python.")
    return f"{found['before'] or ''}\n{found['code']}"


def run(*words: str | Path, cwd: Path) -> str:
    """Standard output of a command; its failure ends this program with what it printed."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"try_install: {' '.join(command)} failed.\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> dict[str, Path]:
    """Form -> file, built from a copy of the package by the installed setuptools."""
    copy, made = folder / "copy", folder / "made"
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "narrowgauge", copy / "narrowgauge", ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-c", BUILD, made, cwd=copy)
    return {"wheel": next(made.glob("*.whl")), "sdist": next(made.glob("*.tar.gz"))}


def rows_of(python: str, files: dict[str, Path], folder: Path) -> list[dict[str, str]]:
    """A row for each form that was installed for this interpreter and ran the snippet."""
    environment, empty = folder / "environment", folder / "empty"
    empty.mkdir()
    run(python, "-m", "venv", environment, cwd=folder)
    inside = environment / "bin" / "python"
    pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", "torch", cwd=folder)
    (folder / "snippet.py").write_text(first_snippet((ROOT / "README.md").read_text("utf-8")))
    versions = run(inside, "-c", VERSIONS, cwd=empty).split()
    rows = []
    for form, file in files.items():
        run(*pip, "--force-reinstall", "--no-deps", file, cwd=empty)
        run(inside, folder / "snippet.py", cwd=empty)
        rows.append({"form": form, "python": versions[0], "torch": versions[1], "snippet": "ran"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="+", help="interpreters of Python 3.11 or newer")
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args()
    commit = run("git", "rev-parse", "--short=8", "HEAD", cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as name:
        files = build(Path(name))
        for number, python in enumerate(given.pythons):
            folder = Path(name) / str(number)
            folder.mkdir()
            for row in rows_of(python, files, folder):
                line = json.dumps({**row, "commit": commit})
                print(line, flush=True)
                with given.rows.open("a", encoding="utf-8") as rows:
                    rows.write(line + "\n")
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
