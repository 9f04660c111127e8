"""Training loop of one run: forward, backward, optimizer step, logging, evaluation and checkpoints.

    for each micro-batch:  loss = sum(-log p) / targets of the whole step; loss.backward()
    raise NumericsError if the loss or the gradient norm is not finite: nothing has changed yet
    clip, optimizer.step(), advance(model)

On a GPU the loss readback is deferred (`deferred`): the device skips the update of a non-finite step
and all later updates. The host copies the losses of several steps at once, before it prints, logs,
evaluates, saves or ends. With CUDA graphs, or with updates in backward, it reads the loss after
every step. A float16 overflow skips only its own update.

A run that resumes from the checkpoint of step k continues with batch k + 1 of the same sequence.
The task (`tasks.task`) defines the data, the loss and the metrics. On several ranks (`parallel`)
each rank computes its own micro-batches of a step. Decisions and logged values always cover all
ranks.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from narrowgauge import manifest
from narrowgauge.conversion import nonfinite_amax
from narrowgauge.conversion.auto import chosen
from narrowgauge.cuda_graphs import refuse_run
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import DataError, NumericsError
from narrowgauge.optim import precision as precisions
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.snapshot import Scope, Snapshot, Training
from narrowgauge.structure import is_weight
from narrowgauge.train import launches, same_run, scoring, step, stepping
from narrowgauge.train.callback import Callback
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.console import Console, tell
from narrowgauge.train.counters import Counters
from narrowgauge.train.deferred import MOST, QueuedStep, SkipFlags, StepQueue, waits
from narrowgauge.train.device import peak_bytes
from narrowgauge.train.loss import Batch, Objective, inputs_of, learning_rate
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.model import build, recipe_switches
from narrowgauge.train.optimizer import build_optimizer, cast_in_step
from narrowgauge.train.parallel import checkpoints, digest
from narrowgauge.train.parallel.evaluation import readings
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.parallel.spread import Parallel
from narrowgauge.train.parallel.stage_state import WholeNumbers
from narrowgauge.train.parallel.step import agreed, targets_of_ranks, where_nonfinite
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.signals import AgreedStop, StopRequest
from narrowgauge.train.tasks import TrainTask
from narrowgauge.train.tasks.left_out import LeavingOut
from narrowgauge.train.tasks.task import Compute
from narrowgauge.train.tensor_stats import NonfiniteAmax, watched

# float16: so many overflows in a row mean that lowering the loss scale does not help
MOST_SKIPPED_STEPS = 20


class Trainer:
    """State of a run in progress: model, optimizer, data feed, counters and log.

    step, saved_step   finished optimizer steps, and the step of the newest checkpoint
    skipped_steps      consecutive float16 overflows up to now
    trained_s          seconds of training, summed over all resumptions
    resumed_from       path of the checkpoint that the run resumed from, or ''
    carried            {"parent": facts} in the checkpoints of a branch, else {}
    policy             resolved activation checkpointing policy; "auto" never stays
    stages             recipe switches of the run, by step
    numbers            maps one pipeline stage's parameters to the indices of an optimizer of the
                       whole model; None without stages
    stepping, holding  step-in-backward hooks, and FP8 gradient storage; None if the run does not
                       use them
    pending, decision  queue of unread steps and device-side flags; None: the host reads every step
                       before its update
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, task: TrainTask, log: MetricsLog,
        has_own_peak: bool = True, ranks: Ranks | None = None, watch: Callable[[Any], Callback] = lambda trainer: Callback(),
    ) -> None:  # fmt: skip
        """Builds all parts and resumes from the newest valid checkpoint, if there is one.

        has_own_peak  the process's peak memory belongs to this run alone; if False, earlier runs
                      contribute to it and the peak is not recorded
        ranks         the ranks that share the micro-batches of a step (config.micro_batches); None:
                      one process
        watch         builds the callbacks of this run (`callback.Callback`)
        """
        self.ranks = ranks = ranks or Ranks()
        self.has_own_peak = has_own_peak
        self.config, self.folder, self.task, self.log = config, folder, task, log
        self.counters = Counters()
        self.resumed_from = ""
        self.carried: dict[str, Any] = {}
        self.stop: StopRequest | AgreedStop = AgreedStop(StopRequest()) if ranks.world > 1 else StopRequest()
        self.amax_log = NonfiniteAmax()
        self.device = device = ranks.device(config.device)
        self.precision = precisions.get(config.precision)
        # Before the model is allocated: estimating needs the free memory
        self.policy, why = self._policy()
        # Read the recorded choices of recipe "auto": a new measurement could choose other recipes,
        # and a resumed run must compute the same numbers.
        choices = (
            read_run(folder.run).get("auto") if folder.run.exists() and (folder.has_run() or config.parent) else None
        )
        self.model = self._built(choices or None)
        self.feed = LeavingOut(task.feed(self.model))
        self.feed.share = ranks.layout.share(ranks.rank)
        self.memory_notes, self.objective = step.ready(
            replace(config, checkpointing=self.policy), task, self.model, self.precision, device, self.feed.probe,
            on_gpu=device.type == "cuda",
        )  # fmt: skip
        self.memory_notes = [*filter(None, [why]), *self.memory_notes]
        self.parameters = sum(each.numel() for name, each in self.model.named_parameters() if is_weight(name))
        self.shapes = {name: each.shape for name, each in self.model.state_dict().items() if is_weight(name)}
        self.auto = chosen(self.model)
        self.switches = recipe_switches(config, self.model)
        # Index parameters as an optimizer of the unsplit model would, so that checkpoints do not
        # depend on the number of pipeline stages.
        self.numbers = WholeNumbers(self.model, self._new_optimizer()) if ranks.layout.pp > 1 else None
        self.parallel = Parallel(config, self.model, ranks, self.objective, self._probe)
        if self.parallel.pipeline is not None:
            # The task's objective refers to the head of the whole model
            self.objective = self.parallel.pipeline.objective
        self.optimizer = self._new_optimizer()
        begun = stepping.begin(config, self.optimizer, config.micro_batches // ranks.layout.data)
        self.stepping = begun if isinstance(begun, InBackward) else None
        self.holding = begun if isinstance(begun, HeldGradients) else None
        self.memory_notes += stepping.summary(config, begun)
        self.scaler = torch.amp.GradScaler(device.type) if self.precision.scales_loss else None
        self.best = checkpoints.best_of(folder.best, task.best, ranks)
        self.watch = watch(self)
        self._resume()
        # After resuming: `train` restores the generators, because console output in between may draw
        # random numbers, and a branch starts from this state.
        self.start = Snapshot.take(self.training, Scope.PROGRESS)
        backward = partial(self.backward, self.objective, checked=True)
        self.graphs = launches.graphed_step(config, self.model, self.optimizer, self.scaler, device, backward)
        # Reason why the optimizer step leaves casting weights to the forward pass; '' if it casts.
        self.no_cast_reason = cast_in_step(config, self.optimizer, self.model)
        self.queue: StepQueue | None = None
        self.flags: SkipFlags | None = None
        if waits(device) and self.graphs is None and self.stepping is None:
            self.flags = self.new_flags()
            self.queue = StepQueue()
        self._compare_ranks()

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.counters.step

    @property
    def trained_s(self) -> float:
        """Seconds of training, summed over all resumptions."""
        return self.counters.trained_s

    @property
    def training(self) -> Training:
        """Everything in this run that a step changes, for snapshots."""
        return Training(
            model=self.model, optimizer=self.optimizer, scaler=self.scaler, agreements=self.parallel.agreements,
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
        self.ranks.place = f"step {self.step}"

    @contextmanager
    def reading_alone(self) -> Iterator[None]:
        """Sets the queue of unread steps aside for a probe, which reads its own results.

        The probe gets device flags of its own. With the run's, a float16 overflow just before would
        skip every step of the probe.
        """
        queue, flags = self.queue, self.flags
        self.queue = None
        self.flags = None if flags is None else self.new_flags()
        try:
            yield
        finally:
            self.queue, self.flags = queue, flags
            if queue is not None:
                # A change inside the block may have replaced amax histories.
                queue.forget()

    def start_from_weights(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Loads weights alone and moves the data feed and recipe switches to their step.

        Optimizer, amax histories and generators stay fresh.
        """
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        for switch in self.switches:
            if switch.step <= step:
                switch.apply(self.model)
        for done in range(step):  # the feed has no seek: draw and discard
            self.feed.draw(done)
        self.counters.step = self.counters.saved_step = step
        self.start.restore_generators()
        self.start = Snapshot.take(self.training, Scope.PROGRESS)

    def new_flags(self) -> SkipFlags:
        """Creates the device-side flags that skip or halt updates.

        The count of consecutive skipped steps starts from the present one.
        """
        scales = self.scaler is not None
        return SkipFlags(self.device, self.ranks.world, scales, MOST_SKIPPED_STEPS, self.counters.skipped_steps)

    def _policy(self) -> tuple[str, str]:
        """Returns (activation checkpointing policy, reason).

        The reason is '' unless the policy was "auto".

        Rank 0 resolves "auto" and broadcasts the result, since estimates could differ between
        ranks.
        """
        if self.config.checkpointing != "auto":
            return self.config.checkpointing, ""
        from narrowgauge.train.planning.policy import settled  # lazy: only "auto" traces the model

        policy, why = self.ranks.told_by_first(lambda: settled(self.config, self.device))
        return policy, why

    def _built(self, choices: dict[str, str] | None) -> Any:
        """Builds the model.

        Rank 0 measures for recipe "auto", and all other ranks build with its choices.
        """
        ranks, config, task = self.ranks, self.config, self.task
        model: Any = None
        if ranks.is_first or "auto" not in (config.recipe, *config.layers_recipe.values()):
            model = build(config, task.model, self.device, task.tokens_at_once(), choices)
        chosen_first = ranks.told_by_first(lambda: chosen(model))
        return model or build(config, task.model, self.device, task.tokens_at_once(), chosen_first)

    def _probe(self) -> dict[str, Any]:
        """Inputs of the largest micro-batch of the first step."""
        return inputs_of(self.feed.probe(), self.device, self.task.options)

    def _new_optimizer(self) -> Any:
        return build_optimizer(self.config, self.model, self.precision)

    def _resume(self) -> None:
        found, skipped = checkpoints.newest_valid(
            self.folder.checkpoints, self._become, self.model, self.optimizer, self.ranks, self.numbers,
            self.folder.at,
        )  # fmt: skip
        for path, why in skipped:
            tell(f"WARNING: passed over the damaged checkpoint {path}: {why}")
        if found is None:
            if self.ranks.is_first and self.log.path.stat().st_size:
                # The earlier attempt ended before its first checkpoint, or the checkpoint was
                # deleted. The resume event at step 0 makes readers of the log ignore its old step
                # events.
                tell(
                    f"WARNING: {self.folder.checkpoints} holds no checkpoint to resume from: the run begins at its first step."
                )
                self.log.write("resume", 0, path="", skipped=[])
            return
        self.load_checkpoint(found)
        if lost := self.best.restore(found.facts.get("best")):
            tell(f"WARNING: {lost}")
        self.counters.saved_step, self.counters.trained_s = found.step, found.facts["trained_s"]
        # Spike rule and guard continue from the state that the checkpoint holds.
        self.watch.restore(found.facts)
        self.resumed_from = str(found.path)
        place = str(found.path.relative_to(self.folder.path))
        self.carried = {"parent": found.facts["parent"]} if "parent" in found.facts else {}
        if not self.ranks.is_first:
            return
        events = read_metrics(self.log.path)
        parent = self.carried.get("parent", {})
        # A branch resumes from the checkpoint that its creation wrote: the first start logs
        # `branch`, later ones `resume`.
        if parent.get("step") == self.step and not any(event["event"] == "branch" for event in events):
            self.log.write("branch", **parent)
        else:
            left_out = {"left_out": list(self.feed.left_out)} if self.feed.left_out else {}
            self.log.write("resume", self.step, path=place, skipped=[path.name for path, _ in skipped], **left_out)
        logged = (event["path"] for event in events if event["event"] == "checkpoint" and event["step"] <= self.step)
        # A kill came after the checkpoint was renamed into place and before its event was written
        if place not in logged:
            self.log.write("checkpoint", self.step, path=place)

    def load_checkpoint(self, found: store.Checkpoint) -> None:
        """Loads a checkpoint of this run into model, optimizer, scaler, data feed and counters."""
        tensors, rest = found.tensors, found.facts["state"]
        if self.numbers is not None:
            with state.unusable(str(found.path)):
                tensors, rest = self.numbers.own_part(tensors, rest, self.model, self.optimizer)
        state.restore(self.model, self.optimizer, self.scaler, tensors, rest, str(found.path))
        # Older checkpoints have no agreement state: start from the seed and the step
        for agreement in self.parallel.agreements:
            agreement.load_state_dict(found.facts.get("agreement") or {"seed": self.config.seed, "step": found.step})
        with state.unusable(f"{found.path / manifest.FACTS}: position"):
            self.feed.restore(found.facts.get("position", {}))
        self.counters.step, self.counters.skipped_steps = found.step, found.facts["skipped_steps"]

    def _become(self, found: store.Checkpoint) -> None:
        """Applies the recipe switches before the checkpoint's step.

        Refuses a checkpoint of another run.

        Runs before the tensors are loaded: a layer's buffers depend on its recipe.
        """
        self.watch.prepare(found.facts)
        past = self._past_switches(found.step)
        same_run.refuse(found, self.config, self._numeric_settings(), self.task.identity, past)
        for switch in self.switches:
            if switch.step <= found.step:
                switch.apply(self.model)

    def _past_switches(self, step: int) -> list[str]:
        return [switch.switch for switch in self.switches if switch.step <= step]

    def _numeric_settings(self) -> dict[str, Any]:
        """Settings that change the arithmetic and leave the names and shapes of tensors alone."""
        own = {
            key: getattr(self.config, key)
            for key in ("recipe", "embedding_codes", "precision", "optimizer", "states", "master", "loss")
        }
        kept = ",".join(self.precision.keep_list(self.config.keep_float32)) or "none"
        return own | {"keep_float32": kept, "recipes": dict(self.config.layers_recipe), "auto": self.auto}

    def train(self, show: Console, stop: StopRequest | AgreedStop) -> str:
        """Trains until the last step or a stop request.

        Returns "finished", "interrupted" or "preempted".
        """
        config, self.stop = self.config, stop
        self.start.restore_generators()  # importing rich for console output draws random numbers
        refused = "; ".join(refuse_run(self.model, self.optimizer, self.scaler)) if self.graphs is None else ""
        monitor = launches.LaunchMonitor(config, self.device, self.graphs, refused)
        while self.step < config.steps and not stop.requested:
            self.watch.before_step(show)
            if stop.requested:
                break  # the interrupted guard check or spike judgement is repeated after resuming
            started_at_s = time.monotonic()
            self._switch(show)
            if self.queue is not None:
                self.queue.begin()
            try:
                numbers, inputs = self._watched_step(monitor, show)
            except DataError:
                self._read(show)  # log the steps computed before the data error
                raise
            numbers["peak_bytes"] = peak_bytes(self.device) if self.has_own_peak else 0
            numbers |= {"compiled_graphs": launches.compiled_graphs()} if config.compile else {}
            if self.queue is None:
                self._log_step(self.step, numbers, inputs, time.monotonic() - started_at_s, show)
            elif self._is_read_after(self.step, monitor):
                self._read(show)
            monitor.report(self.step, show)
            if config.digest_every and self._is_due(config.digest_every):
                self._compare_ranks()
            if self._is_due(config.log_every):
                self.amax_log.report(self.step, self.parallel.of_all(nonfinite_amax(self.model)), self.log, show)
            self.watch.after_step(show)
            if self._is_due(config.eval_every):
                self._evaluate(show)
            if (stop.requested and self.step != self.counters.saved_step) or self._is_due(config.checkpoint_every):
                self._read(show)  # a stop request can arrive between the last read and this line
                self._save()
        self._read(show)
        if self.step > self.counters.saved_step:  # the stop request came after the loop had tested for it
            self._save()
        return stop.requested if self.step < config.steps else "finished"

    def _log_step(self, number: int, numbers: dict[str, Any], inputs: int, spent_s: float, show: Console) -> None:
        """Logs and prints one step whose loss and gradient norm have been read."""
        self.counters.trained_s += spent_s
        speed = inputs / spent_s
        self.log.write("step", number, **numbers, tokens_per_s=speed, elapsed_s=self.trained_s)
        # Watches see every step exactly once and in order, whether it was read alone or with
        # others.
        self.watch.saw(number, numbers["loss"], numbers["grad_norm"])
        show.step(number, loss=numbers["loss"], tokens_per_s=speed, peak_bytes=numbers["peak_bytes"])

    def _is_read_after(self, number: int, monitor: launches.LaunchMonitor) -> bool:
        """True if the host must read all queued steps after this one.

        Reasons: their numbers are logged or used, the next step is measured or switches recipes,
        MOST steps are queued, or a stop was requested.
        """
        config, following = self.config, number + 1
        intervals = [config.log_every, config.eval_every, config.checkpoint_every, config.digest_every]
        intervals.append(config.tensor_every)
        # A step with tensor statistics waits for the device, so its time must not be shared with
        # earlier steps: read them before it.
        is_due = any(map(self._is_due, intervals)) or (config.tensor_every > 0 and following % config.tensor_every == 0)
        measured = monitor.measures(following) or monitor.measures(number)
        switches = any(switch.step == following for switch in self.switches)
        most = self.queue is not None and len(self.queue.steps) >= MOST
        return is_due or measured or switches or most or self.watch.reads_after(number) or bool(self.stop.requested)

    def _read(self, show: Console) -> None:
        """Copies the results of all queued steps to the host and logs them.

        Ends the run at the first fatal step.

        The elapsed time of the queue is divided among its steps in proportion to their input
        tokens.
        """
        if self.queue is None or not self.queue.steps:
            return
        steps, readings = self.queue.steps, self.queue.read()
        per_token_s = (time.monotonic() - self.queue.started_at_s) / sum(each.inputs for each in steps)
        self.queue.steps = []
        if isinstance(self.optimizer, NarrowOptimizer):
            # Correct the optimizer's step counts before any of its state is saved or logged.
            self.optimizer.settle([not math.isfinite(norm) for *_, norm in readings])
        newest = self.step
        for each, (*losses, norm) in zip(steps, readings, strict=True):
            self.ranks.place = f"step {each.number}"
            loss, norm = agreed(losses, norm, self.ranks)
            if not self.is_fine(loss, norm):
                # The device halted this update and all later ones, so the weights are those of the
                # step before. Restore amax histories and RNG counters to that step, and repeat it
                # to locate the non-finite value.
                self.counters.step = each.number - 1
                each.before.restore()
                self._end_nonfinite(loss, norm, each.micro_batches, each.numbers["tokens"])
            numbers = {"loss": loss, "grad_norm": norm, **each.numbers}
            self._log_step(each.number, numbers, each.inputs, each.inputs * per_token_s, show)
        self.counters.step = newest

    def _compare_ranks(self) -> None:
        """Raises DriftError if replicated tensors differ between ranks."""
        self.ranks.place = place = f"step {self.step}"
        if self.ranks.layout.data * self.ranks.layout.tp > 1:
            held = digest.replicated(self.model, self.optimizer)
            digest.refuse_drift(held, place, self.device, self.parallel.mesh)

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
                if self.graphs is not None:
                    # A captured graph replays the kernels of the old recipe.
                    self.graphs.renew()
                if self.queue is not None:
                    self.queue.forget()

    def _watched_step(self, monitor: launches.LaunchMonitor, show: Console) -> tuple[dict[str, Any], int]:
        """Runs `_optimizer_step`.

        Adds tensor statistics or a measurement of GPU idle time where due.
        """
        config, number = self.config, self.step + 1
        watches = config.tensor_every > 0 and not (config.compile or config.cuda_graph)
        if watches and number % config.tensor_every == 0:
            with watched(self.model) as events:
                taken = self._optimizer_step()
            for kind, fields in self.parallel.of_all(events).values():
                self.log.write(kind, self.step, **fields)
            return taken
        # A step with tensor statistics waits for the device all the time, so its idle time means
        # nothing. Measure the next step instead.
        follows = watches and self.step % config.tensor_every == 0
        if monitor.measures(number) or (follows and monitor.measures(self.step)):
            return monitor.measured(number, self._optimizer_step, self.log, show)
        return self._optimizer_step()

    def _optimizer_step(self) -> tuple[dict[str, Any], int]:
        """Runs one optimizer step over all micro-batches.

        Returns (fields of the step event, input tokens).

        Raises NumericsError before anything changes. While the readback is deferred, the fields
        lack loss and gradient norm.
        """
        number = self.step + 1
        self.ranks.place = f"step {number}"
        step_batch = self.feed.draw(self.step)
        micro_batches = step_batch.batches
        targets, facts = targets_of_ranks(step_batch, number, self.stop, self.ranks)
        lr = learning_rate(self.config, number)
        launches.set_learning_rate(self.optimizer, lr)
        if self.queue is not None:
            numbers = {"lr": lr, "tokens": targets, **facts}
            return self._launched(self.queue, numbers, micro_batches, step_batch.inputs), step_batch.inputs
        if self.stepping is not None:
            loss, grad_norm = self._step_in_backward(self.stepping, micro_batches, targets)
        else:
            loss, grad_norm = agreed(*read(self.gradient(micro_batches, targets)), self.ranks)
            self._refuse_nonfinite(loss, grad_norm, micro_batches, targets)
        if self.graphs is not None:
            self.graphs.update()
        else:
            step.update(self.optimizer, self.scaler, partial(self.parallel.advance, self.model))
        self.counters.step = number
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": targets}
        return {**numbers, **facts}, step_batch.inputs

    def _launched(
        self, pending: StepQueue, numbers: dict[str, Any], micro_batches: list[Batch], inputs: int
    ) -> dict[str, Any]:
        """Queues a step on the device without reading its results.

        Returns the fields of its step event. The caller may add to this dict until the step is
        read.
        """
        assert self.flags is not None
        # Copy amax states and generators before the forward pass changes them: repeating a
        # non-finite step needs them.
        before = pending.snapshot(self.training)
        readings = self.gradient(micro_batches, numbers["tokens"])
        self.flags.see(readings)
        step.update(self.optimizer, self.scaler, partial(self.parallel.advance, self.model), self.flags)
        self.counters.step += 1
        pending.steps.append(QueuedStep(self.step, readings, numbers, inputs, micro_batches, before))
        return numbers

    def gradient(self, micro_batches: list[Batch], targets: int) -> Tensor:
        """Computes and clips the gradient of a step.

        Returns a 1-d tensor on the device: the loss of each micro-batch, then the gradient norm
        before clipping.
        """
        if self.graphs is not None:
            for batch in micro_batches:
                launches.accumulate(self.graphs, batch, targets, self.objective.head)
            return self.graphs.readings()
        losses: Any = []
        if self.parallel.pipeline is not None:
            losses = self.parallel.pipeline.step(micro_batches, targets)
            micro_batches = []
        for turn, batch in enumerate(micro_batches, 1):
            self.parallel.follows(turn == len(micro_batches))
            losses.append(self.backward(self.objective, batch, targets))
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = step.clipped(self.config, self.model, self.parallel.stages_group, self.holding)
        return torch.stack((*losses, norm.to(losses[0].dtype)))

    def _step_in_backward(self, inside: InBackward, micro_batches: list[Batch], targets: int) -> tuple[float, float]:
        """Runs a step whose parameters are updated inside its last backward pass.

        Returns (loss, gradient norm).
        """

        def backward() -> Tensor:
            # Reduce gradients in each micro-batch: the FP8 sum must hold this rank's shard
            self.parallel.follows(True)
            return torch.stack([self.backward(self.objective, batch, targets) for batch in micro_batches])

        def between(losses: Tensor) -> None:
            assert inside.norm is not None
            readings = agreed(*read(torch.cat((losses, inside.norm.to(losses.dtype)[None]))), self.ranks)
            self._refuse_nonfinite(*readings, micro_batches, targets)
            self.repeat_draws()

        losses = stepping.take(inside, backward, between)
        inside.end_step()
        norm = losses.new_zeros(()) if inside.norm is None else inside.norm.to(losses.dtype)
        found = agreed(*read(torch.cat((losses, norm[None]))), self.ranks)
        # With a single backward pass, parameters have changed before the host can see a non-finite
        # loss: nothing is left to locate it with.
        if (error := stepping.lost(self.step + 1, *found)) is not None:
            self.log.write("step", self.step + 1, loss=found[0], grad_norm=found[1])
            self.log.write("nonfinite", self.step + 1, where="a step in backward, where it is not looked for")
            raise error
        return found

    def repeat_draws(self) -> None:
        """Makes the next pass of this step repeat the random draws that all ranks share."""
        for agreement in self.parallel.agreements:
            agreement.micro_batch = 0

    def backward(self, objective: Objective, batch: Batch, targets: int | Tensor, *, checked: bool = False) -> Tensor:
        """Accumulates the gradient of one micro-batch. Returns its detached loss.

        checked  the labels were validated on the host already
        """
        loss = step.loss_of(self.parallel, objective, batch, self.device, self.precision, targets, checked)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def _refuse_nonfinite(self, loss: float, grad_norm: float, micro_batches: list[Batch], targets: int) -> None:
        if not self.is_fine(loss, grad_norm):
            self._end_nonfinite(loss, grad_norm, micro_batches, targets)

    def is_fine(self, loss: float, grad_norm: float) -> bool:
        """True if the run continues after a step with these numbers.

        Counts skipped steps, so call it once per step and in order.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.counters.skipped_steps = 0
            return True
        self.counters.skipped_steps += 1
        # float16 overflow: the optimizer skips this update and GradScaler lowers the scale
        return self.scaler is not None and math.isfinite(loss) and self.counters.skipped_steps <= MOST_SKIPPED_STEPS

    def _end_nonfinite(self, loss: float, grad_norm: float, micro_batches: list[Batch], targets: int) -> NoReturn:
        """Names the first non-finite module in a NumericsError.

        Repeats the step from the current weights, under hooks.
        """
        number = self.step + 1
        self.optimizer.zero_grad()
        whole = replace(
            self.objective, forward=self.model, options=self.task.options, head=None
        )  # the whole, uncompiled model: compiled code and the chunked head run no hooks

        pipeline = self.parallel.pipeline
        self.parallel.follows(False)

        def repeat() -> None:
            self.repeat_draws()
            if pipeline is not None:
                pipeline.step(micro_batches, targets)
            for batch in micro_batches if pipeline is None else ():
                self.backward(whole, batch, targets)

        stages = (None, None) if pipeline is None else (partial(pipeline.forward, micro_batches), pipeline.order)
        again = repeat if self.stepping is None else partial(self.stepping.measure, repeat)
        where = where_nonfinite(self.model, again, loss, self.ranks, *stages)
        self.optimizer.zero_grad()
        self.log.write("step", number, loss=loss, grad_norm=grad_norm)
        self.log.write("nonfinite", number, where=where)
        raise NumericsError(
            f"step {number}: loss {loss}, gradient norm {grad_norm}. It appeared first at {where}. "
            f"The weights are those of step {self.step}; nothing was saved since the last checkpoint. "
            "Lower the learning rate, or give that layer a wider recipe with --recipes 'NAME=bf16'."
        )

    @torch.no_grad()
    def _evaluate(self, show: Console) -> None:
        """Logs the task's metrics, updates the best weights, and logs a generated sample."""
        self._set_training(False)
        found, wide = self.scores(self.config.eval_wide)
        self.log.write("eval", self.step, **found, **({"wide": wide} if wide else {}), elapsed_s=self.trained_s)
        # The best weights are for export: recipe states stay out.
        weights, _ = state.split_scaling(self.model.state_dict())
        is_best = self.best.take(self.step, found, weights)
        show.say(f"step {self.step}: validation {scoring.words(found, wide)}{', the best so far' if is_best else ''}")
        if self.config.sample_tokens:
            with self.precision.context(self.device.type):
                written = self.parallel(self.task.sample, self.parallel.pipeline or self.model)
            if written:
                self.log.write("sample", self.step, **written)
        self.parallel.release()
        self._set_training(True)

    @torch.no_grad()
    def scores(self, both: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Computes the task's metrics in evaluation mode.

        Returns (metrics in the run's recipe, metrics in 16 bits or None).

        both  also score with all matmuls in 16 bits; None is returned if the recipe's forward pass
              is in 16 bits anyway
        """
        shared = partial(
            readings, score=self._score, share=self.feed.share, ranks=self.ranks, knows=self.parallel.knows_losses
        )
        evaluate = partial(self.task.evaluate, self.model, shared)
        found, both = evaluate(), both and bool(self.parallel.of_all(scoring.narrow_forward(self.model)))
        return found, scoring.wide(self.model, evaluate) if both else None

    def _set_training(self, mode: bool) -> None:
        self.model.train(mode)
        self.parallel.whole.train(mode)

    def _score(self, batch: Batch, compute: Compute | None = None) -> tuple[Tensor, Tensor | None]:
        if self.parallel.pipeline is not None:
            return self.parallel.pipeline.scored(batch)
        with self.precision.context(self.device.type):
            return self.parallel(compute or self.objective.scored, batch, self.device)

    def collected(self) -> tuple[store.Tensors, dict[str, Any]]:
        """Returns (tensors, facts) of a checkpoint of the current step."""
        tensors, rest = (self.numbers or state).collect(self.model, self.optimizer, self.scaler)
        facts = {
            "state": rest,
            "trained_s": self.trained_s,
            "skipped_steps": self.counters.skipped_steps,
            **self._numeric_settings(),
            "switched": self._past_switches(self.step),
            **self.task.identity,
            "position": self.feed.state(),
            "best": self.best.facts(),
            **self.carried,
            **self.watch.facts(),
        }
        for agreement in self.parallel.agreements[:1]:  # pipeline stages count identically
            facts["agreement"] = agreement.state_dict()
        return tensors, facts

    def _save(self) -> None:
        started_at_s = time.monotonic()
        tensors, facts = self.collected()
        # Sync the log first: a run that resumes here must find the events of all earlier steps
        self.log.sync()
        path = checkpoints.save(self.folder.checkpoints, self.step, tensors, facts, self.config.keep, self.ranks)
        self.counters.saved_step = self.step
        # Only now: until the checkpoint is on disk, a resumed run needs the best weights that the
        # older checkpoint names.
        self.best.clear()
        self.watch.saved()
        save_s = time.monotonic() - started_at_s
        self.log.write("checkpoint", self.step, path=str(path.relative_to(self.folder.path)), save_s=save_s)


def read(readings: Tensor) -> tuple[list[float], float]:
    """Copies micro-batch losses and gradient norm to the host.

    This is the only synchronisation of the step.
    """
    *losses, norm = readings.tolist()
    return losses, norm
