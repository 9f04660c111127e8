"""Compare runs and their branches on one step axis: common steps, controls, and verdicts.

    A ------------o------------------        a branch begins at the step of its parent's checkpoint,
                  |\\__________ bf16          with a log of its own. Its steps are counted on, so step
                   \\                         t is the same batch in every run
                    \\_________ bf16, twice as many micro-batches: the control of the branch above

run.json of a branch names its parent (docs/architecture.md). If the parent's folder is gone,
nothing before the branch point is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import compare as pairs
from narrowgauge.diagnose import left_out
from narrowgauge.diagnose.format_text import PERCENT, count, elsewhere, plural
from narrowgauge.diagnose.guard_settings import MARGIN
from narrowgauge.diagnose.metrics_table import loss_unit_of
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.diagnose.same_curve import CurveComparison, judge
from narrowgauge.diagnose.sensitivity import Assay, assess_curve, trivial_of
from narrowgauge.errors import ConfigError, Reason

if TYPE_CHECKING:
    from narrowgauge.diagnose.verdict import Verdict

CONTROL = "micro_batches"  # changes the order of summation and nothing else


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run or branch, as read from its folder."""

    folder: Path
    run: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def parent(self) -> dict[str, Any]:
        """Facts on a branch's parent from run.json; {} for a run from the start."""
        return self.run.get("parent") or {}

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def recipe(self) -> str:
        return str(self.run.get("recipe") or "?") + elsewhere(
            self.run.get("recipes") or {},
            str(self.run.get("embedding_codes") or ""),
            str(self.run.get("attention") or ""),
        )

    @property
    def left_out(self) -> tuple[int, ...]:
        """Batches that the run skipped at loss spikes."""
        return left_out.of_run(self.run, self.events)

    @property
    def losses(self) -> dict[int, float]:
        return {
            step: event["loss"] for step, event in sorted(pairs.step_events(self.events).items())
        }

    @property
    def words(self) -> str:
        """One line that describes the run: recipe, branch point, changes and steps."""
        steps = self.losses
        reach = f"steps {count(min(steps))} to {count(max(steps))}" if steps else "no step yet"
        if not self.parent:
            return f"{self.name}: {self.recipe}, {reach}"
        changed = "; ".join(
            f"{key}: {old or 'none'} to {new or 'none'}"
            for key, (old, new) in self.parent.get("changes", {}).items()
        )
        return f"{self.name}: branch of {self.parent['from']} at step {count(self.parent['step'])}, {changed or 'same settings'}; {reach}"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run against the first: curves (`same_curve`) and paired comparison (`compare`)."""

    run: Member
    reference: Member
    curve: CurveComparison
    pair: pairs.Comparison

    @property
    def is_insensitive(self) -> bool:
        """True if no difference was seen and the reference could not have shown one."""
        return any(each.is_insensitive for each in self.verdicts)

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdict of the curves, which a control judges, and verdict of the pair alone."""
        return [self.curve.verdict(_change(self.run, self.reference)), self.pair.verdict]

    @property
    def subject(self) -> str:
        return f"{self.run.name} against {self.reference.name}"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Result of `compare`.

    members   all runs
    controls  pairs that differ in the order of summation alone
    judged    the other runs against the first
    notes     sentences on missing parents, skipped batches, and a missing control
    """

    members: list[Member]
    controls: list[tuple[Member, Member]]
    judged: list[Judged]
    notes: list[str]

    @property
    def text(self) -> str:
        lines = [member.words for member in self.members]
        lines += [
            f"Control: {one.name} and {other.name}, which differ in the order of summation alone."
            for one, other in self.controls
        ]
        return "\n".join(
            [*lines, *self.notes, *(each.verdicts[0].text(each.subject) for each in self.judged)]
        )


def read(folder: Path) -> Member:
    """Read a run folder. Raises ConfigError if it is not a run folder."""
    if not os.path.lexists(folder / "run.json"):
        what = "has no run.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"compare: {folder} {what}. Name a folder that `narrowgauge train` wrote.",
            code="compare.no-run" if folder.is_dir() else "compare.no-folder",
        )
    return Member(
        folder=folder,
        run=read_run(folder / "run.json"),
        events=read_metrics(folder / "metrics.jsonl"),
    )


def compare(folders: Sequence[Path | str]) -> Compared:
    """Compare runs and branches with the first one.

    Raises ConfigError for fewer than two folders, for a folder named twice, and for runs on other
    data.
    """
    paths = [Path(each) for each in folders]
    # Resolved, so that a symbolic link and its target count as one run.
    if len({each.resolve() for each in paths}) < max(2, len(paths)):
        raise ConfigError(
            "compare: name two runs or more, each once; the first is what the others are compared with.",
            code="compare.one-run",
        )
    members = [read(each) for each in paths]
    first, *others = members
    for other in others:
        if problem := _apart(first, other):
            raise ConfigError(
                f"compare: {other.name} {problem} {first.name}. Only runs on the same batches can be compared.",
                code="compare.other-batches",
            )
    controls = [(one, other) for one, other in combinations(members, 2) if are_control(one, other)]
    # A control repeats the verdict of its own run.
    doubles = [other for one, other in controls if one in others or one is first]
    judged = [_judged(first, other, controls) for other in others if other not in doubles]
    notes = [note for member in members if (note := gone(member))]
    notes += [note for each in judged if (note := _other_batches(each.run, each.reference))]
    notes += unequal_coverage({member.name: member.run for member in members})
    if judged and not controls and any(each.curve.control is None for each in judged):
        notes.append(
            Reason(
                "compare.no-control",
                "No control among them. Branch one with twice as many micro-batches, from the same checkpoint: "
                "narrowgauge train --from RUN@STEP --recipe bf16 --batch.micro-batches 2 --output CONTROL.",
            )
        )
    return Compared(members=members, controls=controls, judged=judged, notes=notes)


def are_control(one: Member, other: Member) -> bool:
    """True if two runs from one state differ in the order of summation alone."""
    first, second = (each.parent.get("changes", {}) for each in (one, other))
    if one.parent and other.parent:
        from_one_state = one.parent.get("fingerprint") == other.parent.get("fingerprint")
    elif not (from_one_state := is_parent(one, other)):
        if not is_parent(other, one):
            return False
        from_one_state, first, second = True, second, first
    differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    return from_one_state and differing == {CONTROL}


def is_parent(one: Member, other: Member) -> bool:
    """True if `other` is a branch of `one`."""
    if not other.parent or one.run.get("started_at") != other.parent.get("started_at"):
        return False
    expected = (other.folder / str(other.parent.get("run", ""))).resolve()
    # The folders may have been moved since: then the start time and the folder's name must agree.
    return (
        expected == one.folder.resolve()
        or Path(str(other.parent["from"]).partition("@")[0]).name == one.folder.name
    )


def parent_of(member: Member) -> Path | None:
    """Folder of a branch's parent, if it is at the recorded path and is the same run."""
    expected = member.folder / str(member.parent.get("run", ""))
    if not member.parent or not (expected / "run.json").is_file():
        return None
    return (
        expected
        if read_run(expected / "run.json").get("started_at") == member.parent.get("started_at")
        else None
    )


