"""A plain training loop on several ranks: convert, wrap, distribute.

    torchrun --nproc-per-node 2 examples/ddp.py [--fsdp] [--recipe fp8-delayed]
    python examples/ddp.py --micro-batches 2        the same losses, in one process

Micro-batch number `turn * ranks + rank` of a step belongs to this rank.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model by fully_shard instead of copying it"
    )
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank, in a step")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if cuda
        else torch.device("cpu")
    )
    if ranks > 1:
        dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same weights on every rank
    model: nn.Module = nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
    ).to(device)
    ng.convert(model, options.recipe)
    if ranks > 1 and options.fsdp:
        for module in [*model.children(), model]:
            fully_shard(module)
    elif ranks > 1:
        model = DistributedDataParallel(model)
    ng.distribute(model)  # the one line
    if rank == 0:
        print(
            f"{ranks} ranks, {'shards' if isinstance(model, FSDPModule) else 'copies'} of the model"
        )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = options.micro_batches * ranks  # micro-batches of a step
    for step in range(options.steps):
        losses = torch.zeros(count, device=device)
        for turn in range(options.micro_batches):
            number = turn * ranks + rank
            x = torch.randn(
                64, 128, generator=torch.Generator().manual_seed(step * count + number)
            ).to(device)
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            (loss / options.micro_batches).backward()
            losses[number] = loss.detach()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step + 1}: loss {losses.mean().item()!r}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
