"""Guard of a run: regular comparison with BF16 reference steps from the same state.

    after step k      copy the state; run `steps` steps in BF16 (at the first check and every fourth
                      a second time, summed in another order, as a control); restore the state; the
                      run continues as if nothing had happened (`probe`)
    step k + steps    compare the mean losses of both over the second half; add the difference to
                      `Evidence`; log a `guard` event

The setting `then` decides what follows when the run is worse. Unless it is `warn`, the end of the
BF16 reference becomes the state of the run, so nothing is computed twice. A checkpoint in RUN/guard
holds this state during the check. The log replaces the run's steps by the reference steps (event
`rewind`).

    then=stay         the run continues in BF16 until the next check, which tries the run's own
                      recipe again
    then=RECIPE       the run continues in this recipe of higher precision (`wider` in messages) for
                      good

Each checkpoint of the run stores the check in progress, so a killed run resumes in the middle of a
check. A check that would contain a recipe switch starts after the switch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge import storage
from narrowgauge.conversion import suspended
from narrowgauge.diagnose import lineage
from narrowgauge.diagnose.format_text import percent, plural, size
from narrowgauge.diagnose.guard_settings import STAY, WARN, GuardSettings, parse
from narrowgauge.diagnose.runs import encode
from narrowgauge.diagnose.sensitivity import ENDS, trivial_of
from narrowgauge.diagnose.verdict import REFERENCE_DIVERGED, WORSE
from narrowgauge.errors import CheckpointError, ConfigError, Reason
from narrowgauge.lab.blamed import STEPS, blame_run
from narrowgauge.lab.guard.audit import STEPS as AUDITED
from narrowgauge.lab.guard.audit import Audit
from narrowgauge.lab.guard.check import CONTROL_EVERY, wants_control
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.grown import GROWN, grows_into_steps
from narrowgauge.lab.guard.refusals import has_narrow
from narrowgauge.lab.guard.same_weights import FirstGradients, words
from narrowgauge.lab.guard_check_progress import CheckProgress, FirstStep, terms
from narrowgauge.lab.probe import ProbeResult, place_of_copy, rolled_back, take_steps
from narrowgauge.snapshot import snapshot_bytes
from narrowgauge.train.callback import Callback
from narrowgauge.train.console import Console, clock, tell
from narrowgauge.train.guard_state import KEY, Unguarded, known_of
from narrowgauge.train.model import RecipeSwitch, chosen_recipe, with_switch

if TYPE_CHECKING:
    from narrowgauge.lab.guard.result import GuardResult
    from narrowgauge.train.trainer import Trainer


class Guard(Callback):
    """Guard of one run.

    settings       parsed setting `guard`
    evidence       results of all checks so far
    known          newest result; None before the first check has ended
    running        check in progress; None between checks
    first          gradient samples of the check in progress, until the run's first step in it
    audit          recomputation of the check's last steps; None before them
    switched       (step, recipe): the run has had the recipe that `then` names since this step;
                   None: it has its own
    verdicts       outcomes of all checks, in the words of `guard` events
    stretch_steps  reference steps that were thrown away; stretch_s: their duration
    is_wide        the run is in BF16
    where          place of the state's copy during a check: "host" or a folder
    kept           RUN/guard, the checkpoint folder for the end of the reference
    """

    def __init__(self, trainer: Trainer, settings: GuardSettings) -> None:
        self.trainer, self.settings = trainer, settings
        self.evidence = Evidence.of(settings)
        self.known: GuardResult | None = None
        self.running: CheckProgress | None = None
        self.first: FirstStep | None = None
        self.audit: Audit | None = None
        self.switched: tuple[int, str] | None = None
        self.verdicts: list[str] = []
        self.stretch_steps = 0
        self.stretch_s = 0.0
        self._wide = ExitStack()  # the open `suspended` context while the run is in BF16
        self.is_wide = False
        self.where: str | Path = "host"
        self.kept = trainer.folder.guard
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
                self._switches(0, self.settings.recipe)
            except ConfigError as error:
                raise ConfigError(
                    f"guard = {config.guard!r}: then = {self.settings.then!r}: {error} Beside recipes there are 'warn' and 'stay'.",
                    code="guard.then",
                ) from None

    # --- schedule

    def _begins_after(self, step: int) -> bool:
        """True if a check starts after this step."""
        config, settings = self.trainer.config, self.settings
        own = [
            start for start in settings.begins(config.warmup_steps, config.steps) if start <= step
        ]
        if not own or (self.switched is not None and settings.then == "bf16" and not self._codes):
            return False
        start = own[-1]
        for switch in self.trainer.switches:
            # A recipe switch inside the check would compare different recipes: start the check at
            # the switch.
            if start < switch.step <= start + settings.steps:
                start = switch.step
        return start == step and step + settings.steps <= config.steps

    def _ends_after(self, step: int) -> bool:
        return self.running is not None and step == self.running.begun + self.settings.steps

    def must_read_after(self, number: int) -> bool:
        return self._begins_after(number) or self._ends_after(number)

    # --- a check

    def before_step(self, show: Console) -> None:
        trainer, steps = self.trainer, self.settings.steps
        if self.running is not None and trainer.step >= self.running.begun + steps - AUDITED:
            self.audit = self.audit or Audit(trainer.model, len(self.evidence.checks))
            self.audit.begin()
        if self.running is not None or not self._begins_after(trainer.step):
            return
        again = wants_control(self.evidence)
        show.say(
            f"step {trainer.step}: guard: {plural(steps, 'step')} in BF16 from here{', twice' if again else ''}{self._duration(again)}"
        )
        with rolled_back(trainer, self.where):
            with FirstGradients(trainer.model, trainer.optimizer) as gradients:
                wide = take_steps(trainer, steps)
            self._count(wide)
            if not wide.ended and not wide.lost and self.settings.keeps_reference:
                # Save the end of the reference as a checkpoint rather than a copy in memory: it may
                # become the run, so it must survive a kill during the check.
                trainer.checkpoints.write(self.kept, trainer.step, *trainer.collected(), 1)
        # A stopped reference is dropped: the resumed run starts the check again.
        if wide.ended:
            return
        running = CheckProgress(
            trainer.step,
            wide.steps,
            wide.lost,
            spent_s=wide.spent_s,
            trained_s=trainer.counters.trained_s,
        )
        if again and not wide.lost:
            with rolled_back(trainer, self.where):
                control = take_steps(trainer, steps, other_order=True)
                self._count(control)
            if control.ended:
                return
            running.control = control.losses
        self.running, self.first = running, FirstStep(trainer, gradients.samples, wide.steps)
        self._be_wide(False)  # a run that stays in BF16 tries its own recipe again

    def _count(self, found: ProbeResult) -> None:
        self.stretch_steps += len(found.steps)
        self.stretch_s += found.spent_s

    def _duration(self, again: bool) -> str:
        trainer = self.trainer
        spent_s = trainer.counters.trained_s / trainer.step * self.settings.steps * (1 + again)
        return f", about {clock(spent_s)}"

    def on_step(self, number: int, loss: float, grad_norm: float) -> None:
        if number == len(self.evidence.first) + 1 and number <= ENDS:
            self.evidence.first.append(loss)
        if self.running is not None and number > self.running.begun:
            self.running.narrow.append(loss)

    def after_step(self, show: Console) -> None:
        trainer, running = self.trainer, self.running
        if running is not None and self.first is not None:
            running.slopes, self.first = self.first.slopes(), None
        if running is not None and self.audit is not None:
            self.audit.end()
            running.audited.take(self.audit.found())
        if running is None or not self._ends_after(trainer.step):
            return
        self.running = self.audit = None
        result, said = running.judged(self.evidence, self.settings.steps)
        self.known = result
        self.verdicts.append(said["verdict"])
        then = self.settings.then if result.outcome == WORSE else ""
        if then and self.switched is not None:
            then = WARN  # the run has the recipe of `then` already
        # A lower loss in BF16 may only mean that the weights depend on their learned quantization
        # steps.
        if then and grows_into_steps(trainer.model, result):
            then = WARN
        show.say(f"step {trainer.step}: guard: {result.sentence}{self._follows(result, then)}")
        if said["unseen"] and len(self.verdicts) == 1:
            show.say(said["unseen"])
        if then and self.verdicts[-2:-1] != [WORSE]:
            self._blame(show)
        if then and then != WARN:
            self._become(running, show)
        trainer.log.write("guard", trainer.step, **said, then=then, spent_s=running.spent_s)

    def _follows(self, result: GuardResult, then: str) -> str:
        if result.detail == REFERENCE_DIVERGED:
            return " Lower the learning rate, or look at the data of these steps."
        if then == STAY:
            return " The run goes on in BF16 until the next check."
        if then and grows_into_steps(self.trainer.model, result):
            return f" {GROWN}"
        if then == WARN and self.switched is not None and self._codes:
            return f" Its products are wider already: branch it without recipe.embedding_codes = {self._codes!r}."
        if then == WARN:
            return " Name a wider recipe, or let the guard act: then=stay."
        kept = f"; embeddings keep their {self._codes} codes" if self._codes else ""
        return f" From here on the run has recipe {then}{kept}." if then else ""

    @property
    def _codes(self) -> str:
        """The setting embedding_codes. Recipes for matmuls do not change embeddings."""
        return self.trainer.config.embedding_codes

    def _blame(self, show: Console) -> None:
        """Looks for the inaccurate matmuls of the run in its own recipe, and prints them."""
        try:
            blame_run(self.trainer, show, steps=min(STEPS, self.settings.steps), where=self.where)
        except (ConfigError, torch.OutOfMemoryError) as error:
            show.say(f"Which product is to blame was not found: {str(error).splitlines()[0]}")

    # --- the reference becomes the run

    def _become(self, running: CheckProgress, show: Console) -> None:
        """Replaces the run's state and logged steps by the BF16 reference.

        The run then continues in BF16 or in the recipe that `then` names. If the checkpoint in
        RUN/guard is lost, the run keeps its own steps.
        """
        trainer = self.trainer
        try:
            found = trainer.checkpoints.newest(self.kept)
            why = (
                ""
                if found is not None and found.step == trainer.step
                else f"{self.kept} holds none of step {trainer.step}"
            )
        except CheckpointError as error:
            found, why = None, str(error)
        if found is None or why:
            show.say(
                f"WARNING: the end of the stretch in BF16 is lost: {why}. The run keeps its own steps."
            )
        else:
            trainer.load_checkpoint(found)
            self.stretch_steps -= len(running.wide)
            trainer.replace_steps(
                running.begun, running.wide, running.trained_s, running.spent_s, "guard"
            )
        if self.settings.recipe:
            self.switched = (trainer.step, self.settings.recipe)
            trainer.switch_recipes(self._switches(*self.switched))
            first, trivial = self.evidence.first, self.evidence.trivial
            self.evidence = Evidence.of(self.settings)  # earlier checks judged the old recipe
            self.evidence.first, self.evidence.trivial = first, trivial
        else:
            self._be_wide(True)

    def _be_wide(self, wide: bool) -> None:
        if wide and not self.is_wide:
            self._wide.enter_context(suspended(self.trainer.model))
        elif not wide:
            self._wide.close()
        self.is_wide = wide

    def _switches(self, after: int, name: str) -> list[RecipeSwitch]:
        """The run's recipe switches, plus one to the recipe that `then` names, for all layers.

        after  step before the switch
        name   the recipe
        """
        trainer = self.trainer
        recipe = chosen_recipe(trainer.config, name)
        return with_switch(
            list(trainer.switches), trainer.model, recipe, after, f"guard: {name}@{after}"
        )

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """State of the guard for a checkpoint.

        Encoded as text: a diverged reference has infinite losses, which plain JSON cannot hold.
        """
        # Before that, gradient samples are missing, and the check restarts after resuming
        is_known = self.running is not None and self.first is None
        running = (
            self.running.facts(terms(self.trainer, self.settings))
            if self.running and is_known
            else None
        )
        known = {
            "checks": self.evidence.state_dict(), "running": running, "wide": self.is_wide, "verdicts": self.verdicts,
            "switched": self.switched, "stretch_steps": self.stretch_steps, "stretch_s": self.stretch_s,
        }  # fmt: skip
        return {KEY: encode(known)}

    def before_load(self, facts: Mapping[str, Any]) -> None:
        if (switched := known_of(facts).get("switched")) is not None:
            self.trainer.switch_recipes(self._switches(*switched))

    def on_load(self, facts: Mapping[str, Any]) -> None:
        if self.first is not None:
            self.first.close()
        if self.audit is not None:
            self.audit.end()
        self.running = self.first = self.audit = None
        if not (known := known_of(facts)):
            return
        self.switched = known["switched"] and tuple(known["switched"])
        self.verdicts, self.stretch_steps, self.stretch_s = (
            known[key] for key in ("verdicts", "stretch_steps", "stretch_s")
        )
        self.evidence.load_state_dict(known["checks"])
        self.known = self.evidence.result() if self.evidence.checks else None
        self._be_wide(known["wide"])
        if known["running"]:
            self.running = CheckProgress.of(known["running"], terms(self.trainer, self.settings))
        if known["running"] and self.running is None:
            tell(
                Reason(
                    "guard.check-dropped",
                    "Note: the check that was under way is dropped, since its steps in BF16 had other settings or batches.",
                )
            )

    def on_saved(self) -> None:
        """Removes RUN/guard after a checkpoint of the run, unless a check is in progress."""
        if self.running is None and self.trainer.ranks.is_first and self.kept.exists():
            with storage.refusals("remove", self.kept):
                shutil.rmtree(self.kept)

    # --- console messages

    def on_start(self, show: Console) -> None:
        """Prints the schedule and the cost of the guard.

        Raises StorageError if a copy of the state has no space.
        """
        self._know_the_beginning()
        nbytes = snapshot_bytes(self.trainer.model, self.trainer.optimizer)
        self.where = place_of_copy(nbytes, self.trainer.folder.path, self.trainer.ranks)
        place = (
            "the host's memory"
            if self.where == "host"
            else f"{self.where}, since the host has no room"
        )
        kept = ""
        if self.settings.keeps_reference:
            storage.require_space(
                self.trainer.folder.path, 1.2 * nbytes, "the end of a stretch of the guard"
            )
            kept = f", and as much in {self.kept} until the check has ended"
        config, settings = self.trainer.config, self.settings
        begins = settings.begins(config.warmup_steps, config.steps)
        controls = -(-len(begins) // CONTROL_EVERY)
        share = percent(settings.steps * (len(begins) + controls) / config.steps)
        show.say(
            f"Guard: {plural(len(begins), 'check')} of {plural(settings.steps, 'step')} in BF16, after step {begins[0]} and every "
            f"{settings.every}: {share} of the run's steps; margin {settings.margin_words()}; then {settings.then}. "
            f"In a check {size(nbytes)} of state wait in {place}{kept}. {words(self.trainer.model, self.trainer.optimizer)}"
        )

    def _know_the_beginning(self) -> None:
        """Loads two conditions of the verdict "within": trivial predictor's loss and first losses.

        See `sensitivity`.

        Checkpoints of a guarded run store the first losses. For other runs they come from the log
        of the run or of a branch's parent. All ranks call this function.
        """
        known = self.trainer.ranks.told_by_first(self._recorded)
        self.evidence.trivial = known["trivial"]
        if len(self.evidence.first) < min(ENDS, self.trainer.step):
            self.evidence.first = known["first"]

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
        cost = f"{plural(self.stretch_steps, 'step')} that did not count, {percent(self.stretch_steps / steps)} of the run's {steps}"
        return f"Guard: {self.known.sentence} {plural(done, 'check')}{said}; {cost}."


def plugin(trainer: Trainer) -> Callback:
    """The guard of a run, or a stand-in that keeps the recipe of an earlier guard."""
    settings = parse(trainer.config.guard)
    return Unguarded(trainer) if settings is None else Guard(trainer, settings)
