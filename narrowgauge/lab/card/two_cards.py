"""Casts beside communication: does an all-reduce still hide behind a Linear, and do both end?

Two ranks, each with a card, run a Linear forward and backward in a loop on one stream and
all-reduces of 256 MiB on another: each alone, and both at once.

    hidden = (compute + communication - both) / min(compute, communication)

1 means that the shorter one is hidden whole, 0 that they ran one after the other. A cooperative
grid needs every multiprocessor, so it cannot start before a collective has left its own; if two
ranks wait for each other that way, the job hangs, and its line says at which recipe.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.conversion.measure import LinearWorkload, inputs, step_of
from narrowgauge.lab.card import contenders
from narrowgauge.lab.card.process import CardJob, NotHere, Tell

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

LIMIT_S = 120.0
RANKS, STEPS = 2, 10
NAMES = ("bf16", "fp8-delayed", "fp8-current", "fp8-row", "int8")
MESSAGE = 1 << 27  # bfloat16 elements: 256 MiB
TOKENS, INPUTS, OUTPUTS = 8192, 4096, 14_336


def jobs(card: Device, cards: int, device: str = "cuda") -> list[CardJob]:
    """One job for each recipe; with fewer than two cards they say so."""
    native = (contenders.BF16, *contenders.recipes_of(card))
    return [
        CardJob(
            name=f"all-reduce beside a Linear, {name}", part="communication", run="narrowgauge.lab.card.two_cards:beside",
            limit_s=LIMIT_S, arguments={"contender": name, "device": device, "cards": cards}, alone=True,
        )
        for name in NAMES if name in native
    ]  # fmt: skip


def beside(
    tell: Tell, contender: str, device: str, cards: int, elements: int = MESSAGE,
    sizes: tuple[int, int, int] = (TOKENS, INPUTS, OUTPUTS), steps: int = STEPS,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of compute, of communication, and of both at once; on the CPU by gloo, in turn."""
    if cards < RANKS:
        raise NotHere(f"it needs {RANKS} cards, and {cards} is here")
    if device == "cuda" and not torch.distributed.is_nccl_available():
        raise NotHere("torch is built without NCCL")
    with TemporaryDirectory() as name:
        store = str(Path(name) / "store")
        given = store, contender, device, elements, tuple(sizes), steps
        # Not fork: this process may have asked CUDA already.
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_rank, args=(1, *given), daemon=True)
        other.start()
        try:
            found = _rank(0, *given, tell=tell)
        finally:
            other.join(5)
            if other.is_alive():
                other.kill()
    return found


def _rank(
    rank: int, store: str, contender: str, device: str, elements: int, sizes: tuple[int, ...],
    steps: int, tell: Callable[[str], None] = lambda at: None,
) -> dict[str, Any]:  # fmt: skip
    # Each rank has a card and a process; the second one is a child of the first.
    tell(f"{contender}: start of the ranks")
    there = torch.device("cpu") if device == "cpu" else torch.device(device, rank)
    if there.type == "cuda":
        torch.cuda.set_device(there)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )  # fmt: skip
    tokens, k, n = sizes
    workload = LinearWorkload(tokens=tokens, inputs=k, outputs=n, dtype=torch.bfloat16)
    plain = nn.Linear(k, n, bias=False, device=there, dtype=torch.bfloat16)
    layer = contenders.linear(contender, plain, tokens)
    run = step_of(layer, workload, [inputs(workload, there) for _ in range(2)], there)
    message = torch.ones(elements, dtype=torch.bfloat16, device=there)
    found: dict[str, Any] = {}
    for name, computes, sends in (
        ("compute_s", True, False),
        ("communication_s", False, True),
        ("both_s", True, True),
    ):
        tell(f"{contender}: {name.removesuffix('_s')}")
        _together(run if computes else None, message if sends else None, 2, there)
        found[name] = _together(run if computes else None, message if sends else None, steps, there)
    torch.distributed.destroy_process_group()
    shorter = min(found["compute_s"], found["communication_s"])
    saved = found["compute_s"] + found["communication_s"] - found["both_s"]
    return found | {"hidden": saved / shorter, "ranks": RANKS}


def _together(
    run: Callable[[int], None] | None,
    message: torch.Tensor | None,
    steps: int,
    device: torch.device,
) -> float:
    """Seconds of so many steps; messages travel on a stream of their own."""
    torch.distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_at_s = time.perf_counter()
    # async_op: NCCL has a stream of its own, which the casts have to share the card with.
    sent = []
    for turn in range(steps):
        if message is not None:
            sent.append(torch.distributed.all_reduce(message, async_op=True))
        if run is not None:
            run(turn)
    for each in sent:
        each.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started_at_s) / steps
