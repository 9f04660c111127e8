"""The guard in transformers' Trainer: undisturbed without an alarm, resumed from its checkpoints (exact)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from tests.compare import assert_same

pytest.importorskip("accelerate")  # which transformers' Trainer needs

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from narrowgauge.lab.transformers_trainer import GuardedTrainer
from tests.raising import raises

DRAW = np.random.default_rng(0)
DATA = [
    {"input_ids": ids, "labels": ids} for ids in torch.from_numpy(DRAW.integers(1, 50, (48, 16)))
]
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:torch", "ignore::UserWarning:accelerate"
)


class Poison(TrainerCallback):
    """Makes the gradient of one step on narrow numbers not finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        if state.global_step == self.step:
            next(model.parameters()).grad.fill_(math.nan)


def trainer(
    folder: Path, guard: str = "", recipe: str = "fp8-delayed", callbacks: Any = (), **options: Any
) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "attention_dropout": 0.1,
    }
    model = ng.convert(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), recipe)
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 14,
        "learning_rate": 3e-3,
    }
    settings |= {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    settings |= {"logging_steps": 1, "save_strategy": "no", "logging_nan_inf_filter": False}
    arguments = TrainingArguments(folder, **settings | options)
    kind, given = (GuardedTrainer, {"guard": guard}) if guard else (Trainer, {})
    return kind(model=model, args=arguments, train_dataset=DATA, callbacks=list(callbacks), **given)


def losses(run: Any) -> list[float]:
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def bits(run: Any) -> Any:
    scheduler = run.lr_scheduler.state_dict()
    return (
        run.model.state_dict(),
        list(run.optimizer.state_dict()["state"].values()),
        scheduler["last_epoch"],
        scheduler["_last_lr"],
    )


@pytest.mark.slow
def test_a_trainer_goes_on_undisturbed(tmp_path):
    plain = trainer(tmp_path)
    plain.train()
    guarded = trainer(tmp_path, "every=5,steps=4")
    guarded.train()
    assert [event["begun"] for event in guarded.guard.events] == [5, 10]
    assert all(0 < abs(event["difference"]) < 0.1 for event in guarded.guard.events)
    assert_same(bits(guarded), bits(plain))
    assert losses(guarded) == losses(plain)
    logged = [each for each in guarded.state.log_history if "guard_difference" in each]
    assert [(each["step"], each["guard_worse"]) for each in logged] == [(9, 0), (14, 0)]


@pytest.mark.slow
def test_of_equal_arithmetic_the_difference_is_zero(tmp_path):
    """So accumulation, clipping, schedule and masks of dropout are those of the Trainer's loop."""
    run = trainer(tmp_path, "every=5,steps=4", max_grad_norm=0.05)
    for layer in run.model.modules():
        if isinstance(layer, ng.QLinear):
            layer.is_suspended = True
    run.train()
    assert [event["difference"] for event in run.guard.events] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 6, 10, 12])
def test_a_resumed_run_is_guarded_on(tmp_path, stop):
    whole = trainer(tmp_path / "whole", "every=5,steps=4", save_strategy="steps", save_steps=stop)
    whole.train()
    resumed = trainer(tmp_path / "resumed", "every=5,steps=4")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert_same(bits(resumed), bits(whole))
    held = json.loads(
        (tmp_path / "whole" / f"checkpoint-{stop}" / "trainer_state.json").read_text()
    )
    known = held["stateful_callbacks"]["narrowgauge_guard"]["attributes"]
    assert (known["taken"], len(known["evidence"]["checks"])) == (stop, stop // 9)
    begins = [event["begun"] for event in resumed.guard.events]
    assert begins == {4: [5, 10], 6: [6, 10], 10: [10], 12: []}[stop], (
        "one that was cut off begins anew, if the run is long enough"
    )
    assert len(resumed.guard.evidence.checks) == len(begins) + stop // 9


@pytest.mark.slow
def test_a_worse_run_goes_on_in_the_reference(tmp_path):
    run = trainer(tmp_path, "every=5,steps=4,then=stay", callbacks=[Poison(7)])
    run.train()
    assert [(event["verdict"], event["then"]) for event in run.guard.events] == [
        ("worse", "stay"),
        ("unknown", ""),
    ]
    assert all(bool(each.isfinite().all()) for each in run.model.parameters())
    assert [each["guard_worse"] for each in run.state.log_history if "guard_worse" in each] == [
        1,
        0,
    ]


@pytest.mark.slow
def test_autocast_is_that_of_the_trainer(tmp_path):
    plain = trainer(tmp_path, bf16=True)
    plain.train()
    guarded = trainer(tmp_path, "every=5,steps=4", bf16=True)
    guarded.train()
    assert_same(bits(guarded), bits(plain))


def test_settings_that_cannot_work_are_refused_before_the_first_step(tmp_path):
    run = trainer(tmp_path, "every=3,steps=4")
    with raises(ConfigError, "guard.settings-text"):
        run.train()
