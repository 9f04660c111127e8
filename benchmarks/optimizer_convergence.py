"""Do narrow optimizer states learn as float32 ones do? A small Llama from scratch, several seeds, the same batches for all.

    make optimizer-convergence                       600 steps, three seeds, every format, rule and peer: about an hour on two cores
    make optimizer-convergence ARGS="--quick"        40 steps, one seed, AdamW alone: to see that it works

All run in float32 arithmetic on the same corpus (Python's standard library, bytes as tokens), so that only the states differ;
masters train bfloat16 weights. A seed decides weights and batches: a case and torch's float32 AdamW of one seed are a pair.
Reported: validation loss in nats per byte, its difference to the pair's, and what chance does: `adamw-fp32` of ours beside
torch's, the same algorithm with another last bit. Finished runs are kept in OUTPUT and not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, summarize

BASELINE = "torch-adamw"
SIZES: dict[str, int] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
BATCH, TOKENS = 16, 64
LEARNING_RATE, BETAS = 2e-3, (0.9, 0.999)
# Cases that clip by themselves.
CLIPPING = ("adamw-6-bytes", "adamw-8bit-stochastic-fp8-gradients", "adamw-8bit-clip-previous")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.optimizer_convergence", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/optimizer_convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS / "optimizer_convergence.jsonl")
    parser.add_argument("--quick", action="store_true", help="nothing is recorded")
    options = parser.parse_args()
    names = options.cases or list(cases())
    if options.quick:
        options.steps, options.seeds = 40, [0]
        names = [
            name for name in names if name in (BASELINE, "adamw-fp32", "adamw-8bit", "adamw-4bit")
        ]
    if BASELINE not in names:
        parser.error(f"--cases must include {BASELINE}, the reference of every pair")
    folder = options.output / f"{options.steps}-steps"
    results = Experiment(train, names, options.seeds, {"steps": options.steps}, folder).results(
        options.jobs
    )
    lines = summarize(results, ["loss"], BASELINE)
    sizes = {each["recipe"]: each["state_bytes_per_parameter"] for each in results}
    lines = [
        line | {"steps": options.steps, "state_bytes_per_parameter": sizes[line["recipe"]]}
        for line in lines
    ]
    print(markdown(lines))
    if not options.quick:
        record("optimizer-convergence", lines, options.results)


def cases() -> dict[str, tuple[torch.dtype, Callable[[nn.Module], torch.optim.Optimizer]]]:
    """Name -> (dtype of the weights, how the optimizer is built)."""
    from narrowgauge.optim import SGD, AdamW, Lion, groups

    adam: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": 0.1}
    wide = torch.float32
    found: dict[str, tuple[torch.dtype, Callable[[nn.Module], torch.optim.Optimizer]]] = {
        BASELINE: (wide, lambda model: torch.optim.AdamW(model.parameters(), **adam))
    }

    def add(
        name: str, dtype: torch.dtype, build: Callable[..., torch.optim.Optimizer], **settings: Any
    ) -> None:
        found[name] = (dtype, lambda model: build(groups(model), **settings))

    for states in ("fp32", "8bit", "fp8", "fp8-lm", "4bit"):
        add(f"adamw-{states}", wide, AdamW, **adam, states=states)
    for master in ("fp32", "bf16-remainder", "fp16-scaled", "stochastic"):
        add(f"adamw-8bit-{master}", torch.bfloat16, AdamW, **adam, states="8bit", master=master)
    add(
        "adamw-fp8-lm-fp16-scaled",
        torch.bfloat16,
        AdamW,
        **adam,
        states="fp8-lm",
        master="fp16-scaled",
    )
    for states in ("8bit/fp32", "fp32/8bit"):
        add(f"adamw-{states.replace('/', '-')}", wide, AdamW, **adam, states=states)
    for name, dtype, build in (
        ("adamw-6-bytes", torch.bfloat16, _six_bytes),
        ("adamw-8bit-stochastic-fp8-gradients", torch.bfloat16, _fp8_gradients),
        ("adamw-8bit-clip-previous", wide, _clipped_by_previous),
    ):
        found[name] = (dtype, partial(build, adam))
    for states in ("fp32", "8bit", "fp8", "4bit"):
        add(f"lion-{states}", wide, Lion, lr=LEARNING_RATE / 5, weight_decay=0.5, states=states)
        add(f"sgd-{states}", wide, SGD, lr=0.2, momentum=0.9, states=states)
    if find_spec("bitsandbytes"):
        found["bitsandbytes-8bit"] = (
            wide,
            lambda model: _peer("bitsandbytes.optim", "AdamW8bit", model, adam),
        )
    if find_spec("torchao"):
        found["torchao-8bit"] = (
            wide,
            lambda model: _peer("torchao.optim", "AdamW8bit", model, adam),
        )
        found["torchao-4bit"] = (
            wide,
            lambda model: _peer("torchao.optim", "AdamW4bit", model, adam),
        )
    return found


def _six_bytes(adam: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """FP8 gradients, FP8 and float16 moments, float16 weights that are their own master; embeddings, norms as elsewhere."""
    from narrowgauge.optim import AdamW, groups, hold_gradients

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data = parameter.data.half()
    optimizer = AdamW(groups(model), **adam, states="fp8-lm", master="stochastic")
    hold_gradients(optimizer, clip_norm=1.0)
    return optimizer


def _fp8_gradients(adam: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    from narrowgauge.optim import AdamW, groups, hold_gradients

    optimizer = AdamW(groups(model), **adam, states="8bit", master="stochastic")
    hold_gradients(optimizer, clip_norm=1.0)
    return optimizer


def _clipped_by_previous(adam: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    from narrowgauge.optim import AdamW, groups, in_backward

    optimizer = AdamW(groups(model), **adam, states="8bit")
    in_backward(optimizer, clip_norm=1.0, clip="previous")
    return optimizer


def _peer(
    module: str, name: str, model: nn.Module, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    from importlib import import_module

    optimizer: torch.optim.Optimizer = getattr(import_module(module), name)(
        model.parameters(), **settings
    )
    return optimizer


def train(name: str, seed: int, steps: int) -> dict[str, float]:
    """One run: linear warm-up over a tenth, half a cosine to zero, gradients clipped at norm 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from narrowgauge.optim import state_bytes

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peers
    text = corpus()
    held_out, training = text[: len(text) // 20], text[len(text) // 20 :]
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    dtype, build = cases()[name]
    optimizer = build(model.to(dtype))
    peaks = [group["lr"] for group in optimizer.param_groups]
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        share = min((step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        places = torch.randint(0, len(training) - TOKENS, (BATCH,), generator=draw)
        loss(
            model, torch.stack([training[place : place + TOKENS] for place in places.tolist()])
        ).backward()
        if name not in CLIPPING:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    size = state_bytes(optimizer)
    with torch.no_grad():
        batches = held_out[: 64 * BATCH * TOKENS].view(-1, BATCH, TOKENS)
        found = statistics.mean(float(loss(model, batch)) for batch in batches)
    return {"loss": found, "state_bytes_per_parameter": size.per_parameter}


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean nats per byte. bfloat16 weights are multiplied in float32, so that no slow bf16 GEMM is timed or rounded."""
    weights = {name: _Wide.apply(parameter) for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (), {"input_ids": ids}).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class _Wide(torch.autograd.Function):
    """float32; the gradient of a float16 weight is bfloat16, as a QLinear's, and of the others in the weight's type, as autograd has it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = torch.bfloat16 if weight.dtype == torch.float16 else weight.dtype
        return weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


def corpus() -> Tensor:
    """About 2 MB of the standard library's sources, one token per byte, int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)[:2_000_000]))


def markdown(lines: list[dict[str, Any]]) -> str:
    text = [
        "| case | state bytes per parameter | validation loss | difference | by seed |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        seeds = ", ".join(f"{value:+.4f}" for value in line["loss_differences"])
        text.append(
            f"| `{line['recipe']}` | {line['state_bytes_per_parameter']:.2f} | {line['loss']:.4f} "
            f"| {line['loss_difference']:+.4f} | {seeds} |"
        )
    return "\n".join(text)


if __name__ == "__main__":
    main()
