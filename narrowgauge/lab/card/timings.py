"""Timings of pieces: the card's own rates, one Linear per shape and contender, and the optimizer's step.

Each is a process, so a contender that faults costs no other one's figure. A line holds the median
of rounds in seconds, the kernels that ran in one step, with their seconds, as torch's profiler
reports them, the card's clocks under this very load, and the error of the result: a kernel that is
fast and wrong is named as wrong.

    rates      bytes/s of a copy, FLOP/s of 8192 x 8192 x 8192 in BF16 and in FP8 without casts
    linear     forward and backward of the four Linears of a layer (hidden 4096, MLP 16384, 15,872
               tokens: the shapes of TransformerEngine's table), casts included
    optimizer  one step on 537 million parameters
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.conversion.description import describe
from narrowgauge.conversion.measure import (
    INPUT_SETS,
    WARM_UPS,
    LinearWorkload,
    cuda_clock,
    inputs,
    interleaved,
    step_of,
    wall_clock,
)
from narrowgauge.lab.card import contenders
from narrowgauge.lab.card.conditions import Sampler
from narrowgauge.lab.card.process import WRONG, CardJob, Tell
from narrowgauge.optim import AdamW

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

TOKENS = 15_872
SHAPES = ((4096, 16_384), (16_384, 4096), (4096, 12_288), (4096, 4096))  # inputs, outputs
RATES_S, LINEAR_S, OPTIMIZER_S = 60.0, 90.0, 90.0
SIDE, COPIED = 8192, 1 << 29  # of the rates: GEMM's side, and elements of a copy
MATRICES = (16, 8192, 4096)  # of the optimizer: 537 million parameters
ROWS = 64  # of a result that are compared with float32
LEAST_DB = 6.0  # 4-bit operands reach 15 dB and more
NAMED = 40  # kernels of a line
ADAMW = ("torch-fused", "fp32", "8bit", "4bit", "8bit-stochastic", "bitsandbytes-8bit", "torchao-8bit")  # fmt: skip


def jobs(card: Device, device: str = "cuda:0") -> list[CardJob]:
    """Jobs for rates, Linears and the optimizer on such a card."""
    module = "narrowgauge.lab.card.timings"
    found = [
        CardJob(name="rates of the card", part="rates", run=f"{module}:rates", limit_s=RATES_S, arguments={"device": device}, alone=True)
    ]  # fmt: skip
    names = (contenders.BF16, *contenders.recipes_of(card), *contenders.TORCHAO, *contenders.ENGINE)
    for k, n in SHAPES:
        for name in names:
            workload = {"tokens": TOKENS, "inputs": k, "outputs": n, "contender": name}
            found.append(
                CardJob(
                    name=f"Linear {k} to {n}, {name}", part="linear", run=f"{module}:linear", limit_s=LINEAR_S,
                    arguments=workload | {"device": device}, alone=True,
                )
            )  # fmt: skip
    for name in ADAMW:
        found.append(
            CardJob(
                name=f"AdamW, {name}", part="optimizer", run=f"{module}:optimizer", limit_s=OPTIMIZER_S,
                arguments={"contender": name, "matrices": list(MATRICES), "device": device}, alone=True,
            )
        )  # fmt: skip
    return found


def rates(tell: Tell, device: str, side: int = SIDE, copied: int = COPIED) -> dict[str, Any]:
    """The card's own rates per second: `copy` in bytes, `bf16` and `fp8` in FLOP.

    fp8 is torch._scaled_mm in E4M3 with one scale per tensor and fast accumulation; None where it
    is refused.
    """
    there = torch.device(device)
    tell("copy")
    # 1 GiB in each direction, beyond every cache.
    source = torch.randn(copied // 2, device=there)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "copy": 2 * source.nbytes / timed(lambda: target.copy_(source), there),
        "fp8": None,
    }
    tell("bf16")
    left, right = (torch.randn(side, side, device=there, dtype=torch.bfloat16) for _ in range(2))
    flop = 2 * side**3
    found["bf16"] = flop / timed(lambda: torch.mm(left, right.T), there)
    tell("fp8")
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    one = torch.ones((), device=there)

    def product() -> Tensor:
        return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        product()
    except (RuntimeError, NotImplementedError) as error:
        # Before 8.9 there are no FP8 units: an answer, not a failure.
        found["fp8_refused"] = str(error).partition("\n")[0]
    else:
        found["fp8"] = flop / timed(product, there)
    return found | Sampler().during(lambda: timed(lambda: torch.mm(left, right.T), there))


def linear(
    tell: Tell, tokens: int, inputs: int, outputs: int, contender: str, device: str
) -> dict[str, Any]:
    """Seconds of one Linear's forward and backward, as `contender` has it."""
    there = torch.device(device)
    workload = LinearWorkload(tokens=tokens, inputs=inputs, outputs=outputs, dtype=torch.bfloat16)
    # The same weight and inputs for every contender.
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=False, device=there, dtype=torch.bfloat16)
    truth = plain.weight.detach().clone()
    layer = contenders.linear(contender, plain, tokens)
    sets = [_inputs(workload, there) for _ in range(INPUT_SETS)]
    tell("first step")
    run = step_of(layer, workload, sets, there)
    for turn in range(WARM_UPS):
        run(turn)
    # Compared before anything is timed: a wrong kernel would be reported as a fast one.
    tell("error")
    with torch.no_grad():
        x = sets[0][0]
        found: dict[str, Any] = {"error_db": error_db(layer(x), x, truth)}
    tell("timing")
    found |= measured(run, there)
    tell("kernels")
    found |= {"kernels": kernels(lambda: run(0), there), "backend": backends(layer)}
    if not found["error_db"] >= LEAST_DB:  # NaN too
        words = f"its result is {found['error_db']:.1f} dB from float32's, and {LEAST_DB:.0f} are the least"
        found |= {"status": WRONG, "why": words}
    return found


