"""A run and its branches on one axis (exact: the folders are written here)."""

from __future__ import annotations

import json

import pytest

from narrowgauge.cli import main
from narrowgauge.diagnose import lineage
from narrowgauge.errors import ConfigError
from narrowgauge.report import run_data
from tests.raising import coded, raises, require, with_code


def write(folder, recipe, losses, first=1, parent=None, **facts):
    folder.mkdir()
    run = {
        "recipe": recipe,
        "seed": 0,
        "parameters": 10,
        "started_at": "then",
        "data": {"source": "text"},
        "steps": 60,
    }
    (folder / "run.json").write_text(
        json.dumps(run | facts | ({"parent": parent} if parent else {}))
    )
    lines = [{"event": "branch", **parent}] if parent else []
    lines += [
        {"event": "step", "step": step, "loss": loss, "tokens": 8}
        for step, loss in enumerate(losses, first)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def link(**changes):
    changed = {key: list(map(str, pair)) for key, pair in changes.items()}
    return {
        "run": "../first", "from": "first@20", "step": 20, "started_at": "then", "fingerprint": "f", "changes": changed, "carried": [],
    }  # fmt: skip


@pytest.fixture
def family(tmp_path):
    """A run, its branch in BF16, and the control of that; `gap` nats apart."""

    def made(gap):
        wide = [3.0] * 40
        first = write(tmp_path / "first", "int4-hq-bs", [4.0] * 20 + [3.0 + gap] * 40)
        bf16 = write(
            tmp_path / "bf16",
            "bf16",
            wide,
            21,
            link(recipe=("int4-hq-bs", "bf16")),
            started_at="later",
        )
        changes = {"recipe": ("int4-hq-bs", "bf16"), "micro_batches": (1, 2)}
        control = write(
            tmp_path / "control",
            "bf16",
            [3.0005] * 40,
            21,
            link(**changes),
            started_at="later still",
        )
        return [first, bf16, control]

    return made


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0008, "The curve is the same within control (+0.00080 nats over the last 20 steps; control 0.00050): the cause is not"),
        (0.03, "The curve is higher (+0.0300 nats over the last 20 steps; control 0.00050; margin 0.0075; loss 3.0000): the number"),
    ],
)  # fmt: skip
def test_a_run_is_held_against_its_branch_by_the_control(family, capsys, gap, words):
    folders = family(gap)
    assert main(["compare", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert (
        words in said
        and "branch of first@20 at step 20, recipe: int4-hq-bs to bf16; steps 21 to 60" in said
    )
    found = lineage.compare(folders)
    [judged], [control] = found.judged, found.controls
    assert [each.folder for each in control] == folders[1:]
    assert judged.curve.steps == 20 and judged.reference.folder == folders[1]


def test_without_a_control_the_next_step_is_named(family):
    found = lineage.compare(family(0.03)[:2])
    [note] = found.notes
    require(note, "compare.no-control", "--batch.micro-batches 2")
    assert found.judged[0].curve.outcome == "unknown"


def test_a_parent_that_was_moved_is_said_and_not_needed(family, tmp_path):
    first, bf16, control = family(0.0)
    first.rename(tmp_path / "elsewhere")
    found = lineage.compare([bf16, control])
    gone = with_code(found.notes, "compare.parent-gone")
    assert len(gone) == 2 and all(str(tmp_path) in note for note in gone) and found.controls
    with raises(ConfigError, "compare.no-folder", first):
        lineage.compare([first, bf16])


def test_runs_on_other_batches_are_refused(family, tmp_path):
    first = family(0.0)[0]
    for name, facts, words in (
        ("other", {"data": {"source": "csv"}}, coded("compare.other-batches")),
        ("seed", {"seed": 1}, coded("compare.other-batches")),
        ("size", {"parameters": 11}, coded("compare.other-batches")),
    ):
        with raises(ConfigError, words):
            lineage.compare([first, write(tmp_path / name, "bf16", [1.0], **facts)])
    for wrong in ([first], [first, first]):
        with raises(ConfigError, "compare.one-run"):
            lineage.compare(wrong)


def test_the_report_draws_a_branch_beside_its_parent(family, tmp_path):
    first, bf16, _ = family(0.0)
    recorded = run_data.read(bf16)
    assert recorded.reference is not None and recorded.reference.folder.resolve() == first.resolve()
    assert (
        recorded.reference.name == "parent: int4-hq-bs"
        and recorded.last_step == recorded.reference.last_step
    )
    first.rename(tmp_path / "elsewhere")
    assert run_data.read(bf16).reference is None


def test_curves_are_held_against_each_other_on_the_same_batches_alone(family, capsys):
    """The run left out batch 41, 20 steps behind its branch: what follows is worse by the batches, and is not looked at."""
    folders = family(0.0)
    events = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    events = [{**event, "loss": event["loss"] + (event["step"] >= 41)} for event in events]
    spike = {"event": "spike", "step": 41, "cause": "data", "left_out": [41], "loss": 9.0}
    (folders[0] / "metrics.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in [*events, spike])
    )
    assert main(["compare", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert (
        "first left out batch 41 and" in said
        and "from step 41 on they have learnt from different batches" in said
    )
    [judged] = lineage.compare(folders).judged
    assert judged.curve.is_within_control and "over the last 10 steps" in said
    run = json.loads((folders[0] / "run.json").read_text())
    (folders[0] / "run.json").write_text(json.dumps({**run, "left_out": [3]}))
    assert lineage.read(folders[0]).left_out == (3, 41)
    assert main(["compare", *map(str, folders)]) == 0
    [judged] = lineage.compare(folders).judged
    assert judged.curve.outcome == "unknown" and judged.curve.steps == 0
