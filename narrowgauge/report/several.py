"""Page on any number of runs: verdicts on recipes, curves with intervals over seeds, and costs.

    narrowgauge report A B C        run folders in any order; the reference is --reference, else the
                                    recipe of the first run
    narrowgauge report STUDY        a folder of `narrowgauge study`

Like the page of one run it is one file, readable offline, and the same for the same input. An
unfinished or failed run is drawn up to its last step. A branch (run.json names its parent) is drawn
from the step at which it left its parent.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import (
    compare,
    format_text,
    left_out,
    lineage,
    seeds,
    seeds_text,
    study_file,
)
from narrowgauge.diagnose.format_text import PERCENT, count
from narrowgauge.diagnose.paired_tests import half_width, spread_of
from narrowgauge.diagnose.seeds import Margin, SeedComparison
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL
from narrowgauge.diagnose.verdict import UNKNOWN, Verdict
from narrowgauge.errors import ConfigError
from narrowgauge.report.groups import Gathered, final, gather, seed_of

if TYPE_CHECKING:
    from narrowgauge.report.run_data import Recorded

try:
    from narrowgauge.report import cards, several_curves, several_figures, template
except ImportError as error:
    raise ConfigError(
        f"report: needs {error.name}. Install it: pip install jinja2 matplotlib scipy",
        code="report.missing-package",
    ) from error


def is_study(folder: Path) -> bool:
    return os.path.lexists(folder / study_file.NAME)


def of_study(folder: Path, margin: Margin | None = None) -> Gathered:
    """Runs of a study that have begun."""
    facts = facts_of(folder)
    names = [f"{recipe}-seed{seed}" for recipe in facts["recipes"] for seed in facts["seeds"]]
    # Folders of the study's runs are named recipe-seedN.
    names += [
        f"{POSITIVE_CONTROL}-seed{seed}" for seed in facts["seeds"] if facts.get("control", False)
    ]
    begun = [folder / name for name in names if (folder / name / "run.json").is_file()]
    if not begun:
        raise ConfigError(
            f"report: no run of the study {folder} has begun. Start it with narrowgauge study.",
            code="report.empty-study",
        )
    return gather(
        begun,
        metric=facts["metric"],
        margin=margin or Margin.parse(facts["margin"]),
        failed=facts.get("failed"),
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """Contents of study.json. Raises ConfigError if it is damaged."""
    return study_file.read(folder)


def write_folders(
    folders: Sequence[Path],
    path: Path | None = None,
    reference: str = "",
    metric: str = "",
    margin: str = "",
) -> Path:
    """Write the page on run folders, or on one study.

    path  file to write; default: beside the first run folder, or inside the study's folder
    """
    chosen = Margin.parse(margin) if margin else None
    if len(folders) == 1 and is_study(folders[0]):
        facts = facts_of(folders[0])
        if reference not in ("", facts["recipes"][0]) or metric not in ("", facts["metric"]):
            raise ConfigError(
                f"report: the study {folders[0]} has the reference {facts['recipes'][0]} and the metric {facts['metric']}. Leave "
                "them out, or name its runs one by one.",
                code="report.study-settings",
            )
        own = folders[0] / "report.html"
        if path is not None and path.resolve() != own.resolve():
            refuse_other_page(path)
        return write(of_study(folders[0], chosen), path or own, facts)
    path = path or folders[0].resolve().parent / "report.html"
    refuse_other_page(path)
    return write(gather(folders, reference, metric, chosen), path)


def refuse_other_page(path: Path) -> None:
    """Raises ConfigError if `path` is the own page of a run or a study, or a file that is no page of ours."""
    folder = path.resolve().parent
    is_run = os.path.lexists(folder / "run.json") or os.path.lexists(folder / "config.toml")
    if path.name == "report.html" and (is_run or is_study(folder)):
        raise ConfigError(
            f"output: {folder} is {'a run' if is_run else 'a study'}, and its report.html is its own page, which this one would replace. "
            "Name another place by --output.",
            code="report.other-page",
        )
    template.refuse_other_file(path)


def write(found: Gathered, path: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Write the page to `path` and return it. Raises StorageError if it cannot be written."""
    return template.write(path, "report/several.html.jinja", page(found, facts or {}))


