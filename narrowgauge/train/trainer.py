"""Training loop of one run: forward, backward, optimizer step, logging, evaluation and checkpoints.

    for each micro-batch:  loss = sum(-log p) / targets of the whole step; loss.backward()
    raise NumericsError if the loss or the gradient norm is not finite: nothing has changed yet
    clip, optimizer.step(), advance(model)

On a GPU the loss readback is deferred (`deferred`): the device skips the update of a non-finite step
and all later updates. The host copies the losses of several steps at once, before it prints, logs,
evaluates, saves or ends. With CUDA graphs, or with updates in backward, it reads the loss after
every step. A float16 overflow skips only its own update.

The parts of a run have their own files: how they are built (`assembly`), a step's passes (`passes`),
checkpoints (`run_checkpoints`), evaluation (`validation`), measurements (`observation`). The task
(`tasks.task`) defines the data, the loss and the metrics. On several ranks (`parallel`) each rank
computes its own micro-batches of a step. Decisions and logged values always cover all ranks.

Plugins (`callback`) such as the guard see and change a run through the methods of Trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from narrowgauge.errors import DataError, NumericsError
from narrowgauge.snapshot import Scope, Snapshot, Training
from narrowgauge.train.assembly import ALONE, Given, assembled
from narrowgauge.train.callback import Callback, Callbacks
from narrowgauge.train.deferred import MOST, QueuedStep, SkipFlags, StepQueue, waits
from narrowgauge.train.observation import RunObservation
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.signals import AgreedStop, StopRequest

if TYPE_CHECKING:
    from narrowgauge.train.checkpoint import store
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.console import Console
    from narrowgauge.train.metrics import MetricsLog
    from narrowgauge.train.recipe_schedule import RecipeSwitch
    from narrowgauge.train.run_folder import RunFolder
    from narrowgauge.train.tasks import StepBatch, TrainTask

# float16: so many overflows in a row mean that lowering the loss scale does not help
MOST_SKIPPED_STEPS = 20


class Trainer:
    """A run in progress.

    setup        facts about the parts, for messages and run.json
    counters     finished steps, saved step, skipped steps, training time
    passes       forward and backward passes, loss scale, update
    switches     recipe switches of the run
    checkpoints  checkpoints and best weights; `checkpoints.resumed_from` names the loaded one
    start        progress after resuming: position in the data, counters, generators
    queue,       queue of unread steps and device-side flags; None: the host reads every step before
    flags        its update
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, task: TrainTask, log: MetricsLog,
        given: Given = ALONE, ranks: Ranks | None = None, plugins: Sequence[Callable[[Trainer], Callback]] = (),
    ) -> None:  # fmt: skip
        """Builds all parts and resumes from the newest valid checkpoint, if there is one.

        config   settings whose checkpointing is not "auto" (`planning.policy.resolved`)
        given    facts that are known before the parts are built
        ranks    the ranks that share the micro-batches of a step (config.micro_batches); None: one
                 process
        plugins  each is called with this Trainer before it resumes, and returns a Callback
        """
        self.ranks = ranks = ranks or Ranks()
        self.config, self.folder, self.task, self.log = config, folder, task, log
        self.stop: StopRequest | AgreedStop = (
            AgreedStop(StopRequest()) if ranks.world > 1 else StopRequest()
        )
        parts = assembled(config, folder, task, ranks, given)
        self.setup, self.counters, self.model, self.feed = (
            parts.setup,
            parts.counters,
            parts.model,
            parts.feed,
        )
        self.switches, self.parallel, self.optimizer = (
            parts.switches,
            parts.parallel,
            parts.optimizer,
        )
        self.passes, self.checkpoints, self.validation = (
            parts.passes,
            parts.checkpoints,
            parts.validation,
        )
        self.plugins = Callbacks([make(self) for make in plugins])
        self.checkpoints.resume(self.counters, self.plugins, log)
        # After resuming: `train` restores the generators, because console output in between may draw
        # random numbers, and a branch starts from this state.
        self.start = Snapshot.take(self.training, Scope.PROGRESS)
        self.passes.prepare()
        self.queue: StepQueue | None = None
        self.flags: SkipFlags | None = None
        if waits(self.passes.device) and not self.passes.reads_every_step:
            self.flags = self._new_flags()
            self.queue = StepQueue()
        self._compare_ranks()

    # --- what probes and plugins use

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.counters.step

    @property
    def training(self) -> Training:
        """Everything in this run that a step changes, for snapshots."""
        return Training(
            model=self.model, optimizer=self.optimizer, scaler=self.passes.scaler, agreements=self.parallel.agreements,
            feed=self.feed, counters=(self.counters,),
        )  # fmt: skip

    def snapshot(self, where: str | Path = "host") -> Snapshot:
        """Copies the state of the run. where: "host" or a folder, as for `Snapshot`.

        Steps that were queued and not read must be read before.
        """
        return Snapshot.take(self.training, where=where)

    def restore(self, snapshot: Snapshot) -> None:
        """Restores a snapshot of this run bit for bit."""
        # A snapshot copies no gradients: drop them first.
        self.optimizer.zero_grad()
        snapshot.restore()
        self.locate(f"step {self.step}")

    def exchange(self, snapshot: Snapshot) -> None:
        """Exchanges a snapshot of this run with the present state, bit for bit."""
        self.optimizer.zero_grad()  # as in `restore`
        snapshot.swap()
        self.locate(f"step {self.step}")

    @contextmanager
    def reading_alone(self) -> Iterator[None]:
        """Sets the queue of unread steps aside for a probe, which reads its own results.

        The probe gets device flags of its own. With the run's, a float16 overflow just before would
        skip every step of the probe.
        """
        queue, flags = self.queue, self.flags
        self.queue = None
        self._renew_flags()
        try:
            yield
        finally:
            self.queue, self.flags = queue, flags
            # A change inside the block may have replaced amax histories.
            self._forget_recipes()

    def count_step(self, number: int) -> None:
        """Counts a step of a probe."""
        self.counters.step = number

    def locate(self, place: str) -> None:
        """Names the present work in messages of ranks, as "step 12"."""
        self.ranks.place = place

    def stop_with(self, stop: StopRequest | AgreedStop) -> None:
        """Ends probes, and the next `train`, at this request."""
        self.stop = stop

    def load_checkpoint(self, found: store.Checkpoint) -> None:
        """Loads a checkpoint of this run, from which it continues."""
        self.checkpoints.load(found, self.counters)
        self._renew_flags()

    def rewind(self, found: store.Checkpoint, left_out: Sequence[int], why: str) -> None:
        """Returns to an earlier checkpoint of this run and skips batches from there.

        Plugins load their state from the checkpoint, so they forget the undone steps.
        """
        steps = self.step - found.step
        self.optimizer.zero_grad()
        self.load_checkpoint(found)
        self.feed.leave_out(left_out)
        self.plugins.on_load(found.facts)
        self.counters.saved_step = found.step
        self._forget_recipes()
        self.log.write("rewind", found.step, steps=steps, why=why)

    def replace_steps(
        self, begun: int, steps: list[dict[str, Any]], spent_s: float, why: str
    ) -> None:
        """Replaces logged steps by others with their time, after their end has become the state.

        begun    step before them
        steps    fields of their events, and `inputs`
        spent_s  their duration
        """
        per_step_s = spent_s / len(steps)
        self._renew_flags()
        self.log.write("rewind", begun, steps=len(steps), why=why)
        for number, each in enumerate(steps, begun + 1):
            self.counters.trained_s += per_step_s
            clocks = {
                "tokens_per_s": each["inputs"] / per_step_s,
                "elapsed_s": self.counters.trained_s,
                "peak_bytes": 0,
            }
            self.log.write("step", number, **each, **clocks)

    def switch_recipes(self, switches: list[RecipeSwitch]) -> None:
        """Continues with other recipe switches. Applies none: each applies before its first step."""
        self.switches.replace(switches)

    def start_from_best(self, step: int) -> None:
        """Loads the best weights alone and moves the data feed and recipe switches to their step.

        Optimizer, amax histories and generators stay fresh.
        """
        self.checkpoints.load_best(step)
        self.counters.step = self.counters.saved_step = step
        self.start.restore_generators()
        self.start = Snapshot.take(self.training, Scope.PROGRESS)

    def mark_branch(self, parent: dict[str, Any]) -> None:
        """Stores facts about the parent in the checkpoints of a branch."""
        self.checkpoints.carried = {"parent": parent}

    def collected(self) -> tuple[store.Tensors, dict[str, Any]]:
        """Returns (tensors, facts) of a checkpoint of the current step."""
        return self.checkpoints.collected(self.counters, self.plugins)

    def is_fine(self, loss: float, grad_norm: float) -> bool:
        """True if the run continues after a step with these numbers.

        Counts skipped steps, so call it once per step and in order.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.counters.skipped_steps = 0
            return True
        self.counters.skipped_steps += 1
        # float16 overflow: the optimizer skips this update and GradScaler lowers the scale
        is_overflow = self.passes.scaler is not None and math.isfinite(loss)
        return is_overflow and self.counters.skipped_steps <= MOST_SKIPPED_STEPS

    # --- the loop

    def train(self, show: Console, stop: StopRequest | AgreedStop) -> str:
        """Trains until the last step or a stop request.

        Returns "finished", "interrupted" or "preempted".
        """
        config, counters, self.stop = self.config, self.counters, stop
        self.start.restore_generators()  # importing rich for console output draws random numbers
        observation = RunObservation(config, self.passes, self.log, self.setup.has_own_peak)
        while self.step < config.steps and not stop.requested:
            self.plugins.before_step(show)
            if stop.requested:
                break  # the interrupted guard check or spike judgement is repeated after resuming
            started_at_s = time.monotonic()
            self._switch(show)
            if self.queue is not None:
                self.queue.begin()
            try:
                numbers, inputs = observation.taken(self.step, self._optimizer_step, show)
            except DataError:
                self._read(show)  # log the steps computed before the data error
                raise
            numbers |= observation.fields()
            if self.queue is None:
                self._log_step(self.step, numbers, inputs, time.monotonic() - started_at_s, show)
            elif self._is_read_after(self.step, observation):
                self._read(show)
            observation.report(self.step, show)
            if config.digest_every and self._is_due(config.digest_every):
                self._compare_ranks()
            if self._is_due(config.log_every):
                observation.report_amax(self.step, show)
            self.plugins.after_step(show)
            if self._is_due(config.eval_every):
                self.validation.evaluate(counters, self.checkpoints.best, self.log, show)
            if (stop.requested and self.step != counters.saved_step) or self._is_due(
                config.checkpoint_every
            ):
                self._read(show)  # a stop request can arrive between the last read and this line
                self._save()
        self._read(show)
        if (
            self.step > counters.saved_step
        ):  # the stop request came after the loop had tested for it
            self._save()
        return stop.requested if self.step < config.steps else "finished"

    def _save(self) -> None:
        self.checkpoints.save(self.counters, self.plugins, self.log)

    def _new_flags(self) -> SkipFlags:
        """Creates the device-side flags that skip or halt updates.

        The count of consecutive skipped steps starts from the present one.
        """
        scales, skipped = self.passes.scaler is not None, self.counters.skipped_steps
        return SkipFlags(self.passes.device, self.ranks.world, scales, MOST_SKIPPED_STEPS, skipped)

    def _renew_flags(self) -> None:
        """Drops flags that describe other steps than those that follow."""
        self.flags = None if self.flags is None else self._new_flags()

    def _forget_recipes(self) -> None:
        if self.queue is not None:
            self.queue.forget()

    def _log_step(
        self, number: int, numbers: dict[str, Any], inputs: int, spent_s: float, show: Console
    ) -> None:
        """Logs and prints one step whose loss and gradient norm have been read."""
        self.counters.trained_s += spent_s
        speed = inputs / spent_s
        self.log.write(
            "step", number, **numbers, tokens_per_s=speed, elapsed_s=self.counters.trained_s
        )
        # Plugins see every step exactly once and in order, whether it was read alone or with others.
        self.plugins.on_step(number, numbers["loss"], numbers["grad_norm"])
        show.step(
            number, loss=numbers["loss"], tokens_per_s=speed, peak_bytes=numbers["peak_bytes"]
        )

    def _is_read_after(self, number: int, observation: RunObservation) -> bool:
        """True if the host must read all queued steps after this one.

        Reasons: their numbers are logged or used, the next step is measured or switches recipes,
        MOST steps are queued, or a stop was requested.
        """
        config = self.config
        intervals = [
            config.log_every,
            config.eval_every,
            config.checkpoint_every,
            config.digest_every,
        ]
        is_due = any(
            map(self._is_due, [*intervals, config.tensor_every])
        ) or self.switches.starts_at(number + 1)
        most = self.queue is not None and len(self.queue.steps) >= MOST
        asked = observation.must_read_after(number) or self.plugins.must_read_after(number)
        return is_due or most or asked or bool(self.stop.requested)

    def _read(self, show: Console) -> None:
        """Copies the results of all queued steps to the host and logs them.

        Ends the run at the first fatal step.

        The elapsed time of the queue is divided among its steps in proportion to their input
        tokens.
        """
        if self.queue is None or not self.queue.steps:
            return
        steps, readings = self.queue.steps, self.queue.read()
        per_token_s = (time.monotonic() - self.queue.started_at_s) / sum(
            each.drawn.inputs for each in steps
        )
        self.queue.steps = []
        # Correct the optimizer's step counts before any of its state is saved or logged.
        self.passes.settle(norm for *_, norm in readings)
        newest = self.step
        for each, numbers in zip(steps, readings, strict=True):
            self.locate(f"step {each.number}")
            loss, norm = self.passes.agreed(numbers)
            if not self.is_fine(loss, norm):
                # The device halted this update and all later ones, so the weights are those of the
                # step before. Restore low-precision state and generators to that step, and repeat it
                # to locate the non-finite value.
                self.counters.step = each.number - 1
                each.before.restore()
                self._end_nonfinite(loss, norm, each.drawn, each.numbers["tokens"])
            fields = {"loss": loss, "grad_norm": norm, **each.numbers}
            self._log_step(
                each.number, fields, each.drawn.inputs, each.drawn.inputs * per_token_s, show
            )
        self.counters.step = newest

    def _compare_ranks(self) -> None:
        """Raises DriftError if replicated tensors differ between ranks."""
        place = f"step {self.step}"
        self.locate(place)
        self.passes.refuse_drift(place)

    def _is_due(self, every: int) -> bool:
        """True if an action with this interval is due after the current step.

        Interval 0: only after the last step.
        """
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def _switch(self, show: Console) -> None:
        """Applies the recipe switches that start with the next step."""
        for switch in self.switches:
            if switch.step == self.step + 1 and switch.changes:
                switch.apply(self.model)
                self.log.write("switch", switch.step, **switch.event)
                show.say(str(switch))
                self.passes.recipes_changed()
                self._forget_recipes()

    def _optimizer_step(self) -> tuple[dict[str, Any], int]:
        """Runs one optimizer step over all micro-batches.

        Returns (fields of the step event, input tokens).

        Raises NumericsError before anything changes. While the readback is deferred, the fields
        lack loss and gradient norm.
        """
        number, passes = self.step + 1, self.passes
        self.locate(f"step {number}")
        drawn = self.feed.draw(self.step)
        targets, facts = passes.targets(drawn, number, self.stop)
        lr = passes.set_learning_rate(number)
        if self.queue is not None:
            numbers = {"lr": lr, "tokens": targets, **facts}
            return self._launched(self.queue, numbers, drawn), drawn.inputs
        if passes.in_backward is not None:
            loss, grad_norm = self._step_in_backward(drawn, targets)
        else:
            loss, grad_norm = passes.agreed(passes.gradient(drawn.batches, targets))
            self._refuse_nonfinite(loss, grad_norm, drawn, targets)
        passes.update()
        self.counters.step = number
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": targets}
        return {**numbers, **facts}, drawn.inputs

    def _launched(
        self, queue: StepQueue, numbers: dict[str, Any], drawn: StepBatch
    ) -> dict[str, Any]:
        """Queues a step on the device without reading its results.

        Returns the fields of its step event. The caller may add to this dict until the step is
        read.
        """
        assert self.flags is not None
        # Copy amax states and generators before the forward pass changes them: repeating a
        # non-finite step needs them.
        before = queue.snapshot(self.training)
        readings = self.passes.gradient(drawn.batches, numbers["tokens"])
        self.flags.see(readings)
        self.passes.update(self.flags)
        self.counters.step += 1
        queue.steps.append(QueuedStep(self.step, readings, numbers, drawn, before))
        return numbers

    def _step_in_backward(self, drawn: StepBatch, targets: int) -> tuple[float, float]:
        """Runs a step whose parameters are updated inside its last backward pass.

        Returns (loss, gradient norm).
        """

        def check(loss: float, grad_norm: float) -> None:
            self._refuse_nonfinite(loss, grad_norm, drawn, targets)

        found = self.passes.agreed(self.passes.step_in_backward(drawn.batches, targets, check))
        # With a single backward pass, parameters have changed before the host can see a non-finite
        # loss: nothing is left to locate it with.
        if (error := self.passes.lost_in_backward(self.step + 1, *found)) is not None:
            self.log.write("step", self.step + 1, loss=found[0], grad_norm=found[1])
            self.log.write(
                "nonfinite", self.step + 1, where="a step in backward, where it is not looked for"
            )
            raise error
        return found

    def _refuse_nonfinite(
        self, loss: float, grad_norm: float, drawn: StepBatch, targets: int
    ) -> None:
        if not self.is_fine(loss, grad_norm):
            self._end_nonfinite(loss, grad_norm, drawn, targets)

    def _end_nonfinite(
        self, loss: float, grad_norm: float, drawn: StepBatch, targets: int
    ) -> NoReturn:
        """Names the first non-finite module in a NumericsError."""
        number = self.step + 1
        where = self.passes.first_nonfinite(drawn.batches, targets, loss, self.task.options)
        self.log.write("step", number, loss=loss, grad_norm=grad_norm)
        self.log.write("nonfinite", number, where=where)
        raise NumericsError(
            f"step {number}: loss {loss}, gradient norm {grad_norm}. It appeared first at {where}. "
            f"The weights are those of step {self.step}; nothing was saved since the last checkpoint. "
            "Lower the learning rate, or give that layer a wider recipe with --recipe.layers 'NAME=bf16'.",
            code="loss.not-finite",
        )
