"""Loops that a file configures and that make their Trainer inside: the losses of a loop by hand (exact to a unit a step).

LLaMA-Factory and axolotl pin versions of transformers and trl, so each has an environment of its own; what is in none of
them is skipped. axolotl's plugin is tested by structure as well, over a base class that plays axolotl's.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.integrations import ConvertCallback
from tests.integrations.preference_data import answers, saved_model
from tests.raising import raises

STEPS, RATE = 3, 1e-2
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
PLUGIN = "narrowgauge.integrations.axolotl"


class Watch(TrainerCallback):
    """Keeps the batches that the model reads, the losses that are logged, and the model."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def on_train_begin(self, args, state, control, **given):
        self.model = given["model"]
        self.kinds = {type(each).__name__ for each in self.model.modules()}

        def keep(module, positional, named):
            if named.get("labels") is not None:
                kept = ("input_ids", "attention_mask", "labels", "position_ids")
                self.batches.append(
                    {key: named[key].clone() for key in kept if named.get(key) is not None}
                )

        self.model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_log(self, args, state, control, logs=None, **given):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def by_hand(folder: Path, recipe: str, batches: list[dict[str, Any]]) -> list[float]:
    model = ng.convert(LlamaForCausalLM.from_pretrained(folder), recipe).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def rows(folder: Path) -> Path:
    given = [{"instruction": each["prompt"], "input": "", "output": each["chosen"]} for each in answers(16)]  # fmt: skip
    (folder / "rows.json").write_text(json.dumps(given))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return folder / "rows.json"


def check(watch: Watch, folder: Path, recipe: str) -> None:
    assert "QLinear" in watch.kinds and len(watch.losses) == STEPS
    expected = by_hand(folder, recipe, watch.batches[:STEPS])
    # Logged as they are, or rounded to four digits (transformers before 5.7).
    rounded = all(round(each, 4) == each for each in watch.losses)
    limits = {"abs": 5.1e-5} if rounded else {"rel": 2.5e-7 * STEPS}
    assert watch.losses == pytest.approx(expected, **limits)
    assert len(set(expected)) == STEPS  # the weights moved


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int8"])
def test_the_callback_converts_before_the_optimizer_is_made(tmp_path, recipe):
    folder, watch = saved_model(tmp_path / "model"), Watch()
    settings = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": RATE}
    settings |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    ids = torch.arange(3, 27).repeat(16, 1)
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=TrainingArguments(str(tmp_path), optim="sgd", **settings),
        train_dataset=[{"input_ids": each, "labels": each} for each in ids],
        callbacks=[ConvertCallback(recipe), watch],
    )
    trainer.train()
    check(watch, folder, recipe)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("llamafactory"), reason="needs llamafactory")
def test_llama_factory(tmp_path, monkeypatch):
    from llamafactory.train.tuner import run_exp

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, watch = saved_model(tmp_path / "model"), Watch()
    rows(tmp_path)
    settings = {"stage": "sft", "do_train": True, "finetuning_type": "full", "template": "default"}
    settings |= {"model_name_or_path": str(folder), "dataset": "rows", "dataset_dir": str(tmp_path)}
    settings |= {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4}
    settings |= {"max_steps": STEPS, "logging_steps": 1, "learning_rate": RATE, "optim": "sgd"}
    settings |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "report_to": "none"}
    settings |= {"disable_gradient_checkpointing": True, "use_cpu": True, "save_strategy": "no"}
    run_exp(settings, callbacks=[ConvertCallback("fp8-delayed"), watch])
    check(watch, folder, "fp8-delayed")


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("axolotl"), reason="needs axolotl")
def test_axolotl(tmp_path, monkeypatch):
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "AXOLOTL_DO_NOT_TRACK"):
        monkeypatch.setenv(name, "1")
    folder, watch = saved_model(tmp_path / "model"), Watch()
    module = importlib.import_module(PLUGIN)
    own = module.NarrowgaugePlugin.add_callbacks_post_trainer
    monkeypatch.setattr(
        module.NarrowgaugePlugin,
        "add_callbacks_post_trainer",
        lambda self, cfg, trainer: [*own(self, cfg, trainer), watch],
    )
    settings = {
        "base_model": str(folder), "plugins": [f"{PLUGIN}.NarrowgaugePlugin"], "narrowgauge_recipe": "fp8-delayed",
        "narrowgauge_run_folder": str(tmp_path / "run"), "output_dir": str(tmp_path / "out"),
        "datasets": [{"path": str(rows(tmp_path)), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(tmp_path / "prepared"), "dataset_num_proc": 1, "val_set_size": 0, "sequence_len": 128,
        "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": STEPS, "learning_rate": RATE, "optimizer": "sgd",
        "lr_scheduler": "constant", "max_grad_norm": 0.0, "bf16": False, "fp16": False, "tf32": False, "logging_steps": 1,
        "save_strategy": "no", "special_tokens": {"pad_token": "<pad>"},
    }  # fmt: skip
    (tmp_path / "axolotl.yaml").write_text(json.dumps(settings))  # JSON is YAML
    do_train(load_cfg(str(tmp_path / "axolotl.yaml")), TrainerCliArgs())
    check(watch, folder, "fp8-delayed")
    events = [json.loads(line)["event"] for line in (tmp_path / "run/metrics.jsonl").open()]
    assert events.count("step") == STEPS


# --- the plugin by structure ---


@pytest.fixture
def plugin(monkeypatch):
    """The plugin over a class that plays `axolotl.integrations.base.BasePlugin`."""
    if find_spec("axolotl"):
        return importlib.import_module(PLUGIN).NarrowgaugePlugin()
    modules = [
        types.ModuleType(name)
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
    ]
    modules[-1].BasePlugin = type("BasePlugin", (), {})
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    found = importlib.import_module(PLUGIN).NarrowgaugePlugin()
    monkeypatch.delitem(sys.modules, PLUGIN)
    return found


def test_the_plugin_converts_policy_and_reference_and_records(plugin, tmp_path):
    def tiny():
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    trainer = types.SimpleNamespace(model=tiny(), ref_model=tiny(), accelerator=None)
    plugin.register({"narrowgauge_recipe": "fp8-row", "plugins": ["ours"]})
    plugin.post_trainer_create({}, trainer)
    for model in (trainer.model, trainer.ref_model):
        assert [each.recipe.name for each in model] == ["fp8-row", "fp8-row"]
    assert plugin.add_callbacks_post_trainer({}, trainer) == []
    plugin.register({"narrowgauge_recipe": "int8", "narrowgauge_run_folder": str(tmp_path)})
    [folder] = plugin.add_callbacks_post_trainer({}, trainer)
    assert folder.output == tmp_path


def test_configurations_without_one_recipe_are_refused(plugin):
    with raises(ConfigError, "axolotl.no-recipe", "narrowgauge_recipe"):
        plugin.register({"plugins": ["ours"]})
    with raises(ConfigError, "axolotl.two-recipes"):
        plugin.register({"narrowgauge_recipe": "fp8-row", "fp8": True})