def gone(member: Member) -> str:
    """Sentence on a parent that is missing from its recorded path, or ''."""
    if not member.parent or parent_of(member) is not None:
        return ""
    return Reason(
        "compare.parent-gone",
        f"{member.name}: its parent is expected at {member.folder / str(member.parent['run'])}, and is not there or is another run. The "
        f"branch trains, resumes and compares without it; what came before step {count(member.parent['step'])} is not shown.",
    )


def _apart(one: Member, other: Member) -> str:
    """Clause on the reason why two runs cannot be compared, or ''."""
    # The hash of the contents decides if both runs have one, else the source.
    for key in ("content_hash", "source"):
        ours, theirs = ((each.run.get("data") or {}).get(key) for each in (one, other))
        if ours and theirs and ours != theirs:
            return "was trained on other data than"
        if ours and theirs:
            break
    if one.run.get("parameters") != other.run.get("parameters"):
        return "has another model than"
    if one.run.get("seed") != other.run.get("seed"):
        return "has another seed, and so other batches, than"
    return (
        "has no step in common with"
        if one.losses and other.losses and not one.losses.keys() & other.losses.keys()
        else ""
    )


def _judged(first: Member, other: Member, controls: Sequence[tuple[Member, Member]]) -> Judged:
    """Judge the first run against another, which is the reference.

    The sign of the difference is then the cost of the first run's own number format.
    """
    steps = _same_batches(first, other)
    on_steps = [
        tuple([each.losses[step] for step in steps if step in each.losses] for each in pair)
        for pair in controls
        # A control counts only on the steps that are compared: its divergence grows with the steps.
        if set(steps) <= {*_same_batches(*pair)}
    ]
    assay_at = partial(assay_of, other)
    curve = judge(
        [first.losses[step] for step in steps],
        [other.losses[step] for step in steps],
        on_steps,  # type: ignore[arg-type]
        assay_at=assay_at,
    )
    left = (first.left_out, other.left_out)
    pair = pairs.compare(
        first.events,
        other.events,
        first.recipe,
        other.recipe,
        left,
        assay_at(MARGIN * abs(curve.loss)),
        loss_unit_of(first.run),
    )
    return Judged(run=first, reference=other, curve=curve, pair=pair)