def _inputs(workload: LinearWorkload, device: torch.device) -> tuple[Tensor, Tensor]:
    return inputs(workload, device)


def measured(run: Callable[[int], None], device: torch.device) -> dict[str, Any]:
    """Median seconds of a step, its peak of memory, and the card's conditions meanwhile."""
    on_card = device.type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats(device)
    clock = cuda_clock(device) if on_card else wall_clock
    # One candidate: its median of rounds is what `auto` would measure.
    found: dict[str, Any] = {"median_s": interleaved({"": run}, clock)[""]}
    if on_card:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found |= Sampler().during(lambda: clock(run, 1))
    return found


def timed(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Median seconds of a call."""
    clock = cuda_clock(device) if device.type == "cuda" else wall_clock
    clock(lambda turn: _drop(call()), 2)
    return statistics.median(clock(lambda turn: _drop(call()), 3) / 3 for _ in range(rounds))


def _drop(result: object) -> None:
    """A Step returns nothing."""


def error_db(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """Signal to error in dB of some rows of y = x @ weight.T, against float32 on the CPU."""
    rows = slice(None, None, max(len(x) // ROWS, 1))
    wanted = x.detach()[rows].float().cpu() @ weight.float().cpu().T
    error = (y.detach()[rows].float().cpu() - wanted).square().sum()
    return float(10 * torch.log10(wanted.square().sum() / error.clamp_min(1e-30)))


def kernels(call: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Kernels of one call with their counts and seconds, longest first, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    on_card = device.type == "cuda"
    # Kernels alone: with the host's side a step of 30 kernels has hundreds of entries.
    kinds = [ProfilerActivity.CUDA] if on_card else [ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        call()
        if on_card:
            torch.cuda.synchronize(device)
    found = []
    for each in seen.key_averages():
        seconds = (each.self_device_time_total if on_card else each.self_cpu_time_total) / 1e6
        if seconds > 0:
            found.append({"name": each.key[:100], "count": each.count, "seconds": seconds})
    return sorted(found, key=lambda each: -each["seconds"])[:NAMED]


def backends(layer: nn.Module) -> list[str]:
    """Kernels that `describe` reports for the layers, with the reasons against others."""
    return [" ".join(filter(None, (row.backend, row.note))) for row in describe(layer)]


def optimizer(tell: Tell, contender: str, matrices: list[int], device: str) -> dict[str, Any]:
    """Seconds of one AdamW step on `matrices` = [count, rows, columns]."""
    there = torch.device(device)
    dtype = torch.bfloat16 if contender.endswith("stochastic") else torch.float32
    torch.manual_seed(0)
    count, *shape = matrices
    weights = [nn.Parameter(torch.randn(*shape, device=there, dtype=dtype)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    tell("first step")
    stepped = _adamw(contender, weights, there)
    stepped.step()
    tell("timing")
    found = measured(lambda turn: _drop(stepped.step()), there)
    tell("kernels")
    state = [each for of in stepped.state.values() for each in _tensors(of)]
    return found | {
        "parameters": sum(weight.numel() for weight in weights),
        "state_bytes": sum(each.nbytes for each in state),
        "kernels": kernels(stepped.step, there),
    }


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [each for each in state.values() if isinstance(each, Tensor)]


def _adamw(contender: str, weights: list[nn.Parameter], device: torch.device) -> Any:
    if contender == "torch-fused":
        return torch.optim.AdamW(weights, lr=1e-4, fused=True)
    if contender == "bitsandbytes-8bit":
        return contenders.package("bitsandbytes.optim").AdamW8bit(weights, lr=1e-4)
    if contender == "torchao-8bit":
        return contenders.package("torchao.optim").AdamW8bit(weights, lr=1e-4)
    states, _, master = contender.partition("-")
    # By the kernel or not at all: plain torch would be timed as if it were one.
    backend: Any = "triton" if device.type == "cuda" else "auto"
    given: Any = {"states": states, "master": master or None}
    return AdamW(weights, lr=1e-4, backend=backend, **given)
