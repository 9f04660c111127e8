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

Then `narrowgauge report runs/mine`, and `narrowgauge report runs/mine runs/other` for several. Rank 0
alone writes. `recorder` describes the folder, and lists facts that a callback cannot see.

The loop decides which losses are logged: with logging_steps = 10 a point is the mean of 10 steps.
Two runs that are compared need the same logging_steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import nn
from transformers import TrainerCallback

from narrowgauge.diagnose.metrics_table import SCORES
from narrowgauge.integrations.recorder import FolderRecorder


class RunFolder(FolderRecorder, TrainerCallback):  # type: ignore[misc]
    """Writes a run folder from transformers' Trainer or by hand. See the module docstring.

    output        the run folder; None: output_dir of the Trainer
    tensor_every  steps between statistics of operands; 0: none. A step with them takes longer
    recipe        name of the run on pages; '': the recipe of most layers
    loss_unit     unit of the loss on pages; pages show a perplexity beside nats/token alone
    """

    # --- by hand, and with Accelerate

    @contextmanager
    def recording(
        self, model: nn.Module, *, steps: int, done: int = 0, accelerator: Any = None, **facts: Any
    ) -> Iterator[Self]:
        """Records the steps of the block, and its end.

        model        the model, also in the wrapper of Accelerate
        steps, done  optimizer steps of the whole run, and the finished ones
        accelerator  its main process alone writes; None: this process does
        facts        further entries of run.json, as seed or tokens_per_step
        """
        if accelerator is not None:
            model = accelerator.unwrap_model(model)
            facts = {"precision": str(accelerator.mixed_precision), **facts}
        is_main = accelerator is None or accelerator.is_main_process
        if is_main:
            self.begin(Path(self.output or "runs/latest"), model, steps, done, facts)
        try:
            yield self
        except KeyboardInterrupt:
            self.end("interrupted", 130)
            raise
        except BaseException:
            self.close()  # no end: the page says that the run is unfinished
            raise
        self.end("finished" if self.number >= steps else "interrupted", 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Takes the statistics of operands in the block, if they are due in the next step."""
        self.begin_watch()
        try:
            yield
        finally:
            self.end_watch()

    def step(self, loss: Any, **fields: Any) -> None:
        """Records an optimizer step that was taken.

        loss    mean loss of the step, a number or a tensor, which is read from the device
        fields  further keys of a step event, as lr, grad_norm or tokens
        """
        self.number += 1
        if self._log is not None:
            self.write_step(float(loss), {name: float(each) for name, each in fields.items()})

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
        self.begin(
            Path(self.output or args.output_dir), model, int(state.max_steps), int(state.global_step), facts
        )  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.begin_watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.number = int(state.global_step)
        self.end_watch()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **others: Any
    ) -> None:  # fmt: skip
        """Writes a step event for the losses that the Trainer logs; its other logs are not steps."""
        self.number = int(state.global_step)
        if self._log is None or not logs or "loss" not in logs:
            return
        names = {"grad_norm": "grad_norm", "learning_rate": "lr", "epoch": "epoch"}
        fields = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
        self.write_step(float(logs["loss"]), fields)

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
        self.end("finished" if self.number >= self._steps else "interrupted", 0)
