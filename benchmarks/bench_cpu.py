r"""Training steps on this machine's CPU, forward, backward and AdamW: INT8 beside torch's bf16 autocast.

    make bench-cpu                                       three Llamas in five minutes, as in the README
    python -m benchmarks.bench_cpu --threads 1 --processor    by processor time, for a busy machine
    python -m benchmarks.bench_cpu --models bert vit --cases torch-bf16 int8
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        python -m benchmarks.bench_cpu --float32 --cases int8 int8-fused      as a CPU with AVX2 alone

Cases, in one run and interleaved, all from the same weights:

    torch-bf16           torch.autocast(bfloat16) and fused AdamW: the baseline of every ratio
    torch-bf16-compiled  the same under torch.compile; compiling takes minutes and is not counted
    torch-fp32           float32
    int8                 convert(model, "int8"): Linears in INT8 alone, attention and norms of torch
    int8-compiled        the same under torch.compile; compiling is not counted
    int8-fused           convert(model, "int8", fuse=True): with the project's attention, norms and activations
    bf16                 convert(model, "bf16")
    bf16-fused           convert(model, "bf16", fuse=True): attention and norms alone, no INT8
    int4-hq-bs, int4-hq-lss, and both with -fused
    torchao              torchao's INT8 mixed-precision training, where torchao is installed

Heads stay in 16 bits everywhere. The loss after the last step is recorded beside that of torch-bf16.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness import RESULTS, measure, processor_clock, record, rows, table
from narrowgauge.ops.registry import device_facts

VOCABULARY = 2048
BASELINE = "torch-bf16"
RECIPES = {
    "int8": ("int8", False),
    "int8-fused": ("int8", True),
    "bf16": ("bf16", False),
    "bf16-fused": ("bf16", True),
    "int4-hq-bs": ("int4-hq-bs", False),
    "int4-hq-bs-fused": ("int4-hq-bs", True),
    "int4-hq-lss": ("int4-hq-lss", False),
    "int4-hq-lss-fused": ("int4-hq-lss", True),
}
CASES = (BASELINE, "torch-bf16-compiled", "torch-fp32", *RECIPES, "int8-compiled", "torchao")
USUAL = (BASELINE, "torch-fp32", "int8", "int8-fused", "bf16-fused")


@dataclass(frozen=True)
class Setting:
    """A model and its batch. build: the model; batch: arguments of its forward."""

    build: Callable[[], Any]
    batch: Callable[[], dict[str, torch.Tensor]]


def llama(width: int, inner: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, attention_probs_dropout_prob=0.0))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_labels=100))


def text(batch: int, tokens: int, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, tokens))
    return {"input_ids": ids, "labels": ids}


def padded() -> dict[str, torch.Tensor]:
    """8 texts of 33 to 128 tokens in a batch of 8 x 128."""
    lengths = torch.linspace(33, 128, 8).long()
    mask = (torch.arange(128)[None] < lengths[:, None]).long()
    ids = torch.randint(0, 30522, (8, 128))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (8,))}


def pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 100, (4,))}


SETTINGS = {
    "llama-384": Setting(lambda: llama(384, 1024, 6), lambda: text(2, 256)),
    "llama-1024": Setting(lambda: llama(1024, 2816, 2), lambda: text(2, 512)),
    "llama-2048": Setting(lambda: llama(2048, 5376, 1), lambda: text(2, 512)),
    "bert": Setting(bert, padded),
    "vit": Setting(vit, pictures),
}


@dataclass
class Step:
    """One training step of a model; keeps its last loss."""

    model: Any
    batch: dict[str, torch.Tensor]
    autocasts: bool = True
    calls: Callable[..., Any] | None = None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> None:
        with torch.autocast("cpu", torch.bfloat16) if self.autocasts else nullcontext():
            call = self.model if self.calls is None else self.calls
            loss = call(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def step_of(case: str, plain: Any, batch: dict[str, torch.Tensor], autocasts: bool = True) -> Step:
    """autocasts  False: recipes and torchao in a float32 model, for CPUs without bfloat16."""
    import narrowgauge as ng

    model = copy.deepcopy(plain).train()
    if case in RECIPES:
        recipe, fuse = RECIPES[case]
        return Step(ng.convert(model, recipe, fuse=fuse), batch, autocasts)
    if case == "int8-compiled":
        ng.convert(model, "int8")
        return Step(model, batch, calls=torch.compile(model))
    if case == "torch-bf16-compiled":
        return Step(model, batch, calls=torch.compile(model))
    if case == "torchao":
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        # Its tensor subclass does not reach F.linear under torch 2.13; its own Linear does.
        quantize_(model, int8_mixed_precision_training(module_swap=True), filter_fn=_is_inner)
        return Step(model, batch, autocasts)
    return Step(model, batch, autocasts=case == BASELINE)


def _is_inner(module: Any, name: str) -> bool:
    heads = ("lm_head", "classifier", "decoder")
    return isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in heads


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_cpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=[*SETTINGS][:3])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL)
    parser.add_argument(
        "--float32", action=argparse.BooleanOptionalAction, default=not device_facts("cpu", None).bf16_gemm,
        help="no autocast, torch-fp32 is the baseline: the default on CPUs without bfloat16 instructions, which emulate autocast",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=6, help="even")
    parser.add_argument(
        "--warmup", type=int, default=3,
        help="steps before the first round; learned steps read their scales from the data for 16",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="0: as torch has them")
    parser.add_argument(
        "--processor", action="store_true", help="seconds of the processor, beside other work"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = {"clock": processor_clock} if options.processor else {}
    baseline = "torch-fp32" if options.float32 else BASELINE
    names = dict.fromkeys((baseline, *options.cases))
    for model in options.models:
        torch.manual_seed(0)
        setting = SETTINGS[model]
        plain, batch = setting.build(), setting.batch()
        steps = {name: step_of(name, plain, batch, not options.float32) for name in names}
        timings = measure(steps, rounds=options.rounds, warmup=options.warmup, **clock)
        print(f"{model}, {torch.get_num_threads()} threads")
        print(table(timings, baseline=baseline), end="\n\n", flush=True)
        lines = rows(timings, baseline=baseline)
        for line in lines:
            mine, theirs = (steps[each].losses for each in (line["case"], baseline))
            count = min(len(mine), len(theirs))
            line |= {"model": model, "clock": "processor" if options.processor else "wall"}
            line |= {"loss": mine[count - 1], "loss_of_baseline": theirs[count - 1]}
            line |= {"steps": count, "autocasts": not options.float32}
        record("cpu", lines, RESULTS / "cpu.jsonl")


if __name__ == "__main__":
    main()
