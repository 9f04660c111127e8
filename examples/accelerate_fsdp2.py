"""Accelerate with FSDP2: convert before `prepare`, distribute after it.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

from __future__ import annotations

import accelerate
import torch
import transformers

import narrowgauge as ng


def main() -> None:
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = ng.convert(transformers.LlamaForCausalLM(config), "fp8-delayed")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ng.distribute(model)

    tokens = torch.arange(32, device=accelerator.device)
    for step in range(10):
        batch = torch.stack([(tokens * (3 + step + accelerator.process_index + each)) % 256 for each in range(4)])
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        if (step + 1) % 5 == 0:
            accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
