"""Recipes with memory in transformers' Trainer (exact): a resumed run ends in the bits of one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import narrowgauge as ng
from tests.cold_start import shorten
from tests.compare import assert_same
from tests.selection import quick

pytest.importorskip("accelerate")  # which transformers' Trainer needs

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

DRAW = np.random.default_rng(0)
DATA = [
    {"input_ids": ids, "labels": ids} for ids in torch.from_numpy(DRAW.integers(1, 50, (16, 16)))
]


class Advance(TrainerCallback):
    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        ng.advance(model)


def trainer(folder: Path, recipe: str, cold_steps: int, **options: Any) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = ng.convert(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), recipe)
    shorten(model, cold_steps)
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=DATA, callbacks=[Advance()])


@pytest.mark.filterwarnings("ignore")  # the Trainer's own, of torch's and accelerate's versions
@pytest.mark.parametrize(
    "recipe", quick(["fp8-delayed", "int4-lsq-luq"], ["fp8-delayed", "int4-hq-lss", "int4-lsq-luq"])
)
def test_a_resumed_trainer_run_is_the_same(tmp_path: Path, recipe: str) -> None:
    whole = trainer(tmp_path, recipe, cold_steps=2, save_strategy="steps", save_steps=4)
    whole.train()
    resumed = trainer(
        tmp_path, recipe, cold_steps=16, save_strategy="no"
    )  # what is loaded ends the cold start
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    learned = {name: value for name, value in whole.model.named_parameters() if ".steps." in name}
    assert bool(learned) == recipe.startswith("int4")
    then = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(not torch.equal(value, then[name]) for name, value in learned.items()), (
        "steps are trained"
    )
