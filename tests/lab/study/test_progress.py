"""How far a study is, by the logs of its runs: what is done, what is left, and what is not repeated (exact)."""

from __future__ import annotations

import json

import pytest

from narrowgauge.lab.study import conclusion
from narrowgauge.lab.study import progress as module
from narrowgauge.lab.study.plan import Job
from narrowgauge.lab.study.progress import Reached, StudyProgress, reached
from tests.report.synthetic_run import Plan, write_run


def job(tmp_path, recipe="bf16", seed=0):
    return Job(recipe, seed, tmp_path / f"{recipe}-seed{seed}")


def log(made, *events):
    made.folder.mkdir(exist_ok=True)
    with open(made.folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def step(number, elapsed_s=1.0):
    return {
        "event": "step",
        "step": number,
        "loss": 2.0,
        "elapsed_s": elapsed_s,
        "peak_bytes": 1000 * number,
    }


def test_the_last_step_counts_even_in_a_torn_log(tmp_path):
    made = job(tmp_path)
    assert reached(made) == Reached()
    log(made, step(1), step(2, 2.5), {"event": "eval", "step": 2, "loss": 2.0})
    with open(made.folder / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    assert reached(made) == Reached(2, 2.5, 2000)


def test_a_resumption_goes_back(tmp_path):
    made = job(tmp_path)
    log(
        made,
        step(7),
        {"event": "resume", "step": 4, "path": "checkpoints/step-00000004", "skipped": []},
    )
    assert reached(made) == Reached(step=4)
    log(made, step(5, 9.0))
    assert reached(made).step == 5


def test_a_long_log_is_read_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TAIL_BYTES", 200)
    made = job(tmp_path)
    log(made, *(step(number) for number in range(1, 50)))
    assert reached(made).step == 49


def test_each_recipe_has_its_pace_and_runs_share_the_machine(tmp_path):
    """100 steps a run; bf16 takes 1 s a step, mxfp8 2 s; a third recipe the mean of both."""
    jobs = [job(tmp_path, recipe, seed) for recipe in ("bf16", "mxfp8", "other") for seed in (0, 1)]
    log(jobs[0], step(50, 50.0))
    log(jobs[2], step(50, 100.0))
    shown = StudyProgress(jobs, 100, 2)
    found = {each.name: reached(each) for each in jobs}
    assert shown.left_s(found) == pytest.approx((50 + 100 + 100 + 200 + 150 + 150) / 2)
    shown.over = {each.name: "" for each in jobs if each is not jobs[3]}
    assert shown.left_s(found) == 200  # one run cannot be shared


def test_finished_and_diverged_runs_are_not_repeated_and_others_are(tmp_path):
    plans = {
        "finished": Plan(steps=5, planned=5), "diverged": Plan(steps=5, planned=9, done="nonfinite", nonfinite_at=5),
        "stopped": Plan(steps=5, planned=9, done="interrupted"), "killed": Plan(steps=5, planned=9, done=None),
    }  # fmt: skip
    found = {}
    for name, plan in plans.items():
        made = Job(name, 0, tmp_path / name)
        write_run(made.folder, plan)
        found[name] = conclusion.ending(made)
    (tmp_path / "empty").mkdir()
    found["empty"] = conclusion.ending(Job("empty", 0, tmp_path / "empty"))
    assert found == {
        "finished": "",
        "diverged": "not finite",
        "stopped": None,
        "killed": None,
        "empty": None,
    }
