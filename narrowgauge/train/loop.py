"""`narrowgauge train`, readable from top to bottom: prepare, train the run, train its reference, write the report."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import torch

from narrowgauge import storage
from narrowgauge.errors import NarrowgaugeError, NumericsError, OutOfMemoryError
from narrowgauge.report import page
from narrowgauge.train import run_metadata
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.console import Console, tell
from narrowgauge.train.device import (
    chosen_device,
    keep_freed_memory,
    refuse_without_compiler,
    reset_peak,
    use_own_caches,
)
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.model_files import export
from narrowgauge.train.run_folder import RunFolder, refuse_other_run
from narrowgauge.train.signals import StopRequest
from narrowgauge.train.tasks import TASKS, TrainTask
from narrowgauge.train.trainer import Trainer


def run(config: TrainConfig) -> int:
    """Trains what `config` says, then its reference if one is asked for, and writes the report. Returns the exit code."""
    config = resolved(config)
    device = chosen_device(config.device)  # before anything is read or written
    if config.compile:
        refuse_without_compiler(device)
    if config.compile or device.type == "cuda":
        for note in use_own_caches(os.environ):
            tell(f"Note: {note}")
    if config.threads:
        torch.set_num_threads(config.threads)
    if device.type == "cpu":
        keep_freed_memory()
    try:
        return _run(config)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # the CPU's has no class
            first = str(error).splitlines()[0]
            raise OutOfMemoryError(
                f"{device}: {first} Raise micro_batches, or lower batch_size or token_budget."
            ) from error
        raise


def _run(config: TrainConfig) -> int:
    with RunFolder.claim(Path(config.output), config.resume) as folder, StopRequest() as stop:
        if config.resume and folder.config.exists():
            refuse_other_run(resolved(toml.load(folder.config)), config)  # again: it may have changed until now
        if config.resume and not folder.has_run():
            tell(f"WARNING: nothing to resume in {folder.path}: this is a new run.")
        asked = replace(config, resume=False)  # how it was called is not what it is
        if not folder.has_run():
            folder.write_config(asked)
        tell(f"Reading {config.data} ...")
        config, task = prepare(config)
        try:
            code = _train_and_log(config, folder, task, stop, asked)
            if code == 0 and config.compare:
                code = _train_reference(config, folder, task, stop)
        except NumericsError as error:
            try:
                _write_report(folder)
            except NarrowgaugeError as second:  # must not hide the first
                error.add_note(f"The report was not written: {second}")
            raise
        _write_report(folder)
        if code:
            tell(f"Continue: narrowgauge train --resume --output {shlex.quote(config.output)}")
    return code


def _write_report(folder: RunFolder) -> None:
    """Of a run and the reference in it. A run that failed before it began has nothing to tell."""
    if folder.run.exists():
        with storage.refusals("write the report to", folder.path):
            tell(f"Report: {page.write(folder.path)}")


def prepare(config: TrainConfig) -> tuple[TrainConfig, TrainTask]:
    """The data of the task, and the configuration with the steps that its epochs are."""
    task = TASKS[config.task].prepare(config)
    if config.epochs:
        config = replace(config, steps=task.steps(config.epochs), epochs=0)
    for note in (*task.notes, *run_metadata.notes(config)):
        tell(f"Note: {note}")
    return config, task


def _train_reference(config: TrainConfig, folder: RunFolder, task: TrainTask, stop: StopRequest) -> int:
    path = folder.path / f"compare-{config.compare}"
    reference = replace(
        config, output=str(path), recipe=config.compare, layers_recipe={}, switch="", compare="", save=""
    )
    with RunFolder.claim(path, resume=True) as own:  # the run before has shown the same data
        return _train_and_log(reference, own, task, stop, reference, is_first=False)


def _train_and_log(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    stop: StopRequest,
    asked: TrainConfig,
    is_first: bool = True,
) -> int:
    """One run from its newest checkpoint, or from the start, to its end.

    asked     what the folder's config.toml is to say, once it is known that the run can go on so
    is_first  of this process: an example of the data is shown
    """
    with MetricsLog(folder.metrics, folder.tensorboard if config.tensorboard else None) as log:
        has_own_peak = reset_peak(chosen_device(config.device)) or is_first
        trainer = Trainer(config, folder, task, log, has_own_peak)
        folder.write_config(asked)
        with Console(config.steps, config.log_every, trainer.step) as show:
            known = run_metadata.of_run(trainer)
            folder.write_run(known)
            run_metadata.announce(trainer, show, is_first)
            try:
                reason = trainer.train(show, stop)
            except NumericsError:
                log.write("done", trainer.step, reason="nonfinite", exit_code=NumericsError.exit_code)
                folder.write_run(known | run_metadata.of_layers(trainer))
                raise
            folder.write_run(known | run_metadata.of_layers(trainer))
            if reason == "finished":
                export(trainer.model, task.tokenizer, trainer.best, folder.final)
            code = stop.exit_code if reason != "finished" else 0
            log.write("done", trainer.step, reason=reason, exit_code=code)
            show.say(f"{config.recipe}: {reason} at step {trainer.step} of {config.steps}, in {folder.path}")
    return code