def page(found: Gathered, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the template."""
    verdicts = found.verdicts()
    first = found.groups[0].runs[0]
    return {
        "found": found,
        "first": first,
        "facts": facts,
        "title": title(found),
        "notices": [notice(each) for each in verdicts] or [empty_notice(found)],
        "rows": rows(found, verdicts),
        "axis": several_figures.axis(*axis_of(verdicts)) if verdicts else "",
        "margin": margin_words(found, verdicts),
        "legend": [
            (place % len(several_figures.SERIES), group.name)
            for place, group in enumerate(found.groups)
        ],
        "figures": list(several_curves.figures(found)),
        "costs": costs(found),
        "runs": [run_row(found, each) for each in found.runs],
        "apart": found.apart,
        "unseen": unseen(found),
        "limits": list(limits(found, facts)),
        "unit": cards.unit(first),
    }


def unseen(found: Gathered) -> dict[str, Any]:
    """Facts that callbacks in other loops could not see, and in how many folders; {} if in none."""
    lists = [each.run["unseen"] for each in found.runs if each.run.get("unseen")]
    listed = list(dict.fromkeys(entry for each in lists for entry in each))
    return {"count": len(lists), "listed": listed} if lists else {}


def title(found: Gathered) -> str:
    seeds_seen = {seed_of(each) for each in found.runs}
    return f"{format_text.plural(len(found.groups), 'recipe')}, {format_text.plural(len(seeds_seen), 'seed')}"


# Verdicts


def notice(found: SeedComparison) -> dict[str, str]:
    return template.notice(
        seeds_text.verdict(found), found.runs.name, is_checked=not found.lacks_control
    )


def empty_notice(found: Gathered) -> dict[str, str]:
    """Notice for runs of the reference alone."""
    nothing = Verdict(
        outcome=UNKNOWN,
        heading=f"Nothing to judge against {found.groups[0].name}",
        sentence="No other recipe was trained on its batches.",
    )
    return template.notice(nothing)


def margin_words(found: Gathered, verdicts: Sequence[SeedComparison]) -> str:
    margin = next(
        (each.absolute_margin for each in verdicts if each.absolute_margin is not None), None
    )
    if margin is None:
        return ""
    share = (
        f", {100 * found.margin.value:g}{PERCENT} of the mean of {found.groups[0].name}"
        if found.margin.is_share
        else ""
    )
    return f"{seeds_text.number(margin, format_text.decimals(margin))}{share}"


def axis_of(verdicts: Sequence[SeedComparison]) -> tuple[tuple[float, float], float | None]:
    margin = next(
        (each.absolute_margin for each in verdicts if each.absolute_margin is not None), None
    )
    return several_figures.axis_limits(
        [each.differences for each in verdicts], [each.interval for each in verdicts], margin
    ), margin


def rows(found: Gathered, verdicts: Sequence[SeedComparison]) -> list[dict[str, Any]]:
    """Rows of the table of final values, one for each recipe."""
    by_name = {each.runs.name: each for each in verdicts}
    ends, margin = axis_of(verdicts)
    listed = []
    for place, group in enumerate(found.groups):
        runs, compared = found.runs_of(group), by_name.get(group.name)
        values = list(runs.finite.values())
        # Decimals that show two digits of the standard deviation over seeds.
        places = format_text.decimals(spread_of(values)) if len(values) > 1 else 4
        half = half_width(values)
        row = {
            "colour": place % len(several_figures.SERIES), "name": group.name, "finished": f"{len(values)} of {len(group.runs)}",
            "mean": seeds_text.number(statistics.fmean(values), places) if values else "–",
            "half": f"± {half:.{places}f}" if half is not None else "", "reason": group.reason, "difference": "", "interval": "",
            "figure": "", "inside": "", "verdict": "reference" if not place else "", "kind": "",
        }  # fmt: skip
        if compared is not None and compared.mean is not None:
            digits = format_text.decimals(compared.half_width or compared.mean)
            interval = compared.interval
            row |= {
                "difference": format_text.signed(compared.mean, digits),
                "interval": " to ".join(format_text.signed(end, digits) for end in interval)
                if interval
                else "",
                "figure": several_figures.strip(
                    str(place), place, compared.differences, interval, margin, ends
                ),
                "inside": f"{compared.inside_count} of {len(values)}"
                if compared.inside is not None
                else "",
            }
        if compared is not None:
            row |= {"verdict": seeds_text.heading(compared), "kind": notice(compared)["kind"]}
        elif group is found.control:
            row |= control_row(found, verdicts)
        listed.append(row)
    return listed


def control_row(found: Gathered, verdicts: Sequence[SeedComparison]) -> dict[str, str]:
    """Table cells of the positive control: its difference, and whether the study detected it."""
    control = next((each.assay.control for each in verdicts), None)
    if control is None or control.harm is None:
        return {"verdict": "positive control"}
    sign = seeds.sign_of(found.metric)
    return {
        "difference": format_text.signed(sign * control.harm, format_text.decimals(control.harm)),
        "verdict": f"positive control, {'seen' if control.told else 'not seen'}",
    }


def limits(found: Gathered, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the limits of the verdicts."""
    verdicts = found.verdicts()
    yield from lineage.unequal_coverage({group.name: group.runs[0].run for group in found.groups})
    yield from sensitivity_words(found, verdicts)
    if any(len(each.seeds) > 1 for each in verdicts):
        yield (
            "A seed changes first weights, order of the data and stochastic rounding; data and evaluation are the same for all. So "
            "intervals and verdicts are of seeds, and say nothing of other data, larger models or longer training."
        )
    if len(verdicts) > 1 and any(each.holds_together is not None for each in verdicts):
        lost = [each.runs.name for each in verdicts if each.holds_together is False]
        holds = (
            f"the verdicts on {', '.join(lost)} do not hold then"
            if lost
            else "every verdict holds then as well"
        )
        yield (
            f"Each verdict errs in 5{PERCENT} of studies at most, by itself: no correction for {len(verdicts)} recipes is in it. With "
            f"Holm’s correction for all of them together, {holds}."
        )
    for name, why in facts.get("failed", {}).items():
        yield f"The run {name} failed ({why}), and is in no verdict."
    if len(margins := facts.get("margins", [])) > 1:
        yield f"The margin was {margins[0]} when the study began, and {margins[-1]} later: one that is chosen after the runs proves less."
    if len(looks := facts.get("looks", [])) > 1:
        yield (
            f"Seeds were added after a look at the results ({', then '.join(map(str, looks))}): who adds seeds until a verdict pleases "
            f"errs more often than in 5{PERCENT}."
        )


def sensitivity_words(found: Gathered, verdicts: Sequence[SeedComparison]) -> Iterator[str]:
    """Yield one sentence on the reference's progress and its controls, which all verdicts share."""
    if not verdicts:
        return
    name, assay = found.groups[0].name, verdicts[0].assay
    if assay.progress is None:
        return
    trivial = (
        f"{assay.predictor}: {assay.trivial:.4f}"
        if assay.trivial is not None
        else "trivial predictor: not known"
    )
    control = "positive control: none" if assay.control is None else ""
    if assay.control is not None and assay.control.harm is not None:
        harm = assay.control.harm
        control = (
            f"positive control: worse by {seeds_text.number(harm, format_text.decimals(harm))}"
        )
    yield (
        f"Could these runs have seen a difference? The training loss of {name} went from {assay.progress.first:.4f} to "
        f"{assay.progress.last:.4f}, of which {assay.progress.shown:.4f} is shown; {'; '.join(filter(None, (trivial, control)))}."
    )


# Costs and runs


def costs(found: Gathered) -> list[dict[str, str]]:
    """Speed and memory of each recipe: medians over its runs, and ratios to the reference.

    half  first and third quartile of the speed of all steps
    """
    listed: list[dict[str, str]] = []
    first: dict[str, float | None] = {}
    for place, group in enumerate(found.groups):
        row = {"colour": str(place % len(several_figures.SERIES)), "name": group.name}
        for key, of, show in (
            ("speed", compare.tokens_per_s, count),
            ("peak", compare.peak_bytes, format_text.size),
        ):
            values = [value for each in group.runs if (value := of(each.events)) is not None]
            median = statistics.median(values) if values else None
            # The first group is the reference, so its median is stored for the ratios of the
            # others.
            whole = first.setdefault(key, median)
            row[key] = show(median) if median is not None else "–"
            row[f"{key}_ratio"] = f"{median / whole:.2f}" if median and whole else ""
        middle = compare.speed_quartiles(*(each.events for each in group.runs))
        row["half"] = f"{count(round(middle[0]))} to {count(round(middle[1]))}" if middle else "–"
        row["device"] = ", ".join(
            dict.fromkeys(str(each.run.get("device", "?")) for each in group.runs)
        )
        listed.append(row)
    return listed


def run_row(found: Gathered, recorded: Recorded) -> dict[str, str]:
    value, why = final(recorded, found.metric)
    known = found.failed.get(recorded.folder.name)
    parent = recorded.run.get("parent") or {}
    branch = (
        f"branch of {parent.get('run', '?')} from step {count(parent.get('step', '?'))}"
        if parent
        else ""
    )
    skipped = left_out.words("", recorded.left_out).strip() if recorded.left_out else ""
    wide = (recorded.of("eval") or [{}])[-1].get("wide", {}).get(found.metric)
    return {
        "wide": seeds_text.number(wide, 4) if wide is not None and not why else "–",
        "name": recorded.folder.name, "recipe": recorded.name, "seed": str(seed_of(recorded)), "steps": count(recorded.last_step),
        "value": seeds_text.number(value, 4) if not why else "–", "note": "; ".join(filter(None, [known or why, branch, skipped])),
    }  # fmt: skip
