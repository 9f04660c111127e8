"""Writes constraints.txt: the exact version of everything that the extras need, as installed in this environment.

    .venv/bin/python scripts/pin.py > constraints.txt

Starts from the requirements in pyproject.toml and follows each package's own. What is installed beside them is left out.
Local version tags (2.13.0+cpu) are dropped, so that the pin fits every build of that version.
Packages that only another platform or Python needs are not installed here and therefore not pinned. Nor is Triton: the builds of
torch for CUDA ask for one exact version each, and a pin of another would contradict them.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

UNPINNED = {"triton"}
ROOT = Path(__file__).resolve().parent.parent


def requirements_of_project(*extras: str) -> list[Requirement]:
    """Core dependencies and those of these extras; of every extra if none is named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    asked = [groups[name] for name in extras or groups]
    return [Requirement(line) for group in [project["dependencies"], *asked] for line in group]


def requirements_of(distribution: metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """What an installed package asks for here, with these of its extras."""
    requirements = [Requirement(line) for line in distribution.requires or []]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": e}) for e in (extras or {""}))
    ]


def closure(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Name -> what is installed, for these and all that they need in turn. UNPINNED ones are left out.

    Raises PackageNotFoundError where one is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in visited:
            continue
        visited.add((name, frozenset(requirement.extras)))
        if name in UNPINNED:
            continue
        found[name] = metadata.distribution(name)
        waiting += requirements_of(found[name], requirement.extras)
    return found


def pins(requirements: list[Requirement]) -> dict[str, str]:
    """Name -> public version, for the closure of these requirements."""
    return {
        name: Version(distribution.version).public
        for name, distribution in closure(requirements).items()
    }


if __name__ == "__main__":
    print(
        "# Exact versions of what the extras need. Written by scripts/pin.py; change pyproject.toml or the environment, then run it again."
    )
    try:
        for name, version in sorted(pins(requirements_of_project()).items()):
            print(f"{name}=={version}")
    except metadata.PackageNotFoundError as missing:
        sys.exit(
            f"scripts/pin.py: {missing.name!r} is not installed. Install every extra of pyproject.toml first."
        )
