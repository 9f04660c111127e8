"""A run in progress: its parts, one optimizer step, what is logged, evaluated and saved.

    for each micro-batch:  loss = sum of -log p / targets of the whole step;  backward
    stop here if loss or gradient norm is not finite: nothing has been changed yet
    clip, optimizer.step(), advance(model)

On a GPU the device stops: it leaves out this update and those after it, and the host, which waits for nothing else, finds that when it
reads the numbers of several steps together (`pending`): before it prints, logs, evaluates, saves or ends. CUDA graphs and steps in backward
are read step by step. A run that goes on from the checkpoint of step k continues with batch k + 1 of the same sequence.
What is learnt, from which batches and by which metrics, is the task's business (`tasks.task`). On several ranks (`parallel`) each has
its micro-batches of a step; what decides anything, and what is logged, is of all of them together.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from narrowgauge import manifest
from narrowgauge.conversion import nonfinite_amax
from narrowgauge.conversion.auto import chosen
from narrowgauge.cuda_graphs import refuse_run
from narrowgauge.diagnose.generators import generators, set_generators
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import DataError, NumericsError
from narrowgauge.optim import precision as precisions
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.structure import is_weight
from narrowgauge.train import launches, same_run, scoring, step, stepping
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.console import Console, tell
from narrowgauge.train.device import peak_bytes
from narrowgauge.train.loss import Batch, Objective, inputs_of, learning_rate
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.model import build, stages
from narrowgauge.train.optimizer import build_optimizer, cast_in_step
from narrowgauge.train.parallel import checkpoints, digest
from narrowgauge.train.parallel.evaluation import readings
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.parallel.spread import Parallel
from narrowgauge.train.parallel.stage_state import WholeNumbers
from narrowgauge.train.parallel.step import agreed, targets_of_ranks, where_nonfinite
from narrowgauge.train.pending import MOST, Decision, Pending, Step, waits
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.signals import AgreedStop, StopRequest
from narrowgauge.train.tasks import TrainTask
from narrowgauge.train.tasks.left_out import LeavingOut
from narrowgauge.train.tasks.task import Compute
from narrowgauge.train.tensor_stats import NonfiniteAmax, watched
from narrowgauge.train.watch import Watch

MOST_SKIPPED_STEPS = 20  # float16: that many overflows in a row mean that no loss scale helps


class Trainer:
    """The parts of a run in progress."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, task: TrainTask, log: MetricsLog,
        has_own_peak: bool = True, ranks: Ranks | None = None, watch: Callable[[Any], Watch] = lambda trainer: Watch(),
    ) -> None:  # fmt: skip
        """Builds everything, and resumes from the newest valid checkpoint of the folder if there is one.

        has_own_peak  the peak of memory is this run's; else it is of the runs before as well, and is not recorded
        ranks         among which the micro-batches of a step (config.micro_batches) are shared; None: one
        watch         gives what looks after this run
        """
        self.ranks = ranks = ranks or Ranks()
        self.has_own_peak = has_own_peak
        self.config, self.folder, self.task, self.log = config, folder, task, log
        self.step = self.saved_step = 0  # finished optimizer steps
        self.skipped_steps = 0  # in a row, of float16
        self.trained_s = 0.0  # over all resumptions
        self.resumed_from = ""
        self.carried: dict[str, Any] = {}  # that a branch's checkpoints say of its parent
        self.stop: StopRequest | AgreedStop = AgreedStop(StopRequest()) if ranks.world > 1 else StopRequest()
        self.amax_log = NonfiniteAmax()
        self.device = device = ranks.device(config.device)
        self.precision = precisions.get(config.precision)
        self.policy, why = self._policy()  # before the model takes memory
        # What recipe "auto" chose when the run began: a resumed run computes the same.
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
        self.stages = stages(config, self.model)
        # Of a model that is cut into stages: how an optimizer of all of it would number its parameters.
        self.numbers = WholeNumbers(self.model, self._new_optimizer()) if ranks.layout.pp > 1 else None
        self.parallel = Parallel(config, self.model, ranks, self.objective, self._probe)
        if self.parallel.pipeline is not None:
            self.objective = self.parallel.pipeline.objective  # the other one has the whole model's head
        self.optimizer = self._new_optimizer()
        begun = stepping.begin(config, self.optimizer, config.micro_batches // ranks.layout.data)
        self.stepping = begun if isinstance(begun, InBackward) else None
        self.holding = begun if isinstance(begun, HeldGradients) else None
        self.memory_notes += stepping.summary(config, begun)
        self.scaler = torch.amp.GradScaler(device.type) if self.precision.scales_loss else None
        self.best = checkpoints.best_of(folder.best, task.best, ranks)
        self.watch = watch(self)
        self._resume()
        self.generators = generators()
        backward = partial(self.backward, self.objective, checked=True)
        self.graphs = launches.graphed_step(config, self.model, self.optimizer, self.scaler, device, backward)
        # Why the optimizer's step is not asked to cast weights, or ''.
        self.no_cast_reason = cast_in_step(config, self.optimizer, self.model)
        self.pending: Pending | None = None  # None: each step is read before its update
        self.decision: Decision | None = None
        if waits(device) and self.graphs is None and self.stepping is None:
            self.decision = self.new_decision()
            self.pending = Pending()
        self._compare_ranks()

    def new_decision(self) -> Decision:
        """What the device decides by from here on."""
        scales = self.scaler is not None
        return Decision(self.device, self.ranks.world, scales, MOST_SKIPPED_STEPS, self.skipped_steps)

    def _policy(self) -> tuple[str, str]:
        """The policy of checkpointing, the same on all ranks, and why where it was chosen."""
        if self.config.checkpointing != "auto":
            return self.config.checkpointing, ""
        from narrowgauge.train.planning.policy import settled  # counts, which no other run does

        policy, why = self.ranks.told_by_first(lambda: settled(self.config, self.device))
        return policy, why

    def _built(self, choices: dict[str, str] | None) -> Any:
        """The model. Recipe "auto" chooses by the measurements of rank 0, on all ranks."""
        ranks, config, task = self.ranks, self.config, self.task
        model: Any = None
        if ranks.is_first or "auto" not in (config.recipe, *config.layers_recipe.values()):
            model = build(config, task.model, self.device, task.tokens_at_once(), choices)
        chosen_first = ranks.told_by_first(lambda: chosen(model))
        return model or build(config, task.model, self.device, task.tokens_at_once(), chosen_first)

    def _probe(self) -> dict[str, Any]:
        """Inputs of the first step's largest micro-batch."""
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
                # It ended before its first checkpoint, or that is gone: what it logged does not count.
                tell(
                    f"WARNING: {self.folder.checkpoints} holds no checkpoint to resume from: the run begins at its first step."
                )
                self.log.write("resume", 0, path="", skipped=[])
            return
        self.take_up(found)
        if lost := self.best.restore(found.facts.get("best")):
            tell(f"WARNING: {lost}")
        self.saved_step, self.trained_s = found.step, found.facts["trained_s"]
        self.watch.restore(found.facts)
        self.resumed_from = str(found.path)
        place = str(found.path.relative_to(self.folder.path))
        self.carried = {"parent": found.facts["parent"]} if "parent" in found.facts else {}
        if not self.ranks.is_first:
            return
        events = read_metrics(self.log.path)
        parent = self.carried.get("parent", {})
        if parent.get("step") == self.step and not any(event["event"] == "branch" for event in events):
            self.log.write("branch", **parent)
        else:
            left_out = {"left_out": list(self.feed.left_out)} if self.feed.left_out else {}
            self.log.write("resume", self.step, path=place, skipped=[path.name for path, _ in skipped], **left_out)
        logged = (event["path"] for event in events if event["event"] == "checkpoint" and event["step"] <= self.step)
        if place not in logged:  # a kill came between saving it and logging it
            self.log.write("checkpoint", self.step, path=place)

    def take_up(self, found: store.Checkpoint) -> None:
        """The state of a checkpoint of this run becomes the present one."""
        tensors, rest = found.tensors, found.facts["state"]
        if self.numbers is not None:
            with state.unusable(str(found.path)):
                tensors, rest = self.numbers.own_part(tensors, rest, self.model, self.optimizer)
        state.restore(self.model, self.optimizer, self.scaler, tensors, rest, str(found.path))
        for agreement in self.parallel.agreements:  # checkpoints of before have none
            agreement.load_state_dict(found.facts.get("agreement") or {"seed": self.config.seed, "step": found.step})
        with state.unusable(f"{found.path / manifest.FACTS}: position"):
            self.feed.restore(found.facts.get("position", {}))
        self.step, self.skipped_steps = found.step, found.facts["skipped_steps"]

    def _become(self, found: store.Checkpoint) -> None:
        """Gives layers the recipes that they had at the step of a checkpoint of this run."""
        self.watch.prepare(found.facts)
        past = self._past_switches(found.step)
        same_run.refuse(found, self.config, self._numeric_settings(), self.task.identity, past)
        for stage in self.stages:
            if stage.step <= found.step:
                stage.apply(self.model)

    def _past_switches(self, step: int) -> list[str]:
        return [stage.switch for stage in self.stages if stage.step <= step]

    def _numeric_settings(self) -> dict[str, Any]:
        """Settings that change the arithmetic but not the tensors' names and shapes."""
        own = {
            key: getattr(self.config, key)
            for key in ("recipe", "embedding_codes", "precision", "optimizer", "states", "master", "loss")
        }
        kept = ",".join(self.precision.keep_list(self.config.keep_float32)) or "none"
        return own | {"keep_float32": kept, "recipes": dict(self.config.layers_recipe), "auto": self.auto}

    def train(self, show: Console, stop: StopRequest | AgreedStop) -> str:
        """Steps until the end or a request to stop; returns "finished", "interrupted" or "preempted"."""
        config, self.stop = self.config, stop
        set_generators(self.generators)  # what was shown since may have drawn: rich does when it is imported
        refused = "; ".join(refuse_run(self.model, self.optimizer, self.scaler)) if self.graphs is None else ""
        monitor = launches.LaunchMonitor(config, self.device, self.graphs, refused)
        while self.step < config.steps and not stop.requested:
            self.watch.before_step(show)
            if stop.requested:
                break  # what it cut short begins anew
            started_at_s = time.monotonic()
            self._switch(show)
            if self.pending is not None:
                self.pending.begin()
            try:
                numbers, inputs = self._watched_step(monitor, show)
            except DataError:
                self._read(show)  # what was computed before is logged
                raise
            numbers["peak_bytes"] = peak_bytes(self.device) if self.has_own_peak else 0
            numbers |= {"compiled_graphs": launches.compiled_graphs()} if config.compile else {}
            if self.pending is None:
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
            if (stop.requested and self.step != self.saved_step) or self._is_due(config.checkpoint_every):
                self._read(show)  # a signal may come at any time
                self._save()
        self._read(show)
        if self.step > self.saved_step:  # asked to stop after this step had looked whether to save
            self._save()
        return stop.requested if self.step < config.steps else "finished"

    def _log_step(self, number: int, numbers: dict[str, Any], inputs: int, spent_s: float, show: Console) -> None:
        """Of a step whose numbers are known."""
        self.trained_s += spent_s
        speed = inputs / spent_s
        self.log.write("step", number, **numbers, tokens_per_s=speed, elapsed_s=self.trained_s)
        self.watch.saw(number, numbers["loss"], numbers["grad_norm"])
        show.step(number, loss=numbers["loss"], tokens_per_s=speed, peak_bytes=numbers["peak_bytes"])

    def _is_read_after(self, number: int, monitor: launches.LaunchMonitor) -> bool:
        """Whether the host reads the steps so far after this one: their numbers are told or used then, or the next step is another."""
        config, following = self.config, number + 1
        intervals = [config.log_every, config.eval_every, config.checkpoint_every, config.digest_every]
        intervals.append(config.tensor_every)
        is_due = any(map(self._is_due, intervals)) or (config.tensor_every > 0 and following % config.tensor_every == 0)
        measured = monitor.measures(following) or monitor.measures(number)
        switches = any(stage.step == following for stage in self.stages)
        most = self.pending is not None and len(self.pending.steps) >= MOST
        return is_due or measured or switches or most or self.watch.reads_after(number) or bool(self.stop.requested)

    def _read(self, show: Console) -> None:
        """Reads and logs the steps that were launched; ends the run where one of them has to. Time is shared out by tokens."""
        if self.pending is None or not self.pending.steps:
            return
        steps, readings = self.pending.steps, self.pending.read()
        per_token_s = (time.monotonic() - self.pending.started_at_s) / sum(each.inputs for each in steps)
        self.pending.steps = []
        if isinstance(self.optimizer, NarrowOptimizer):
            self.optimizer.settle([not math.isfinite(norm) for *_, norm in readings])
        newest = self.step
        for each, (*losses, norm) in zip(steps, readings, strict=True):
            self.ranks.place = f"step {each.number}"
            loss, norm = agreed(losses, norm, self.ranks)
            if not self.is_fine(loss, norm):
                self.step = each.number - 1
                self.pending.put_back(each, self.parallel.agreements)
                self._end_nonfinite(loss, norm, each.micro_batches, each.numbers["tokens"])
            numbers = {"loss": loss, "grad_norm": norm, **each.numbers}
            self._log_step(each.number, numbers, each.inputs, each.inputs * per_token_s, show)
        self.step = newest

    def _compare_ranks(self) -> None:
        """Raises DriftError if ranks differ in what they hold alike."""
        self.ranks.place = place = f"step {self.step}"
        if self.ranks.layout.data * self.ranks.layout.tp > 1:
            held = digest.replicated(self.model, self.optimizer)
            digest.refuse_drift(held, place, self.device, self.parallel.mesh)

    def _is_due(self, every: int) -> bool:
        """Whether what is done every so many steps is done after this one; 0: only after the last."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def _switch(self, show: Console) -> None:
        """Gives layers the recipes that begin with the next step."""
        for stage in self.stages:
            if stage.step == self.step + 1 and stage.changes:
                stage.apply(self.model)
                self.log.write("switch", stage.step, **stage.event)
                show.say(str(stage))
                if self.graphs is not None:
                    self.graphs.renew()
                if self.pending is not None:
                    self.pending.forget_windows()

    def _watched_step(self, monitor: launches.LaunchMonitor, show: Console) -> tuple[dict[str, Any], int]:
        """`_optimizer_step`, with statistics of tensors or the GPU's idle time where they are due."""
        config, number = self.config, self.step + 1
        watches = config.tensor_every > 0 and not (config.compile or config.cuda_graph)
        if watches and number % config.tensor_every == 0:
            with watched(self.model) as events:
                taken = self._optimizer_step()
            for kind, fields in self.parallel.of_all(events).values():
                self.log.write(kind, self.step, **fields)
            return taken
        follows = watches and self.step % config.tensor_every == 0
        if monitor.measures(number) or (follows and monitor.measures(self.step)):
            return monitor.measured(number, self._optimizer_step, self.log, show)
        return self._optimizer_step()

    def _optimizer_step(self) -> tuple[dict[str, Any], int]:
        """One step, all micro-batches; returns what the log says of it, and how many tokens the model read.

        Raises NumericsError before anything changes; where it is not read yet, loss and norm are not among what is returned.
        """
        number = self.step + 1
        self.ranks.place = f"step {number}"
        step_batch = self.feed.draw(self.step)
        micro_batches = step_batch.batches
        targets, facts = targets_of_ranks(step_batch, number, self.stop, self.ranks)
        lr = learning_rate(self.config, number)
        launches.set_learning_rate(self.optimizer, lr)
        if self.pending is not None:
            numbers = {"lr": lr, "tokens": targets, **facts}
            return self._launched(self.pending, numbers, micro_batches, step_batch.inputs), step_batch.inputs
        if self.stepping is not None:
            loss, grad_norm = self._step_in_backward(self.stepping, micro_batches, targets)
        else:
            loss, grad_norm = agreed(*read(self.gradient(micro_batches, targets)), self.ranks)
            self._refuse_nonfinite(loss, grad_norm, micro_batches, targets)
        if self.graphs is not None:
            self.graphs.update()
        else:
            step.update(self.optimizer, self.scaler, partial(self.parallel.advance, self.model))
        self.step = number
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": targets}
        return {**numbers, **facts}, step_batch.inputs

    def _launched(
        self, pending: Pending, numbers: dict[str, Any], micro_batches: list[Batch], inputs: int
    ) -> dict[str, Any]:
        """A step whose numbers are read later; returns what the log will say beside them, to which more may be added."""
        assert self.decision is not None
        windows, counted = pending.windows(self.model), [each.step for each in self.parallel.agreements]
        readings = self.gradient(micro_batches, numbers["tokens"])
        self.decision.see(readings)
        step.update(self.optimizer, self.scaler, partial(self.parallel.advance, self.model), self.decision)
        self.step += 1
        pending.steps.append(Step(self.step, readings, numbers, inputs, micro_batches, windows, counted))
        return numbers

    def gradient(self, micro_batches: list[Batch], targets: int) -> Tensor:
        """The gradient of a step, clipped; on the device: the losses of its micro-batches, and the norm before clipping."""
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
        """The loss of a step and the norm of its gradient; its parameters have stepped in its last backward pass."""

        def backward() -> Tensor:
            self.parallel.follows(True)  # each micro-batch: what is summed in FP8 is the part of this rank
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
        if (error := stepping.lost(self.step + 1, *found)) is not None:
            self.log.write("step", self.step + 1, loss=found[0], grad_norm=found[1])
            self.log.write("nonfinite", self.step + 1, where="a step in backward, where it is not looked for")
            raise error
        return found

    def repeat_draws(self) -> None:
        """The next pass of this step draws what ranks have drawn once more."""
        for agreement in self.parallel.agreements:
            agreement.micro_batch = 0

    def backward(self, objective: Objective, batch: Batch, targets: int | Tensor, *, checked: bool = False) -> Tensor:
        """The gradient of a micro-batch, added to what is there, and its loss. checked: its labels were looked at."""
        loss = step.loss_of(self.parallel, objective, batch, self.device, self.precision, targets, checked)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def _refuse_nonfinite(self, loss: float, grad_norm: float, micro_batches: list[Batch], targets: int) -> None:
        if not self.is_fine(loss, grad_norm):
            self._end_nonfinite(loss, grad_norm, micro_batches, targets)

    def is_fine(self, loss: float, grad_norm: float) -> bool:
        """Whether the run goes on after a step with these numbers; called once for each, in order."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped_steps = 0
            return True
        self.skipped_steps += 1
        # float16 overflowed: this step is left out, and the scaler lowers its scale
        return self.scaler is not None and math.isfinite(loss) and self.skipped_steps <= MOST_SKIPPED_STEPS

    def _end_nonfinite(self, loss: float, grad_norm: float, micro_batches: list[Batch], targets: int) -> NoReturn:
        """Takes the step after this one's weights once more to see where it appeared, and raises NumericsError."""
        number = self.step + 1
        self.optimizer.zero_grad()
        whole = replace(
            self.objective, forward=self.model, options=self.task.options, head=None
        )  # and uncompiled: all hooks run

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
        """The task's metrics, the best weights by one of them, and a sample of text."""
        self._set_training(False)
        found, wide = self.scores(self.config.eval_wide)
        self.log.write("eval", self.step, **found, **({"wide": wide} if wide else {}), elapsed_s=self.trained_s)
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
        """The task's metrics in evaluation mode, as the run computes; and in 16 bits, if `both` are wanted and it computes narrow."""
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
        """Tensors and facts of a checkpoint."""
        tensors, rest = (self.numbers or state).collect(self.model, self.optimizer, self.scaler)
        facts = {
            "state": rest,
            "trained_s": self.trained_s,
            "skipped_steps": self.skipped_steps,
            **self._numeric_settings(),
            "switched": self._past_switches(self.step),
            **self.task.identity,
            "position": self.feed.state(),
            "best": self.best.facts(),
            **self.carried,
            **self.watch.facts(),
        }
        for agreement in self.parallel.agreements[:1]:  # those of other stages say the same
            facts["agreement"] = agreement.state_dict()
        return tensors, facts

    def _save(self) -> None:
        started_at_s = time.monotonic()
        tensors, facts = self.collected()
        self.log.sync()  # a run that goes on from here has the lines of the steps before
        path = checkpoints.save(self.folder.checkpoints, self.step, tensors, facts, self.config.keep, self.ranks)
        self.saved_step = self.step
        self.best.clear()
        self.watch.saved()
        save_s = time.monotonic() - started_at_s
        self.log.write("checkpoint", self.step, path=str(path.relative_to(self.folder.path)), save_s=save_s)


def read(readings: Tensor) -> tuple[list[float], float]:
    """Copies the losses of micro-batches and the gradient norm to the host: the step's only synchronisation."""
    *losses, norm = readings.tolist()
    return losses, norm
