"""What does the model of time predict, beside what others published: a layer, whole steps compiled and eager, and each defect's cost?

    python -m benchmarks.planned_time            minutes; rows appended to benchmarks/results/planned_time.jsonl
    python -m benchmarks.planned_time b200       one card
    python -m benchmarks.planned_time h100 --only experts

layer     the 12 products of hidden 4096, FFN 16384, 15,872 tokens with their casts: four Linears forward and backward, counted
compiled  4 layers of 8B's shape, 8,192 tokens, vocabulary 32,000, head in bfloat16, torch's AdamW; work from benchmarks.compiled_work
eager     Llama 3 8B, one row, counted with 3 and 4 layers; their work lies on a line with the number of layers (`plan.tally`)

experts   the experts of one layer of a mixture, forward and backward, 16,384 tokens, beside torch's grouped products in bf16; and the
          fewest tokens of an expert at which the recipe is predicted to be no slower, and to gain a quarter

How far predictions of published times are off is what `benchmarks.calibration` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, product
from typing import Any

import torch

from benchmarks.harness import RESULTS, record
from benchmarks.published import Done, compiled, compiled_rows, deep, llama
from benchmarks.steps_of_llamas import LLAMA_8B, Run
from narrowgauge import convert
from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import counted, counted_step
from narrowgauge.errors import ConfigError
from narrowgauge.ops.timing.cards import Card, card
from narrowgauge.ops.timing.rates import RATES, Rates, likely_gain, seconds
from narrowgauge.plan.roofline import Time, time
from narrowgauge.plan.tally import Tally

CARDS = ("h100", "h200", "b200", "rtx-5090", "rtx-4090", "a100")
TOKENS, LINEARS = 15872, ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
ONE_LINEAR = (
    "bf16",
    "fp8-delayed",
    "fp8-current",
    "fp8-row",
    "fp8-block",
    "mxfp8",
    "nvfp4",
    "int8",
)
PARTS = ("layers", "experts", "steps", "eager")
# Experts, hidden size, inner size, experts of a token: configurations of Mixtral 8x7B, Llama 4 Scout, Qwen3-30B-A3B and DeepSeek-V3.
MIXTURES = {
    "mixtral-8x7b": (8, 4096, 14_336, 2),
    "llama-4-scout": (16, 5120, 8192, 1),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
}
MIXTURE_TOKENS = 16_384
# A defect as it was found, and what of the model it changes: its cost is the layer with it less the layer without.
DEFECTS: list[tuple[str, dict[str, Any]]] = [
    ("661 instructions in 16 elements of a cast", {"instructions": 661}),
    ("sums split in no product", {"split": 1.0}),
]
RECIPES: list[tuple[str, Run]] = [
    ("bf16", Run()),
    ("fp8-current", Run(recipe="fp8-current")),
    ("fp8-delayed, fused", Run(recipe="fp8-delayed", convert={"fuse": True})),
    ("fp8-block", Run(recipe="fp8-block")),
    ("int8", Run(recipe="int8")),
]


def layer(recipe: str, on: Card) -> Done:
    """Forward and backward of its four Linears."""
    workloads = (
        LinearWorkload(tokens=TOKENS, inputs=k, outputs=n, dtype=torch.bfloat16) for n, k in LINEARS
    )
    return [(each, 1) for workload in workloads for each in counted(workload, recipe, on)]


def taken(done: Done, on: Card, rates: Rates = RATES) -> float:
    return sum(times * seconds(each, on, rates) for each, times in done)


def layers(on: Card) -> Iterator[dict[str, Any]]:
    plain = 0.0
    for name in ONE_LINEAR:
        try:
            done = layer(name, on)
            found = taken(done, on)
        except ConfigError:  # no unit for its products
            continue
        if name != "bf16" and any(
            each.operands in ("bf16", "fp16") for each, _ in done if each.kind == "products"
        ):
            continue  # emulated there
        plain = plain or found
        casts = sum(times * seconds(each, on) for each, times in done if each.kind == "casts")
        beside = sum(
            times * seconds(each, on) for each, times in done if each.kind == "elementwise"
        )
        costs = {
            words: round(1e3 * (taken(done, on, replace(RATES, **changed)) - found), 3)
            for words, changed in DEFECTS
        }
        yield {
            "case": f"layer, {name}", "card": on.name, "ms": round(1e3 * found, 3), "gain_over_bf16": round(plain / found, 3),
            "likely_gain": _likely(plain / found, "layer"),
            "casts_ms": round(1e3 * casts, 3), "beside_ms": round(1e3 * beside, 3), "launches": len(done), "defects_ms": costs,
        }  # fmt: skip


def _experts(model: str, recipe: str, tokens: int, on: Card) -> Done:
    """Work of the experts of one layer, their router left out."""
    count, hidden, inner, chosen = MIXTURES[model]

    def made() -> Callable[[int], object]:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(
            hidden_size=hidden, intermediate_size=inner, num_local_experts=count
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        own = MixtralExperts(config)
        for name, parameter in list(own.named_parameters()):  # fake tensors refuse `.to`
            narrow = torch.empty(parameter.shape, dtype=torch.bfloat16)
            setattr(own, name, torch.nn.Parameter(narrow))
        module = torch.nn.ModuleList([own])
        if recipe != "bf16":
            convert(module, recipe)
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        index = torch.zeros(tokens, chosen, dtype=torch.int64)
        weights = torch.empty(tokens, chosen, dtype=torch.bfloat16, requires_grad=True)
        return lambda _: module[0](x, index, weights).backward(torch.empty_like(x))

    return [(each, 1) for each in counted_step(made, on)]


def experts(on: Card) -> Iterator[dict[str, Any]]:
    """Each mixture at 16,384 tokens, and its bound."""
    if on.device is None or "fp8" not in on.peak:
        return
    for model, recipe in product(MIXTURES, ("fp8-row", "fp8-block", "mxfp8")):
        count, _, _, chosen = MIXTURES[model]
        done = _experts(model, recipe, MIXTURE_TOKENS, on)
        if not any("grouped" in each.operation for each, _ in done):
            continue  # expert by expert there

        def gain(tokens: int, model: str = model, recipe: str = recipe) -> float:
            plain, own = (_experts(model, each, tokens, on) for each in ("bf16", recipe))
            return taken(plain, on) / taken(own, on)

        own = gain(MIXTURE_TOKENS)
        parts = {
            kind: round(1e3 * sum(seconds(each, on) for each, _ in done if each.kind == kind), 3)
            for kind in ("products", "casts", "elementwise")
        }
        gains = {2**k * chosen // count: gain(2**k) for k in range(9, 18)}
        fewest = {
            reach: next((tokens for tokens, found in gains.items() if found >= reach), None)
            for reach in (1, 1.25)
        }
        yield {
            "case": f"experts of {model}, {recipe}", "card": on.name, "tokens": MIXTURE_TOKENS,
            "tokens_an_expert": MIXTURE_TOKENS * chosen // count, "ms": round(1e3 * taken(done, on), 3),
            "gain_over_bf16": round(own, 3), "likely_gain": _likely(own, "layer"), "by_kind_ms": parts,
            "launches": len(done), "fewest_tokens_an_expert": fewest,
        }  # fmt: skip


def _on(on: Card, done: Done) -> Done:
    """Counted on an H100: elsewhere our Triton kernel multiplies in blocks."""
    if on.device is not None and on.device.capability[0] == 9:
        return done
    return [
        (replace(each, sums="triton") if each.sums == "blocks" else each, times)
        for each, times in done
    ]


def _likely(gain: float, of: str) -> list[float]:
    return [round(each, 3) for each in likely_gain(gain, of)]


def steps(on: Card) -> Iterator[dict[str, Any]]:
    """Compiled; 4 layers."""
    plain = RATES.compiled * taken(compiled("bf16", layers=4), on)
    torchao = (
        RATES.compiled * taken(compiled("torchao-tensorwise", layers=4), on)
        if "fp8" in on.peak
        else 0.0
    )
    for name, row in compiled_rows().items():
        done = _on(on, compiled(name, layers=4))
        if any(each.flops and each.operands not in on.peak for each, _ in done):
            continue
        found = RATES.compiled * taken(done, on)
        parts = {
            kind: sum(times * seconds(each, on) for each, times in done if each.kind == kind)
            for kind in ("products", "attention", "elementwise", "optimizer")
        }
        yield {
            "case": f"compiled step, {name}", "card": on.name, "ms": round(1e3 * found, 2), "gain_over_bf16": round(plain / found, 3),
            "likely_gain": _likely(plain / found, "step"),
            "gain_over_torchao": round(torchao / found, 3), "triton_gb": row["triton_gb"], "launches": row["launches"],
            "by_kind_ms": {kind: round(1e3 * RATES.compiled * each, 2) for kind, each in parts.items()},
            "runtime_torch": row["runtime_torch"],
        }  # fmt: skip


@cache
def _work(name: str, device: Any, tokens: int) -> Tally:
    """Counted once for cards that take the same kernels."""
    run = replace(dict(RECIPES)[name], tokens=tokens)
    return deep(llama(run), LLAMA_8B["num_hidden_layers"], replace(card("h100"), device=device))


def eager(on: Card, tokens: int) -> Iterator[dict[str, Any]]:
    plain = 0.0
    for name, _ in RECIPES:
        if "fp8" in name and "fp8" not in on.peak:
            continue
        found = time(_work(name, on.device, tokens), on)
        plain = plain or found.seconds
        yield {
            "case": f"eager step, {name}",
            **_row(found, on, tokens),
            "gain_over_bf16": round(plain / found.seconds, 3),
        }


def _row(found: Time, on: Card, tokens: int) -> dict[str, Any]:
    return {
        "card": on.name, "tokens": tokens, "ms": round(1e3 * found.seconds, 1), "tokens_per_s": round(tokens / found.seconds),
        "host_ms": round(1e3 * found.host, 1), "launches": found.launches, "utilisation": round(found.utilisation(on), 3),
        "by_kind_ms": {kind: round(1e3 * seconds, 1) for kind, seconds in found.by_kind.items()},
        "by_phase_ms": {phase: round(1e3 * seconds, 1) for phase, seconds in found.by_phase.items()},
    }  # fmt: skip


def main() -> None:
    options = _options()
    for key in options.cards:
        on = card(key)
        lines: list[dict[str, Any]] = []
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "layers": lambda on=on: layers(on),
            "experts": lambda on=on: experts(on),
            "steps": lambda on=on: steps(on) if compiled_rows() else iter(()),
            "eager": lambda on=on: eager(on, 4096),
        }  # fmt: skip
        for line in chain.from_iterable(parts[name]() for name in options.only):
            lines.append(line)
            told = {
                name: value
                for name, value in line.items()
                if name not in ("case", "card", "ms", "by_phase_ms")
            }
            print(f"{on.name:9} {line['case']:34} {line['ms']:9.2f} ms  {told}", flush=True)
        record("planned_time", lines, RESULTS / "planned_time.jsonl")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.planned_time", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("cards", nargs="*", default=list(CARDS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
