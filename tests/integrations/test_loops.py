"""One line of ours in loops that are not: each has the losses of a loop by hand.

Exact for Accelerate and Lightning. transformers' Trainer and sentence-transformers scale the loss of
a micro-batch in another order, so that theirs are equal to a unit in the last place of float32.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import narrowgauge as ng

accelerate = pytest.importorskip("accelerate")

from torch.utils.data import DataLoader, SequentialSampler  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

DRAW = np.random.default_rng(0)
IDS = torch.from_numpy(DRAW.integers(1, 50, (24, 16)))
STEPS = 3
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:torch", "ignore::UserWarning:accelerate"
)


def llama(recipe, intermediate=32):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": intermediate}  # fmt: skip
    return ng.convert(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), recipe)


def by_hand(model, loss_of, micro_batches=1, kind=torch.optim.AdamW, **options):
    """Losses of STEPS steps with 4 rows in a micro-batch, means over micro-batches."""
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.0, **options)
    batches = iter(IDS.split(4))
    losses = []
    for _ in range(STEPS):
        found = [loss_of(model, next(batches)) for _ in range(micro_batches)]
        for loss in found:
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(found).mean().detach()))
    return losses


def causal(model, ids):
    return model(input_ids=ids, labels=ids).loss


CASES = {
    "fused": {"optim": "adamw_torch_fused"},
    "accumulation": {"gradient_accumulation_steps": 2, "optim": "adamw_torch"},
    "checkpointing": {"gradient_checkpointing": True, "optim": "adamw_torch"},
}


def by_trainer(model, folder, **options):
    """Losses of STEPS steps of transformers' Trainer over the same batches."""
    settings = {"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(folder), **settings | options)
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer._get_train_sampler = lambda dataset=None: SequentialSampler(rows)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int8"])
def test_transformers_trainer(tmp_path, recipe, case):
    found = by_trainer(llama(recipe), tmp_path, **CASES[case])
    count = CASES[case].get("gradient_accumulation_steps", 1)
    expected = by_hand(llama(recipe).train(), causal, count, fused=case == "fused")
    assert found == pytest.approx(expected, rel=2.5e-7 * STEPS)  # a unit each step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo instantiates Functions
def test_transformers_trainer_with_torch_compile(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "optim": "adamw_torch"}
    found = by_trainer(llama("fp8-delayed"), tmp_path, **compiled)
    expected = by_hand(llama("fp8-delayed").train(), causal)
    # Not the same kernels: a code of FP8 at a boundary may move, 2^-4 of one product of 32.
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.slow
def test_transformers_trainer_with_8_bit_states_of_bitsandbytes(tmp_path):
    """Matrices of 4,096 weights, the least that bitsandbytes holds in 8 bits."""
    optim = pytest.importorskip("bitsandbytes").optim
    found = by_trainer(llama("fp8-delayed", 128), tmp_path, optim="adamw_bnb_8bit")
    model = llama("fp8-delayed", 128).train()
    expected = by_hand(model, causal, kind=optim.AdamW8bit)
    assert found == pytest.approx(expected, rel=2.5e-7 * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recipe", ["fp8-delayed", "int8"])
def test_accelerate(recipe, micro_batches):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    model = llama(recipe).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(IDS, batch_size=4))
    found = []
    for place, ids in enumerate(loader):
        if place == STEPS * micro_batches:
            break
        with accelerator.accumulate(model):
            loss = causal(model, ids)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.detach())
    accelerator.end_training()
    means = torch.stack(found).reshape(STEPS, micro_batches).mean(1).tolist()
    assert means == by_hand(llama(recipe).train(), causal, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_lightning(tmp_path, micro_batches):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model, self.losses = llama("fp8-delayed").train(), []

            def training_step(self, ids):
                loss = causal(self.model, ids)
                self.losses.append(loss.detach().clone())
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

        module = Module()
        lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=micro_batches, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(module, DataLoader(IDS, batch_size=4))  # fmt: skip
    means = torch.stack(module.losses).reshape(STEPS, micro_batches).mean(1).tolist()
    assert means == by_hand(llama("fp8-delayed").train(), causal, micro_batches)


@pytest.mark.slow
def test_sentence_transformers(tmp_path):
    """A bag of words below a Linear of each size that a real model has; the loss of pairs by their cosine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sentence_transformers")
        check_sentence_transformers(tmp_path)


def check_sentence_transformers(folder):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.models import Pooling, Transformer
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from transformers import BertConfig, BertModel

    from narrowgauge.integrations import convert_trainer
    from tests.integrations.preference_data import tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **dropouts, num_attention_heads=2, max_position_embeddings=32)
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")

    def encoder():
        words = Transformer(str(folder / "bert"))
        return SentenceTransformer(modules=[words, Pooling(32)], device="cpu")

    texts = [" ".join("abcdefghij"[place : place + 4]) for place in range(7)]
    pairs = [
        {"one": texts[place % 7], "two": texts[place * 3 % 7], "score": place % 3 / 2}
        for place in range(12)
    ]
    arguments = Arguments(
        str(folder / "out"), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=1e-2, use_cpu=True, report_to=[],
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, disable_tqdm=True, save_strategy="no",
        optim="adamw_torch",
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=encoder(), args=arguments, train_dataset=Dataset.from_list(pairs)
    )
    trainer.loss = CosineSimilarityLoss(trainer.model)
    trainer.get_batch_sampler = lambda dataset, batch_size, drop_last, **_: (
        torch.utils.data.BatchSampler(SequentialSampler(dataset), batch_size, drop_last)
    )
    convert_trainer(trainer, "fp8-delayed").train()
    found = [each["loss"] for each in trainer.state.log_history if "loss" in each]

    model = ng.convert(encoder(), "fp8-delayed").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(STEPS):
        rows = pairs[step * 4 : step * 4 + 4]
        one, two = (
            model(model.preprocess([row[name] for row in rows]))["sentence_embedding"]
            for name in ("one", "two")
        )
        scores = torch.tensor([row["score"] for row in rows])
        loss = nn.functional.mse_loss(torch.cosine_similarity(one, two), scores)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=2.5e-7 * STEPS, abs=1e-7)
