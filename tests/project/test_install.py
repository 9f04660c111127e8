"""What an installation brings (exact): requirements against pins, and the files of a built wheel against the package folder."""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from narrowgauge.ops import triton
from tests.processes import PYTHON, ROOT, run, run_ok

PROJECT_FILE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PROJECT_FILE["project"]
BUILD: list[str] = PROJECT_FILE["build-system"]["requires"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line) for group in [PROJECT["dependencies"], *EXTRAS.values()] for line in group
]


def pins() -> dict[str, Version]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert canonicalize_name(name) == name and name not in found, line
            found[name] = Version(version)
    return found


UNPINNED = {"triton"}  # each CUDA build of torch asks for one exact version of its own


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_the_pin_fits_the_requirement(requirement):
    if requirement.name in UNPINNED:
        assert requirement.name not in pins()
        return
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, (
        f"constraints.txt has no {requirement.name}. Install it, then run scripts/pin.py."
    )
    assert requirement.specifier.contains(pin), f"pinned to {pin}"
    assert any(each.operator in (">=", "==") for each in requirement.specifier), (
        "a lower bound is missing"
    )


def test_pins_fit_every_build_of_a_version():
    """No local tag: torch==2.13.0 takes the CPU build 2.13.0+cpu as well as the CUDA one."""
    assert not [name for name, version in pins().items() if version.local or version.is_prerelease]


def test_the_core_needs_torch_alone():
    assert [Requirement(line).name for line in PROJECT["dependencies"]] == ["torch"]


def test_every_import_is_declared():
    """By core or an extra for users: what another package happens to bring may be gone with its next release."""
    declared = {
        "torch",
        *(
            Requirement(line).name
            for extra in ("train", "tensorboard", "evaluate", "adapt", "gguf")
            for line in EXTRAS[extra]
        ),
    }
    declared |= {
        "triton",  # comes with torch's GPU builds; the kernels that import it are refused without it
        "pydantic_core",  # in a method that pydantic alone calls
        "axolotl",  # imports its plugin itself
    }
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {root}"
        for path in (ROOT / "narrowgauge").rglob("*.py")
        for root in imported_roots(ast.parse(path.read_text(encoding="utf-8")))
        - sys.stdlib_module_names
        - {"narrowgauge"}
        if declared.isdisjoint({root, *map(canonicalize_name, distributions.get(root, []))})
    }
    assert not undeclared, f"imported but not in pyproject.toml: {sorted(undeclared)}"


def imported_roots(tree: ast.AST) -> set[str]:
    """First parts of the names that a module imports, at its top or within a function."""
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {
        node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    }
    return {name.partition(".")[0] for name in names}


def test_no_package_index_is_named():
    """Where packages come from is the user's decision, in pip's own configuration."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"index-url|find-links|https?://", text), name


def test_the_documents_name_every_dependency():
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    missing = [each.name for each in REQUIREMENTS if f"`{each.name}`" not in text]
    assert not missing, f"docs/dependencies.md does not say what {missing} are for"


def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    """Built without isolation by the installed setuptools, from a copy, so that the checkout gains no build folder."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT / "narrowgauge", copy / "narrowgauge", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    wheel = run_ok([PYTHON, "-c", build], cwd=copy, import_from=copy).stdout.split()[-1]
    inside = {
        name
        for name in zipfile.ZipFile(copy / "dist" / wheel).namelist()
        if ".dist-info/" not in name
    }
    on_disk = {
        path.relative_to(copy).as_posix()
        for path in (copy / "narrowgauge").rglob("*")
        if path.is_file()
    }
    assert inside == on_disk
    assert "narrowgauge/py.typed" in inside


