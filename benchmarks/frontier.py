"""4 bits at the frontier: errors of casts, and how far a gradient in 4 bits lies from float32's.

casts       relative squared error of a cast of 96 x 1,024 numbers, mean of 60 draws, in four
            distributions. `bias` is the squared error of the mean of the draws, times the draws,
            over the error of one: 1 if the cast is unbiased. `slope` is <mean, x> / <x, x>
gradients   a byte-level Llama of 2 x 128 learns --data in float32 for 120 steps. Then the
            gradient of one batch under each recipe, 8 draws, against float32's in all Linears
            but the head: noise is the mean squared distance of a draw from the mean, fixed is
            the squared distance of the mean from float32's, without the noise that it holds.
            Both are relative to the squared norm of float32's gradient

python -m benchmarks.frontier casts
python -m benchmarks.frontier gradients --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge import recipes
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.hadamard import unrotate
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import Cast, ClippedRms, Gemm, Hadamard, Recipe
from narrowgauge.scaling import E4M3_EDEN, E4M3_TWO_LEVEL

ROWS, COLUMNS, DRAWS = 96, 1024, 60
# Distribution -> numbers [ROWS, COLUMNS].
VALUES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "normal": lambda g: torch.randn(ROWS, COLUMNS, generator=g),
    # Student's t with 2 degrees: a normal number over the root of an exponential one.
    "t(2)": lambda g: (
        torch.randn(ROWS, COLUMNS, generator=g)
        / torch.rand(ROWS, COLUMNS, generator=g).log().neg().clamp(min=1e-12).sqrt()
    ),
    "log-normal columns": lambda g: (
        torch.randn(ROWS, COLUMNS, generator=g)
        * torch.randn(1, COLUMNS, generator=g).mul(1.5).exp()
    ),
    "90 % zeros": lambda g: (
        torch.randn(ROWS, COLUMNS, generator=g) * (torch.rand(ROWS, COLUMNS, generator=g) < 0.1)
    ),
}  # fmt: skip
FORWARD = {
    "nvfp4 forward": recipes.NVFP4.output.lhs,
    "four over six forward": recipes.NVFP4_46.output.lhs,
}


def blocks_of(gemm: Gemm, block: int, **changes: Any) -> Gemm:
    """The same product with EDEN in blocks of another size, and with other changes of its casts."""
    assert gemm.lhs is not None
    cast = replace(gemm.lhs, block=block, **changes)
    return Gemm(lhs=cast, rhs=cast, rotate=Hadamard(block=block, signs="random"))


def twice(gemm: Gemm) -> Gemm:
    """The same product with two rounds of random signs."""
    return replace(gemm, rotate=Hadamard(block=128, signs="random", rounds=2))


_FP4, _INT4 = recipes.QUARTET2_46.grad_input, recipes.INT4_EDEN.grad_input
# Name -> product whose lhs is cast, under its rotation.
BACKWARD = {
    "nvfp4": replace(recipes.NVFP4.grad_input, rotate=None),
    "NVIDIA's scales": Gemm(lhs=replace(recipes.NVFP4.grad_input.lhs, scale=E4M3_TWO_LEVEL)),  # type: ignore[type-var]
    "quartet2": blocks_of(_FP4, 128, scale=E4M3_EDEN),
    "quartet2, blocks of 16": blocks_of(_FP4, 16, scale=E4M3_EDEN),
    "quartet2-46": _FP4,
    "quartet2-46, two rounds": twice(_FP4),
    "quartet2-46, blocks of 16": blocks_of(_FP4, 16),
    "int4-hq-bs": recipes.INT4_HQ_BS.grad_input,
    "int4-row-sr": recipes.get("int4-row-sr").grad_input,
    "int4-eden": _INT4,
    "int4-eden, two rounds": twice(_INT4),
    "int4-eden, scale 2.475 rms": blocks_of(_INT4, 128, calibrate=ClippedRms()),
}


def once(x: Tensor, cast: Cast, rotation: Hadamard | None) -> Tensor:
    """x cast and decoded, in x's own basis."""
    drawn = Rotation.draw(rotation, x)
    turned = drawn(x)
    shape = cast.noise_shape((turned.shape[0], turned.shape[1]))
    made = dequantize(quantize(turned, cast, noise=torch.rand(shape) if cast.draws else None))
    for signs in (drawn.second, drawn.signs):
        made = made if signs is None else unrotate(made, rotation, x.shape[1], signs)
    return made


