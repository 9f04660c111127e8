"""Group any number of runs for one page: by recipe, with one run per seed, and judge each recipe.

Runs can be compared if data, task and model are the same; others are listed apart. They are judged
in pairs of one seed if their batches are the same too: steps and tokens of each step, except
batches that a run skipped at a loss spike, which the verdict names. The reference is the recipe
named by the user, else the recipe of the first run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.diagnose import format_text, seeds
from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.diagnose.left_out import other_steps
from narrowgauge.diagnose.seeds import NOT_FINITE, Margin, Runs, SeedComparison
from narrowgauge.diagnose.sensitivity import POSITIVE_CONTROL, trivial_of
from narrowgauge.errors import ConfigError, closest
from narrowgauge.report.run_data import Recorded, last_done, read_alone

NO_METRICS = {"event", "step", "tokens", "elapsed_s"}
NAME = re.compile(r"[A-Za-z][\w@.-]{0,40}")
UNFINISHED = "unfinished"
# Settings of config.toml that do not distinguish runs, in tables of which others do.
NOT_NAMED = {  # embedding_codes, attention: already part of the recipe's name
    "recipe.name", "recipe.switch", "recipe.save", "recipe.embedding_codes", "recipe.attention", "training.seed", "training.steps",
    "training.epochs",
    "batch.micro_batches", "data.cache", "memory.keep_freed", "memory.checkpointing", "memory.plan", "parallel.layout",
    "parallel.schedule", "parallel.digest_every", "parallel.timeout_s",
}  # fmt: skip
# Tables of config.toml of which no setting distinguishes runs; recipe.layers never did.
NOT_NAMED_TABLES = ("", "recipe.layers", "device", "evaluation", "checkpoint", "log", "guard")


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, by seed."""

    name: str
    runs: tuple[Recorded, ...]
    reason: str = ""  # reason why it is not judged against the reference


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Contents of a page on several runs. The first group is the reference."""

    groups: tuple[Group, ...]
    apart: tuple[tuple[Recorded, str], ...]  # runs that cannot be compared, with reasons
    metric: str
    margin: Margin
    # Folder name -> reason why the run did not finish, from a study.
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> list[Recorded]:
        return [each for group in self.groups for each in group.runs]

    @property
    def control(self) -> Group | None:
        """Runs of the positive control on the reference's batches; None if none was trained."""
        return next(
            (each for each in self.groups[1:] if is_control(each) and not each.reason), None
        )

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

    def verdicts(self) -> list[SeedComparison]:
        """Verdicts on the groups with the reference's batches.

        The reference and the positive control get none.
        """
        judged = [
            self.runs_of(group)
            for group in self.groups
            if not group.reason and group is not self.control
        ]
        control = self.runs_of(self.control) if self.control is not None else None
        return seeds.judge_all(judged, self.metric, self.margin, control)


def is_control(group: Group) -> bool:
    """True for runs of the positive control with the settings of the reference."""
    return group.name == POSITIVE_CONTROL


def seed_of(recorded: Recorded) -> int:
    return int(recorded.run.get("seed", 0))


