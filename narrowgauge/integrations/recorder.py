"""`FolderRecorder`: writes a run folder for a loop that is not ours, on behalf of its callbacks.

A callback calls, in this order:

    begin         the model, the steps of the run and those that are done
    begin_watch   before the forward passes of a step: statistics of operands, if they are due
    end_watch     after its backward passes, and before an evaluation, whose operands would count too
    write_step    loss, learning rate, gradient norm
    evaluation, checkpoint
    end           the reason; or close: the folder then says that the run is unfinished

The folder holds run.json and metrics.jsonl as docs/architecture.md has them: losses, gradient norms,
learning rates, evaluations, checkpoints, peak memory, recipes of all layers, and every `tensor_every`
steps the statistics of operands, which the layers themselves report. A process that must not write,
as a rank other than 0, leaves out `begin`; the other calls then do nothing.

`UNSEEN` lists facts that a callback cannot see, and the part of the page that lacks them. run.json
has the same list under `unseen`.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import narrowgauge
from narrowgauge.conversion.description import describe
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
    "the products of a batch": "no share of operations in low precision; describe(model, batch=...) counts it",
    "other metrics of the loop": "rewards, entropies and the like are not drawn",
    "idle time of the GPU": "no launches event",
    "config.toml": "the page shows no settings; command and recipe are known",
}


class FolderRecorder:
    """Writes a run folder. See the module docstring.

    output        the run folder; None: the one that the callback takes from its loop
    tensor_every  steps between statistics of operands; 0: none. A step with them takes longer
    recipe        name of the run on pages; '': the recipe of most layers
    loss_unit     unit of the loss on pages; pages show a perplexity beside nats/token alone
    unseen        further entries like UNSEEN
    """

    def __init__(
        self,
        output: str | Path | None = None,
        *,
        tensor_every: int = 50,
        recipe: str = "",
        loss_unit: str = "nats/token",
        unseen: Mapping[str, str] | None = None,
    ) -> None:
        if tensor_every < 0:
            raise ConfigError(
                f"RunFolder: tensor_every = {tensor_every}: must be at least 0. 0 takes no statistics.",
                code="run-folder.tensor-every",
            )
        self.output, self.tensor_every, self.recipe = output, tensor_every, recipe
        self.loss_unit = loss_unit
        self.unseen = UNSEEN | dict(unseen or {})
        self.number = 0  # finished optimizer steps
        self._held = ExitStack()
        self._watch = ExitStack()
        self._events: tensor_stats.Events = {}
        self._watched_step = 0
        self._log: MetricsLog | None = None
        self._model: Any = None
        self._steps, self._started_at_s = 0, 0.0
        self._amax: dict[tuple[str, str], int] = {}

    def evaluation(self, **scores: float) -> None:
        """Records an evaluation after the last step: loss, and scores such as accuracy."""
        if self._log is not None:
            self._log.write("eval", self.number, **scores, elapsed_s=self._elapsed_s())

    def checkpoint(self, path: str | Path) -> None:
        """Records a checkpoint of the last step."""
        if self._log is not None:
            self._log.write("checkpoint", self.number, path=str(path))

    def begin(
        self,
        path: Path,
        model: Any,
        steps: int,
        done: int,
        facts: Mapping[str, Any],
        resumed_from: str = "",
    ) -> None:
        """Claims the folder and writes run.json.

        steps, done   optimizer steps of the whole run, and the finished ones
        facts         further entries of run.json
        resumed_from  checkpoint with the finished steps; '': checkpoint-N of transformers' Trainer
        """
        self.close()
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
                checkpoint = resumed_from or f"checkpoint-{done}"
                self._log.write("resume", done, path=checkpoint, skipped=[])
        except BaseException:
            self.close()
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
            "loss_unit": self.loss_unit,
            "unseen": [f"{what}: {means}" for what, means in self.unseen.items()],
        }  # fmt: skip

    def write_step(self, loss: float, fields: Mapping[str, float]) -> None:
        """Records step `number`. loss and fields are numbers or tensors, read from the device."""
        if self._log is None:
            return
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

    def begin_watch(self) -> None:
        """Takes the statistics of operands until `end_watch`, if they are due in the next step."""
        if self._log is None or not self.tensor_every or (self.number + 1) % self.tensor_every:
            return
        self._watch.close()  # of a step that ended without `end_watch`
        self._watch, self._watched_step = ExitStack(), self.number + 1
        self._events = self._watch.enter_context(tensor_stats.watched(self._model))

    def end_watch(self) -> None:
        """Writes the statistics of the step that ended, if they were taken."""
        events, self._events = self._events, {}
        self._watch.close()
        if self._log is not None:
            for kind, fields in events.values():
                # `step` is called behind `watching` in a loop by hand, and before it in a Trainer.
                self._log.write(kind, self._watched_step, **fields)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def end(self, reason: str, code: int) -> None:
        if self._log is not None:
            self._log.write("done", self.number, reason=reason, exit_code=code)
        self.close()

    def close(self) -> None:
        self._watch.close()
        self._log, self._model = None, None
        self._held.close()
