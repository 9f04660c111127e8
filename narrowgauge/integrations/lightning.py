"""`LightningRunFolder`: a run folder from Lightning's Trainer.

    trainer = lightning.Trainer(..., callbacks=[LightningRunFolder("runs/mine")])
    trainer.fit(module, loader)

Works with `lightning.pytorch` and `pytorch_lightning`, and imports neither: Lightning calls the
methods of a callback by their names. `recorder` describes the folder and lists unseen facts.
Lightning differs from transformers' Trainer in four points:

    loss        of each optimizer step: the mean over its micro-batches, and over ranks
    grad_norm   of all gradients, before they are clipped; one pass over the gradients in each step
    evaluation  the metric that `validation_loss` names, as the module has logged it
    checkpoint  not recorded: Lightning tells a callback the contents of a checkpoint and not its path
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.diagnose.metrics_table import SCORES
from narrowgauge.errors import warn
from narrowgauge.integrations.recorder import FolderRecorder

UNSEEN = {"checkpoints": "no checkpoint events"}
# Lightning's names -> those of run.json; any other stands as Lightning has it.
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "amp-bf16", "16-mixed": "amp-fp16"}


class LightningRunFolder:
    """Writes a run folder from Lightning. See the module docstring.

    output           the run folder
    tensor_every     steps between statistics of operands; 0: none. A step with them takes longer
    recipe           name of the run on pages; '': the recipe of most layers
    loss_unit        unit of the loss on pages; pages show a perplexity beside nats/token alone
    validation_loss  name under which the module logs the loss of an evaluation
    """

    def __init__(
        self,
        output: str | Path = "runs/latest",
        *,
        tensor_every: int = 50,
        recipe: str = "",
        loss_unit: str = "nats/token",
        validation_loss: str = "val_loss",
    ) -> None:
        self.recorder = FolderRecorder(
            output,
            tensor_every=tensor_every,
            recipe=recipe,
            loss_unit=loss_unit,
            unseen=UNSEEN,
        )
        self.path, self.validation_loss = Path(output), validation_loss
        # Keys of a callback's entry in a checkpoint; Lightning 2.6 reads both when it resumes.
        self.state_key = self._legacy_state_key = type(self).__qualname__
        self._losses: list[Tensor] = []  # of the micro-batches of this step
        self._fields: dict[str, Any] = {}  # lr and grad_norm of this step
        self._steps = self._written = 0

    def __getattr__(self, name: str) -> Any:
        """Lightning looks up every hook on every callback; those left out here do nothing."""
        if name.startswith("on_") or name in ("setup", "teardown"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    # Lightning stores these in its checkpoints. The folder itself holds everything.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._losses, self._fields, self._written = [], {}, 0
        steps = trainer.estimated_stepping_batches  # inf if time alone ends the run
        # "finished" needs the number of steps; without one every ordinary end is the end.
        self._steps = int(steps) if steps != float("inf") and steps > 0 else 0
        self.recorder.number = trainer.global_step
        if not trainer.is_global_zero:
            return
        precision = str(trainer.precision)
        facts = {
            "precision": PRECISIONS.get(precision, precision),
            "optimizer": ", ".join(type(each).__name__ for each in trainer.optimizers),
            "ranks": trainer.world_size,
        }
        # seed_everything keeps the seed there, for the processes that Lightning starts.
        if (seed := os.environ.get("PL_GLOBAL_SEED", "")).isdigit():
            facts["seed"] = int(seed)
        self.recorder.begin(
            self.path, module, self._steps, trainer.global_step, facts, str(trainer.ckpt_path or "")
        )

    def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
        if not self._losses:
            self.recorder.begin_watch()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [
            each.grad
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(grads)
        # Of shards a DTensor, whose ranks all come here. A schedule changes lr behind the step.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._fields = {"grad_norm": norm, "lr": optimizer.param_groups[0]["lr"]}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Automatic optimization divides by the micro-batches of a step; an epoch may end early.
            parts = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            self._losses.append(loss.detach() * parts)
        if trainer.global_step == self.recorder.number:
            return  # one of several micro-batches
        self.recorder.number = trainer.global_step
        self.recorder.end_watch()
        if not self._losses:
            return  # training_step skipped the batch
        mean = torch.stack(self._losses).mean()
        self._losses = []
        if trainer.world_size > 1:
            mean = trainer.strategy.reduce(mean, reduce_op="mean")
        fields = {name: float(each) for name, each in self._fields.items()}
        self.recorder.write_step(float(mean), fields)
        self._written += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        # Lightning evaluates two batches before the first step, to find errors early.
        if trainer.sanity_checking:
            return
        found = {name: float(each) for name, each in trainer.callback_metrics.items()}
        if self.validation_loss not in found:
            warn(
                f"LightningRunFolder: the module logged no {self.validation_loss!r} in this evaluation, so that the folder lacks it. "
                f"It logged: {', '.join(sorted(found)) or 'nothing'}. Name its loss by validation_loss=...",
                code="run-folder.no-validation-loss",
                stacklevel=2,
            )
            return
        prefix = self.validation_loss.removesuffix("loss")
        known = {name: found[prefix + name] for name in SCORES if prefix + name in found}
        self.recorder.evaluation(loss=found[self.validation_loss], **known)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if not self._written:
            warn(
                "LightningRunFolder: training_step returned no loss in any step, so that the folder has no curve. Return it, also with "
                "manual optimization.",
                code="run-folder.no-loss",
                stacklevel=2,
            )
        done = self.recorder.number >= self._steps
        self.recorder.end("finished" if done else "interrupted", 0)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self.recorder.end("interrupted", 130)
        else:
            self.recorder.close()  # no end: the page says that the run is unfinished


def _nothing(*arguments: Any, **named: Any) -> None:
    """A hook that the callback has no use for."""
