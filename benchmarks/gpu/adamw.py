"""Does AdamW on narrow states run at the speed of memory, and beside its peers? 2**27 weights in matrices of a Transformer.

Counted are the bytes that no kernel can avoid: weight and gradient read, weight and master written, both states read and written.
More than a GiB per step, which no cache holds; the host's part of a step is in the time. "+ cast": the step, and both orientations of the
weights' FP8 casts after it, made by a kernel of their own or ("in one") left by that of the step; counted are 2 bytes more in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import narrowgauge as ng
from benchmarks.gpu.bench import Bench

BASELINE = "torch-fused"
# Bytes of both states per weight, codes and scales (docs/optimizers.md); bitsandbytes has a float32 for 256 codes, torchao for 256 or 128.
STATE_BYTES = {"fp32": 8.0, "8bit": 2.02, "fp8": 2.05, "fp8-lm": 3.02, "4bit": 1.03}


@dataclass(frozen=True)
class Contender:
    """make: parameters -> optimizer; dtype of weights and gradients; bytes of states, and of a master, per weight."""

    make: Callable[[Any], Any]
    dtype: torch.dtype
    states: float
    master: float = 0.0

    @property
    def moved(self) -> float:
        """Bytes per weight and step."""
        return 3.0 * self.dtype.itemsize + 2 * (self.states + self.master)


def main(bench: Bench) -> None:
    if not bench.has_time("adamw"):
        return
    matrices, rows, columns = bench.size(8, 2), bench.size(4096, 64), bench.size(4096, 128)
    count = matrices * rows * columns
    contenders = _contenders(bench)
    builds = {
        name: _build(bench, each, matrices, rows, columns) for name, each in contenders.items()
    }
    work = {name: (count * each.moved, "copy") for name, each in contenders.items()}
    for recipe in ("fp8-delayed", "fp8-current"):
        for together in (False, True) if bench.device.type == "cuda" else (False,):
            name = f"8bit-stochastic + {recipe} cast{', in one' if together else ''}"
            builds[name] = _build_with_casts(bench, recipe, together, matrices, rows, columns)
            work[name] = (count * (contenders["narrowgauge-8bit-stochastic"].moved + 2.0), "copy")
    bench.compare(
        "adamw", builds, BASELINE, work=work, facts={"parameters": count, "mode": "eager"}
    )


def _contenders(bench: Bench) -> dict[str, Contender]:
    wide, narrow = torch.float32, torch.bfloat16
    found = {BASELINE: Contender(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), wide, 8.0)}
    for states, size in STATE_BYTES.items():
        found[f"narrowgauge-{states}"] = Contender(_ours(bench, states), wide, size)
    found["narrowgauge-8bit-stochastic"] = Contender(
        _ours(bench, "8bit", "stochastic"), narrow, STATE_BYTES["8bit"]
    )
    found["narrowgauge-8bit-remainder"] = Contender(
        _ours(bench, "8bit", "bf16-remainder"), narrow, STATE_BYTES["8bit"], 2.0
    )
    if bench.device.type == "cuda":  # torchao's compiles for minutes on a CPU
        found["bitsandbytes-8bit"] = Contender(_bitsandbytes, wide, 2.03)
        found["torchao-8bit"] = Contender(_torchao("AdamW8bit"), wide, 2.03)
        found["torchao-4bit"] = Contender(_torchao("AdamW4bit"), wide, 1.06)
        found["torchao-fp8"] = Contender(_torchao("AdamWFp8"), wide, 2.03)
    return found


def _ours(bench: Bench, states: Any, master: Any = None) -> Callable[[Any], Any]:
    """On a GPU by the kernel or not at all: a fallback would be measured as if it were one."""
    backend: Any = "triton" if bench.device.type == "cuda" else "auto"
    return lambda parameters: ng.optim.AdamW(
        parameters, lr=1e-4, states=states, master=master, backend=backend
    )


def _bitsandbytes(parameters: Any) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-4)


def _torchao(name: str) -> Callable[[Any], Any]:
    def make(parameters: Any) -> Any:
        from torchao import optim

        return getattr(optim, name)(parameters, lr=1e-4)

    return make


def _build(bench: Bench, contender: Contender, matrices: int, rows: int, columns: int) -> Any:
    def build() -> Any:
        made = torch.randn(matrices, rows, columns, device=bench.device).to(contender.dtype)
        weights = [torch.nn.Parameter(each) for each in made]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        return contender.make(weights).step

    return build


def _build_with_casts(
    bench: Bench, recipe: str, together: bool, matrices: int, rows: int, columns: int
) -> Any:
    def build() -> Any:
        layers = [
            torch.nn.Linear(columns, rows, bias=False, device=bench.device, dtype=torch.bfloat16)
            for _ in range(matrices)
        ]
        model = ng.convert(torch.nn.Sequential(*layers), recipe)
        optimizer = _ours(bench, "8bit", "stochastic")(model.parameters())
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        if together:
            left = optimizer.cast_weights(model)
            if any("taken after" not in words for words in left.values()):
                raise RuntimeError(
                    f"the step leaves nothing for some layers: {'; '.join(left.summary())}"
                )

        from narrowgauge.cuda_graphs import cast_weight

        def step() -> None:
            optimizer.step()
            ng.advance(model)
            for layer in model.children():
                cast_weight(layer)

        return step

    return build