def test_the_oldest_versions_are_those_that_are_asked_for():
    """`make oldest` tries what pyproject.toml promises, and what kernels refuse below."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    oldest = dict(re.findall(r"^OLDEST_(TORCH|TRITON) := (\d+\.\d+)\.\d+$", makefile, re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = {
        name.upper(): re.search(rf'"{name}>=(\d+\.\d+)', project)[1] for name in ("torch", "triton")
    }
    assert oldest == asked
    assert ".".join(map(str, triton.OLDEST)) == oldest["TRITON"]


def wheel(folder: Path, name: str, needs: str = "") -> Path:
    """A package without code, as a wheel."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}",
        )
        file.writestr(
            f"{name}-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_a_lock_has_the_hash_of_every_package_and_pip_refuses_another_file(tmp_path, monkeypatch):
    """From a folder of wheels, without an index. One changed byte of a package that another one needs is refused."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "onea", "twob")
    second = wheel(tmp_path / "wheels", "twob")
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[build-system]\nrequires = []\n[project]\nname = "x"\ndependencies = ["onea"]\n[project.optional-dependencies]\ndev = ["twob"]\n'
    )
    (tmp_path / "constraints.txt").write_text("onea==1.0\ntwob==1.0\n")
    options = [
        "--project",
        str(project),
        "--constraints",
        str(tmp_path / "constraints.txt"),
        "--extras",
        "dev",
    ]
    lock = run_ok([PYTHON, str(ROOT / "scripts" / "lock.py"), *options]).stdout
    found = [line.split()[0] for line in lock.splitlines() if not line.startswith("#")]
    assert found == ["onea==1.0", "twob==1.0"]
    (tmp_path / "requirements.lock").write_text(lock)
    install = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--require-hashes",
        "-r",
        str(tmp_path / "requirements.lock"),
    ]
    run_ok([*install, "--target", str(tmp_path / "whole")])
    with zipfile.ZipFile(second, "a") as file:
        file.writestr("added.py", "")
    refused = run([*install, "--target", str(tmp_path / "changed")])
    assert (
        refused.returncode
        and "DO NOT MATCH THE HASHES" in refused.stderr
        and not (tmp_path / "changed").exists()
    )


def test_the_lock_is_of_what_make_installs():
    """The extras of scripts/lock.py and of docs/install.md's offline recipe are those of the Makefile."""
    makefile, docs = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "docs/install.md")
    )
    first, asked = re.findall(r"-c \$\(CONSTRAINTS\) -e '\.\[([a-z,]+)\]'", makefile)[:2]
    assert first == "train", "what `make train` installs, to which `make test` adds"
    script = (ROOT / "scripts" / "lock.py").read_text(encoding="utf-8")
    assert f"EXTRAS = {tuple(asked.split(','))!r}".replace("'", '"') in script
    assert docs.count(f"pip install -c constraints.txt -e '.[{first}]'") == 1
    assert docs.count(f".[{asked}]") == 2, (
        "what make runs, and what to download for a machine without a network"
    )


def test_training_brings_few_packages():
    """At most 60 packages and 1.5 GB beside torch's own, of what is installed here at the pinned versions."""
    run_ok([PYTHON, str(ROOT / "scripts" / "install_size.py"), "--check"])


def test_the_count_of_packages_can_fail():
    """The extras of `make test` are more than the limit."""
    counted = run(
        [PYTHON, str(ROOT / "scripts" / "install_size.py"), "train,evaluate,dev", "--check"]
    )
    assert counted.returncode == 1 and "lm-eval" not in counted.stdout


def test_the_hashes_are_those_of_the_pins():
    """hashes-train.txt: what training needs beside torch, at the versions of constraints.txt, each file with its SHA-256."""
    found = {}
    for line in (ROOT / "hashes-train.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        pinned, *hashes = line.split()
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
        name, version = pinned.split("==")
        found[name] = Version(version)
    assert "torch" not in found and UNPINNED.isdisjoint(found)
    wanted = {Requirement(line).name for line in [*EXTRAS["train"], *BUILD]} - UNPINNED
    assert set(map(canonicalize_name, wanted)) <= found.keys()
    assert found == {name: pins()[name] for name in found}
