"""Who imports whom, and what importing costs (exact; the time limit of --help is in CPU seconds).

The contracts stand in pyproject.toml; planted violations show that they bite.
"""

from __future__ import annotations

import shutil
import tomllib

import pytest

from tests.processes import PYTHON, ROOT, run, run_ok

LINT = [
    PYTHON,
    "-c",
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))",
]


def test_the_layers_hold():
    run_ok(LINT)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("errors.py", "from narrowgauge import formats", "narrowgauge.errors is not allowed to import narrowgauge.formats"),
        ("data/planted.py", "from narrowgauge import formats", "narrowgauge.data is not allowed to import narrowgauge.formats"),
        ("recipe.py", "from narrowgauge import recipes", "narrowgauge.recipe is not allowed to import narrowgauge.recipes"),
        ("ops/planted.py", "def f():\n    import narrowgauge.train", "narrowgauge.ops is not allowed to import narrowgauge.train"),
        ("train/planted.py", "from narrowgauge.train import planted_too", "No cycles are allowed in narrowgauge.train"),
        ("nn/plan.py", "from narrowgauge.nn import linear", "narrowgauge.nn.plan is not allowed to import narrowgauge.nn.linear"),
        ("unplaced.py", "", "narrowgauge.unplaced"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(tmp_path, file, source, complaint):
    package = tmp_path / "narrowgauge"
    files = {
        name: ""
        for name in (
            "__init__.py",
            "errors.py",
            "formats.py",
            "recipes.py",
            "ops/__init__.py",
            "data/__init__.py",
        )
    }
    files |= {"nn/__init__.py": "", "nn/linear.py": ""}
    files |= {
        "train/__init__.py": "",
        "train/planted_too.py": "from narrowgauge.train import planted",
    }
    files |= {"train/planted.py": "", file: source}
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = run(LINT, cwd=tmp_path, import_from=tmp_path)
    assert done.returncode == 1 and complaint in " ".join(done.stdout.split()), (
        done.stdout + done.stderr
    )


def test_the_house_stays_small():
    """Entries at the top of the package, and floors: a reader finds a place for everything, and new packages have room."""
    entries = {path.name for path in (ROOT / "narrowgauge").iterdir()} - {
        "__pycache__",
        "py.typed",
        "__init__.py",
        "__main__.py",
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    # One more of each since 2026-11-24: the lab above train. One more entry since 2026-11-27: export, and one: integrations.
    assert len(entries) <= 28 and len(floors) <= 17


# Touching each name resolves what the package imports lazily. Subpackages (train, cli, ...) may bring their extras.
IMPORT_EVERY_PUBLIC_NAME = """
import pkgutil
import narrowgauge
packages = {module.name for module in pkgutil.iter_modules(narrowgauge.__path__) if module.ispkg}
for name in getattr(narrowgauge, "__all__", ()):
    if name not in packages:
        getattr(narrowgauge, name)
"""


def test_importing_brings_torch_reads_no_environment_and_configures_no_logging():
    """One process for all three, since it imports everything.

    What torch itself imports (numpy, where installed) is not counted. A read of the environment
    counts if narrowgauge's own code makes it; torch reads many variables by itself.
    """
    code = f"""
import logging, os, sys, warnings
import torch

modules = set(sys.modules)

asked = []

def spy(method):
    def spied(self, *args):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith("<frozen") or frame.f_globals["__name__"] in ("os", "_collections_abc"):
            frame = frame.f_back
        if frame.f_globals["__name__"].partition(".")[0] == "narrowgauge":
            asked.append((frame.f_globals["__name__"], *args))
        return method(self, *args)
    return spied

for name in ("__getitem__", "__iter__", "__len__"):
    setattr(os._Environ, name, spy(getattr(os._Environ, name)))

def logging_state():
    loggers = [logging.root] + [logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict)]
    return [(each.name, each.level, list(each.handlers)) for each in loggers if each.level or each.handlers]

before = logging_state(), list(warnings.filters)
{IMPORT_EVERY_PUBLIC_NAME}
roots = {{name.partition(".")[0] for name in set(sys.modules) - modules}}
brought = roots - sys.stdlib_module_names - {{"narrowgauge", "torch", "triton"}}
assert not brought, f"imported besides torch: {{sorted(brought)}}"
assert not asked, f"environment read at import: {{asked}}"
assert (logging_state(), list(warnings.filters)) == before, "logging or warnings configured at import"
exec(compile("import os; os.environ.get('HOME'); 'HOME' in os.environ", "x", "exec"), {{"__name__": "narrowgauge.probe"}})
assert len(asked) == 2, f"the spy is blind: {{asked}}"
"""
    run_ok([PYTHON, "-c", code])


def test_help_does_without_torch():
    code = """
import runpy, sys
sys.argv = ["narrowgauge", "--help"]
try:
    runpy.run_module("narrowgauge", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "datasets", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, f"--help imported {sorted(heavy)}"
"""
    assert "train" in run_ok([PYTHON, "-c", code]).stdout
