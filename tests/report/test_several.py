"""The page on several runs, over made-up run folders: grouped, judged, escaped, and honest about what cannot be compared (exact)."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic_run import Plan, write_run
from tests.report.test_page import Page

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from narrowgauge.cli import main
from narrowgauge.diagnose import compare, seeds, seeds_text
from narrowgauge.errors import ConfigError
from narrowgauge.report import groups, several, several_curves, several_figures
from tests.raising import cli_raises, coded, raises


def write(
    folder: Path,
    recipe: str,
    seed: int,
    gap: float = 0.0,
    facts: dict[str, Any] | None = None,
    **plan: Any,
) -> Path:
    """A run of 30 steps; the seed moves its losses too."""
    values = {"steps": 30, "planned": 30, "gap": gap, **plan}
    write_run(folder, Plan(recipe=recipe, seed=seed + 1, **values))
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(
        json.dumps({**run, "seed": seed, **(facts or {})}), encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Two recipes, three seeds."""
    root = tmp_path_factory.mktemp("several")
    return [
        write(root / f"{recipe}-{seed}", recipe, seed, gap)
        for recipe, gap in (("bf16", 0.0), ("fp8-row", 0.001))
        for seed in range(3)
    ]


def visible(path: Path) -> str:
    return re.sub(r"\s+", " ", Page(path.read_text(encoding="utf-8")).text)


def test_runs_are_grouped_by_recipe_and_judged_in_pairs(six):
    found = groups.gather(six)
    assert [(group.name, [groups.seed_of(each) for each in group.runs]) for group in found.groups] == [
        ("bf16", [0, 1, 2]), ("fp8-row", [0, 1, 2])
    ]  # fmt: skip
    [verdict] = found.verdicts()
    finals = {
        folder.name: groups.final(each, "loss")[0]
        for folder, each in zip(six, found.runs, strict=True)
    }
    assert verdict.differences == tuple(
        finals[f"fp8-row-{seed}"] - finals[f"bf16-{seed}"] for seed in range(3)
    )
    assert groups.gather(six, reference="fp8-row").groups[0].name == "fp8-row"


def test_a_speed_has_the_quartiles_of_all_runs(six):
    """Of the steps of three runs together, without the first of each."""
    found = groups.gather(six)
    for group, row in zip(found.groups, several.costs(found), strict=True):
        rates = [rate for each in group.runs for rate in compare.speeds(each.events)]
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        assert len(rates) == 3 * 29 and row["half"] == f"{round(low):,} to {round(high):,}"


