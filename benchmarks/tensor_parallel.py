"""What does DTensor cost a step of tensor parallelism, and how many bytes do its messages take?

    python -m benchmarks.tensor_parallel                    two ranks of this CPU (gloo), one thread each
    python -m benchmarks.tensor_parallel --blocks 1 --rounds 4 --recipes none fp8-row

A block is attention's and an MLP's seven Linears without what lies between, forward and backward, and the end of a step:

    dtensor   the block parallelised by torch's ColwiseParallel and RowwiseParallel, and converted
    local     Linears of the shards' shapes, converted, with the same all-reduces written out: the baseline
    sp-16bit  the same under sequence parallelism, torch's messages; sp-fp8: those of narrowgauge.distributed.tensor_parallel

"none" among the recipes is the control: torch's own nn.Linear in the same places, under the same styles. Calls of Python functions in a
step of rank 0 are counted beside its time, which clocks of a busy machine do not change.

Weights move by SGD on local shards, the same in all cases. Rounds interleave all cases. On a shared machine ranks wait for each other's
turns: --clock cpu takes the processor time of rank 0, all its threads, which waiting does not enter. Bytes are of whole messages that
a rank gives to collectives.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import narrowgauge as ng
from benchmarks.harness import RESULTS, measure, record, rows, table
from narrowgauge.distributed import tensor_parallel

RECIPES = (
    "bf16",
    "fp8-current",
    "fp8-delayed",
    "fp8-row",
    "fp8-block",
    "mxfp8",
    "int8",
    "int4-hq-bs",
)
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


class Half(nn.Module):
    """x -> the row-wise layer of what the column-wise ones make of x."""

    def __init__(self, names: tuple[str, ...], width: int, inner: int, shards: int = 1) -> None:
        super().__init__()
        self.names = names
        for name in names[:-1]:
            setattr(self, name, nn.Linear(width, inner // shards, bias=False))
        setattr(self, names[-1], nn.Linear(inner // shards, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = (getattr(self, name)(x) for name in self.names[:-1])
        for each in others:
            first = first * torch.sigmoid(each)
        return getattr(self, self.names[-1])(first)


class Blocks(nn.Module):
    def __init__(
        self,
        blocks: int,
        width: int,
        inner: int,
        shards: int = 1,
        enter: Any = None,
        leave: Any = None,
    ) -> None:
        super().__init__()
        names = (
            (("q_proj", "k_proj", "v_proj", "o_proj"), width),
            (("gate_proj", "up_proj", "down_proj"), inner),
        )
        self.halves = nn.ModuleList(
            Half(each, width, size, shards) for _ in range(blocks) for each, size in names
        )
        self.enter, self.leave = enter or nn.Identity(), leave or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for half in self.halves:
            x = x + self.leave(half(self.enter(x))) * 0.1
        return x


class Enter(nn.Module):
    """The identity, whose gradient is summed over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return _Enter.apply(x)


class Leave(nn.Module):
    """The sum over ranks, whose gradient is passed on."""

    def forward(self, x: Tensor) -> Tensor:
        return _Leave.apply(x)


def summed(x: Tensor) -> Tensor:
    """By the collectives that DTensor takes, whose own cost is not in question here."""
    return functional_collectives.wait_tensor(
        functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
    )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def parallelized(model: Blocks, mesh: DeviceMesh, activations: str | None) -> Blocks:
    """activations: of sequence parallelism; None: without it."""
    for half in model.halves:
        rows: Any = RowwiseParallel(output_layouts=Replicate() if activations is None else Shard(1))
        # One DTensor for all readers, so that the gradient of x is summed over ranks once.
        lies = Replicate() if activations is None else Shard(1)
        enter: Any = PrepareModuleInput(input_layouts=(lies,), desired_input_layouts=(Replicate(),))
        if activations == "fp8":
            rows, enter = tensor_parallel.RowwiseParallel(), tensor_parallel.GatherInput()
        parallelize_module(half, mesh, enter)
        plan = {name: ColwiseParallel(use_local_output=True) for name in half.names[:-1]} | {
            half.names[-1]: rows
        }
        parallelize_module(half, mesh, plan)
    return model