def cast_row(name: str, gemm: Gemm, distribution: str) -> dict[str, Any]:
    x = VALUES[distribution](torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    assert gemm.lhs is not None
    draws = DRAWS if gemm.lhs.draws or gemm.rotate is not None else 1
    total, error = torch.zeros_like(x, dtype=torch.float64), 0.0
    for _ in range(draws):
        made = once(x, gemm.lhs, gemm.rotate).double()
        error += float((made - x).square().sum())
        total += made
    error, mean, size = error / draws, total / draws, float(x.double().square().sum())
    return {
        "part": "casts",
        "cast": name,
        "values": distribution,
        "draws": draws,
        "error": error / size,
        "bias": float((mean - x).square().sum()) * draws / error if draws > 1 else None,
        "slope": float((mean * x).sum()) / size,
    }


def casts() -> Iterator[dict[str, Any]]:
    products = {name: Gemm(lhs=cast) for name, cast in FORWARD.items()} | BACKWARD
    for name, gemm in products.items():
        for distribution in VALUES:
            yield cast_row(name, gemm, distribution)


# --- gradients of a small model ------------------------------------------------------------------

STEPS, SEQUENCES, LENGTH, GRADIENTS = 120, 8, 128, 8


def variants() -> dict[str, Recipe]:
    """Name -> recipe, without blocks in 16 bits."""
    quartet = recipes.QUARTET2_46
    other = {
        "quartet2, from 16-bit originals": replace(recipes.QUARTET2, backward="recast"),
        "quartet2-46, from 16-bit originals": replace(quartet, backward="recast"),
        "quartet2-46, two rounds": replace(
            quartet, grad_input=twice(_FP4), grad_weight=twice(_FP4)
        ),
        "int4-eden, from 16-bit originals": replace(recipes.INT4_EDEN, backward="recast"),
        "nvfp4, backward alone": replace(recipes.NVFP4, output=Gemm()),
        "quartet2-46, backward alone": replace(quartet, backward="recast", output=Gemm()),
        "four over six, forward alone": quartet.with_gemm(grad_input=Gemm(), grad_weight=Gemm()),
    }
    named = (
        "nvfp4", "nvfp4-46", "quartet2", "quartet2-46", "mxfp4", "int4-hq-bs", "int4-row-sr", "int4-eden",
        "fp8-current",
    )  # fmt: skip
    return {name: recipes.get(name) for name in named} | other


def model_of(seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def batch_of(text: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=generator)
    ids = torch.stack([text[start : start + LENGTH] for start in starts])
    return {"input_ids": ids, "labels": ids}


def gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Gradient of the weights of all Linears but the head, as one float64 vector."""
    model.zero_grad()
    model(**batch).loss.backward()
    layers = (
        each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "head" not in name
    )  # fmt: skip
    return torch.cat([each.weight.grad.flatten().double() for each in layers])


def gradients(data: Path) -> Iterator[dict[str, Any]]:
    text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8).long()
    source, model = torch.Generator().manual_seed(3), model_of(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        model(**batch_of(text, source)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = batch_of(text, source)
    exact = gradient(model, batch)
    size = float(exact.square().sum())
    other = gradient(model, batch_of(text, source))
    yield {
        "part": "gradients",
        "recipe": "another batch in float32",
        "sum": float((other - exact).square().sum()) / size,
    }
    for name, recipe in variants().items():
        narrow = ng.convert(copy.deepcopy(model), replace(recipe, wide_blocks=None))
        torch.manual_seed(4)
        found = torch.stack([gradient(narrow, batch) for _ in range(GRADIENTS)])
        mean = found.mean(dim=0)
        noise = float((found - mean).square().sum()) / (GRADIENTS - 1)
        fixed = float((mean - exact).square().sum()) - noise / GRADIENTS
        yield {
            "part": "gradients", "recipe": name, "draws": GRADIENTS, "data": data.name, "steps": STEPS,
            "noise": noise / size, "fixed": fixed / size, "sum": (noise + fixed) / size,
        }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    if row["part"] == "casts":
        bias = "" if row["bias"] is None else f"{row['bias']:6.2f}"
        return f"{row['cast']:24} {row['values']:20} {row['error']:.4f} {bias:6} {row['slope']:.4f}"
    parts = "".join(f" {name} {row[name]:.4f}" for name in ("noise", "fixed", "sum") if name in row)
    return f"{row['recipe']:32}{parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["casts", "gradients"])
    parser.add_argument("--data", type=Path, default=Path("tinyshakespeare.txt"))
    parser.add_argument("--results", type=Path, default=RESULTS / "frontier.jsonl")
    options = parser.parse_args()
    found = []
    for row in casts() if options.part == "casts" else gradients(options.data):
        print(line(row), flush=True)
        found.append(row)
    record("frontier", found, options.results)


if __name__ == "__main__":
    main()
