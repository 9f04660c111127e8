"""Guard of a run: the plugin by which `narrowgauge train --guard` checks a run against BF16.

`lab.guard.engine` does the checks. `RunSteps` shows it the run, and `RunGuard` prints, logs and saves
what it finds. The setting `then` decides what follows when the run is worse. Unless it is `warn`,
the end of the BF16 reference becomes the state of the run. The log replaces the run's steps by the
reference steps (event `rewind`).

    then=stay         the run continues in BF16 until the next check, which tries the run's own
                      recipe again
    then=RECIPE       the run continues in this recipe of higher precision (`wider` in messages) for
                      good

A checkpoint stores no check in progress: a resumed run begins it anew. A check that would contain a
recipe switch starts after the switch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge import storage
from narrowgauge.diagnose import lineage
from narrowgauge.diagnose.format_text import percent, plural, size
from narrowgauge.diagnose.guard_settings import COPIES, STAY, WARN, GuardSettings, parse
from narrowgauge.diagnose.runs import encode
from narrowgauge.diagnose.sensitivity import ENDS, trivial_of
from narrowgauge.diagnose.verdict import REFERENCE_DIVERGED, WORSE
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.lab.blamed import STEPS, blame_run
from narrowgauge.lab.guard.check import CONTROL_EVERY, wants_control
from narrowgauge.lab.guard.engine import GROWN, GuardEngine, Replay, grows_into_steps
from narrowgauge.lab.guard.refusals import has_narrow
from narrowgauge.lab.guard.same_weights import words
from narrowgauge.lab.probe import ProbeResult, place_of_copy, take_steps
from narrowgauge.snapshot import snapshot_bytes
from narrowgauge.train.callback import Callback
from narrowgauge.train.console import Console, clock
from narrowgauge.train.guard_state import KEY, Unguarded, known_of
from narrowgauge.train.recipe_schedule import RecipeSwitch, chosen_recipe, with_switch

if TYPE_CHECKING:
    from narrowgauge.lab.guard.result import GuardResult
    from narrowgauge.snapshot import Snapshot
    from narrowgauge.train.trainer import Trainer


class RunSteps:
    """A run as the engine sees it (`engine.Steps`).

    where          place of the state's copies during a check: "host" or a folder
    switched       (step, recipe): the run has had the recipe that `then` names since this step;
                   None: it has its own
    stretch_steps  reference steps that were thrown away; stretch_s: their duration
    """

    def __init__(
        self, trainer: Trainer, told: Callable[[GuardResult, Mapping[str, Any]], None]
    ) -> None:
        """told: gets each result before the engine acts."""
        self.trainer, self.tell = trainer, told
        self.where: str | Path = "host"
        self.switched: tuple[int, str] | None = None
        self.stretch_steps = 0
        self.stretch_s = 0.0
        self._newest = ProbeResult(0)

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizer

    @property
    def taken(self) -> int:
        return self.trainer.step

    def may_check(self, steps: int) -> bool:
        # A recipe switch inside the check would compare different recipes.
        last = self.taken + steps
        return not any(self.taken < switch.step <= last for switch in self.trainer.switches)

    def snapshot(self) -> Snapshot:
        return self.trainer.snapshot(self.where)

    def restore(self, snapshot: Snapshot) -> None:
        self.trainer.restore(snapshot)

    def exchange(self, snapshot: Snapshot) -> None:
        self.trainer.exchange(snapshot)

    def replay(self, steps: int, *, as_control: bool) -> Replay:
        # The state includes the position in the data: the probe draws the batches of the check.
        with self.trainer.reading_alone():
            found = take_steps(self.trainer, steps, other_order=as_control)
        self._newest = found
        self.stretch_steps += len(found.steps)
        self.stretch_s += found.spent_s
        return Replay(
            losses=found.losses,
            lost=found.lost,
            was_stopped=bool(found.ended),
            # If float16 overflowed in the first step, its gradients tell nothing.
            has_gradients=any(abs(norm) < float("inf") for norm in found.grad_norms[:1]),
        )

    def read(self, losses: Sequence[float]) -> list[float]:
        return list(losses)  # a run logs losses over all ranks

    def adopt(self, begun: int) -> None:
        self.stretch_steps -= len(self._newest.steps)
        self.trainer.replace_steps(begun, self._newest.steps, self._newest.spent_s, "guard")

    def widen(self, recipe: str) -> None:
        self.switched = (self.taken, recipe)
        self.trainer.switch_recipes(self.switches(*self.switched))

    def switches(self, after: int, name: str) -> list[RecipeSwitch]:
        """The run's recipe switches, plus one to a recipe, for all layers.

        after  step before the switch
        name   the recipe
        """
        trainer = self.trainer
        recipe = chosen_recipe(trainer.config, name)
        return with_switch(
            list(trainer.switches), trainer.model, recipe, after, f"guard: {name}@{after}"
        )


class RunGuard(Callback):
    """Guard of one run.

    settings  parsed setting `guard`
    steps     the run, as the engine sees it
    engine    the checks
    known     newest result; None before the first check has ended
    verdicts  outcomes of all checks, in the words of `guard` events
    """

    def __init__(self, trainer: Trainer, settings: GuardSettings) -> None:
        config = trainer.config
        self.trainer, self.settings = trainer, settings
        self.steps = RunSteps(trainer, self._tell)
        self.engine = GuardEngine(
            settings, self.steps, warmup_steps=config.warmup_steps, total_steps=config.steps
        )
        self.known: GuardResult | None = None
        self.verdicts: list[str] = []
        self._show: Console | None = None
        self._refuse()

    def _refuse(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        if not has_narrow(trainer.model):
            raise ConfigError(
                f"guard = {config.guard!r}: no product of recipe {config.recipe!r} is narrower than 16 bits, and no embedding has "
                "codes, so there is nothing to guard. Remove guard, or name a narrow recipe.",
                code="guard.not-converted",
            )
        if self.settings.recipe:
            try:
                self.steps.switches(0, self.settings.recipe)
            except ConfigError as error:
                raise ConfigError(
                    f"guard = {config.guard!r}: then = {self.settings.then!r}: {error} Beside recipes there are 'warn' and 'stay'.",
                    code="guard.then",
                ) from None

    # --- steps of the run

    def must_read_after(self, number: int) -> bool:
        return self.engine.begins_now() or self.engine.ends_now()

    def before_step(self, show: Console) -> None:
        self.engine.before_step()

    def on_step(self, number: int, loss: float, grad_norm: float) -> None:
        self.engine.saw(number, loss)

    def after_step(self, show: Console) -> None:
        trainer, engine = self.trainer, self.engine
        self._show = show
        if engine.ends_now():
            again = wants_control(engine.evidence)
            show.say(
                f"step {trainer.step}: guard: the last {plural(self.settings.steps, 'step')} in BF16{', twice' if again else ''}"
                f"{self._duration(again)}"
            )
        if (event := engine.after_step()) is not None:
            trainer.log.write("guard", trainer.step, **event)

    def _duration(self, again: bool) -> str:
        trainer = self.trainer
        spent_s = trainer.counters.trained_s / trainer.step * self.settings.steps * (1 + again)
        return f", about {clock(spent_s)}"

    # --- a result

    def _tell(self, result: GuardResult, event: Mapping[str, Any]) -> None:
        """Prints a result and, on the first alarm, the matmuls that may be the cause."""
        show, then = self._show, event["then"]
        assert show is not None  # `after_step` has set it
        self.known = result
        self.verdicts.append(event["verdict"])
        show.say(f"step {self.trainer.step}: guard: {result.sentence}{self._follows(result, then)}")
        if event["unseen"] and len(self.verdicts) == 1:
            show.say(event["unseen"])
        if then and self.verdicts[-2:-1] != [WORSE]:
            self._blame(show)

    def _follows(self, result: GuardResult, then: str) -> str:
        if result.detail == REFERENCE_DIVERGED:
            return " Lower the learning rate, or look at the data of these steps."
        if then == STAY:
            return " The run goes on in BF16 until the next check."
        if then and grows_into_steps(self.trainer.model, result.detail):
            return f" {GROWN}"
        if then == WARN and self.engine.given and self._codes:
            return f" Its products are wider already: branch it without recipe.embedding_codes = {self._codes!r}."
        if then == WARN:
            return " Name a wider recipe, or let the guard act: then=stay."
        kept = f"; embeddings keep their {self._codes} codes" if self._codes else ""
        kept += "; attention stays in FP8" if self.trainer.config.attention else ""
        return f" From here on the run has recipe {then}{kept}." if then else ""

    @property
    def _codes(self) -> str:
        """The setting embedding_codes. Recipes for matmuls do not change embeddings."""
        return self.trainer.config.embedding_codes

    def _blame(self, show: Console) -> None:
        """Looks for the inaccurate matmuls of the run in its own recipe, and prints them."""
        try:
            blame_run(
                self.trainer, show, steps=min(STEPS, self.settings.steps), where=self.steps.where
            )
        except (ConfigError, torch.OutOfMemoryError) as error:
            show.say(f"Which product is to blame was not found: {str(error).splitlines()[0]}")

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """State of the guard for a checkpoint.

        Encoded as text: a diverged reference has infinite losses, which plain JSON cannot hold.
        """
        engine, steps = self.engine, self.steps
        known = {
            "checks": engine.evidence.state_dict() | {"first": engine.first}, "due": engine.is_due, "wide": engine.stays_wide,
            "verdicts": self.verdicts, "switched": steps.switched, "stretch_steps": steps.stretch_steps, "stretch_s": steps.stretch_s,
        }  # fmt: skip
        return {KEY: encode(known)}

    def before_load(self, facts: Mapping[str, Any]) -> None:
        if (switched := known_of(facts).get("switched")) is not None:
            self.trainer.switch_recipes(self.steps.switches(*switched))

    def on_load(self, facts: Mapping[str, Any]) -> None:
        engine, steps = self.engine, self.steps
        engine.drop()
        if not (known := known_of(facts)):
            return
        steps.switched = known["switched"] and tuple(known["switched"])
        self.verdicts, steps.stretch_steps, steps.stretch_s = (
            known[key] for key in ("verdicts", "stretch_steps", "stretch_s")
        )
        # Checkpoints of earlier versions hold a check in progress under `running` instead.
        is_due = known["due"] if "due" in known else bool(known["running"])
        engine.load(
            known["checks"],
            known["checks"].get("first", ()),
            given=steps.switched[1] if steps.switched else "",
            stays_wide=known["wide"],
            due_after=self.trainer.step if is_due else None,
        )
        self.known = engine.evidence.result() if engine.evidence.checks else None

    # --- console messages

    def on_start(self, show: Console) -> None:
        """Prints the schedule and the cost of the guard.

        Raises StorageError if a copy of the state has no space.
        """
        self._know_the_beginning()
        trainer = self.trainer
        nbytes = COPIES * snapshot_bytes(trainer.model, trainer.optimizer)
        self.steps.where = place_of_copy(nbytes, trainer.folder.path, trainer.ranks)
        place = (
            "the host's memory"
            if self.steps.where == "host"
            else f"{self.steps.where}, since the host has no room"
        )
        if self.engine.is_due and trainer.step % self.settings.every:
            show.say(
                Reason(
                    "guard.check-dropped",
                    f"Note: a check of the guard had not ended. It begins anew from step {trainer.step}.",
                )
            )
        # The checkpoint of a check in progress, by a version that kept one
        if trainer.ranks.is_first and trainer.folder.guard.exists():
            with storage.refusals("remove", trainer.folder.guard):
                shutil.rmtree(trainer.folder.guard)
        config, settings = trainer.config, self.settings
        begins = settings.begins(config.warmup_steps, config.steps)
        controls = -(-len(begins) // CONTROL_EVERY)
        share = percent(settings.steps * (len(begins) + controls) / config.steps)
        show.say(
            f"Guard: {plural(len(begins), 'check')} of {plural(settings.steps, 'step')} in BF16, after step {begins[0]} and every "
            f"{settings.every}: {share} of the run's steps; margin {settings.margin_words()}; then {settings.then}. "
            f"A check keeps up to {size(nbytes)} of state in {place}. {words(trainer.model, trainer.optimizer)}"
        )

    def _know_the_beginning(self) -> None:
        """Loads two conditions of the verdict "within": trivial predictor's loss and first losses.

        See `sensitivity`.

        Checkpoints of a guarded run store the first losses. For other runs they come from the log
        of the run or of a branch's parent. All ranks call this function.
        """
        known = self.trainer.ranks.told_by_first(self._recorded)
        self.engine.evidence.trivial = known["trivial"]
        if len(self.engine.first) < min(ENDS, self.trainer.step):
            self.engine.first = known["first"]

    def _recorded(self) -> dict[str, Any]:
        """Reads both conditions from run.json and the log, which rank 0 has."""
        member = lineage.read(self.trainer.folder.path)
        return {
            "trivial": trivial_of(member.run).get("loss"),
            "first": lineage.whole_curve(member)[:ENDS],
        }

    def summary(self) -> str:
        done, steps = len(self.verdicts), self.trainer.step
        if self.known is None or not done:
            return "Guard: no check has ended."
        worse = self.verdicts.count(WORSE)
        said = f", {worse} of them alarms" if worse else ", no alarm"
        thrown_away = self.steps.stretch_steps
        cost = f"{plural(thrown_away, 'step')} that did not count, {percent(thrown_away / steps)} of the run's {steps}"
        return f"Guard: {self.known.sentence} {plural(done, 'check')}{said}; {cost}."


def plugin(trainer: Trainer) -> Callback:
    """The guard of a run, or a stand-in that keeps the recipe of an earlier guard."""
    settings = parse(trainer.config.guard)
    return Unguarded(trainer) if settings is None else RunGuard(trainer, settings)