def assay_of(reference: Member, margin: float, name: str = "") -> Assay:
    """Assay sensitivity of a reference: could it have shown a difference of `margin` nats?

    name  name in sentences; '' for the folder's name
    """
    evaluated = [loss for _, loss in pairs.evaluations(reference.events)]
    return assess_curve(
        name or reference.name,
        whole_curve(reference),
        margin,
        trivial_of(reference.run),
        evaluated[-1] if evaluated else None,
    )


def whole_curve(member: Member) -> list[float]:
    """Losses from the first step on.

    A branch's losses are preceded by its parents' losses, as far as their folders exist.
    """
    # `seen` ends the loop if damaged folders name each other as parents.
    own, seen, found = member, {member.folder.resolve()}, dict(member.losses)
    while (folder := parent_of(own)) is not None and folder.resolve() not in seen:
        begun, own = own.parent["step"], read(folder)
        seen.add(own.folder.resolve())
        found |= {step: loss for step, loss in own.losses.items() if step <= begun}
    return [loss for _, loss in sorted(found.items())]


def _same_batches(one: Member, other: Member) -> list[int]:
    """Common steps of two runs before the first one on different batches."""
    common = sorted(one.losses.keys() & other.losses.keys())
    others = {*left_out.other_steps(common, one.left_out, other.left_out)}
    return [step for step in common if step not in others]


def _other_batches(one: Member, other: Member) -> str:
    """Sentence on the steps at which two runs trained on different batches, or ''."""
    common = sorted(one.losses.keys() & other.losses.keys())
    others = left_out.other_steps(common, one.left_out, other.left_out)
    if not others:
        return ""
    same = plural(len(common) - len(others), "step")
    return (
        f"{left_out.words(one.name, one.left_out)} and {left_out.words(other.name, other.left_out)} of the data (on_spike = skip): from "
        f"step {count(others[0])} on they have learnt from different batches. What is compared is {same} before that."
    )


SAME_COVERAGE = 0.01  # difference of two shares that is not worth a sentence


def narrow_share(run: Mapping[str, Any]) -> float | None:
    """Share of a run's matrix-product operations in low precision; None if it was not counted."""
    found = (run.get("coverage") or {}).get("narrow")
    return None if found is None else float(sum(found.values()))


def unequal_coverage(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence if runs in low precision differ in the share of products that they compute so.

    runs  name -> run.json. A run without any product in low precision is a reference in 16 bits,
          which differs from the others on purpose
    """
    shares = {name: share for name, run in runs.items() if (share := narrow_share(run))}
    if not shares or max(shares.values()) - min(shares.values()) < SAME_COVERAGE:
        return []
    listed = ", ".join(f"{name} {100 * share:.0f}{PERCENT}" for name, share in shares.items())
    return [
        Reason(
            "compare.coverage",
            f"Warning: they differ in the share of matrix-product operations in low precision: {listed}. So a difference is one of the "
            "share too, not of the number format alone. run.json says under coverage which parts are left.",
        )
    ]


def _change(one: Member, other: Member) -> str:
    """Difference between two runs in words, for the verdict's sentence."""
    if one.recipe != other.recipe or one.run.get("precision") != other.run.get("precision"):
        return "the number format"
    return "what differs between them"
