"""`narrowgauge train`: prepare the data, train the run and its reference, write the report."""

import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

import narrowgauge
from narrowgauge import storage
from narrowgauge.errors import (
    ConfigError,
    NarrowgaugeError,
    NumericsError,
    OutOfMemoryError,
    Reason,
)
from narrowgauge.report import page
from narrowgauge.train import run_metadata, stepping
from narrowgauge.train.callback import Callback
from narrowgauge.train.config import toml
from narrowgauge.train.config.parallel_syntax import layout
from narrowgauge.train.config.settings import TrainConfig, key_of, resolved
from narrowgauge.train.console import tell, tell_note
from narrowgauge.train.device import (
    give_cublaslt_workspace,
    keep_freed_memory,
    peak_bytes,
    refuse_without_compiler,
    reset_peak,
    use_own_caches,
)
from narrowgauge.train.guard_state import Unguarded
from narrowgauge.train.model_files import export
from narrowgauge.train.parallel import followers
from narrowgauge.train.parallel.checkpoints import trained_weights
from narrowgauge.train.parallel.ranks import EndedElsewhere, Ranks, restarted, under_torchrun
from narrowgauge.train.parallel.spread import shared
from narrowgauge.train.planning import of_run
from narrowgauge.train.preparation import prepare_on_ranks
from narrowgauge.train.run_folder import RunFolder, refuse_other_run
from narrowgauge.train.signals import AgreedStop, StopRequest
from narrowgauge.train.tasks import TrainTask
from narrowgauge.train.trainer import Trainer

Stop = StopRequest | AgreedStop
Plugin = Callable[[Trainer], Callback]
BeginBranch = Callable[[TrainConfig, RunFolder, TrainTask], list[str]]
BeginBranchApart = Callable[[TrainConfig, Path], list[str]]


def _without_lab(config: TrainConfig) -> Sequence[Plugin]:
    """Plugins of a run without a guard or spike watch. Raises ConfigError if it asks for one."""
    for name in ("guard", "on_spike"):
        if value := getattr(config, name):
            raise ConfigError(
                f"{key_of(config.__dataclass_fields__[name])} = {value!r}: needs narrowgauge.lab. Train with "
                "narrowgauge.lab.training.run, or remove it.",
                code="train.needs-lab",
            )
    return [Unguarded]


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """Parts of a run that `lab.training` supplies, since this package must not import the lab.

    plugins             plugins(config) -> functions that make a Callback from a Trainer
    begin_branch        writes the first checkpoint of a branch and returns sentences
    begin_branch_apart  the same in a process of its own, for rank 0 of several
    """

    plugins: Callable[[TrainConfig], Sequence[Plugin]] = _without_lab
    begin_branch: BeginBranch | None = None
    begin_branch_apart: BeginBranchApart | None = None


ALONE = Extensions()


def _of_former_calls(config: TrainConfig) -> Extensions:
    """Extensions for calls of `run` from before the lab had a package of its own."""
    needs = [name for name in ("guard", "on_spike", "parent") if getattr(config, name)]
    if not needs:
        return ALONE
    warnings.warn(
        f"{', '.join(needs)}: call narrowgauge.lab.training.run(config) in place of train.loop.run.",
        DeprecationWarning,
        stacklevel=3,
    )
    # By name, as no other code of this package may: remove it with the deprecation.
    found: Extensions = import_module("narrowgauge.lab.training").EXTENSIONS
    return found


def run(config: TrainConfig, extensions: Extensions | None = None) -> int:
    """Trains the run of `config` and its optional reference run, and writes the report.

    Returns the exit code.

    extensions  parts from the lab; None: those that the settings need, with a DeprecationWarning

    Under torchrun every rank calls this function. Rank 0 alone writes files and prints.
    """
    config = resolved(config)
    extensions = extensions or _of_former_calls(config)
    several = under_torchrun()
    try:
        # StopRequest is outermost: torchrun sends SIGTERM to the remaining ranks while they still
        # report which rank died.
        with (
            StopRequest(patient=several) as stop,
            Ranks.join(config.device, config.timeout_s) as ranks,
            followers.silent(ranks),
        ):
            again = replace(config, resume=config.resume or restarted())
            return run_of_rank(again, ranks, stop, extensions)
    except EndedElsewhere as error:
        return error.exit_code


