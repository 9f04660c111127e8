"""The Trainer of transformers on several ranks: convert and distribute before it, nothing else.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py            copies of the model (DDP)
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --fsdp     shards of it, by the Trainer's own FSDP2 settings
    accelerate launch --config_file examples/fsdp2.yaml examples/transformers_trainer.py     the same, by Accelerate's settings
    python examples/transformers_trainer.py --micro-batches 2               the same losses, in one process

The Trainer wraps the model itself, so `distribute` is told which ranks will read other data. Its shards need a GPU: on a CPU it has
copies, whatever was asked for, and the first line says which.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule

import narrowgauge as ng


class Losses(transformers.TrainerCallback):
    """Every digit of them; and what the Trainer made of the model."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            print(
                f"{args.world_size} ranks, {'shards' if isinstance(model, FSDPModule) else 'copies'} of the model"
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fsdp", action="store_true", help="shard the model instead of copying it")
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank, in a step")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(32)
    rows = [
        {"input_ids": (tokens * (3 + each)) % 256, "labels": (tokens * (3 + each)) % 256}
        for each in range(64)
    ]
    sharded = {"fsdp": True, "fsdp_config": {"version": 2}} if options.fsdp else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(  # which starts the process group
            output_dir=folder, max_steps=10, per_device_train_batch_size=4, save_strategy="no", logging_steps=1, report_to=[],
            gradient_accumulation_steps=options.micro_batches, use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
            **sharded,
        )  # fmt: skip
        ng.convert(model, options.recipe)
        ng.distribute(model, replicas=dist.group.WORLD if dist.is_initialized() else None)
        transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, callbacks=[Losses()]
        ).train()


if __name__ == "__main__":
    main()
