"""Assay sensitivity: runs that could not have shown a difference are never called equivalent (exact, over made-up run folders).

CANNOT_TELL names designs, as folders of runs whose recipe is next to its reference everywhere. Each is judged by all readers:
`narrowgauge report` and `study` (one code), `compare`, the page of one run, and the guard. Designs that can tell keep the verdict
that the t tests alone give them: committed results and made-up ones.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from narrowgauge import recipes
from narrowgauge.cli import main
from narrowgauge.diagnose import lineage, seeds, seeds_text, sensitivity
from narrowgauge.diagnose.runs import encode
from narrowgauge.diagnose.seeds import Runs, judge
from narrowgauge.diagnose.sensitivity import NOT_LEARNT, POSITIVE_CONTROL
from narrowgauge.diagnose.verdict import EQUIVALENT
from narrowgauge.lab.guard import check
from narrowgauge.lab.guard.evidence import Evidence
from tests.selection import quick

GREEN = {seeds.EQUIVALENT, seeds.NOT_WORSE, seeds.IDENTICAL, seeds.BETTER}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Curve = Callable[[int, random.Random], float]  # training loss of a step, from 1


@dataclass(frozen=True, kw_only=True)
class Design:
    """One study of four seeds. Values are of the last evaluation, a seed each; None: there was none.

    gap      of the recipe, over the seeds
    control  how much worse the positive control is; None: no runs of it
    alone    whether one pair of runs shows the flaw as well, as compare and the guard see it
    """

    steps: int = 120
    curve: Curve = lambda step, draw: 3.0 + 4.6 * math.exp(-step / 10) + draw.gauss(0, 0.05)
    values: tuple[float | None, ...] = (3.10, 3.13, 3.08, 3.11)
    gap: tuple[float, ...] = (0.0002, -0.0001, 0.0001, -0.0003)
    control: float | None = 0.5
    metric: str = "loss"
    task: str = "text"
    trivial: dict[str, Any] = field(
        default_factory=lambda: {"predictor": "token frequencies", "loss": 5.0}
    )
    targets: int = 20_000
    ended: str = "finished"
    logs_steps: bool = True
    alone: bool = True


def flat(level: float, noise: float, slope: float = 0.0) -> Curve:
    return lambda step, draw: level + slope * step + draw.gauss(0, noise)


ACCURATE = {"predictor": "class frequencies", "loss": 0.69, "accuracy": 0.5}
CLASSES = {"task": "classification", "metric": "accuracy", "trivial": ACCURATE, "alone": False}
CANNOT_TELL = {
    "three steps at 1e-6": Design(steps=3, curve=flat(7.6, 0.003), values=(7.601, 7.603, 7.602, 7.6)),
    "one step": Design(steps=1),
    "two steps": Design(steps=2),
    "a frozen model": Design(curve=flat(7.6, 0.01), values=(7.601, 7.603, 7.602, 7.6), control=0.0),
    "a learning rate of zero": Design(curve=flat(7.6, 0.01), gap=(0.0,) * 4, control=0.0),
    "a rising loss": Design(curve=flat(3.0, 0.02, 0.01)),
    "a loss that swings": Design(curve=lambda step, draw: 3.0 + math.sin(step / 3) + draw.gauss(0, 0.1)),
    "a pretrained model that hardly moves": Design(curve=flat(3.1, 0.2, -0.0001)),
    "hardly learnt, and half of it lost": Design(
        curve=flat(4.01, 0.0005, -1e-4), values=(4.0, 4.01, 3.99, 4.0), gap=(0.006, 0.0061, 0.0059, 0.006), alone=False
    ),
    "noise: no better than token frequencies": Design(values=(5.01, 5.02, 5.0, 5.01)),
    "worse than token frequencies": Design(values=(5.8, 5.9, 5.7, 5.8)),
    "token frequencies of an older folder": Design(values=(5.8, 5.9, 5.7, 5.8), trivial={}),
    "constant labels": Design(values=(1.0, 1.0, 0.99, 1.0), **{**CLASSES, "trivial": {**ACCURATE, "accuracy": 1.0}}),
    "the largest class": Design(values=(0.50, 0.51, 0.49, 0.50), **CLASSES),
    "no better than the mean": Design(
        task="regression", trivial={"predictor": "means", "loss": 1.0}, values=(1.0, 1.1, 0.99, 1.02)
    ),
    "a score at its ceiling": Design(values=(1.0,) * 4, gap=(0.0,) * 4, **CLASSES),
    "an evaluation of one batch": Design(targets=32, alone=False),
    "an accuracy over twenty examples": Design(values=(0.9, 0.95, 0.9, 0.85), targets=20, **CLASSES),
    "seeds with the same result": Design(values=(3.1,) * 4, alone=False),
    "a reference that diverged": Design(values=(3.10, 3.13, 3.08, math.nan), alone=False),
    "not a number at every step": Design(curve=lambda step, draw: math.nan, values=(math.nan,) * 4),
    "evaluations that are missing": Design(values=(None,) * 4, alone=False),
    "steps that are missing": Design(logs_steps=False),
    "a control that is not seen": Design(control=0.0001, alone=False),
    "a control that never finished": Design(control=math.nan, ended="interrupted", alone=False),
    "runs that are unfinished": Design(ended="interrupted", alone=False),
}  # fmt: skip


def write(folder: Path, design: Design, recipe: str, seed: int, extra: float, **facts: Any) -> Path:
    """A run whose losses and value are `extra` above the reference's of that seed."""
    folder.mkdir(parents=True)
    data = (
        {"source": "text", "unigram_entropy": 5.0} if design.task == "text" else {"source": "text"}
    )
    run = {
        "recipe": recipe,
        "seed": seed,
        "parameters": 10,
        "steps": design.steps,
        "tokens_per_step": 8,
        "data": data,
    }
    run |= (
        {"task": design.task, "started_at": "then"}
        | ({"trivial": design.trivial} if design.trivial else {})
        | facts
    )
    (folder / "run.json").write_text(json.dumps(run))
    draw = random.Random(seed)
    losses = [design.curve(step, draw) + extra for step in range(1, design.steps + 1)]
    events = [
        {"event": "step", "step": step, "loss": loss, "tokens": 8}
        for step, loss in enumerate(losses, 1)
    ]
    events = events if design.logs_steps else []
    value, sign = design.values[seed], 1 if design.metric == "loss" else -1
    if value is not None:
        found = {design.metric: value + sign * extra}
        if design.metric == "accuracy":
            found["accuracy"] = min(max(found["accuracy"], 0.0), 1.0)
        loss = found.get("loss", losses[-1])
        events.append(
            {"event": "eval", "step": design.steps, "tokens": design.targets, "loss": loss, **found}
        )
    reason = "nonfinite" if value is not None and math.isnan(value) else design.ended
    code = {"nonfinite": 5, "interrupted": 130}.get(reason, 0)
    events.append({"event": "done", "step": design.steps, "reason": reason, "exit_code": code})
    (folder / "metrics.jsonl").write_text("".join(encode(event) + "\n" for event in events))
    return folder


