"""A run in progress: its parts, one optimizer step, what is logged, evaluated and saved.

    for each micro-batch:  loss = sum of -log p / targets of the whole step;  backward
    stop here if loss or gradient norm is not finite: nothing has been changed yet
    clip, optimizer.step(), advance(model)

A step synchronises with the host once, to read its loss and gradient norm. A run that goes on
from the checkpoint of step k continues with batch k + 1 of the same sequence.
What is learnt, from which batches and by which metrics, is the task's business (`tasks.task`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.auto import chosen, summary
from narrowgauge.conversion import advance, nonfinite_amax
from narrowgauge.cuda_graphs import GraphedStep, refuse_run
from narrowgauge.diagnose import format_text, forms
from narrowgauge.diagnose.blame import first_nonfinite
from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import CheckpointError, ConfigError, DataError, NumericsError
from narrowgauge.fuse import fusions
from narrowgauge.optim import precision as precisions
from narrowgauge.optim.clipping import clip_gradients
from narrowgauge.train.attention import use_attention_of_whole_rows
from narrowgauge.train.checkpoint import manifest, state, state_checks, store
from narrowgauge.train.checkpoint.best import Best
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.console import Console
from narrowgauge.train.device import (
    chosen_device,
    device_name,
    emulated_on_gpu,
    peak_bytes,
    stepped_in_torch,
    unused_gpu,
)
from narrowgauge.train.hooks import cuda_graph
from narrowgauge.train.hooks.gpu_idle import LaunchMonitor
from narrowgauge.train.hooks.tensor_stats import watched
from narrowgauge.train.loss import Batch, Objective, learning_rate, loss_of_model, targets_of_step
from narrowgauge.train.memory_options import apply_memory_options
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.model import build
from narrowgauge.train.optimizer import build_optimizer, cast_in_step, cast_summary
from narrowgauge.train.recipe_schedule import Schedule
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.signals import StopRequest
from narrowgauge.train.tasks import Feed, TrainTask

MOST_SKIPPED_STEPS = 20  # float16: that many overflows in a row mean that no loss scale helps


@dataclass
class Trainer:
    """The parts of a run in progress. `step` counts finished optimizer steps."""

    config: TrainConfig
    folder: RunFolder
    task: TrainTask
    log: MetricsLog
    device: torch.device
    precision: precisions.Precision
    model: Any
    objective: Objective
    optimizer: Any
    scaler: torch.amp.GradScaler | None
    feed: Feed
    best: Best
    memory_notes: list[str]
    step: int = 0
    saved_step: int = 0
    trained_s: float = 0.0  # over all resumptions
    skipped_steps: int = 0
    schedule: Schedule = field(default_factory=lambda: Schedule(()))
    resumed_from: str = ""
    generators: state.Generators = field(default_factory=state.generators)
    nonfinite_counts: dict[tuple[str, str], int] = field(default_factory=dict)
    graphs: GraphedStep | None = None
    no_cast_reason: str = ""  # why the optimizer's step is not asked to cast weights

    @classmethod
    def start(cls, config: TrainConfig, folder: RunFolder, task: TrainTask, log: MetricsLog) -> Trainer:
        """Builds everything, and resumes from the newest valid checkpoint of the folder if there is one."""
        device = chosen_device(config.device)
        precision = precisions.get(config.precision)
        model = build(config, task.model, device, precision, task.tokens_at_once(), _choices_before(folder))
        feed = task.feed(model)
        if device.type == "cuda":
            use_attention_of_whole_rows(model, feed.probe())
        # before the optimizer: it holds what trains, no more
        memory_notes = apply_memory_options(config, model, precision, device, feed.probe, task.options)
        trainer = cls(
            config=config,
            folder=folder,
            task=task,
            log=log,
            device=device,
            precision=precision,
            model=model,
            objective=task.objective(model, precision.computes_in),
            optimizer=build_optimizer(config, model, precision),
            scaler=torch.amp.GradScaler(device.type) if precision.scales_loss else None,
            feed=feed,
            best=Best(folder.best, task.best),
            memory_notes=memory_notes,
            schedule=Schedule.of(config, model),
        )
        trainer._resume()
        trainer.generators = state.generators()
        trainer.graphs = cuda_graph.graphed_step(
            config, model, trainer.optimizer, trainer.scaler, device, trainer._backward_of_graph
        )
        trainer.no_cast_reason = cast_in_step(config, trainer.optimizer, model)
        return trainer

    def _resume(self) -> None:
        found, skipped = store.newest_valid(self.folder.checkpoints)
        for path, why in skipped:
            print(f"WARNING: passed over the damaged checkpoint {path}: {why}", file=sys.stderr, flush=True)
        if found is None:
            if self.log.path.stat().st_size:  # it ended before its first checkpoint: what it logged does not count
                self.log.write("resume", 0, path="", skipped=[])
            return
        if found.step > self.config.steps:
            raise ConfigError(
                f"steps = {self.config.steps}: the run is at step {found.step} already, in {found.path}. "
                f"Resume with --steps {found.step} or more."
            )
        if problem := forms.refuse(found.facts, state_checks.FACTS):
            raise CheckpointError(
                f"{found.path / manifest.FACTS}: {problem}. Restore the checkpoint, or remove it to go on from an older one."
            )
        for key, own in self._numeric_settings().items():
            if found.facts.get(key, own) != own:  # checkpoints of before have no optimizer, states and master
                raise CheckpointError(
                    f"{found.path}: was written with {key} = {found.facts[key]!r}, this run has {own!r}. "
                    "Resume with the settings that wrote it, or start anew in another --output."
                )
        for key, own in self.task.identity.items():
            if found.facts[key] != own:
                raise DataError(
                    f"{found.path}: trained with another {key.replace('content_hash', 'data content')} than "
                    f"{self.config.data!r} has now. Restore the data, or start anew in another --output."
                )
        self._refuse_moved_switches(found)
        self.schedule.fast_forward(self.model, found.step)
        state.restore(self.model, self.optimizer, self.scaler, found.tensors, found.facts["state"], str(found.path))
        with state.unusable(f"{found.path / manifest.FACTS}: position"):
            self.feed.restore(found.facts.get("position", {}))
        if lost := self.best.restore(found.facts.get("best")):
            print(f"WARNING: {lost}", file=sys.stderr, flush=True)
        self.step = self.saved_step = found.step
        self.trained_s = found.facts["trained_s"]
        self.skipped_steps = found.facts["skipped_steps"]
        self.resumed_from = str(found.path)
        place = str(found.path.relative_to(self.folder.path))
        self.log.write("resume", self.step, path=place, skipped=[path.name for path, _ in skipped])
        self._log_saved(place)

    def _log_saved(self, path: str) -> None:
        """Logs the checkpoint at `path` if a kill came between memory_notes and logging it."""
        if not any(event["event"] == "checkpoint" and event["path"] == path for event in read_metrics(self.log.path)):
            self.log.write("checkpoint", self.step, path=path)

    def _refuse_moved_switches(self, found: store.Checkpoint) -> None:
        """With other --steps a share is another step; it must not move a switch that is past."""
        own, stored = self._past_switches(found.step), found.facts.get("switched", [])
        if own != stored:
            raise ConfigError(
                f"steps = {self.config.steps}: at step {found.step} of {found.path} the switches {stored or 'none'} had "
                f"happened, but in a run of {self.config.steps} steps {own or 'none'} would have. Resume with the steps it had, "
                "or start anew in another --output."
            )

    def _past_switches(self, step: int) -> list[str]:
        return [stage.switch for stage in self.schedule.stages if stage.step <= step]

    def _numeric_settings(self) -> dict[str, Any]:
        """Settings that change the arithmetic but not the tensors' names and shapes."""
        own = {key: getattr(self.config, key) for key in ("recipe", "precision", "optimizer", "states", "master")}
        return own | {"recipes": dict(self.config.layers_recipe), "auto": chosen(self.model)}

    def announce(self, show: Console, previews: bool = True) -> None:
        """Prints what the run is, before its first step. previews: also an example of its data."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        show.say(
            f"{self.config.recipe}{format_text.elsewhere(self.config.layers_recipe)} ({self.config.precision}) on "
            f"{device_name(self.device)}: {parameters:,} parameters, {self.task.summary()}"
            + (f"; resumed from {self.resumed_from}" if self.resumed_from else "")
        )
        slow = [*emulated_on_gpu(self.model, self.device), *stepped_in_torch(self.optimizer)]
        for line in filter(None, (unused_gpu(self.device), *summary(self.model), *slow)):
            show.say(line)
        if self.config.compile:
            show.say("Compiling during the first step and the first evaluation: minutes of silence.")
        for stage in self.schedule.stages:
            if stage.step > self.step:
                show.say(f"To come at {stage}")
        show.say("\n".join([f"Loss: {self.objective.description}.", *self.memory_notes]))
        for part in self.task.preview() if previews else ():
            show.say(part)
        for setting, what in (("compile", "Compiled code"), ("cuda_graph", "What CUDA graphs replay")):
            if getattr(self.config, setting) and self.config.tensor_every:
                show.say(f"{what} cannot be observed: no tensor statistics in this run.")
        casts = cast_summary(self.optimizer, self.no_cast_reason)
        if casts and self.device.type == "cuda":
            show.say(f"Weights cast by the optimizer's step: {'; '.join(casts)}.")
        for fusion in fusions(self.model):
            if fusion.reason:
                show.say(f"Not fused: {fusion}")

    def train(self, show: Console, stop: StopRequest) -> str:
        """Steps until the end or a request to stop; returns "finished", "interrupted" or "preempted"."""
        config = self.config
        state.set_generators(self.generators)  # what was shown since may have drawn: rich does when it is imported
        launch_monitor = LaunchMonitor(config, self.device, self.graphs)
        if self.graphs is None:
            launch_monitor.refused = "; ".join(refuse_run(self.model, self.optimizer, self.scaler))
        while self.step < config.steps and not stop.requested:
            started_at_s = time.monotonic()
            can_observe = config.tensor_every and not (config.compile or config.cuda_graph)
            for stage in self.schedule.apply(self.model, self.step + 1):
                self.log.write("switch", stage.step, **stage.event)
                show.say(str(stage))
                if self.graphs is not None:
                    self.graphs.renew()
            if can_observe and (self.step + 1) % config.tensor_every == 0:
                with watched(self.model) as events:
                    numbers, inputs = self._optimizer_step()
                for event in events:
                    self.log.write("tensor", self.step, **event)
            elif launch_monitor.measures(self.step + 1):
                numbers, inputs = launch_monitor.measured(self.step + 1, self._optimizer_step, self.log, show)
            else:
                numbers, inputs = self._optimizer_step()
            spent_s = time.monotonic() - started_at_s
            self.trained_s += spent_s
            speed = inputs / spent_s
            peak = peak_bytes(self.device)
            self.log.write(
                "step", self.step, **numbers, tokens_per_s=speed, elapsed_s=self.trained_s, peak_bytes=peak,
                **launch_monitor.facts(),
            )  # fmt: skip
            show.step(self.step, loss=numbers["loss"], tokens_per_s=speed, peak_bytes=peak)
            launch_monitor.report(self.step, show)
            self._report_nonfinite_amax(show)
            last = self.step == config.steps
            if last or (config.eval_every and self.step % config.eval_every == 0):
                self._evaluate(show)
            if last or stop.requested or (config.checkpoint_every and self.step % config.checkpoint_every == 0):
                self._save()
        if self.step > self.saved_step:  # asked to stop after this step had looked whether to save
            self._save()
        return stop.requested if self.step < config.steps else "finished"

    def _optimizer_step(self) -> tuple[dict[str, Any], int]:
        """One step, all micro-batches; returns what the log says of it, and how many tokens the model read.

        Raises NumericsError before anything changes.
        """
        config, number = self.config, self.step + 1
        step_batch = self.feed.draw(self.step)
        micro_batches = step_batch.batches
        targets = targets_of_step(micro_batches, number)
        lr = learning_rate(
            number, steps=config.steps, warmup_steps=config.warmup_steps,
            peak=config.learning_rate, lowest=config.min_learning_rate,
        )  # fmt: skip
        cuda_graph.set_learning_rate(self.optimizer, lr)
        loss, grad_norm = read(self._gradient(micro_batches, targets))  # the step's only synchronisation
        self._refuse_nonfinite(loss, grad_norm, micro_batches, targets)
        self._update()
        self.step = number
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": targets}
        return {**numbers, **step_batch.facts}, step_batch.inputs

    def _gradient(self, micro_batches: list[Batch], targets: int) -> Tensor:
        """The gradient of a step, clipped; [2] on the device: its loss, and the norm before clipping."""
        if self.graphs is not None:
            for batch in micro_batches:
                cuda_graph.accumulate(self.graphs, batch, targets, self.objective.head)
            return self.graphs.readings()
        loss_sum = torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss_sum += self._backward(self.objective, batch, targets)
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model.parameters(), self.config.clip or None)
        return torch.stack((loss_sum, norm.to(loss_sum.dtype)))

    def _update(self) -> None:
        """Steps the optimizer and the amax windows."""
        if self.graphs is not None:
            self.graphs.update()
            return
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        advance(self.model)
        self.optimizer.zero_grad()

    def _backward_of_graph(self, batch: Batch, targets: Tensor) -> Tensor:
        """`_backward` of a micro-batch that is on the device and whose labels are checked."""
        return self._backward(partial(self.objective, checked=True), batch, targets)

    def _backward(
        self, objective: Callable[[Batch, torch.device], Tensor], batch: Batch, targets: int | Tensor
    ) -> Tensor:
        with self.precision.context(self.device.type):
            loss = objective(batch, self.device) / targets
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def _refuse_nonfinite(self, loss: float, grad_norm: float, micro_batches: list[Batch], targets: int) -> None:
        finite = torch.tensor([loss, grad_norm]).isfinite()
        if finite.all():
            self.skipped_steps = 0
            return
        self.skipped_steps += 1
        if self.scaler and finite[0] and self.skipped_steps <= MOST_SKIPPED_STEPS:
            return  # float16 overflowed: the scaler leaves this step out and lowers its scale
        number = self.step + 1
        self.optimizer.zero_grad()

        def repeat() -> None:
            for batch in micro_batches:
                whole = partial(loss_of_model, self.model, options=self.task.options)  # and uncompiled: all hooks run
                self._backward(whole, batch, targets)

        where = first_nonfinite(self.model, repeat, loss)
        self.optimizer.zero_grad()
        self.log.write("step", number, loss=loss, grad_norm=grad_norm)
        self.log.write("nonfinite", number, where=where)
        raise NumericsError(
            f"step {number}: loss {loss}, gradient norm {grad_norm}. It appeared first at {where}. "
            f"The weights are those of step {self.step}; nothing was saved since the last checkpoint. "
            "Lower the learning rate, or give that layer a wider recipe with --recipes 'NAME=bf16'."
        )

    def _report_nonfinite_amax(self, show: Console) -> None:
        """Logs amax readings that were not finite, every log_every steps, since it synchronises."""
        if self.step % self.config.log_every and self.step != self.config.steps:
            return
        counts = nonfinite_amax(self.model)
        for (module, role), count in counts.items():
            if count > self.nonfinite_counts.get((module, role), 0):
                self.log.write("nonfinite_amax", self.step, module=module, role=role, count=count)
                show.say(
                    f"step {self.step}: amax of {role} in {module} was not finite in {count} steps; kept out of its window"
                )
        self.nonfinite_counts = counts

    @torch.no_grad()
    def _evaluate(self, show: Console) -> None:
        """The task's metrics, the best weights by one of them, and a sample of text."""
        self.model.eval()
        found = self.task.evaluate(self.model, self._score)
        self.log.write("eval", self.step, **found, elapsed_s=self.trained_s)
        weights, _ = state.split_scaling(self.model.state_dict())
        is_best = self.best.take(self.step, found, weights)
        metrics = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in found.items() if isinstance(value, float)]
        show.say(f"step {self.step}: validation {', '.join(metrics)}{', the best so far' if is_best else ''}")
        if self.config.sample_tokens:
            with self.precision.context(self.device.type):
                written = self.task.sample(self.model)
            if written:
                self.log.write("sample", self.step, **written)
        self.model.train()

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        with self.precision.context(self.device.type):
            return self.objective.scored(batch, self.device)

    def _save(self) -> None:
        started_at_s = time.monotonic()
        tensors, rest = state.collect(self.model, self.optimizer, self.scaler)
        facts = {
            "state": rest,
            "trained_s": self.trained_s,
            "skipped_steps": self.skipped_steps,
            **self._numeric_settings(),
            "switched": self._past_switches(self.step),
            **self.task.identity,
            "position": self.feed.state(),
            "best": self.best.facts(),
        }
        self.log.sync()  # a run that goes on from here has the lines of the steps before
        path = store.save(self.folder.checkpoints, self.step, tensors, facts)
        self.saved_step = self.step
        manifest.prune(self.folder.checkpoints, self.config.keep)
        self.best.clear()
        save_s = time.monotonic() - started_at_s
        self.log.write("checkpoint", self.step, path=str(path.relative_to(self.folder.path)), save_s=save_s)


def _choices_before(folder: RunFolder) -> dict[str, str] | None:
    """What recipe "auto" chose when the run began, so that a resumed run computes the same; None for a new run."""
    is_old = folder.has_run() and folder.run.exists()
    return (folder.read_run().get("auto") or None) if is_old else None


def read(readings: Tensor) -> tuple[float, float]:
    """Copies loss and gradient norm to the host; synchronises."""
    loss, norm = readings.tolist()
    return loss, norm
