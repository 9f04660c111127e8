"""Files that former trees wrote can be read: run folders, checkpoints, state dicts (exact; moments bounded).

Each folder `tree_YYYY_MM_DD` was written by `write.py` with the tree of that day, and never changes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from narrowgauge.cli import main
from narrowgauge.optim.transfer import transfer
from tests.compatibility.write import RUNS, SETTINGS, model_of, optimizer_of, rules, weight_of

EXIT_UNKNOWN = 11  # runs that have not learnt enough to tell
TREES = sorted(Path(__file__).parent.glob("tree_*"), key=str)
# Relative error of moments after five steps. Formats of 8 bits have 2 mantissa bits at least, and
# E5M2 rounded to nearest errs by up to 1/8; 4-bit levels are up to a third apart.
ROUNDING = {"fp32": 0.0, "4bit": 0.5}


@pytest.fixture(params=TREES, ids=lambda tree: tree.name)
def folder(request, tmp_path, monkeypatch) -> Path:
    """A copy of a tree's files, as the current directory: settings name text.txt."""
    copy = tmp_path / "tree"
    shutil.copytree(request.param, copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture(params=TREES, ids=lambda tree: tree.name)
def stored(request) -> dict[str, Any]:
    return torch.load(request.param / "states.pt", weights_only=True)


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(run: Path) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in events(run) if each["event"] == "step"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_goes_on_from_its_checkpoint(folder, name):
    last = max(losses(folder / name))
    settings = RUNS[name].replace(f"--steps {last}", f"--steps {last + 2}").split()
    base = SETTINGS.replace("--keep 1", "--keep 9").split()
    assert main(["train", *base, *settings, "--output", "branch", "--from", name]) == 0
    assert sorted(losses(folder / "branch")) == [last + 1, last + 2]
    # A branch first writes what it read: losses of so short a run would not show lost weights.
    for part in ("weights", "scaling"):
        path = f"checkpoints/step-{last:08}/{part}-0.safetensors"
        before, after = (load_file(folder / run / path) for run in (name, "branch"))
        assert before and set(before) == set(after)
        assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_a_finished_run_resumes_evaluates_and_reports(folder, name):
    former = losses(folder / name)
    settings = [*SETTINGS.split(), *RUNS[name].split()]
    assert main(["train", *settings, "--output", name, "--resume"]) == 0
    assert losses(folder / name) == former
    assert main(["report", name]) == 0 and (folder / name / "report.html").exists()

    assert main(["evaluate", name]) == 0
    scored = json.loads((folder / name / "evaluation.json").read_text(encoding="utf-8"))
    values = scored["results"][0]["checkpoints"][0]["narrow"]["validation"]["values"]
    evaluated = [each["loss"] for each in events(folder / name) if each["event"] == "eval"]
    # A training evaluation reads 64 tokens, this one all of them.
    assert abs(values["loss"] - evaluated[-1]) < 0.1


def test_runs_of_a_former_tree_are_compared(folder, capsys):
    assert main(["compare", *RUNS]) == EXIT_UNKNOWN
    words = capsys.readouterr().out
    assert all(name in words for name in RUNS)


# Of the recipes that a tree had: newer ones are not among its files.
STORED = sorted(
    {
        key.removeprefix("model/")
        for tree in TREES
        for key in torch.load(tree / "states.pt", weights_only=True)
        if key.startswith("model/")
    }
)


@pytest.mark.parametrize("recipe", STORED)
def test_a_model_loads_its_state(stored, recipe):
    if f"model/{recipe}" not in stored:
        pytest.skip("this tree did not have the recipe yet")
    state = stored[f"model/{recipe}"]
    model = model_of(recipe)
    model.load_state_dict(state)
    found = model.state_dict()
    assert set(found) == set(state)
    for name, value in state.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("rule", "states"), rules())
def test_an_optimizer_decodes_its_state(stored, rule, states):
    """The moments are those of the same steps in float32, up to the rounding of the format."""
    optimizer, wide = optimizer_of(rule, states), optimizer_of(rule, "fp32")
    optimizer.load_state_dict(stored[f"optimizer/{rule}/{states}"])
    transfer(optimizer, wide, [(weight_of(optimizer), weight_of(wide))])
    found = wide.state[weight_of(wide)]
    expected = stored[f"optimizer/{rule}/fp32"]["state"][0]
    assert set(found) >= set(expected) and found["step"] == expected["step"] == 5
    for name, moment in expected.items():
        if moment.ndim:
            error = float((found[name] - moment).norm() / moment.norm())
            assert error <= ROUNDING.get(states, 0.15), (name, error)
