"""Any number of runs, sorted for one page: by recipe, one run a seed; what cannot be compared apart; and the verdict on each recipe.

Runs can be compared if data, task and model are the same. They are judged, in pairs of one seed, if their batches are the same too: steps
and tokens of a step, but for what a run left out at a loss spike, which the verdict names. The reference is the recipe that is named,
else that of the first run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import format_text, seeds
from narrowgauge.diagnose.left_out import other_steps
from narrowgauge.diagnose.seeds import NOT_FINITE, Margin, Runs, Verdict
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL, trivial_of
from narrowgauge.errors import ConfigError, closest
from narrowgauge.report.run_data import Recorded, last_done, read_alone

NO_METRICS = {"event", "step", "tokens", "elapsed_s"}
NAME = re.compile(r"[A-Za-z][\w@.-]{0,40}")
UNFINISHED = "unfinished"
SECTIONS = ("model", "data", "task", "precision", "training")  # of config.toml, whose settings make a run another one
NOT_NAMED = {  # embedding_codes: the name of a recipe has them
    "recipe", "seed", "steps", "epochs", "device", "threads", "compile", "keep_freed", "micro_batches", "cache", "checkpointing",
    "cuda_graph", "parallel", "schedule", "guard", "switch", "save", "from", "embedding_codes",
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, by seed."""

    name: str
    runs: tuple[Recorded, ...]
    reason: str = ""  # why it is not judged against the reference


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What a page of several runs is about. The first group is the reference."""

    groups: tuple[Group, ...]
    apart: tuple[tuple[Recorded, str], ...]  # runs that cannot be compared, with reasons
    metric: str
    margin: Margin
    failed: Mapping[str, str] = field(default_factory=dict)  # folder's name -> why it did not finish, as a study knows

    @property
    def runs(self) -> list[Recorded]:
        return [each for group in self.groups for each in group.runs]

    @property
    def control(self) -> Group | None:
        """The runs of the positive control, on the reference's batches; None if none was trained."""
        return next((each for each in self.groups[1:] if is_control(each) and not each.reason), None)

    def runs_of(self, group: Group) -> Runs:
        values, failed = {}, {}
        for each in group.runs:
            value, why = final(each, self.metric)
            if why:
                failed[seed_of(each)] = self.failed.get(each.folder.name, why)
            else:
                values[seed_of(each)] = value
        left_out = {seed_of(each): each.left_out for each in group.runs}
        curves = {seed_of(each): [step["loss"] for step in each.of("step")] for each in group.runs}
        targets = [each.of("eval")[-1].get("tokens") for each in group.runs if each.of("eval")]
        return Runs(
            name=group.name, values=values, failed=failed, left_out=left_out, curves=curves,
            trivial=trivial_of(group.runs[0].run), targets=min(filter(None, targets), default=None),
        )  # fmt: skip

    def verdicts(self) -> list[Verdict]:
        """On every group but the reference and the positive control, whose batches are the reference's."""
        judged = [self.runs_of(group) for group in self.groups if not group.reason and group is not self.control]
        control = self.runs_of(self.control) if self.control is not None else None
        return seeds.judge_all(judged, self.metric, self.margin, control)


def is_control(group: Group) -> bool:
    """Whether these are runs of the positive control, with the settings of the reference."""
    return group.name == POSITIVE_CONTROL


def seed_of(recorded: Recorded) -> int:
    return int(recorded.run.get("seed", 0))


def final(recorded: Recorded, metric: str) -> tuple[float, str]:
    """(the metric of the last evaluation, '') of a finished run, else (NaN, why there is none)."""
    done = last_done(recorded)
    if done is not None and done["reason"] == "nonfinite":
        return math.nan, NOT_FINITE
    if done is None or done["reason"] != "finished":
        return math.nan, f"{UNFINISHED}, at step {format_text.count(recorded.last_step)}"
    last = recorded.of("eval")[-1:]
    if not last or metric not in last[0]:
        return math.nan, f"no {metric} was measured"
    return float(last[0][metric]), ""


def metrics_of(runs: Sequence[Recorded]) -> list[str]:
    """Names of what the evaluations of all runs measured that had one yet, the loss first."""
    measured = [
        {key for event in found for key, value in event.items() if isinstance(value, float) and NAME.fullmatch(key)}
        for each in runs
        if (found := each.of("eval"))
    ]
    common = set.intersection(*measured) - NO_METRICS if measured else set()
    return sorted(common, key=lambda name: (name != "loss", name))