def own(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def case(
    recipe: str, kind: str, options: argparse.Namespace, mesh: DeviceMesh
) -> tuple[Callable[[], None], nn.Module]:
    """One step: forward, backward, the weights moved, the step ended."""
    torch.manual_seed(0)
    shape = options.blocks, options.width, options.inner
    if kind == "local":
        model: nn.Module = Blocks(*shape, mesh.size(), Enter(), Leave())
    else:
        model = parallelized(
            Blocks(*shape), mesh, {"dtensor": None, "sp-16bit": "16bit", "sp-fp8": "fp8"}[kind]
        )
    if recipe != "none":
        ng.convert(model, {"*": recipe})
    tokens = options.tokens // (mesh.size() if kind.startswith("sp") else 1)
    x, gy = torch.randn(1, tokens, options.width), torch.randn(1, tokens, options.width)
    weights = list(model.parameters())

    @torch.no_grad()
    def move() -> None:
        """Plain SGD on what this rank holds: an optimizer on DTensors is another question."""
        for weight in weights:
            assert weight.grad is not None
            own(weight).add_(own(weight.grad), alpha=-1e-3)
            weight.grad = None

    def step() -> None:
        model(x.requires_grad_()).backward(gy)
        move()
        if recipe != "none":
            ng.advance(model)
        x.grad = None

    return step, model


def cpu_clock(step: Callable[[], object], calls: int) -> float:
    """Processor seconds per call, of all threads of this process."""
    started_at_s = time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - started_at_s) / calls


def on_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    mesh = init_device_mesh("cpu", (options.ranks,))
    found = []
    for recipe in options.recipes:
        made = {kind: case(recipe, kind, options, mesh) for kind in ("local", *options.kinds)}
        # One call per sample: as many on every rank, or collectives would not meet.
        timings = measure(
            {kind: step for kind, (step, _) in made.items()},
            rounds=options.rounds,
            warmup=2,
            sample_s=1e-9,
            clock=cpu_clock if options.clock == "cpu" else None,
        )
        if rank == 0:
            print(recipe, table(timings, baseline="local"), sep="\n", end="\n\n", flush=True)
        sizes = {
            "ranks": options.ranks,
            "blocks": options.blocks,
            "width": options.width,
            "inner": options.inner,
        }
        for line in rows(timings, baseline="local"):
            sent = bytes_of(made[line["case"]], options) | {
                "calls": calls_of(made[line["case"]][0])
            }
            found.append(
                {
                    "recipe": recipe,
                    "clock": options.clock,
                    **sizes,
                    "tokens": options.tokens,
                    **line,
                    **sent,
                }
            )
            if rank == 0:
                print(recipe, line["case"], sent, flush=True)
    if rank == 0 and not options.dry_run:
        record("tensor_parallel", found, RESULTS / "tensor_parallel.jsonl")
    dist.destroy_process_group()


def calls_of(step: Callable[[], None]) -> int:
    """Of Python functions, and of those built in, in one step; all ranks take it."""
    profile = cProfile.Profile()
    profile.runcall(step)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


def bytes_of(
    made: tuple[Callable[[], None], nn.Module], options: argparse.Namespace
) -> dict[str, float]:
    """Bytes per number of x that messages of FP8 take in a step, gathered and summed; nothing for the others."""
    step, model = made
    via = [
        each
        for module in model.modules()
        if (each := tensor_parallel.messages_of(module)) is not None
    ]
    for each in via:
        each.bytes_sent.clear()
    if not via:
        return {}
    step()
    numbers = 2 * 2 * options.blocks * options.tokens * options.width  # x and gy of each half
    kinds = {
        kind: sum(each.bytes_sent[kind] for each in via) / numbers
        for kind in ("all-gather", "all-to-all")
    }
    return {f"bytes_per_number_{kind}": value for kind, value in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tensor_parallel", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10, help="even")
    parser.add_argument("--kinds", nargs="+", default=("dtensor", "sp-16bit", "sp-fp8"))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="none: nn.Linear")
    parser.add_argument("--dry-run", action="store_true", help="record nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (options, str(Path(folder) / "store")), nprocs=options.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
