"""Lightning with FSDP2, its ModelParallelStrategy: convert, shard and distribute in `configure_model`.

    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py
    python examples/lightning_fsdp2.py --micro-batches 2        the same losses, in one process

Optimizers end a step by themselves, so nothing calls `advance`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.distributed import distributed_state


class Regression(lightning.LightningModule):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe, self.losses = recipe, list[Tensor]()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this more than once
            return
        torch.manual_seed(0)  # the same weights on every rank
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
        )
        ng.convert(self.model, self.recipe)
        if self.trainer.world_size > 1:
            for module in [*self.model.children(), self.model]:
                fully_shard(module, mesh=self.device_mesh["data_parallel"])
        ng.distribute(self.model)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, x: Tensor) -> Tensor:
        loss = (self.model(x) - x.roll(1, dims=1)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        if len(self.losses) == self.trainer.accumulate_grad_batches:
            loss = self.all_gather(torch.stack(self.losses)).mean()
            self.losses.clear()
            self.print(f"step {self.global_step}: loss {loss.item()!r}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["distribute"] = distributed_state(
            self.model
        ).state_dict()  # the step, by which random numbers are drawn

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        distributed_state(self.model).load_state_dict(checkpoint["distribute"])

    def on_train_start(self) -> None:
        how = "shards" if isinstance(self.model, FSDPModule) else "copies"
        self.print(f"{self.trainer.world_size} ranks, {how} of the model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="fp8-delayed")
    parser.add_argument(
        "--precision", default="32-true", help="of Lightning: 32-true, bf16-mixed or bf16-true"
    )
    parser.add_argument("--clip", type=float, help="the largest norm of the gradient")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank, in a step")
    parser.add_argument("--save", default="", help="a checkpoint after the last step, of all ranks")
    parser.add_argument("--resume", default="", help="a checkpoint to go on from")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    batches = torch.randn(40, 64, 128, generator=torch.Generator().manual_seed(1))
    own = batches[
        int(os.environ.get("RANK", "0")) :: ranks
    ]  # Lightning would shuffle before it deals them out to the ranks
    loader = DataLoader(list(own), collate_fn=torch.cat)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1) if ranks > 1 else "auto",
            accelerator="auto", devices=ranks, use_distributed_sampler=False, max_steps=options.steps, precision=options.precision,
            gradient_clip_val=options.clip, accumulate_grad_batches=options.micro_batches, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Regression(options.recipe), loader, ckpt_path=options.resume or None)
        if options.save:
            trainer.save_checkpoint(options.save)


if __name__ == "__main__":
    main()