def run_of_rank(
    config: TrainConfig, ranks: Ranks, stop: StopRequest, extensions: Extensions = ALONE
) -> int:
    """`run` for a resolved configuration, on one rank."""
    # Fails here if the device is missing, before any file is read or written
    device = ranks.device(config.device)
    ranks.refuse_differences(
        {"narrowgauge": narrowgauge.__version__, "torch": torch.__version__}, "versions"
    )
    ranks.refuse_differences(asdict(config), "settings")
    ranks.layout = layout(config.parallel, ranks.world)
    stepping.refuse(config, ranks.layout)
    if config.compile:
        refuse_without_compiler(device)
    if config.compile or device.type == "cuda":
        # Set the cache folders before the first import of Inductor or Triton reads the environment.
        for note in use_own_caches(os.environ):
            tell_note(note)
    if device.type == "cuda":
        tell(give_cublaslt_workspace(os.environ, torch.cuda.get_device_capability(device)))
    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        stops = AgreedStop(stop) if ranks.world > 1 else stop
        return _run(config, ranks, stops, extensions)
    except RuntimeError as error:
        # The CPU allocator raises a plain RuntimeError
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            first = str(error).splitlines()[0]
            raise OutOfMemoryError(
                f"{device}: {first} Raise micro_batches, or lower batch_size or token_budget.",
                code="memory.device",
            ) from error
        raise


def _run(config: TrainConfig, ranks: Ranks, stop: Stop, extensions: Extensions) -> int:
    path = Path(config.output)
    with followers.claimed(path, config.resume, ranks) as folder:
        if config.resume and ranks.is_first and folder.config.exists():
            # Check once more under the lock: another process may have changed the stored
            # configuration
            refuse_other_run(resolved(toml.load_stored(folder.config)), config)
        has_run = ranks.told_by_first(folder.has_run)
        if config.resume and not has_run and not config.parent:
            tell(f"WARNING: nothing to resume in {folder.path}: this is a new run.")
        # The stored configuration describes the run, not this start of it
        asked = replace(config, resume=False)
        if not has_run:
            folder.write_config(asked)
        tell(f"Reading {config.data} ...")
        config, task = prepare_on_ranks(shared(config, ranks), ranks)
        _begin_branch(config, folder, task, ranks, extensions)
        try:
            code = _train_and_log(config, folder, task, stop, asked, ranks, extensions)
            if code == 0 and config.compare:
                code = _train_reference(config, folder, task, stop, ranks, extensions)
        except NumericsError as error:
            try:
                ranks.first(lambda: _write_report(folder))
            except NarrowgaugeError as second:  # the NumericsError matters more
                error.add_note(
                    Reason("report.not-written", f"The report was not written: {second}")
                )
            raise
        ranks.first(lambda: _write_report(folder))
        if code:
            several = f"torchrun --nproc-per-node {ranks.world} -m " if ranks.world > 1 else ""
            tell(
                f"Continue: {several}narrowgauge train --resume --output {shlex.quote(config.output)}"
            )
    return code


def _write_report(folder: RunFolder) -> None:
    """Writes the report of a run and its reference.

    Does nothing for a run that failed before it wrote run.json.
    """
    if folder.run.exists():
        with storage.refusals("write the report to", folder.path):
            tell(f"Report: {page.write(folder.path)}")


