"""What a recipe costs a training step of a mixture of experts on the CPU: a small Mixtral, forward and backward.

    python -m benchmarks.mixture_step --threads 1 --record

2 layers of width 256, 8 experts of width 512, 2 for each of 4 x 128 tokens, float32 weights. Cases, interleaved in one run:

    fp32            the plain model; transformers multiplies all experts in one call (`grouped_mm`)
    fp32-loop       the plain model with transformers' loop over experts (`eager`)
    bf16-recipe     every product through the recipe `bf16`, experts one after another
    fp8-..., mxfp8  the recipes, weights quantized once per step
    ...-dense       the same without the experts, which compute as in `fp32`

A CPU without bfloat16 instructions multiplies the operands of `bf16-recipe` in float32 and torch's bf16 through a slow path, so
`bf16-recipe` is the honest baseline of bf16 there (docs/emulation.md). With one thread, seconds are those of the processor, which
other work on the machine disturbs least; glibc keeps freed memory, as in `narrowgauge train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import RESULTS, measure, processor_clock, ratio, record, rows, table
from narrowgauge.train.device import keep_freed_memory

BATCH, TOKENS, VOCABULARY = 4, 128, 1024
RECIPES = ("bf16", "fp8-current", "fp8-row", "mxfp8")


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(sizes)


def step(
    recipe: str | None, experts: str = "grouped_mm", only_dense: bool = False
) -> Callable[[], None]:
    """Forward, backward, and the end of a step."""
    import narrowgauge as ng

    model = mixtral()
    model.set_experts_implementation(experts)
    if recipe is not None:
        ng.convert(model, {"*": recipe} | ({"*.experts": None} if only_dense else {}))
        ng.advance(model)
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
        for parameter in model.parameters():
            parameter.grad = None
        if recipe is not None:
            ng.advance(model)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.mixture_step", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=6, help="even")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--record", action="store_true", help="append to results/mixture_step.jsonl"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(keep_freed_memory(True, torch.device("cpu")))  # as the trainer does
    cases = {"fp32": step(None), "fp32-loop": step(None, "eager")}
    cases |= {"bf16-recipe" if name == "bf16" else name: step(name) for name in RECIPES}
    cases |= {f"{name}-dense": step(name, only_dense=True) for name in ("fp8-current", "mxfp8")}
    clock = processor_clock if options.threads == 1 else None
    timings = measure(cases, rounds=options.rounds, warmup=2, clock=clock)
    lines = rows(timings, baseline="fp32")
    for line in lines:
        for floor in ("fp32-loop", "bf16-recipe"):
            spread = ratio(timings[line["case"]], timings[floor])
            line["clock"] = "host" if clock is None else "processor"
            line[f"of_{floor}"] = [spread.median, spread.q1, spread.q3]
    work = dict.fromkeys(timings, (float(BATCH * TOKENS), "tokens"))
    for baseline in ("fp32", "fp32-loop", "bf16-recipe"):
        print(table(timings, baseline=baseline, work=work), end="\n\n")
    if options.record:
        record("mixture_step", lines, RESULTS / "mixture_step.jsonl")


if __name__ == "__main__":
    main()
