"""`RunFolder`: a run folder from a loop that is not ours, for `report`, `compare` and reports on several runs.

transformers' Trainer, TRL's trainers and others that take its callbacks:

    trainer = Trainer(model=model, args=args, ..., callbacks=[RunFolder("runs/mine")])

Accelerate and loops by hand, where `accelerator` may be left out:

    with RunFolder("runs/mine").recording(model, steps=1000, accelerator=accelerator) as run:
        for batch in loader:
            with run.watching():
                loss = ...
                accelerator.backward(loss)
            optimizer.step()
            run.step(loss, lr=scheduler.get_last_lr()[0])
        run.evaluation(loss=validation_loss)

Then `narrowgauge report runs/mine`, and `narrowgauge report runs/mine runs/other` for several.

The folder holds run.json and metrics.jsonl as docs/architecture.md has them: losses, gradient norms,
learning rates, evaluations, checkpoints, peak memory, recipes of all layers, and every `tensor_every`
steps the statistics of operands, which the layers themselves report. Rank 0 alone writes.

`UNSEEN` lists facts that a callback cannot see, and the part of the page that lacks them. run.json
has the same list under `unseen`. The loop decides which losses are logged: with logging_steps = 10 a
point is the mean of 10 steps. Two runs that are compared need the same logging_steps.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import TrainerCallback

import narrowgauge
from narrowgauge.conversion.description import describe
from narrowgauge.diagnose.metrics_table import SCORES
from narrowgauge.errors import ConfigError
from narrowgauge.nn.converted_model import nonfinite_amax
from narrowgauge.train import run_folder, tensor_stats
from narrowgauge.train.device import device_name, peak_bytes
from narrowgauge.train.metrics import MetricsLog

# What a callback cannot see -> what the page lacks for it.
UNSEEN = {
    "the data": "no entropy of the tokens, no best constant answer, no fingerprint: compare trusts you that two runs saw the same",
    "the loss in 16 bits": "evaluations have the loss of the recipe alone",
    "the state of a step": "no guard, blame, branch or rewind, and --resume of narrowgauge train does not apply",
    "samples": "the page shows no generated text",
    "idle time of the GPU": "no launches event",
    "config.toml": "the page shows no settings; command and recipe are known",
}


class RunFolder(TrainerCallback):  # type: ignore[misc]
    """Writes a run folder. See the module docstring.

    output        the run folder; None: output_dir of the Trainer
    tensor_every  steps between statistics of operands; 0: none. A step with them takes longer
    recipe        name of the run on pages; '': the recipe of most layers
    """

    def __init__(
        self, output: str | Path | None = None, *, tensor_every: int = 50, recipe: str = ""
    ) -> None:
        if tensor_every < 0:
            raise ConfigError(
                f"RunFolder: tensor_every = {tensor_every}: must be at least 0. 0 takes no statistics.",
                code="run-folder.tensor-every",
            )
        self.output, self.tensor_every, self.recipe = output, tensor_every, recipe
        self.number = 0  # finished optimizer steps
        self._held = ExitStack()
        self._watch = ExitStack()
        self._events: tensor_stats.Events = {}
        self._watched_step = 0
        self._log: MetricsLog | None = None
        self._model: Any = None
        self._steps, self._started_at_s = 0, 0.0
        self._amax: dict[tuple[str, str], int] = {}

    # --- by hand, and with Accelerate

    @contextmanager
    def recording(
        self, model: nn.Module, *, steps: int, done: int = 0, accelerator: Any = None, **facts: Any
    ) -> Iterator[Self]:
        """Records the steps of the block, and its end.

        model        the model, also in the wrapper of Accelerate
        steps, done  optimizer steps of the whole run, and those finished before
        accelerator  its main process alone writes; None: this process does
        facts        further entries of run.json, as seed or tokens_per_step
        """
        if accelerator is not None:
            model = accelerator.unwrap_model(model)
            facts = {"precision": str(accelerator.mixed_precision), **facts}
        is_main = accelerator is None or accelerator.is_main_process
        if is_main:
            self._begin(Path(self.output or "runs/latest"), model, steps, done, facts)
        try:
            yield self
        except KeyboardInterrupt:
            self._end("interrupted", 130)
            raise
        except BaseException:
            self._close()  # no end: the page says that the run is unfinished
            raise
        self._end("finished" if self.number >= steps else "interrupted", 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Takes the statistics of operands in the block, if they are due in the next step."""
        self._begin_watch()
        try:
            yield
        finally:
            self._end_watch()

    def step(self, loss: Any, **fields: Any) -> None:
        """Records an optimizer step that was taken.

        loss    mean loss of the step, a number or a tensor, which is read from the device
        fields  further keys of a step event, as lr, grad_norm or tokens
        """
        self.number += 1
        if self._log is not None:
            self._write_step(float(loss), {name: float(each) for name, each in fields.items()})

    def evaluation(self, **scores: float) -> None:
        """Records an evaluation after the last step: loss, and scores such as accuracy."""
        if self._log is not None:
            self._log.write("eval", self.number, **scores, elapsed_s=self._elapsed_s())

    def checkpoint(self, path: str | Path) -> None:
        """Records a checkpoint of the last step."""
        if self._log is not None:
            self._log.write("checkpoint", self.number, path=str(path))

    # --- transformers' Trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        # Losses and norms that the Trainer logs are those of all ranks.
        if not state.is_world_process_zero or model is None:
            return
        facts: dict[str, Any] = {
            "seed": int(args.seed),
            "precision": "amp-bf16" if args.bf16 else "amp-fp16" if args.fp16 else "fp32",
            "optimizer": str(getattr(args.optim, "value", args.optim)),
            "ranks": int(args.world_size),
        }
        every = int(getattr(state, "logging_steps", 0) or args.logging_steps or 1)
        if every > 1:
            facts["memory"] = [f"A point of the loss is the mean of {every} steps (logging_steps)."]
        self._begin(
            Path(self.output or args.output_dir), model, int(state.max_steps), int(state.global_step), facts
        )  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begin_watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.number = int(state.global_step)
        self._end_watch()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any
    ) -> None:  # fmt: skip
        """Writes a step event for the losses that the Trainer logs; its other logs are not steps."""
        self.number = int(state.global_step)
        if self._log is None or not logs or "loss" not in logs:
            return
        names = {"grad_norm": "grad_norm", "learning_rate": "lr", "epoch": "epoch"}
        fields = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
        self._write_step(float(logs["loss"]), fields)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **others: Any
    ) -> None:  # fmt: skip
        self.number = int(state.global_step)
        found = {name.removeprefix("eval_"): each for name, each in (metrics or {}).items()}
        if "loss" in found:  # one of several evaluation sets has its name in it, and is left out
            known = {name: float(found[name]) for name in SCORES if name in found}
            self.evaluation(loss=float(found["loss"]), **known)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.number = int(state.global_step)
        self.checkpoint(f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.number = int(state.global_step)
        self._end("finished" if self.number >= self._steps else "interrupted", 0)

    # --- the folder

    def _begin(
        self, path: Path, model: Any, steps: int, done: int, facts: Mapping[str, Any]
    ) -> None:
        self._close()
        # The lock of the folder is held until the end: a second run there would mix two logs.
        self._held = ExitStack()
        folder = self._held.enter_context(run_folder.RunFolder.claim(path, resume=done > 0))
        try:
            self._log = self._held.enter_context(MetricsLog(folder.metrics))
            self._model, self._steps, self.number = model, steps, done
            self._started_at_s = time.monotonic()
            self._amax = {}
            folder.write_run({**self._known(model), "steps": steps, **facts})
            if done:
                self._log.write("resume", done, path=f"checkpoint-{done}", skipped=[])
        except BaseException:
            self._close()
            raise

    def _known(self, model: Any) -> dict[str, Any]:
        """Entries of run.json that the model and the machine give."""
        rows = [row.columns() for row in describe(model)]
        # Output heads and layers that a pattern left alone have no recipe, and no vote.
        names = [str(row["recipe"]) for row in rows if row.get("recipe") not in (None, "none")]
        device = next(model.parameters()).device
        sizes = getattr(model, "config", None)
        keys = {
            "hidden_size": "hidden_size",
            "num_hidden_layers": "layers",
            "num_attention_heads": "heads",
        }
        shape = {
            ours: getattr(sizes, key, None)
            for key, ours in (keys | {"vocab_size": "vocab_size"}).items()
        }
        return {
            "narrowgauge": narrowgauge.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device_name(device),
            "device_type": device.type,
            "threads": torch.get_num_threads(),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [*sys.orig_argv[:1], *sys.argv],
            "recipe": self.recipe or (max(set(names), key=names.count) if names else "none"),
            "parameters": sum(each.numel() for each in model.parameters()),
            "model": {"name": type(model).__name__} | {key: each for key, each in shape.items() if each},
            "describe": rows,
            "unseen": [f"{what}: {means}" for what, means in UNSEEN.items()],
        }  # fmt: skip

    def _write_step(self, loss: float, fields: Mapping[str, float]) -> None:
        assert self._log is not None
        device = next(self._model.parameters()).device
        clocks = {"elapsed_s": self._elapsed_s(), "peak_bytes": peak_bytes(device)}
        counts = {name: int(fields[name]) for name in ("tokens", "examples") if name in fields}
        # Counts are whole numbers in the log, and the caller may give tensors.
        self._log.write("step", self.number, loss=loss, **{**fields, **clocks, **counts})
        readings = nonfinite_amax(self._model)
        for (module, role), count in readings.items():
            if count > self._amax.get((module, role), 0):
                self._log.write(
                    "nonfinite_amax", self.number, module=module, role=role, count=count
                )
        self._amax = readings

    def _begin_watch(self) -> None:
        if self._log is None or not self.tensor_every or (self.number + 1) % self.tensor_every:
            return
        self._watch, self._watched_step = ExitStack(), self.number + 1
        self._events = self._watch.enter_context(tensor_stats.watched(self._model))

    def _end_watch(self) -> None:
        """Writes the statistics of the step that ended, if they were taken."""
        events, self._events = self._events, {}
        self._watch.close()
        if self._log is not None:
            for kind, fields in events.values():
                # `step` is called behind `watching` in a loop by hand, and before it in a Trainer.
                self._log.write(kind, self._watched_step, **fields)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def _end(self, reason: str, code: int) -> None:
        if self._log is not None:
            self._log.write("done", self.number, reason=reason, exit_code=code)
        self._close()

    def _close(self) -> None:
        self._watch.close()
        self._log, self._model = None, None
        self._held.close()