def study(root: Path, design: Design) -> list[Path]:
    folders = []
    for seed in range(len(design.values)):
        folders.append(write(root / f"bf16-{seed}", design, "bf16", seed, 0.0))
        folders.append(
            write(root / f"narrow-{seed}", design, "int4-minmax-sr", seed, design.gap[seed])
        )
        if design.control is not None:
            harm = design.control * (1 + 0.05 * seed)  # some spread: without any there is no t test
            folders.append(write(root / f"control-{seed}", design, POSITIVE_CONTROL, seed, harm))
    return folders


def test_the_design_that_all_others_spoil_can_tell(tmp_path):
    """So what they show is their own flaw."""
    pytest.importorskip("jinja2")
    from narrowgauge.report import several
    from narrowgauge.report.groups import gather

    found = gather(study(tmp_path, Design()))
    [verdict] = found.verdicts()
    assert (
        verdict.name == seeds.EQUIVALENT
        and verdict.assay.control.told
        and several.notice(verdict)["kind"] == "same"
    )
    alone = gather([folder for folder in study(tmp_path / "alone", Design(control=None))])
    [verdict] = alone.verdicts()
    assert verdict.name == seeds.EQUIVALENT and several.notice(verdict)["kind"] == "open"
    assert verdict.lacks_control
    assert seeds_text.heading(verdict) in several.notice(verdict)["heading"]