def test_the_page_is_whole_and_the_same_for_the_same_runs(six, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", *map(str, six), f"--output={path}"]) == 0
    first = path.read_text(encoding="utf-8")
    text = visible(path)
    assert "2 recipes, 3 seeds" in text and "6 runs of a model" in text and "fp8-row: " in text
    for heading in (
        "Finals",
        "Training loss",
        "Validation loss",
        "Difference from bf16",
        "Speed",
        "Runs",
    ):
        assert heading in text
    assert "http:" not in first and "https:" not in first and "<script" not in first
    assert main(["report", *map(str, reversed(six)), "--reference=bf16", f"--output={path}"]) == 0
    assert path.read_text(encoding="utf-8").count("<svg") == first.count("<svg")
    assert (
        main(["report", *map(str, six), f"--output={path}"]) == 0
        and path.read_text(encoding="utf-8") == first
    )


def test_what_cannot_be_compared_is_said_and_left_out(six, tmp_path):
    other = write(tmp_path / "other", "mxfp8", 0, facts={"data": {"source": "another.txt"}})
    larger = write(tmp_path / "larger", "mxfp8", 1, facts={"parameters": 7})
    longer = write(tmp_path / "longer", "mxfp8", 2, planned=60)
    found = groups.gather([*six, other, larger, longer])
    assert [(each.folder.name, why) for each, why in found.apart] == [
        ("other", "other data"), ("larger", "7 parameters instead of 3,212,928")
    ]  # fmt: skip
    assert [(group.name, group.reason) for group in found.groups if group.reason] == [
        ("mxfp8", "60 steps instead of 30")
    ]
    assert [each.runs.name for each in found.verdicts()] == ["fp8-row"]
    text = visible(several.write(found, tmp_path / "page.html"))
    assert "Not comparable" in text and "other data" in text and "60 steps instead of 30" in text


def test_other_settings_make_another_group_and_other_batches_no_verdict(six, tmp_path):
    faster = write(tmp_path / "faster", "fp8-row", 4)
    head = "# model\nlayers = 4\n\n# training\nseed = 17\nthreads = 1\nlearning_rate = "
    for folder, rate in ((six[0], "0.001"), (faster, "0.002")):
        (folder / "config.toml").write_text(f"{head}{rate}\n\n# run\nlog_every = {rate[-1]}\n")
    longer = write(tmp_path / "longer", "mxfp8", 0)
    lines = (longer / "metrics.jsonl").read_text().splitlines()
    changed = [
        json.dumps({**json.loads(line), "tokens": 7}) if '"event": "step"' in line else line
        for line in lines
    ]
    (longer / "metrics.jsonl").write_text("\n".join(changed) + "\n")
    found = groups.gather([*six, faster, longer])
    assert [group.name for group in found.groups] == [
        "bf16",
        "fp8-row",
        "fp8-row, optimizer.learning_rate = 0.002",
        "mxfp8",
    ]
    assert found.groups[-1].reason == "other batches at 30 steps"
    assert [each.runs.name for each in found.verdicts()] == [
        "fp8-row",
        "fp8-row, optimizer.learning_rate = 0.002",
    ]


def test_two_runs_of_one_seed_stand_for_themselves(six, tmp_path):
    twin = write(tmp_path / "twin", "fp8-row", 0)
    names = [group.name for group in groups.gather([*six, twin]).groups]
    assert names == ["bf16", *(f"fp8-row (fp8-row-{seed})" for seed in range(3)), "fp8-row (twin)"]
    alone = groups.gather([six[0], six[3]])
    [verdict] = alone.verdicts()
    assert verdict.half_width is None and len(verdict.seeds) == 1
    text = visible(several.write(alone, tmp_path / "page.html"))
    assert seeds_text.sentences(verdict) in text and "worse" not in seeds_text.heading(verdict)


def test_runs_that_failed_or_go_on_are_told_of(six, tmp_path):
    broken = write(tmp_path / "broken", "mxfp8", 0, done="nonfinite", nonfinite_at=20, steps=20)
    going = write(tmp_path / "going", "mxfp8", 1, done=None, steps=10)
    found = groups.gather([*six, broken, going])
    verdict = next(each for each in found.verdicts() if each.runs.name == "mxfp8")
    assert verdict.name == seeds.DIVERGED and verdict.runs.failed == {
        0: seeds.NOT_FINITE,
        1: "unfinished, at step 10",
    }
    text = visible(several.write(found, tmp_path / "page.html"))
    assert "mxfp8: diverged in 1 of 2 runs" in text and "unfinished, at step 10" in text


def test_a_branch_stands_beside_its_parent(six, tmp_path):
    parent = {"run": "../fp8-row-0", "from": "fp8-row-0@20", "step": 20}
    branch = write(tmp_path / "branch", "bf16", 0, facts={"parent": parent})
    found = groups.gather([*six, branch])
    assert [group.name for group in found.groups] == ["bf16", "fp8-row", "bf16, from step 20"]
    assert "branch of ../fp8-row-0 from step 20" in visible(
        several.write(found, tmp_path / "page.html")
    )


def test_what_runs_say_is_escaped(six, tmp_path):
    evil = "</td><script>alert(1)</script>{{ 7 * 7 }}"
    odd = write(tmp_path / "odd", "fp8-row", 5, facts={"recipe": evil, "device": evil})
    lines = (odd / "metrics.jsonl").read_text().splitlines()
    changed = [
        json.dumps({**json.loads(line), evil: 0.5}) if '"eval"' in line else line for line in lines
    ]
    (odd / "metrics.jsonl").write_text("\n".join(changed) + "\n")
    page = several.write(groups.gather([*six, odd]), tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
    assert "<script" not in page and "{{" in Page(page).text


def test_wrong_folders_references_and_metrics_are_refused(six, tmp_path):
    for folders, more, expected in (
        ([six[0], six[0]], {}, coded("report.run-twice", six[0])),
        ([six[0], tmp_path], {}, coded("file.unreadable", tmp_path / "run.json")),
        (six, {"reference": "fp8-rov"}, coded("report.reference", "'fp8-rov'", "'fp8-row'")),
        (six, {"metric": "mcc"}, coded("report.metric", "'mcc'")),
    ):
        with raises(ConfigError, expected):
            groups.gather(folders, **more)
    assert main(["report", str(six[0]), "--margin=1%"]) == 2
    assert main(["report", str(six[0]), str(six[3]), "--margin=none"]) == 2


def study_of(folder: Path, **changes: Any) -> Path:
    facts = {
        "recipes": ["bf16", "fp8-row"],
        "seeds": [0, 1],
        "metric": "loss",
        "margin": "0.25%",
        **changes,
    }
    for recipe in facts["recipes"]:
        for seed in facts["seeds"]:
            write(folder / f"{recipe}-seed{seed}", recipe, seed)
    (folder / "study.json").write_text(json.dumps(facts))
    return folder


def test_a_study_is_named_by_its_folder(tmp_path, capsys):
    folder = study_of(
        tmp_path / "study",
        failed={"fp8-row-seed1": "no memory"},
        margins=["1%", "0.25%"],
        looks=[1, 2],
    )
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    text = visible(folder / "report.html")
    assert (
        "The margin was 1% when the study began" in text
        and "The run fp8-row-seed1 failed (no memory)" in text
    )
    assert main(["report", str(folder), "--metric=mcc"]) == 2


def test_the_verb_study_judges_run_folders_of_any_loop(six, tmp_path, capsys):
    """The verdict and the page are those of the same runs named to `report`, with the reference that is asked for."""
    words = [*map(str, reversed(six)), "--recipes=bf16", f"--output={tmp_path / 'out'}"]
    assert main(["study", *words]) == 0
    said = capsys.readouterr().out
    [verdict] = groups.gather(six, "bf16").verdicts()
    assert seeds_text.verdict(verdict).text("fp8-row") in said
    page = tmp_path / "out" / "report.html"
    expected = several.write_folders(six[::-1], tmp_path / "same.html", "bf16", "", "")
    assert page.read_bytes() == expected.read_bytes()
    other = write(tmp_path / "other", "int8", 0, facts={"parameters": 5})
    assert main(["study", *words, str(other)]) == 1
    assert "other is left out of the verdicts: 5 parameters" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["study", "report"])
def test_the_own_page_of_a_run_or_a_study_is_never_replaced(verb, tmp_path):
    study = study_of(tmp_path / "study")
    runs = [study / "bf16-seed0", study / "fp8-row-seed0"]
    for folder in (study, runs[1]):
        (folder / "report.html").write_text("own")
    end = "" if verb == "study" else "/report.html"
    for flags in ([], [f"--output={study}{end}"], [f"--output={runs[1]}{end}"]):
        cli_raises([verb, *map(str, runs), *flags], ConfigError, "report.other-page")
    assert {(folder / "report.html").read_text() for folder in (study, runs[1])} == {"own"}
    assert not (runs[0] / "report.html").exists()
    assert main([verb, *map(str, runs), f"--output={tmp_path / 'else'}{end}"]) == 0
    assert (tmp_path / "else/report.html").is_file()


@pytest.mark.parametrize(
    "name", ["config.toml", "weights.safetensors", "notes.html", "report.html"]
)
def test_a_file_that_is_no_page_of_ours_is_never_replaced(name, tmp_path):
    """Whatever its name; a page that was written here is written again."""
    study = study_of(tmp_path / "study")
    runs = [str(study / "bf16-seed0"), str(study / "fp8-row-seed0")]
    path = tmp_path / "other" / name
    path.parent.mkdir()
    path.write_text("mine")
    for sources in (runs, [str(study)]):
        cli_raises(["report", *sources, f"--output={path}"], ConfigError, "report.other-file", name)
    assert path.read_text() == "mine"
    path.unlink()
    for _ in range(2):
        assert main(["report", *runs, f"--output={path}"]) == 0


def test_flags_of_training_are_refused_for_run_folders(six, tmp_path):
    two = [str(six[0]), str(six[3])]
    for words, code, *more in (
        ([two[0]], "study.one-folder", "report"),
        ([two[0], str(tmp_path / "absent")], "study.sources", "absent"),
        ([*two, "--seeds=3"], "study.of-runs", "--seeds"),
        ([*two, "--training.steps=3"], "study.of-runs", "--training.steps"),
        ([*two, "--no-control"], "study.of-runs", "--no-control"),
        ([*two, "--recipes=bf16,fp8-row"], "study.of-runs", "reference"),
        ([*two, "--margin=none"], "study.margin"),
    ):
        cli_raises(["study", *words], ConfigError, code, *more)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"recipes": [], "seeds": [1], "metric": "loss", "margin": "1%"}']
)
def test_a_damaged_study_is_refused(tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        several.of_study(tmp_path)


def test_a_mean_line_ends_with_the_shortest_run_and_has_a_band_of_two():
    line = several_figures.mean_line(
        1, [[(1, 2.0), (2, 4.0), (3, 9.0)], [(1, 4.0), (2, float("nan")), (3, 5.0)]]
    )
    assert line.points == [(1, 3.0), (3, 7.0)] and line.half_widths[1] == pytest.approx(
        12.7062 * 1.0, rel=1e-4
    )
    assert several_figures.mean_line(0, [[(1, 2.0)]]).half_widths == {}


def test_limits_show_every_line_and_a_band_that_is_not_far_wider():
    lines = [
        several_figures.Line(0, [(1, 2.0), (2, 4.0)], {}),
        several_figures.Line(1, [(1, 3.0), (2, 3.0)], {1: 2.0, 2: 900.0}),
    ]
    low, high = several_figures.limits(lines, zero=False)
    assert -1.5 < low < 1.0 and 5.0 < high < 7.5
    assert several_figures.limits(lines, zero=True)[0] < 0.0


def test_the_differences_that_are_drawn_are_those_of_the_pairs(six, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        several_figures, "curves", lambda lines, *words, zero: drawn.extend(lines) or ""
    )
    found = groups.gather(six)
    assert len(list(several_curves.difference_figures(found))) == 1
    [line], [verdict] = drawn, found.verdicts()
    assert line.points[-1][1] == pytest.approx(statistics.fmean(verdict.differences))


def test_more_recipes_than_colours_are_drawn(tmp_path):
    folders = [write(tmp_path / f"r{place}", f"recipe-{place}", 0) for place in range(8)]
    assert several.write(groups.gather(folders), tmp_path / "page.html").stat().st_size > 20_000


def test_a_run_that_left_a_batch_out_is_judged_and_named(six, tmp_path):
    """The tokens of its steps are those of other batches from there on, which is said and is no reason against the pair."""
    run = write(tmp_path / "skipped", "fp8-row", 2, 0.001, facts={"left_out": [11]})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = [
        {**each, "tokens": 7} if each["event"] == "step" and each["step"] >= 11 else each
        for each in lines
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))
    found = groups.gather([*six[:5], run])
    assert [group.reason for group in found.groups] == ["", ""]
    text = visible(several.write(found, tmp_path / "page.html"))
    assert "1 pair of them did not see the same batches to the end" in text
    assert "seed 2: fp8-row left out batch 11 and bf16 left out none" in text
    assert "which saw the same batches but at seed 2, where one of the two left some out" in text