def _begin_branch(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    ranks: Ranks,
    extensions: Extensions,
) -> None:
    """Writes the first checkpoint of a branch, unless the branch has one."""
    if config.parent and not ranks.told_by_first(folder.has_run):
        if extensions.begin_branch is None or extensions.begin_branch_apart is None:
            raise ConfigError(
                f"from = {config.parent!r}: a branch needs narrowgauge.lab. Train with narrowgauge.lab.training.run.",
                code="train.needs-lab",
            )
        begin = (
            partial(extensions.begin_branch, config, folder, task)
            if ranks.world == 1
            else partial(extensions.begin_branch_apart, config, folder.path)
        )
        for line in ranks.first(begin) or ():
            tell(f"Branch of {config.parent}: {line}")


def _train_reference(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    stop: Stop,
    ranks: Ranks,
    extensions: Extensions,
) -> int:
    path = folder.path / f"compare-{config.compare}"
    reference = replace(
        config,
        output=str(path),
        recipe=config.compare,
        layers_recipe={},
        embedding_codes="",
        switch="",
        compare="",
        save="",
    )
    # resume=True: the reference may be half trained, and its data were shown with the main run
    with followers.claimed(path, True, ranks) as own:
        _begin_branch(reference, own, task, ranks, extensions)
        return _train_and_log(
            reference, own, task, stop, reference, ranks, extensions, is_first=False
        )


def _train_and_log(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    stop: Stop,
    asked: TrainConfig,
    ranks: Ranks,
    extensions: Extensions,
    is_first: bool = True,
) -> int:
    """Trains one run from its newest checkpoint, or from the start, to its end.

    asked     configuration to store as config.toml, once the trainer has accepted the checkpoint
    is_first  first run of this process: it prints an example of the data
    """
    with followers.log_of(folder, config.tensorboard, ranks) as log:
        device = ranks.device(config.device)
        freed_memory = keep_freed_memory(config.keep_freed, device)
        # The second run of a process has its own peak only if the system can reset the counter.
        has_own_peak = reset_peak(device) or is_first
        trainer = Trainer(
            config, folder, task, log, has_own_peak, ranks, extensions.plugins(config)
        )
        folder.write_config(asked)
        if trainer.checkpoints.resumed_from:
            # A kill may have come between saving a checkpoint and removing older best weights
            trainer.checkpoints.best.clear()
        with followers.console_of(config.steps, config.log_every, trainer.step, ranks) as show:
            settled = replace(config, checkpointing=trainer.setup.policy)
            memory_plan = (
                ranks.first(lambda: of_run.planned(settled, device, trainer.feed.probe())) or {}
            )
            known = run_metadata.of_run(trainer) | {"freed_memory": freed_memory}
            known |= {"planned": memory_plan} if memory_plan else {}
            folder.write_run(known)
            run_metadata.announce(trainer, show, is_first)
            if line := of_run.first_line(memory_plan):
                show.say(line)
            of_run.refuse_guard(config, memory_plan)
            trainer.plugins.on_start(show)
            try:
                reason = trainer.train(show, stop)
            except NumericsError:
                log.write(
                    "done", trainer.step, reason="nonfinite", exit_code=NumericsError.exit_code
                )
                folder.write_run(known | run_metadata.of_layers(trainer))
                raise
            folder.write_run(known | run_metadata.of_layers(trainer))
            if line := of_run.last_line(
                memory_plan, peak_bytes(device) if has_own_peak else 0, device
            ):
                show.say(line)
            if reason == "finished":
                weights = trained_weights(trainer.model, trainer.checkpoints.best)
                ranks.first(
                    lambda: export(
                        trainer.model,
                        trainer.setup.shapes,
                        weights,
                        task.tokenizer,
                        trainer.checkpoints.best,
                        folder.final,
                    )
                )
            if line := trainer.plugins.summary():
                show.say(line)
            # Log `done` after the export: it may still fail, and a log that said `done` before
            # would be wrong.
            code = stop.exit_code if reason != "finished" else 0
            log.write("done", trainer.step, reason=reason, exit_code=code)
            show.say(
                f"{config.recipe}: {reason} at step {trainer.step} of {config.steps}, in {folder.path}"
            )
    return code
