"""One line of ours in TRL's trainers (exact): the loss of a loop by hand, and references that follow the policy."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.integrations import convert_trainer
from narrowgauge.nn.linear import QLinear
from tests.raising import raises, with_code

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")

import datasets
from torch.utils.data import SequentialSampler
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from tests.integrations.preference_data import answers, saved_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages; what ours says is matched


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return saved_model(tmp_path_factory.mktemp("trl") / "model")


def plain(folder):
    return LlamaForCausalLM.from_pretrained(folder)


def trained(kind, folder, settings, model=None, **given):
    """A trainer of TRL on the CPU that logs each step."""
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": [],
    }
    options |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"}
    options |= {"gradient_checkpointing": False, "lr_scheduler_type": "constant"}
    arguments = getattr(trl, f"{kind}Config")(output_dir=str(folder / "out"), **options | settings)
    found = getattr(trl, f"{kind}Trainer")(
        model=model or plain(folder), args=arguments, processing_class=tokenizer(), **given
    )
    found._get_train_sampler = lambda dataset=None: SequentialSampler(found.train_dataset)
    return found


def logged(trainer, key="loss"):
    return [each[key] for each in trainer.state.log_history if key in each]


def dpo(folder, model=None, **settings):
    return trained(
        "DPO", folder, settings, model, train_dataset=datasets.Dataset.from_list(answers(8))
    )


@pytest.mark.slow
def test_the_first_loss_of_dpo_is_ln_2_in_every_recipe(folder):
    """The learning rate is 0, so that one trainer serves all recipes. Without our line no loss is."""
    trainer = dpo(folder, learning_rate=0.0)
    reference = trainer.ref_model
    for recipe in recipes.ALL:
        assert convert_trainer(trainer, recipe.name) is trainer
        trainer.train()
        assert logged(trainer)[-1] == pytest.approx(math.log(2), abs=1e-6), recipe.name
        assert logged(trainer, "rewards/chosen")[-1] == logged(trainer, "rewards/rejected")[-1] == 0
        rows = zip(ng.describe(trainer.model), ng.describe(reference), strict=True)
        assert all(one.recipe == other.recipe for one, other in rows)
        convert_trainer(trainer, None)
        assert not any(
            isinstance(layer, QLinear)
            for model in (trainer.model, reference)
            for layer in model.modules()
        )
    ng.convert(trainer.model, "fp8-current")
    trainer.train()
    assert abs(logged(trainer)[-1] - math.log(2)) > 1e-3


@pytest.mark.slow
def test_a_policy_that_was_converted_before_its_trainer_is_followed(folder):
    model = ng.convert(plain(folder), "fp8-delayed")
    trainer = dpo(folder, model, max_steps=3, learning_rate=1e-3)
    ng.convert_like(trainer.model, trainer.ref_model)
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert len({*logged(trainer)}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_was_compiled")
def test_a_wide_reference_is_told_of_and_computed_ones_are_refused(folder):
    trainer = dpo(folder, ng.convert(plain(folder), "nvfp4"), max_steps=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert with_code(told, "convert.second-copy")
    before = dpo(folder, precompute_ref_log_probs=True)
    with raises(ConfigError, "convert-trainer.precomputed", "DPOTrainer"):
        convert_trainer(before, "nvfp4")
    # TRL's cache distinguishes weights and not recipes: without this it gives the wide numbers.
    datasets.disable_caching()
    try:
        after = dpo(folder, ng.convert(plain(folder), "nvfp4"), precompute_ref_log_probs=True)
    finally:
        datasets.enable_caching()
    after.train()
    assert logged(after)[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int8"])
def test_sft_has_the_losses_of_a_loop_by_hand(folder, recipe):
    """Of recipes without noise in backward, which a data loader shifts by the number that it draws."""
    rows = datasets.Dataset.from_list(
        [{"text": each["prompt"] + each["chosen"]} for each in answers(12)]
    )
    settings = {"max_steps": 3, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    trainer = trained("SFT", folder, settings, train_dataset=rows)
    convert_trainer(trainer, recipe).train()
    model = ng.convert(plain(folder).train(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(3):
        ids = torch.tensor(trainer.train_dataset[step * 4 : step * 4 + 4]["input_ids"])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_a_reward_model_has_the_losses_of_a_loop_by_hand(folder):
    """-log sigmoid(r_chosen - r_rejected), with the answers of a pair end to end in one batch."""
    pairs = [
        {"chosen": each["prompt"] + each["chosen"], "rejected": each["prompt"] + each["rejected"]}
        for each in answers(12)
    ]

    def scorer():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)

    settings = {"max_steps": 3, "learning_rate": 1e-3, "max_grad_norm": 0.0, "optim": "adamw_torch"}
    trainer = trained(
        "Reward", folder, settings, scorer(), train_dataset=datasets.Dataset.from_list(pairs)
    )
    convert_trainer(trainer, "fp8-delayed").train()
    model = ng.convert(scorer().train(), "fp8-delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(3):
        rows = [trainer.train_dataset[step * 4 + each] for each in range(4)]
        batch = trainer.data_collator(rows)
        kept = {key: batch[key] for key in ("input_ids", "attention_mask")}
        chosen, rejected = model(**kept).logits.squeeze(-1).chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_grpo_begins_without_divergence_from_its_reference(folder, recipe):
    """KL(policy | reference) is 0 (exact) on the first batch; answers are drawn in the loop."""
    rows = datasets.Dataset.from_list([{"prompt": each["prompt"]} for each in answers(8)])
    settings = {"beta": 0.1, "num_generations": 4, "max_completion_length": 4, "max_steps": 2}
    trainer = trained(
        "GRPO", folder, settings | {"learning_rate": 1e-3}, train_dataset=rows,
        reward_funcs=lambda completions, **_: [float(len({*each.split()})) for each in completions],
    )  # fmt: skip
    convert_trainer(trainer, recipe).train()
    assert logged(trainer, "kl")[0] == 0.0 and logged(trainer, "kl")[1] > 0
    assert all(math.isfinite(each) for each in logged(trainer, "reward"))
