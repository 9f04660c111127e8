"""Writes a requirements file with the SHA-256 of every package that pip would install here, at the versions of constraints.txt.

    .venv/bin/python scripts/lock.py > requirements.lock                 with the same index and platform as the installation
    pip install --require-hashes -r requirements.lock                   refuses every file with another hash
    pip install --no-deps --no-build-isolation -e .

pip resolves and reports (--dry-run --report); it downloads what has no separate metadata, and installs nothing. The hashes are those of
the files that this platform, this Python and the configured index give. Another platform, or another build of torch, needs its own lock.
Hashes in constraints.txt would not do: pip then asks for the hash of every requirement, and an editable folder has none.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "evaluate", "dev")  # those of the Makefile


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """What the extras ask for, and what builds the package."""
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    return lines + [
        line for extra in extras for line in project["project"]["optional-dependencies"][extra]
    ]


def reported(lines: list[str], constraints: Path) -> list[dict[str, Any]]:
    """pip's report on what it would install, in an environment where nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--disable-pip-version-check",
            "--report",
            str(report),
        ]
        command = [sys.executable, "-m", "pip", "install", *options, "-c", str(constraints), *lines]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit("lock: pip found no set of packages. Its message stands above.")
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def line_of(entry: dict[str, Any]) -> str:
    """'name==version --hash=sha256:...' of an entry of the report."""
    metadata = entry["metadata"]
    hashes = entry["download_info"].get("archive_info", {}).get("hashes", {})
    if not re.fullmatch(r"[0-9a-f]{64}", hashes.get("sha256", "")):
        raise SystemExit(
            f"lock: {metadata['name']} {metadata['version']} comes without a SHA-256. Take it from an index."
        )
    return f"{metadata['name']}=={metadata['version']} --hash=sha256:{hashes['sha256']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--project", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--extras", default=",".join(EXTRAS))
    asked = parser.parse_args()
    project = tomllib.loads(asked.project.read_text(encoding="utf-8"))
    entries = reported(
        requirements(project, [each for each in asked.extras.split(",") if each]), asked.constraints
    )
    print(
        "# Written by scripts/lock.py: install with pip install --require-hashes -r, then the package with --no-deps."
    )
    print("\n".join(sorted(map(line_of, entries), key=str.lower)))


if __name__ == "__main__":
    main()
