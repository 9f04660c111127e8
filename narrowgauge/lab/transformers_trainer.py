"""The guard for transformers' Trainer: `GuardedTrainer`, or `GuardMixin` before a Trainer subclass.

    trainer = GuardedTrainer(
        model=model, args=args, train_dataset=data,
        guard="every=2000,steps=100,margin=0.25%,then=warn"
    )
    trainer.train()

A TrainerCallback cannot see the micro-batches of a step. `training_step`, which Trainer documents
for overriding, therefore stores the micro-batches during a check. `GuardCallback` starts and ends
checks between two steps. The BF16 reference repeats these micro-batches by the Trainer's own
`training_step`, so with its loss, accumulation, autocast and loss scale. Clipping, optimizer and
scheduler follow as in the Trainer's loop. Other callbacks are not called for reference steps.

Verdicts go to the Trainer's logs: numbers by `Trainer.log`, sentences by transformers' logger.
trainer_state.json of every checkpoint stores the guard's state, so a resumed run is guarded as
before.

Not supported: DeepSpeed, whose engine steps by itself, and several GPUs in one process
(DataParallel).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from narrowgauge.diagnose.verdict import WORSE
from narrowgauge.errors import ConfigError
from narrowgauge.lab.guard.loop import Guard
from narrowgauge.nn.converted_model import advance

KEY = "narrowgauge_guard"  # key in `TrainerState.stateful_callbacks`
NUMBERS = (
    "difference",
    "same",
    "mean",
    "margin",
    "e_worse",
    "e_within",
    "checks",
)  # fields of a verdict that go to `Trainer.log`

logger = logging.get_logger(__name__)


class GuardMixin:
    """Adds a guard to a Trainer: `class MyTrainer(GuardMixin, Trainer)`.

    guard        settings, as for `narrowgauge train --guard`; '': no guard
    guard_where  place of the state's copy: "host" or a folder on a disk

    `trainer.guard` is the `narrowgauge.Guard` after training has started. Its `events` hold the
    numbers of every check.
    """

    args: Any
    model_wrapped: Any
    accelerator: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    add_callback: Callable[..., None]
    log: Callable[..., None]

    def __init__(
        self, *given: Any, guard: str = "", guard_where: str | Path = "host", **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self.guard: Guard | None = None
        self.guard_settings, self.guard_where = guard, guard_where
        if not guard:
            return
        if getattr(self, "is_deepspeed_enabled", False) or self.args.n_gpu > 1:
            raise ConfigError(
                "GuardedTrainer: DeepSpeed and DataParallel take steps where they cannot be taken back. Use one process for each GPU "
                "with DDP or FSDP, or leave the guard out.",
                code="guard.trainer-parallel",
            )
        self.micro_batches: list[dict[str, Any]] = []  # of the current optimizer step
        self.step_losses: list[Tensor] = []
        self.items: Any = None
        self.add_callback(GuardCallback(self))

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **named: Any
    ) -> Tensor:
        """Calls the Trainer's `training_step`. With a guard, also stores its inputs and loss."""
        # Copy first: Trainer pops entries from `inputs`.
        kept = dict(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch, **named)  # type: ignore[misc]
        if not self.guard_settings:
            return loss
        self.micro_batches.append(kept)
        self.step_losses.append(loss)
        self.items = num_items_in_batch
        return loss

    def step_again(self, batch: dict[str, Any]) -> Tensor:
        """Runs an optimizer step from stored micro-batches, as the Trainer's loop does.

        Returns the summed loss.
        """
        model, accelerator, losses = self.model_wrapped, self.accelerator, []
        micro_batches = batch["micro_batches"]
        before, self.current_gradient_accumulation_steps = (
            getattr(self, "current_gradient_accumulation_steps", 1),
            len(micro_batches),
        )
        for inputs in micro_batches:
            is_last = inputs is micro_batches[-1]
            # As in Trainer's loop: DDP reduces gradients, and accelerate scales them, in the last
            # micro-batch alone.
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else accelerator.no_sync(model=model):
                losses.append(super().training_step(model, inputs, batch["items"]))  # type: ignore[misc]
        if self.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        advance(model)
        if not accelerator.optimizer_step_was_skipped and not hasattr(
            self.lr_scheduler, "best"
        ):  # ReduceLROnPlateau, which follows a metric
            self.lr_scheduler.step()
        model.zero_grad()
        self.current_gradient_accumulation_steps = before
        return torch.stack(losses).sum()

    def tell_verdict(self, event: dict[str, Any]) -> None:
        is_worse = event["outcome"] == WORSE
        # Trainer.log resets should_log, and the step's own line would be lost
        was_due = self.control.should_log
        self.log(
            {f"guard_{name}": event[name] for name in NUMBERS if event[name] is not None}
            | {"guard_worse": int(is_worse)}
        )
        self.control.should_log = was_due
        say = logger.warning if is_worse else logger.info
        say(f"guard, steps {event['begun'] + 1} to {event['step']}: {event['sentence']}")


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """Starts and ends guard checks between optimizer steps. `GuardMixin` adds it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self.trainer
        trainer.guard = guard = Guard(
            trainer.guard_settings, trainer.model_wrapped, trainer.optimizer, trainer.step_again,
            scaler=getattr(trainer.accelerator, "scaler", None), also=[trainer.lr_scheduler],
            warmup_steps=args.get_warmup_steps(state.max_steps), total_steps=state.max_steps, steps_done=state.global_step,
            where=trainer.guard_where, tell=trainer.tell_verdict,
        )  # fmt: skip
        if (known := (state.stateful_callbacks or {}).get(KEY)) is not None:
            guard.load_state_dict(known["attributes"])
        logger.info(guard.words())

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self.trainer
        trainer.micro_batches, trainer.step_losses = [], []
        trainer.guard.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self.trainer
        batch = {"micro_batches": trainer.micro_batches, "items": trainer.items}
        trainer.micro_batches = []
        trainer.guard.after_step(batch, torch.stack(trainer.step_losses).sum())
        state.stateful_callbacks[KEY] = {"args": {}, "attributes": trainer.guard.state_dict()}


class GuardedTrainer(GuardMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer with a guard. See the module."""