def final(recorded: Recorded, metric: str) -> tuple[float, str]:
    """(metric of the last evaluation, '') of a finished run, else (NaN, reason)."""
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
    """Metrics that the evaluations of all runs measured, the loss first.

    Runs without an evaluation so far are ignored.
    """
    measured = [
        {
            key
            for event in found
            for key, value in event.items()
            if isinstance(value, float) and NAME.fullmatch(key)
        }
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
    """Read run folders and group them.

    Raises ConfigError for a folder that is named twice or is not a run, and for a reference or
    metric that no run has.
    """
    resolved = [folder.resolve() for folder in folders]
    if twice := next((folder for folder in folders if resolved.count(folder.resolve()) > 1), None):
        raise ConfigError(
            f"report: {twice} is named twice. Name each run once.", code="report.run-twice"
        )
    runs = [read_alone(folder) for folder in folders]
    names = list(dict.fromkeys(each.name for each in runs))
    if reference and reference not in names:
        near = closest(reference, names, limit=1) or ", ".join(names)
        raise ConfigError(
            f"reference = {reference!r}: no run has this recipe. There are: {near}.",
            code="report.reference",
        )
    # The positive control is never the default reference.
    wanted = (
        each
        for each in runs
        if each.name == reference or (not reference and each.name != POSITIVE_CONTROL)
    )
    first = next(wanted, runs[0])
    apart = [(each, why) for each in runs if (why := differences(identity(first), identity(each)))]
    kept = [each for each in runs if not differences(identity(first), identity(each))]
    # sorted() is stable: the reference comes first.
    groups = sorted(grouped(kept, first), key=lambda group: first not in group.runs)
    known = metrics_of(kept)
    chosen = metric or default_metric(first, known)
    if chosen not in known and any(each.of("eval") for each in kept):
        near = closest(chosen, known, limit=1) or ", ".join(known)
        raise ConfigError(
            f"metric = {chosen!r}: not every run measured it. There are: {near}.",
            code="report.metric",
        )
    return Gathered(
        groups=tuple(groups),
        apart=tuple(apart),
        metric=chosen,
        margin=margin or Margin.usual(chosen),
        failed=failed or {},
    )


def default_metric(recorded: Recorded, known: Sequence[str]) -> str:
    """The metric that chose the best weights if all runs have it, else the loss."""
    best = str(recorded.run.get("best") or "")
    return best if best in known else "loss"


def grouped(runs: Sequence[Recorded], first: Recorded) -> list[Group]:
    """Group runs by recipe, other changed settings, branch point, and batches.

    Several runs of one group with the same seed become groups of their own, named by folder.
    """
    theirs = {seed_of(each): each for each in runs if name_of(each, first) == name_of(first, first)}
    found: dict[tuple[str, str], list[Recorded]] = {}
    for each in runs:
        reason = differences(batches(first), batches(each)) or other_tokens(
            each, theirs.get(seed_of(each))
        )
        found.setdefault((name_of(each, first), reason), []).append(each)
    names = [name for name, _ in found]
    groups = []
    for (name, reason), members in found.items():
        listed = sorted(members, key=seed_of)
        # A reason distinguishes groups of one name, such as another number of steps.
        label = f"{name}, {reason}" if reason and names.count(name) > 1 else name
        if len({seed_of(each) for each in listed}) == len(listed):
            groups.append(Group(label, tuple(listed), reason))
        else:
            groups += [Group(f"{label} ({each.folder.name})", (each,), reason) for each in members]
    return groups


def name_of(recorded: Recorded, first: Recorded) -> str:
    """Recipe, settings that differ from the first run's, and the branch point if it is a branch."""
    own, its = settings(recorded), settings(first)
    changed = [f"{key} = {value}" for key, value in own.items() if its.get(key, value) != value]
    branch = (
        [f"from step {format_text.count(recorded.run['parent']['step'])}"]
        if recorded.run.get("parent")
        else []
    )
    return ", ".join([recorded.name, *changed, *branch])


def settings(recorded: Recorded) -> dict[str, str]:
    """Settings of config.toml that distinguish runs.

    Leaves out seed and recipe, and settings that choose the device or the length of the run.
    """
    found, table = {}, ""
    for line in recorded.config.splitlines():
        key, equals, value = line.partition(" = ")
        if line.startswith("["):
            table = "recipe.layers" if line == "[recipes]" else line[1:-1]
        elif equals:
            # Former runs have all keys at the top.
            path = f"{table}.{key}" if table else FORMER.get(key, key)
            if path not in NOT_NAMED and path.rpartition(".")[0] not in NOT_NAMED_TABLES:
                found[path] = value
    return found


def other_tokens(recorded: Recorded, reference: Recorded | None) -> str:
    """Reason why two runs of one seed did not train on the same batches, by tokens per step; or ''.

    Steps after a batch that only one run skipped are ignored: the verdict names such batches.
    """
    if reference is None:
        return ""
    ours, theirs = (
        {each["step"]: each.get("tokens") for each in run.of("step")}
        for run in (recorded, reference)
    )
    # Token counts per step stand for the batches: metrics.jsonl has no hash of a batch.
    common = ours.keys() & theirs.keys()
    same = common - {*other_steps(common, recorded.left_out, reference.left_out)}
    other = sum(ours[step] != theirs[step] for step in same)
    return f"other batches at {format_text.plural(other, 'step')}" if other else ""


def identity(recorded: Recorded) -> dict[str, Any]:
    """Facts that must be the same for a comparison."""
    run, data = recorded.run, recorded.data
    # Runs without a hash of their contents are compared by source and sizes.
    learnt = data.get("content_hash") or (
        data.get("source"),
        data.get("train_tokens"),
        data.get("rows"),
    )
    return {
        "data": learnt,
        "task": run.get("task"),
        "model": {**recorded.model},
        "parameters": run.get("parameters"),
    }


def batches(recorded: Recorded) -> dict[str, Any]:
    """Facts that must be the same for pairs of one seed."""
    return {key.replace("_", " "): recorded.run.get(key) for key in ("steps", "tokens_per_step")}


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Differences in words: 'other data', '300 steps instead of 200', comma-separated.

    '' if none.
    """
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
