"""A plain training loop on several ranks: convert, wrap, distribute.

torchrun --nproc-per-node 2 examples/ddp.py [--fsdp] [--recipe fp8-delayed]
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", action="store_true", help="shard the model by fully_shard instead of copying it")
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    torch.manual_seed(0)  # the same weights on every rank
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))).to(device)
    ng.convert(model, options.recipe)
    if options.fsdp:
        for module in [*model.children(), model]:
            fully_shard(module)
    else:
        model = DistributedDataParallel(model)
    ng.distribute(model)  # the one line

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())  # other batches on every rank
    for step in range(options.steps):
        x = torch.randn(64, 128, generator=data).to(device)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
