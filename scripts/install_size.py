"""What `make train` installs beside torch: how many packages, and how many bytes.

    .venv/bin/python scripts/install_size.py                     each package of the extra train, the largest first
    .venv/bin/python scripts/install_size.py train,evaluate,dev  of other extras: what `make test` installs
    .venv/bin/python scripts/install_size.py --check             exit 1 above LIMITS; tests/project/test_install.py runs this

Counted from the metadata of what is installed, by the walk of scripts/pin.py. torch and what torch needs itself are left out: their size
is that of the build (CPU or CUDA). So is Triton, which comes with a CUDA build. A package's bytes are those of its files in RECORD,
without the byte code that pip compiles, which takes about a third more in all.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import Distribution

from packaging.requirements import Requirement
from pin import closure, requirements_of_project

LIMITS = {"packages": 60, "bytes": 1_500_000_000}


def size_of(distribution: Distribution) -> int:
    """Bytes of a package's files as its RECORD gives them, zero for a file without a size."""
    return sum(file.size or 0 for file in distribution.files or [])


def beside_torch(extras: list[str]) -> dict[str, int]:
    """Package -> bytes, for all that these extras bring and torch does not."""
    own = closure([Requirement("torch")])
    brought = closure(requirements_of_project(*extras))
    return {name: size_of(brought[name]) for name in brought.keys() - own.keys()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extras", nargs="?", default="train", help="separated by commas")
    parser.add_argument("--check", action="store_true", help="exit 1 above the limits")
    given = parser.parse_args()
    sizes = beside_torch(given.extras.split(","))
    if not given.check:
        for name, size in sorted(sizes.items(), key=lambda each: -each[1]):
            print(f"{size / 1e6:9.1f} MB  {name}")
    found = {"packages": len(sizes), "bytes": sum(sizes.values())}
    print(f"{found['bytes'] / 1e6:9.1f} MB in {found['packages']} packages beside torch's own")
    above = [
        f"{found[what]} {what}, at most {most}"
        for what, most in LIMITS.items()
        if found[what] > most
    ]
    if given.check and above:
        sys.exit(
            f"install_size: {given.extras} brings {'; '.join(above)}. Move a dependency to an extra of its own, "
            "and name that extra in the error where it is missing."
        )


if __name__ == "__main__":
    main()
