"""The guard in transformers' Trainer: `GuardedTrainer`, or `GuardMixin` before a Trainer of one's own.

    trainer = GuardedTrainer(model=model, args=args, train_dataset=data, guard="every=2000,steps=100,margin=0.25%,then=warn")
    trainer.train()

A callback alone does not see what a step is made of, so `training_step`, the method that Trainer's documentation names for overriding,
keeps the micro-batches while a check is under way; `GuardCallback` begins and ends the checks between two steps. In BF16 they are taken
once more by the Trainer's own `training_step` (so with its loss, its accumulation, its autocast and its loss scale), clipped, stepped and
scheduled as its loop does. Other callbacks are not called for these steps.

Verdicts go where the Trainer logs, numbers by `Trainer.log`, sentences by transformers' logger. What the guard knows lies in
trainer_state.json of every checkpoint of the Trainer, so a resumed run is guarded as it was.

Left out: DeepSpeed, which steps in its own engine, and more than one GPU in one process (DataParallel).
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

from narrowgauge.conversion import advance
from narrowgauge.diagnose.guard.loop import Guard
from narrowgauge.diagnose.guard.verdict import WORSE
from narrowgauge.errors import ConfigError

KEY = "narrowgauge_guard"  # in `TrainerState.stateful_callbacks`
NUMBERS = (
    "difference",
    "same",
    "mean",
    "margin",
    "e_worse",
    "e_within",
    "checks",
)  # of a verdict that `Trainer.log` gets

logger = logging.get_logger(__name__)


class GuardMixin:
    """Goes before a Trainer: `class MyTrainer(GuardMixin, Trainer)`.

    guard        the settings, as `narrowgauge train --guard`; '': none
    guard_where  of the copy of the state: "host", or a folder on a disk

    trainer.guard is the `narrowgauge.Guard`, from the begin of training on; its `events` have the numbers of every check.
    """

    args: Any
    model_wrapped: Any
    accelerator: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    add_callback: Callable[..., None]
    log: Callable[..., None]

    def __init__(self, *given: Any, guard: str = "", guard_where: str | Path = "host", **named: Any) -> None:
        super().__init__(*given, **named)
        self.guard: Guard | None = None
        self.guard_settings, self.guard_where = guard, guard_where
        if not guard:
            return
        if getattr(self, "is_deepspeed_enabled", False) or self.args.n_gpu > 1:
            raise ConfigError(
                "GuardedTrainer: DeepSpeed and DataParallel take steps where they cannot be taken back. Use one process for each GPU "
                "with DDP or FSDP, or leave the guard out."
            )
        self.micro_batches: list[dict[str, Any]] = []  # of the optimizer step under way
        self.step_losses: list[Tensor] = []
        self.items: Any = None
        self.add_callback(GuardCallback(self))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **named: Any) -> Tensor:
        """The Trainer's; with a guard it keeps what it was given."""
        kept = dict(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch, **named)  # type: ignore[misc]
        if not self.guard_settings:
            return loss
        self.micro_batches.append(kept)
        self.step_losses.append(loss)
        self.items = num_items_in_batch
        return loss

    def step_again(self, batch: dict[str, Any]) -> Tensor:
        """An optimizer step of what `training_step` kept, as the Trainer's loop makes one; the loss."""
        model, accelerator, losses = self.model_wrapped, self.accelerator, []
        micro_batches = batch["micro_batches"]
        before, self.current_gradient_accumulation_steps = (
            getattr(self, "current_gradient_accumulation_steps", 1),
            len(micro_batches),
        )
        for inputs in micro_batches:
            is_last = inputs is micro_batches[-1]
            accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else accelerator.no_sync(model=model):
                losses.append(super().training_step(model, inputs, batch["items"]))  # type: ignore[misc]
        if self.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        advance(model)
        if not accelerator.optimizer_step_was_skipped and not hasattr(
            self.lr_scheduler, "best"
        ):  # which a metric moves
            self.lr_scheduler.step()
        model.zero_grad()
        self.current_gradient_accumulation_steps = before
        return torch.stack(losses).sum()

    def tell_verdict(self, event: dict[str, Any]) -> None:
        is_worse = event["verdict"] == WORSE
        was_due = self.control.should_log  # which logging takes away: the step has a line of its own
        self.log(
            {f"guard_{name}": event[name] for name in NUMBERS if event[name] is not None}
            | {"guard_worse": int(is_worse)}
        )
        self.control.should_log = was_due
        say = logger.warning if is_worse else logger.info
        say(f"guard, steps {event['begun'] + 1} to {event['step']}: {event['sentence']}")


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """Added by `GuardMixin`."""

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
    """transformers.Trainer with a guard; see the module."""
