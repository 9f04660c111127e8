"""Sampler, collator and loss in transformers' Trainer (exact): an interrupted run ends in the same weights as one that was not."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from narrowgauge.data import Batching, Collator, LengthBatchSampler, trainer_loss

pytest.importorskip("accelerate")  # which transformers' Trainer needs

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

DRAW = np.random.default_rng(0)
DATA = [
    {"input_ids": ids, "labels": ids}
    for ids in (DRAW.integers(1, 50, size) for size in DRAW.integers(3, 60, 100))
]


class ByLength(Trainer):
    def get_train_dataloader(self):
        self.sampler = LengthBatchSampler(
            [len(item["input_ids"]) for item in DATA], Batching(batch_size=8)
        )
        collate, self.shapes = Collator(pad_id=0, widths=self.sampler.widths), []

        def collate_and_note(items):
            batch = collate(items)
            self.shapes.append(tuple(batch["input_ids"].shape))
            return batch

        return DataLoader(
            self.train_dataset, batch_sampler=self.sampler, collate_fn=collate_and_note
        )


def trainer(folder, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    arguments = TrainingArguments(
        folder,
        num_train_epochs=3,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    return ByLength(
        model=model, args=arguments, train_dataset=DATA, compute_loss_func=trainer_loss("causal-lm")
    )


@pytest.mark.filterwarnings("ignore")  # the Trainer's own, of torch's and accelerate's versions
def test_a_resumed_trainer_run_is_the_same(tmp_path):
    whole = trainer(tmp_path, save_strategy="steps", save_steps=5)
    whole.train()
    assert whole.state.global_step == 3 * 7  # 13 batches an epoch, two to a step
    assert whole.sampler.epoch == 2
    assert len(whole.shapes) == 3 * 13
    resumed = trainer(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.sampler.epoch == 2
    assert resumed.shapes == whole.shapes[-len(resumed.shapes) :]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
