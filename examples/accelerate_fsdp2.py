"""Accelerate with FSDP2: convert before `prepare`, distribute after it.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
    accelerate launch --config_file examples/fsdp2.yaml examples/accelerate_fsdp2.py        the same, by Accelerate's settings
    python examples/accelerate_fsdp2.py --micro-batches 2                                   the same losses, in one process

Accelerate shards on GPUs alone: on a CPU it has copies, whatever was asked for, and the first line says which.
"""

from __future__ import annotations

import argparse

import accelerate
import torch
import transformers

import narrowgauge as ng


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank, in a step")
    options = parser.parse_args()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = accelerate.Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plugin,
        gradient_accumulation_steps=options.micro_batches,
    )
    rank, ranks = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = ng.convert(transformers.LlamaForCausalLM(config), options.recipe)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ng.distribute(model)
    accelerator.print(
        f"{ranks} ranks, {'shards' if accelerator.is_fsdp2 else 'copies'} of the model"
    )

    tokens = torch.arange(32, device=accelerator.device)
    count = options.micro_batches * ranks  # micro-batches of a step
    for step in range(10):
        losses = torch.zeros(count, device=accelerator.device)
        for turn in range(options.micro_batches):
            number = turn * ranks + rank
            batch = torch.stack(
                [(tokens * (3 + step * count + number + each)) % 256 for each in range(4)]
            )
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                losses[number] = loss.detach()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        ng.advance(model)
        accelerator.print(f"step {step + 1}: loss {accelerator.reduce(losses).mean().item()!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