FLAWS = {
    "three steps at 1e-6": "progress", "one step": "progress", "a frozen model": "progress", "a rising loss": "progress",
    "a pretrained model that hardly moves": "progress", "noise: no better than token frequencies": "trivial",
    "token frequencies of an older folder": "trivial", "constant labels": "trivial", "the largest class": "trivial",
    "no better than the mean": "trivial", "an evaluation of one batch": "evaluation",
    "an accuracy over twenty examples": "evaluation", "seeds with the same result": "seeds",
    "a score at its ceiling": "seeds", "a reference that diverged": "divergence", "a control that is not seen": "control",
    "steps that are missing": "progress", "a learning rate of zero": "control",
}  # fmt: skip


@pytest.mark.parametrize("name", FLAWS)
def test_each_flaw_is_found_as_what_it_is(name, tmp_path):
    from narrowgauge.report.groups import gather

    design = CANNOT_TELL[name]
    [verdict] = gather(study(tmp_path, design), metric=design.metric).verdicts()
    assert FLAWS[name] in [kind for kind, _ in verdict.assay.flaws]


# One for each kind of flaw; `make test-slow` judges all of them.
OF_EACH_KIND = [
    "one step",
    "constant labels",
    "an evaluation of one batch",
    "seeds with the same result",
    "a reference that diverged",
    "a control that is not seen",
]
ALONE = [name for name, design in CANNOT_TELL.items() if design.alone]


@pytest.fixture(params=quick(OF_EACH_KIND, CANNOT_TELL))
def design(request):
    return CANNOT_TELL[request.param]


