"""The Trainer of transformers on several ranks: convert and distribute before it, nothing else.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

The Trainer wraps the model itself, so `distribute` is told which ranks will read other data.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import transformers

import narrowgauge as ng


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(32)
    rows = [{"input_ids": (tokens * (3 + each)) % 256, "labels": (tokens * (3 + each)) % 256} for each in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(  # which starts the process group
            output_dir=folder, max_steps=10, per_device_train_batch_size=4, save_strategy="no", logging_steps=5, report_to=[]
        )  # fmt: skip
        ng.convert(model, "fp8-delayed")
        ng.distribute(model, replicas=dist.group.WORLD if dist.is_initialized() else None)
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main()
