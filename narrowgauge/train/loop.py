"""`narrowgauge train`: join the ranks, prepare the data, train the run and its reference, report."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import narrowgauge
from narrowgauge import storage
from narrowgauge.errors import (
    NarrowgaugeError,
    NumericsError,
    OutOfMemoryError,
    Reason,
)
from narrowgauge.ops.registry import device_facts
from narrowgauge.report import page
from narrowgauge.train import stepping
from narrowgauge.train.adapter_state import refuse_run
from narrowgauge.train.checkpoint_ref import CheckpointRef
from narrowgauge.train.config import toml
from narrowgauge.train.config.parallel_syntax import layout
from narrowgauge.train.config.settings import NO_RECIPE, TrainConfig, resolved
from narrowgauge.train.console import tell, tell_note
from narrowgauge.train.device import (
    give_cublaslt_workspace,
    leave_free,
    refuse_without_compiler,
    use_own_caches,
)
from narrowgauge.train.extensions import ALONE, Extensions, begin_branch, of_former_calls
from narrowgauge.train.one_run import train_and_log
from narrowgauge.train.parallel import followers
from narrowgauge.train.parallel.ranks import EndedElsewhere, Ranks, restarted, under_torchrun
from narrowgauge.train.parallel.spread import shared
from narrowgauge.train.preparation import prepare_on_ranks
from narrowgauge.train.run_folder import RunFolder, refuse_other_run
from narrowgauge.train.signals import AgreedStop, StopRequest

if TYPE_CHECKING:
    from narrowgauge.train.tasks import TrainTask

Stop = StopRequest | AgreedStop


def run(config: TrainConfig, extensions: Extensions | None = None) -> int:
    """Trains the run of `config` and its optional reference run, and writes the report.

    Returns the exit code.

    extensions  parts from the lab; None: those that the settings need, with a DeprecationWarning

    Under torchrun every rank calls this function. Rank 0 alone writes files and prints.
    """
    config = resolved(config)
    extensions = extensions or of_former_calls(config)
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
    if config.parent:  # runs/latest will name this run
        config = replace(config, parent=str(CheckpointRef.of(config.parent).of_newest()))
    ranks.refuse_differences(asdict(config), "settings")
    ranks.layout = layout(config.parallel, ranks.world)
    stepping.refuse(config, ranks.layout)
    refuse_run(config, ranks.world)
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
    leave_free(config.free_multiprocessors, device)
    try:
        stops = AgreedStop(stop) if ranks.world > 1 else stop
        return _run(config, ranks, stops, extensions)
    except RuntimeError as error:
        # The CPU allocator raises a plain RuntimeError
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            first = str(error).splitlines()[0]
            raise OutOfMemoryError(
                f"{device}: {first} Raise batch.micro_batches, or lower batch.size or batch.token_budget.",
                code="memory.device",
            ) from error
        raise


def _run(config: TrainConfig, ranks: Ranks, stop: Stop, extensions: Extensions) -> int:
    path = Path(config.output)
    with followers.claimed(path, config.resume, ranks) as folder:
        if folder.path != path:  # numbered
            config = replace(config, output=str(folder.path))
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
        try:
            config, task = prepare_on_ranks(shared(config, ranks), ranks)
            begin_branch(config, folder, task, ranks, extensions)
        except BaseException:
            # torchrun may start the ranks again. They resume what runs/latest names.
            if not under_torchrun():
                folder.give_up()
            raise
        if config.compare and not has_run:
            tell(
                f"Two runs on the same batches: this one, then {_reference_words(config, ranks)}. --compare '' leaves the second out."
            )
        try:
            code = train_and_log(
                config, folder, task, stop, asked, ranks, extensions.plugins(config)
            )
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
            path = page.write(folder.path)
            if gain := page.gain(folder.path):
                tell(gain)
            tell(f"Report: {path}")


def reference_precision(config: TrainConfig, device: torch.device) -> str:
    """The precision of the second run: plain torch gets the faster of its two on a CPU.

    Without bfloat16 instructions a CPU emulates bf16 autocast, so plain torch trains in float32.
    """
    is_emulated = device.type == "cpu" and not device_facts("cpu", None).bf16_gemm
    is_plain = config.compare == NO_RECIPE and config.precision == "amp-bf16"
    return "fp32" if is_emulated and is_plain else config.precision


def _reference_words(config: TrainConfig, ranks: Ranks) -> str:
    """ "plain torch in fp32", "plain torch in amp-bf16", or the recipe of the second run."""
    if config.compare != NO_RECIPE:
        return config.compare
    return f"plain torch in {reference_precision(config, ranks.device(config.device))}"


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
        # Without a recipe the reference is the model as torch computes it.
        fuse=config.fuse and config.compare != NO_RECIPE,
        recipe=config.compare,
        precision=reference_precision(config, ranks.device(config.device)),
        layers_recipe={},
        embedding_codes="",
        attention="",
        switch="",
        compare="",
        save="",
        base="",
        merge=False,
    )
    # The task builds the model, and reads a wide base for the reference.
    task = replace(task, config=replace(task.config, base="")) if config.base else task
    # resume=True: the reference may be half trained, and its data were shown with the main run
    with followers.claimed(path, True, ranks) as own:
        begin_branch(reference, own, task, ranks, extensions)
        return train_and_log(
            reference,
            own,
            task,
            stop,
            reference,
            ranks,
            extensions.plugins(reference),
            is_first=False,
        )
