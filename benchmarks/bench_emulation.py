"""What emulating narrow formats costs a training step on the CPU: a 6-layer, 384-wide Llama, batch 8 x 256, forward and backward.

    make bench-emulation

Cases, all in one run and interleaved:

    bf16             torch's bf16 autocast on the plain model: what the issue of speed is measured against
    bf16-recipe      the same operands through the recipe `bf16` (on a CPU without bfloat16 instructions: multiplied in float32)
    fp32             the plain model in float32
    fp8-..., mxfp8   the recipes, under the same autocast, weights quantized once per step
    ...-definition   the recipe whose casts run the definition in plain torch, as without a C++ compiler
    torchao          torchao's Float8Linear, tensor-wise, emulate=True, under the same autocast

With --mixture the model is a small Mixtral, and the weights are float32: 2 layers of width 256, 8 experts of width 512, 2 for each of
4 x 128 tokens. Of these experts each has 128 tokens, so casts of weights weigh more. Its cases are fp32, bf16-recipe and FP8 recipes.

A CPU without bfloat16 instructions (no AVX512-BF16, AMX or AVX-VNNI-2) runs torch's bf16 GEMM through a slow path, which flatters
every ratio to `bf16`; `bf16-recipe` and `fp32` are the honest floors there, so their ratios are recorded too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.harness import RESULTS, measure, processor_clock, ratio, record, rows, table
from narrowgauge.train.device import keep_freed_memory

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

RECIPES = (
    "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "int8", "nvfp4", "mxfp4",
    "nvfp4-46", "quartet2", "quartet2-46", "int4-eden",
)  # fmt: skip
OF_MIXTURE = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8")
BY_DEFINITION = ("nvfp4", "mxfp4")
BATCH, TOKENS, VOCABULARY = 8, 256, 4096
BATCH_OF_MIXTURE = 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_emulation", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=6, help="even")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--skip", nargs="*", default=[], help="cases to leave out, e.g. the slow native bf16"
    )
    parser.add_argument(
        "--processor",
        action="store_true",
        help="seconds of the processor, beside other work; one thread",
    )
    parser.add_argument("--mixture", action="store_true", help="a small Mixtral instead")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # As the trainer does: new pages for each buffer cost some casts more than others.
    keep_freed_memory(True, torch.device("cpu"))
    made = cases_of_mixture() if options.mixture else cases(options.skip)
    everything = {name: step for name, step in made.items() if name not in options.skip}
    clock = {"clock": processor_clock} if options.processor else {}
    timings = measure(everything, rounds=options.rounds, warmup=1, **clock)
    lines = rows(timings, baseline=next(iter(timings)))
    for line in lines:
        for floor in [name for name in ("bf16-recipe", "fp32") if name in timings]:
            spread = ratio(timings[line["case"]], timings[floor])
            line[f"of_{floor}"] = [spread.median, spread.q1, spread.q3]
    rows_of_batch, length = BATCH_OF_MIXTURE if options.mixture else (BATCH, TOKENS)
    work = dict.fromkeys(timings, (float(rows_of_batch * length), "tokens"))
    for baseline in [name for name in ("bf16", "bf16-recipe") if name in timings]:
        print(table(timings, baseline=baseline, work=work), end="\n\n")
    name = "emulation of a mixture" if options.mixture else "emulation"
    record(name, lines, RESULTS / "emulation.jsonl")


def cases(skip: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Name -> one forward and backward pass."""
    import narrowgauge as ng
    from narrowgauge import recipes
    from narrowgauge.ops.registry import device_facts
    from narrowgauge.train.attention import use_float32_attention

    plain = llama()

    def converted(recipe: Recipe) -> Callable[[], None]:
        model = copy.deepcopy(plain)
        if not device_facts("cpu", None).bf16_gemm:
            use_float32_attention(model)
        ng.convert(model, {"*": recipe, "lm_head": "bf16"})
        ng.advance(model)
        return step(model, autocast=True)

    found: dict[str, Callable[[], object]] = {"bf16": step(copy.deepcopy(plain), autocast=True)}
    for name in RECIPES:
        found["bf16-recipe" if name == "bf16" else name] = converted(recipes.get(name))
    for name in BY_DEFINITION:
        # Another name, since layers of one recipe share the choice of kernels.
        case = f"{name}-definition"
        found[case] = cast_by_definition(converted(replace(recipes.get(name), name=case)))
    found["fp32"] = step(copy.deepcopy(plain), autocast=False)
    if "torchao" not in skip:
        found["torchao"] = step(torchao_model(plain), autocast=True)
    return found


def cases_of_mixture() -> dict[str, Callable[[], object]]:
    """As `cases`, for the Mixtral."""
    import narrowgauge as ng

    plain, found = mixtral(), {}
    for name in OF_MIXTURE:
        model = ng.convert(copy.deepcopy(plain), {"*": name})
        ng.advance(model)
        case = "bf16-recipe" if name == "bf16" else name
        found[case] = step(model, autocast=False, batch=BATCH_OF_MIXTURE)
    return found | {"fp32": step(plain, autocast=False, batch=BATCH_OF_MIXTURE)}


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(sizes)


def cast_by_definition(run: Callable[[], None]) -> Callable[[], None]:
    """`run` without the C++ library of casts. The first call chooses the kernels."""
    from narrowgauge.ops.quantize import cpp

    def without() -> None:
        with mock.patch.dict(vars(cpp.LIBRARY), missing="switched off"):
            run()

    return without


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(sizes)


def torchao_model(plain: Any) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        copy.deepcopy(plain),
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name != "lm_head",
    )


def step(
    model: Any, *, autocast: bool, batch: tuple[int, int] = (BATCH, TOKENS)
) -> Callable[[], None]:
    """Forward, backward, and what ends a step: gradients dropped, weights cast anew where they are cached."""
    import narrowgauge as ng

    ids = torch.randint(
        0, model.config.vocab_size, batch, generator=torch.Generator().manual_seed(1)
    )

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)
        ng.advance(model)

    return run


if __name__ == "__main__":
    main()
