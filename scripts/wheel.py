"""Makes a wheel that carries the C++ kernels, compiled for every level of one kind of processor.

    .venv/bin/python scripts/wheel.py                                   a wheel for this machine, in dist/
    .venv/bin/python scripts/wheel.py --machine aarch64 --compiler CXX  with a compiler for another one

`pip install .` makes a wheel for every machine instead, which compiles its kernels when they are
first used. The package is copied first, so that the checkout goes on to compile its own sources.
The tag of the wheel comes from the newest symbol of glibc that the libraries import.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SETUP = """\
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Platform(Distribution):
    def has_ext_modules(self):
        return True


class Tagged(bdist_wheel):
    def get_tag(self):
        return "py3", "none", {tag!r}


setup(distclass=Platform, cmdclass={{"bdist_wheel": Tagged}})
"""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def prebuilt() -> ModuleType:
    """The module of that name, without the package around it, which imports torch."""
    path = ROOT / "narrowgauge" / "ops" / "cpp" / "prebuilt.py"
    spec = importlib.util.spec_from_file_location("prebuilt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(target: Path, machine: str, compiler: str) -> Path:
    """Write the wheel into the folder `target`. Returns its path."""
    kernels = prebuilt()
    if machine not in kernels.LEVELS:
        sys.exit(
            f"wheel: {machine} is none of {', '.join(kernels.LEVELS)}. Run `pip wheel .`, whose kernels compile at first use."
        )
    path = shutil.which(compiler)
    if path is None:
        sys.exit(
            f"wheel: there is no compiler {compiler!r}. Install g++, or name another with --compiler."
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", kernels.FOLDER)
        shutil.copytree(ROOT / "narrowgauge", copy / "narrowgauge", ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        try:
            libraries = kernels.compile_all(copy / "narrowgauge", path, machine)
        except subprocess.CalledProcessError as error:
            sys.exit(f"wheel: {' '.join(error.cmd)} failed.\n{error.stderr}")
        major, minor = kernels.glibc_needed(libraries)
        tag = f"manylinux_{major}_{minor}_{machine}"
        (copy / "setup.py").write_text(SETUP.format(tag=tag), encoding="utf-8")
        made = copy / "made"
        subprocess.run(
            [sys.executable, "-c", BUILD, str(made)], cwd=copy, check=True, stdout=sys.stderr
        )
        [wheel] = made.glob("*.whl")
        target.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, target / wheel.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--machine", default=platform.machine(), help="as uname -m")
    parser.add_argument("--compiler", default="g++", help="C++ compiler that makes code for it")
    given = parser.parse_args()
    print(make(given.output, given.machine, given.compiler))


if __name__ == "__main__":
    main()