def test_no_study_or_report_that_cannot_tell_is_green(design, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from narrowgauge.report import several
    from narrowgauge.report.groups import gather

    found = gather(
        study(tmp_path, design), metric=design.metric if design.values[0] is not None else ""
    )
    [verdict] = found.verdicts()
    assert verdict.name not in GREEN and verdict.outcome in (seeds.UNKNOWN, seeds.WORSE)
    assert verdict.numbers()["outcome"] == verdict.outcome
    assert not verdict.assay.is_sensitive or verdict.name != seeds.EQUIVALENT
    assert several.notice(verdict)["kind"] in ("warn", "bad")
    page = several.write(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'class="notice same"' not in page and 'class="verdict same"' not in page
    if verdict.is_insensitive:
        assert NOT_LEARNT in seeds_text.heading(verdict) and NOT_LEARNT in page
        assert seeds_text.sentences(verdict).rstrip().endswith(".") and verdict.assay.flaws


@pytest.mark.parametrize("name", quick([n for n in OF_EACH_KIND if n in ALONE], ALONE))
def test_no_pair_that_cannot_tell_is_called_the_same(name, tmp_path, capsys):
    """By `compare`, with a control of the order of sums, and on the page of a run with its reference."""
    pytest.importorskip("jinja2")
    from narrowgauge.report import page

    design = CANNOT_TELL[name]
    changes = {"micro_batches": ["1", "2"]}
    link = {
        "run": "../wide",
        "from": "wide@0",
        "step": 0,
        "started_at": "then",
        "fingerprint": "f",
        "changes": changes,
        "carried": [],
    }
    narrow = write(tmp_path / "narrow", design, "int4-minmax-sr", 0, 0.0002)
    wide = write(tmp_path / "wide", design, "bf16", 0, 0.0)
    control = write(
        tmp_path / "control", design, "bf16", 0, 0.0005, parent=link, started_at="later"
    )
    code = main(["compare", *map(str, (narrow, wide, control))])
    said = capsys.readouterr().out
    judged = lineage.compare([narrow, wide, control]).judged
    assert judged and all(
        each.curve.outcome != EQUIVALENT or not math.isfinite(each.curve.loss) for each in judged
    )
    assert all(each.verdicts[0].sentence in said for each in judged)
    is_lost = math.isnan(design.curve(1, random.Random(0))) or not design.logs_steps
    assert code == (0 if is_lost else 11) and (is_lost or NOT_LEARNT in said)
    write(narrow / "compare-bf16", design, "bf16", 0, 0.0)
    assert 'class="notice same"' not in page.write(narrow).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", quick([n for n in OF_EACH_KIND if n in ALONE], ALONE))
def test_no_run_that_cannot_tell_is_certified_by_its_guard(name):
    design, draw = CANNOT_TELL[name], random.Random(0)
    steps = max(design.steps, 40)
    curve = [design.curve(min(step, design.steps), draw) for step in range(1, steps + 1)]
    if design.values[0] is not None and design.values[0] > 4.9:
        curve = [
            loss + 2.5 for loss in curve
        ]  # so that it ends above the trivial predictor, as the values do
    if design.task == "regression" or not design.logs_steps:
        curve = [curve[-1]] * steps
    assert all(
        verdict.outcome != EQUIVALENT for verdict in guarded(curve, design.trivial.get("loss", 5.0))
    )


def guarded(curve: list[float], trivial: float | None, checks: int = 12, gap: float = 0.0001):
    """Verdicts of checks of 20 steps, all at the end of a run; the narrow losses are `gap` above."""
    evidence = Evidence()
    evidence.first, evidence.trivial = curve[: sensitivity.ENDS], trivial
    wide = curve[-20:]
    narrow = [loss + gap for loss in wide]
    found = []
    for number in range(checks):
        control = [loss - gap for loss in wide] if number % 4 == 0 else None
        found.append(check.judged(evidence, 100 * number, 20, narrow, wide, control)[0])
    return found


def test_a_run_that_has_learnt_is_certified():
    """And its state keeps the first losses."""
    draw = random.Random(0)
    curve = [Design().curve(step, draw) for step in range(1, 121)]
    verdicts = guarded(curve, 5.0)
    assert verdicts[-1].outcome == EQUIVALENT and verdicts[-1].certified == verdicts[-1].margin
    evidence = Evidence()
    evidence.first = curve[:16]
    other = Evidence()
    other.load_state_dict(json.loads(encode(evidence.state_dict())))
    assert other.first == curve[:16]


def test_a_guarded_run_that_hardly_moves_says_why():
    verdict = guarded([3.0 + 0.01 * (step % 2) for step in range(60)], None)[-1]
    assert verdict.verdict.is_insensitive and verdict.learnt < 5e-5
    assert "0.0000 nats" in verdict.sentence


# Designs that can tell


def as_before(verdict: seeds.SeedComparison) -> str:
    """The name that the t tests alone give, with the margin that was asked for."""
    harm = [verdict.sign * each for each in verdict.differences]
    margin = verdict.margin.of(
        sum(verdict.reference.values[seed] for seed in verdict.seeds) / len(verdict.seeds)
    )
    relief = [-each for each in harm]
    shown = {
        seeds.WORSE: seeds.p_above(harm, margin), seeds.BETTER: seeds.p_above(relief, margin),
        seeds.EQUIVALENT: seeds.p_equivalent(harm, margin), seeds.NOT_WORSE: seeds.p_above(relief, -margin),
    }  # fmt: skip
    return next((name for name, p in shown.items() if p < seeds.ALPHA), seeds.UNKNOWN)


def learnt(first: float, last: float, steps: int = 200) -> list[float]:
    return [last + (first - last) * math.exp(-step / 20) for step in range(steps)]


def committed() -> list[tuple[str, Runs, Runs]]:
    """Of benchmarks/results: runs of one recipe and of bf16, with curves from ln(vocabulary) to where they ended."""
    found = []
    rows = [json.loads(line) for line in (RESULTS / "convergence.jsonl").read_text().splitlines()]
    wide = {row["data"]: row["losses"] for row in rows if row["recipe"] == "bf16"}
    pairs = [
        (f"{row['recipe']} on {row['data']}", row["losses"], wide[row["data"]])
        for row in rows
        if row["recipe"] != "bf16"
    ]
    for line in (RESULTS / "study_translation.jsonl").read_text().splitlines():
        row = json.loads(line)
        pairs.append(
            (
                f"{row['recipe']}, translated",
                *(dict(enumerate(row[key])) for key in ("values", "reference_values")),
            )
        )
    for name, ours, theirs in pairs:
        narrow = Runs(name=name, values={int(seed): value for seed, value in ours.items()})
        values = {int(seed): value for seed, value in theirs.items()}
        curves = {seed: learnt(math.log(1000), value) for seed, value in values.items()}
        trivial = {"predictor": "token frequencies", "loss": 5.9}
        found.append(
            (
                name,
                narrow,
                Runs(name="bf16", values=values, curves=curves, trivial=trivial, targets=30_000),
            )
        )
    return found


def made() -> list[tuple[str, Runs, Runs]]:
    """Every kind of verdict, of losses and scores."""
    draw, found = random.Random(3), []
    for metric, level, moves in (
        ("loss", 3.0, (0.0, 0.05, -0.05, 0.004)),
        ("accuracy", 0.9, (0.0, -0.05, 0.05, 0.006)),
    ):
        for by in moves:
            values = {seed: level + draw.gauss(0, 0.02) for seed in range(5)}
            narrow = {seed: value + by + draw.gauss(0, 0.002) for seed, value in values.items()}
            trivial = {"predictor": "class frequencies", "accuracy": 0.5, "loss": 4.0}
            wide = Runs(
                name="bf16",
                values=values,
                curves={seed: learnt(6.0, 2.0) for seed in values},
                trivial=trivial,
                targets=5000,
            )
            found.append((metric, Runs(name=f"{metric} {by:+g}", values=narrow), wide))
    return found


CAN_TELL = [("loss", narrow, wide) for _, narrow, wide in committed()] + made()


def test_there_are_twenty_designs_of_each_sort():
    assert len(CANNOT_TELL) >= 20 and len(CAN_TELL) >= 20
    names = {judge(narrow, wide, metric).name for metric, narrow, wide in CAN_TELL}
    assert (
        names == {seeds.WORSE, seeds.BETTER, seeds.EQUIVALENT, seeds.NOT_WORSE, seeds.UNKNOWN}
        or len(names) >= 4
    )


@pytest.mark.parametrize(
    ("metric", "narrow", "wide"), CAN_TELL, ids=[narrow.name for _, narrow, _ in CAN_TELL]
)
def test_runs_that_can_tell_keep_their_verdict(metric, narrow, wide):
    """With a positive control that is seen, and without one, which the heading then says."""
    lost = 0.5 if metric == "loss" else -0.3
    bad = Runs(
        name=POSITIVE_CONTROL,
        values={seed: value + lost + 0.01 * seed for seed, value in wide.values.items()},
    )
    verdict = judge(narrow, wide, metric, control=bad)
    assert (
        verdict.assay.is_sensitive and verdict.assay.control.told and not verdict.assay.is_narrowed
    )
    assert verdict.name == as_before(verdict)
    alone = judge(narrow, wide, metric)
    assert alone.name == verdict.name
    assert alone.lacks_control == (alone.name in (seeds.EQUIVALENT, seeds.NOT_WORSE))
    assert not verdict.lacks_control
    assert (seeds_text.heading(alone) != seeds_text.heading(verdict)) == alone.lacks_control


# The rule


def test_the_margin_is_a_share_of_what_was_learnt_where_that_is_smaller():
    """4.10 to 4.00: 0.25 % of the loss is 0.01, a tenth of what was learnt; the margin is half of that."""
    values = {seed: 4.0 + 0.001 * seed for seed in range(4)}
    wide = Runs(name="bf16", values=values, curves={seed: learnt(4.1, 4.0) for seed in values})
    narrow = Runs(
        name="fp8",
        values={seed: value + 0.007 + 0.0001 * (seed % 2) for seed, value in values.items()},
    )
    verdict = judge(narrow, wide, "loss")
    shown = verdict.assay.progress.shown
    assert 0.04 < shown < 0.1 and verdict.absolute_margin == pytest.approx(
        sensitivity.SHARE * shown
    )
    assert verdict.name == seeds.WORSE and as_before(verdict) == seeds.EQUIVALENT
    assert "of what bf16 learnt; 0.0100 was asked for" in seeds_text.sentences(verdict)


def test_the_progress_that_is_shown_is_less_by_the_error_of_both_ends():
    """By hand: five differences of neighbours give the variance of a step, and t with 5 degrees."""
    found = sensitivity.progress_between([4.0, 4.2, 3.9, 4.1], [1.0, 1.2, 1.1])
    scatter = (0.2**2 + 0.3**2 + 0.2**2 + 0.2**2 + 0.1**2) / (2 * 5)
    error = math.sqrt(scatter * (1 / 4 + 1 / 3))
    assert (found.first, found.last) == pytest.approx((4.05, 1.1))
    assert found.shown == pytest.approx(4.05 - 1.1 - 2.5706 * error, abs=1e-3)


@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_no_progress_is_shown_of_losses_that_only_scatter(noise):
    """2,000 runs of 40 steps: more than zero in 2.5 % at most, with four standard errors for chance, 1.4 %."""
    draw = random.Random(1)
    curves = [[3.0 + draw.gauss(0, noise) for _ in range(40)] for _ in range(2000)]
    shown = sum(sensitivity.progress_of([curve]).shown > 0 for curve in curves)
    assert shown / 2000 <= 0.025 + 0.014


def test_progress_is_not_more_than_it_was():
    for curve in (learnt(7.6, 3.0), learnt(7.6, 3.0, steps=4), [5.0, 4.0, 3.0]):
        found = sensitivity.progress_of([curve])
        assert 0 <= found.shown <= found.first - found.last <= curve[0] - curve[-1] + 1e-12
    assert sensitivity.progress_of([learnt(7.6, 3.0)]).shown > 3.0
    assert (
        sensitivity.progress_of([[3.0, 2.0]]) is None
        and sensitivity.progress_of([[3.0, math.nan, 1.0]]) is None
    )


def test_a_recipe_that_is_worse_is_worse_whatever_the_reference_learnt():
    """By the margin that was asked for: a smaller one would call rounding a harm."""
    values = {seed: 7.6 + 0.001 * seed for seed in range(4)}
    wide = Runs(name="bf16", values=values, curves={seed: [7.6, 7.6, 7.6] for seed in values})
    for by, name in ((0.5, seeds.WORSE), (0.001, seeds.UNKNOWN), (-0.5, seeds.UNKNOWN)):
        narrow = Runs(
            name="sick", values={seed: value + by + 0.0001 * seed for seed, value in values.items()}
        )
        assert judge(narrow, wide, "loss").name == name


def test_the_positive_control_is_a_recipe_that_no_list_offers():
    recipe = recipes.get(POSITIVE_CONTROL)
    assert (
        recipe is recipes.POSITIVE_CONTROL
        and recipe.name == POSITIVE_CONTROL not in recipes.names()
    )
    assert recipe.output == recipes.BF16.output  # what is evaluated has the numbers of bf16
