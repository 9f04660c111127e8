"""What do messages of 8 bits between the stages of a pipeline cost in quality? On a small language model in two stages.

    python -m benchmarks.pipeline_messages            2 ranks (gloo), one core each; about ten minutes

A causal Transformer of 4 blocks learns Python's standard library, byte by byte, under Schedule1F1B with 4 micro-batches.

    gradient   after some steps: the gradient of one batch with messages of 8 bits against that with 16-bit messages, beside two
               controls: the weights perturbed by 1e-6 of themselves, and the recipe against bf16. Of the whole model, relative norm
    training   200 steps with messages of either kind and each of 3 seeds: the loss gap between them beside the spread of the seeds,
               of the mean over the last 50 steps; and the bytes that were sent
"""

from __future__ import annotations

import argparse
import multiprocessing
import sysconfig
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge.distributed import distributed_state

HIDDEN, HEADS, BLOCKS, LENGTH, BATCH, MICRO_BATCHES = 128, 4, 4, 64, 16, 4
LAST = 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(HIDDEN, 3 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, HIDDEN, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.norm2, self.up, self.down = (
            nn.RMSNorm(HIDDEN),
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bytes(ids) + self.places.weight  # type: ignore[no-any-return]


def build(recipe: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: dict[str, nn.Module] = {"embed": Embedding()}
    parts |= {f"block{number}": Block() for number in range(BLOCKS)}
    parts |= {"norm": nn.RMSNorm(HIDDEN), "head": nn.Linear(HIDDEN, 256, bias=False)}
    return ng.convert(nn.Sequential(OrderedDict(parts)), recipe)  # type: ignore[return-value]


def sources() -> Tensor:
    """The beginning of the standard library, in the order of its file names: uint8."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= 2_000_000:
            break
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Run:
    """One rank's stage in training."""

    def __init__(self, recipe: str, seed: int, activations: str) -> None:
        rank, middle = dist.get_rank(), 1 + BLOCKS // 2
        parts = list(build(recipe, seed).named_children())
        self.module = nn.Sequential(OrderedDict(parts[:middle] if rank == 0 else parts[middle:]))
        self.stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        ng.distribute(self.stage, activations=activations)
        self.engine = Schedule1F1B(self.stage, MICRO_BATCHES, loss_fn=self._loss)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-3)
        self.data, self.generator = sources(), torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def _loss(self, y: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def backward(self) -> None:
        starts = torch.randint(len(self.data) - LENGTH, (BATCH, 1), generator=self.generator)
        ids, losses = self.data[starts + torch.arange(LENGTH)].long(), []  # type: ignore[var-annotated]
        self.optimizer.zero_grad()
        if dist.get_rank() == 0:
            self.engine.step(ids)
        else:
            self.engine.step(target=ids, losses=losses)
            self.losses.append(sum(each.item() for each in losses) / MICRO_BATCHES)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        ng.advance(self.module)

    def train(self, steps: int) -> None:
        for step in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
            self.step()


def gradient(
    recipe: str, steps: int, activations: str, weights: str = "", noise: float = 0.0
) -> Tensor:
    """Of this rank's stage, after so many steps in 16-bit messages; the last batch with what is asked. weights: another recipe for it."""
    run = Run(recipe, 0, "16bit")
    run.train(steps)
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in run.module.parameters():
            parameter.mul_(1 + noise * torch.randn_like(parameter))
    if weights:
        ng.convert(run.module, weights)
    ng.distribute(run.stage, activations=activations)
    run.engine = Schedule1F1B(run.stage, MICRO_BATCHES, loss_fn=run._loss)
    run.backward()
    return torch.cat([p.grad.flatten() for p in run.module.parameters() if p.grad is not None])


def _far(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth| over both stages."""
    squares = torch.tensor(
        [float((found - truth).square().sum()), float(truth.square().sum())], dtype=torch.float64
    )
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


def gradient_rows(recipes: list[str], steps: int) -> list[dict[str, Any]]:
    rows = []
    for recipe in recipes:
        truth = gradient(recipe, steps, "16bit")
        rows.append(
            {
                "what": "gradient", "recipe": recipe, "steps": steps,
                "messages_fp8": _far(gradient(recipe, steps, "fp8"), truth),
                "weights_1e-6": _far(gradient(recipe, steps, "16bit", noise=1e-6), truth),
                "recipe_to_bf16": _far(truth, gradient(recipe, steps, "16bit", "bf16")),
            }
        )  # fmt: skip
    return rows


def training_row(recipe: str, steps: int, seed: int) -> dict[str, Any]:
    ends: dict[str, float] = {}
    sent: dict[str, int] = {}
    for form in ("16bit", "fp8"):
        run = Run(recipe, seed, form)
        run.train(steps)
        end = torch.tensor(
            sum(run.losses[-LAST:]) / LAST if run.losses else 0.0, dtype=torch.float64
        )
        dist.broadcast(end, src=1)
        ends[form], sent = float(end), distributed_state(run.module).bytes_sent
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, sent)
    elements = steps * BATCH * LENGTH * HIDDEN
    share = {
        key: value / (2 * elements)
        for rank in gathered
        for key, value in rank.items()
        if "activations" in key
    }
    return {
        "what": "training", "recipe": recipe, "steps": steps, "seed": seed, "loss_16bit": ends["16bit"], "loss_fp8": ends["fp8"],
        "gap": ends["fp8"] - ends["16bit"], "bytes_of_bf16": share,
    }  # fmt: skip


def _rank(rank: int, store: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = (
        []
        if "gradient" not in options.only
        else gradient_rows(options.recipes, options.gradient_steps)
    )
    for recipe in options.recipes if "training" in options.only else ():
        rows += [training_row(recipe, options.steps, seed) for seed in options.seeds]
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--gradient-steps", type=int, default=20)
    parser.add_argument("--recipes", nargs="+", default=["fp8-current"])
    parser.add_argument("--only", nargs="+", default=["gradient", "training"])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    store = str(Path(tempfile.mkdtemp(prefix="pipeline-")) / "store")
    ranks = [
        context.Process(target=_rank, args=(rank, store, options, results)) for rank in range(2)
    ]
    for each in ranks:
        each.start()
    rows = results.get()
    for each in ranks:
        each.join()
    for row in rows:
        print(
            {
                key: f"{value:.4g}" if isinstance(value, float) else value
                for key, value in row.items()
            }
        )
    record("pipeline_messages", rows, RESULTS / "pipeline_messages.jsonl")


if __name__ == "__main__":
    main()