def gather(
    folders: Sequence[Path],
    reference: str = "",
    metric: str = "",
    margin: Margin | None = None,
    failed: Mapping[str, str] | None = None,
) -> Gathered:
    """Reads run folders. ConfigError for one that is named twice, or is none, and for a reference or metric that no run has."""
    resolved = [folder.resolve() for folder in folders]
    if twice := next((folder for folder in folders if resolved.count(folder.resolve()) > 1), None):
        raise ConfigError(f"report: {twice} is named twice. Name each run once.")
    runs = [read_alone(folder) for folder in folders]
    names = list(dict.fromkeys(each.name for each in runs))
    if reference and reference not in names:
        near = closest(reference, names, limit=1) or ", ".join(names)
        raise ConfigError(f"reference = {reference!r}: no run has this recipe. There are: {near}.")
    wanted = (each for each in runs if each.name == reference or (not reference and each.name != POSITIVE_CONTROL))
    first = next(wanted, runs[0])
    apart = [(each, why) for each in runs if (why := differences(identity(first), identity(each)))]
    kept = [each for each in runs if not differences(identity(first), identity(each))]
    groups = sorted(grouped(kept, first), key=lambda group: first not in group.runs)  # stable: the reference first
    known = metrics_of(kept)
    chosen = metric or default_metric(first, known)
    if chosen not in known and any(each.of("eval") for each in kept):
        near = closest(chosen, known, limit=1) or ", ".join(known)
        raise ConfigError(f"metric = {chosen!r}: not every run measured it. There are: {near}.")
    return Gathered(
        groups=tuple(groups),
        apart=tuple(apart),
        metric=chosen,
        margin=margin or Margin.usual(chosen),
        failed=failed or {},
    )


def default_metric(recorded: Recorded, known: Sequence[str]) -> str:
    """The one that chose the best weights, if all runs have it; else the loss."""
    best = str(recorded.run.get("best") or "")
    return best if best in known else "loss"


def grouped(runs: Sequence[Recorded], first: Recorded) -> list[Group]:
    """By recipe, other settings, the step that a branch left its parent at, and batches; twins of one seed each by its folder."""
    theirs = {seed_of(each): each for each in runs if name_of(each, first) == name_of(first, first)}
    found: dict[tuple[str, str], list[Recorded]] = {}
    for each in runs:
        reason = differences(batches(first), batches(each)) or other_tokens(each, theirs.get(seed_of(each)))
        found.setdefault((name_of(each, first), reason), []).append(each)
    names = [name for name, _ in found]
    groups = []
    for (name, reason), members in found.items():
        listed = sorted(members, key=seed_of)
        label = f"{name}, {reason}" if reason and names.count(name) > 1 else name
        if len({seed_of(each) for each in listed}) == len(listed):
            groups.append(Group(label, tuple(listed), reason))
        else:
            groups += [Group(f"{label} ({each.folder.name})", (each,), reason) for each in members]
    return groups


def name_of(recorded: Recorded, first: Recorded) -> str:
    """The recipe, with the settings in which the run differs from the first one, and the step that a branch left its parent at."""
    own, its = settings(recorded), settings(first)
    changed = [f"{key} = {value}" for key, value in own.items() if its.get(key, value) != value]
    branch = [f"from step {format_text.count(recorded.run['parent']['step'])}"] if recorded.run.get("parent") else []
    return ", ".join([recorded.name, *changed, *branch])


def settings(recorded: Recorded) -> dict[str, str]:
    """What config.toml says that makes a run another one: neither its seed and recipe, nor where and how long it runs."""
    found, section = {}, ""
    for line in recorded.config.splitlines():
        key, equals, value = line.partition(" = ")
        if line.startswith("# "):
            section = line[2:]
        elif equals and section in SECTIONS and key not in NOT_NAMED:
            found[key] = value
    return found


def other_tokens(recorded: Recorded, reference: Recorded | None) -> str:
    """What is wrong if two runs of one seed did not learn from the same batches, by the tokens of their steps; else ''.

    Steps behind a batch that one of them left out say nothing of that: the verdict names such batches.
    """
    if reference is None:
        return ""
    ours, theirs = ({each["step"]: each.get("tokens") for each in run.of("step")} for run in (recorded, reference))
    common = ours.keys() & theirs.keys()
    same = common - {*other_steps(common, recorded.left_out, reference.left_out)}
    other = sum(ours[step] != theirs[step] for step in same)
    return f"other batches at {format_text.plural(other, 'step')}" if other else ""


def identity(recorded: Recorded) -> dict[str, Any]:
    """What must be the same for a comparison."""
    run, data = recorded.run, recorded.data
    learnt = data.get("content_hash") or (data.get("source"), data.get("train_tokens"), data.get("rows"))
    return {"data": learnt, "task": run.get("task"), "model": {**recorded.model}, "parameters": run.get("parameters")}


def batches(recorded: Recorded) -> dict[str, Any]:
    """What must be the same for pairs of one seed."""
    return {key.replace("_", " "): recorded.run.get(key) for key in ("steps", "tokens_per_step")}


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """'other data', '300 steps instead of 200', ... with commas; '' if there are none."""
    words = []
    for key, value in first.items():
        if other[key] != value:
            is_number = isinstance(value, int | float) and isinstance(other[key], int | float)
            words.append(
                f"{format_text.count(other[key])} {key} instead of {format_text.count(value)}"
                if is_number
                else f"other {key}"
            )
    return ", ".join(words)
