"""Writes a requirements file with the SHA-256 of every package that pip would install here, at the versions of constraints.txt.

    .venv/bin/python scripts/lock.py > requirements.lock                 with the same index and platform as the installation
    pip install --require-hashes -r requirements.lock                   refuses every file with another hash
    pip install --no-deps --no-build-isolation -e .

    .venv/bin/python scripts/lock.py --portable > hashes-train.txt      for every platform and Python of TARGETS, and any build of torch

pip resolves and reports (--dry-run --report); it downloads what has no separate metadata, and installs nothing. The hashes are those of
the files that this platform, this Python and the configured index give. Another platform, or another build of torch, needs its own lock.
Hashes in constraints.txt would not do: pip then asks for the hash of every requirement, and an editable folder has none.

--portable writes what the extra `train` needs, torch's own requirements among it, but neither torch nor Triton: their builds are
different files of one version, and which one a machine needs is its owner's choice. Each line has the hashes of all files that TARGETS
take, so one list serves them all. Names and versions are those of scripts/pin.py; pip downloads some 100 MB for each target.
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

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pin import pins, requirements_of_project

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "evaluate", "dev")  # those of the Makefile

# pip lowers a macOS version by itself, and a manylinux one not.
_GLIBC = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_26",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux_2_12",
    "manylinux_2_5",
)
PLATFORMS = (
    tuple(f"{glibc}_x86_64" for glibc in _GLIBC),
    tuple(f"{glibc}_aarch64" for glibc in _GLIBC),
    ("macosx_14_0_arm64",),
)
TARGETS = [(python, tags) for python in ("3.11", "3.12", "3.13", "3.14") for tags in PLATFORMS]


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """What the extras ask for, and what builds the package."""
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    return lines + [
        line for extra in extras for line in project["project"]["optional-dependencies"][extra]
    ]


def reported(lines: list[str], constraints: Path, *target: str) -> list[dict[str, Any]]:
    """pip's report on what it would install, in an environment where nothing is. `target`: pip's options for another machine."""
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
        command = [sys.executable, "-m", "pip", "install", *options, *target]
        command += ["-c", str(constraints), *lines]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit("lock: pip found no set of packages. Its message stands above.")
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def hash_of(entry: dict[str, Any]) -> str:
    """The SHA-256 of the file that an entry of the report names, as 64 hexadecimal digits."""
    metadata = entry["metadata"]
    hashes = entry["download_info"].get("archive_info", {}).get("hashes", {})
    if not re.fullmatch(r"[0-9a-f]{64}", hashes.get("sha256", "")):
        raise SystemExit(
            f"lock: {metadata['name']} {metadata['version']} comes without a SHA-256. Take it from an index."
        )
    return str(hashes["sha256"])


def line_of(entry: dict[str, Any]) -> str:
    """'name==version --hash=sha256:...' of an entry of the report."""
    metadata = entry["metadata"]
    return f"{metadata['name']}=={metadata['version']} --hash=sha256:{hash_of(entry)}"


def portable_lines(constraints: Path) -> list[str]:
    """'name==version --hash=... --hash=...' of what training needs beside torch, with the file of each of TARGETS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    builds = [Requirement(line) for line in project["build-system"]["requires"]]
    wanted = pins([*requirements_of_project("train"), *builds])
    wanted.pop("torch")
    lines = [f"{name}=={version}" for name, version in sorted(wanted.items())]
    hashes: dict[str, set[str]] = {line: set() for line in lines}
    for python, tags in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--no-deps", "--only-binary", ":all:", "--target", folder]
            options += ["--python-version", python]
            options += [word for tag in tags for word in ("--platform", tag)]
            for entry in reported(lines, constraints, *options):
                metadata = entry["metadata"]
                hashes[f"{canonicalize_name(metadata['name'])}=={metadata['version']}"].add(
                    hash_of(entry)
                )
    return [
        " ".join([line, *(f"--hash=sha256:{each}" for each in sorted(hashes[line]))])
        for line in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--project", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--extras", default=",".join(EXTRAS))
    parser.add_argument("--portable", action="store_true", help="for TARGETS, without torch")
    asked = parser.parse_args()
    if asked.portable:
        print(
            "# What training needs beside torch, with the hashes of its files. Written by scripts/lock.py --portable."
        )
        print("\n".join(portable_lines(asked.constraints)))
        return
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
