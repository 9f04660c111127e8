"""One run of `narrowgauge train`, the run itself or its reference: trained, logged and exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from narrowgauge.errors import NumericsError
from narrowgauge.train import run_metadata
from narrowgauge.train.assembly import Given
from narrowgauge.train.device import keep_freed_memory, peak_bytes, reset_peak
from narrowgauge.train.final_folder import export, export_merged
from narrowgauge.train.parallel import followers
from narrowgauge.train.parallel.checkpoints import trained_weights
from narrowgauge.train.planning import of_run, policy
from narrowgauge.train.trainer import Trainer

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.extensions import Plugin
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.run_folder import RunFolder
    from narrowgauge.train.signals import AgreedStop, StopRequest
    from narrowgauge.train.tasks import TrainTask


def train_and_log(
    config: TrainConfig,
    folder: RunFolder,
    task: TrainTask,
    stop: StopRequest | AgreedStop,
    asked: TrainConfig,
    ranks: Ranks,
    plugins: Sequence[Plugin],
    is_first: bool = True,
) -> int:
    """Trains one run from its newest checkpoint, or from the start, to its end.

    Returns the exit code.

    asked     settings to store as config.toml, once the trainer has accepted the checkpoint
    is_first  first run of this process: it prints an example of the data
    """
    with followers.log_of(folder, config, ranks) as log:
        device = ranks.device(config.device)
        freed_memory = keep_freed_memory(config.keep_freed, device)
        # The second run of a process has its own peak only if the system can reset the counter.
        has_own_peak = reset_peak(device) or is_first
        config, policy_note = policy.resolved(config, ranks)
        given = Given(has_own_peak=has_own_peak, policy_note=policy_note)
        trainer = Trainer(config, folder, task, log, given, ranks, plugins)
        folder.write_config(asked)
        if trainer.checkpoints.resumed_from:
            # A kill may have come between saving a checkpoint and removing older best weights
            trainer.checkpoints.best.clear()
        with followers.console_of(config.steps, config.log_every, trainer.step, ranks) as show:
            memory_plan = (
                ranks.first(lambda: of_run.planned(config, device, trainer.feed.probe())) or {}
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
                if config.merge:
                    show.say(export_merged(trainer.model, weights, task.tokenizer, folder.merged))
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
