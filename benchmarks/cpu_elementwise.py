"""Norms, activations, rotary embeddings, the loss and INT8 casts on a CPU: beside torch's code and a copy of the bytes, and in a step.

    python -m benchmarks.cpu_elementwise                         functions alone
    python -m benchmarks.cpu_elementwise --step                  a step of a Llama, 1,024 wide, 2 layers, 2 x 512 tokens, AdamW
    python -m benchmarks.cpu_elementwise --json results.jsonl    appends the rows, with versions, commit and command

Processor time by `benchmarks.harness`, one thread. Functions run forward and backward through autograd. Of a function:

    torch    the code of transformers or torch, and for a norm of float32 the cast to bfloat16 that autocast's Linear makes of it
    own      the kernel of `convert(..., fuse=True)`
    copy     `copy_` of as many bytes as the kernel reads and writes, each once

`of_baseline` is relative to torch. `copy_share` is the time of the copy over that of the kernel, round by round: 1 is the rate of memory.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks import harness
from benchmarks.harness import Spread, processor_clock
from narrowgauge.fuse.forward import FusedForward
from narrowgauge.fuse.loss import FusedLoss
from narrowgauge.fuse.rotary import FusedAttention
from narrowgauge.fuse.values import ValueKernels
from narrowgauge.ops import rotary
from narrowgauge.ops.norm_act import Kind, value
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.pair import quantize_pair

FLOAT, NARROW = torch.float32, torch.bfloat16
# Rows and columns: in the last-level cache of a server CPU, and beyond it.
SHAPES = ((1024, 1024), (6144, 1024), (1024, 2816), (4096, 2816))
NORMS = (("rms-norm", FLOAT), ("rms-norm", NARROW), ("layer-norm", FLOAT), ("layer-norm", NARROW))
ACTIVATIONS = ("swiglu", "geglu-tanh", "gelu", "gelu-tanh", "silu")
ROUNDS = 20


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """As transformers' LlamaRMSNorm computes it."""
    wide = x.to(FLOAT)
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * normal.to(x.dtype)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, w.shape, w, b, 1e-6)


def step(function: Callable[..., Tensor], tensors: list[Tensor], gy: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(function(*tensors), tensors, gy)


def of_rows(name: str, dtype: torch.dtype, rows: int, columns: int) -> dict[str, Any]:
    """Cases of a norm or an activation, and the bytes of each pass."""
    out = NARROW if name.endswith("norm") and dtype is FLOAT else None
    kind = Kind(name, 1e-6, out=out)  # type: ignore[arg-type]
    x = torch.randn(rows, columns).to(dtype)
    if kind.is_norm:
        others = [torch.rand(columns).to(dtype) for _ in range(1 + (name == "layer-norm"))]
        own = {"rms-norm": rms_norm, "layer-norm": layer_norm}[name]
    else:
        others = [torch.randn(rows, columns).to(dtype)] * kind.is_gated
        own = lambda *given: value(kind, given)  # noqa: E731
    tensors = [each.requires_grad_() for each in (x, *others)]
    gy = torch.randn(rows, columns).to(out or dtype)
    kernels = ValueKernels(kind, False, FusedForward(nn.Identity()))
    inputs = x.nbytes * (1 + kind.is_gated)
    return {
        "torch": partial(step, lambda *given: own(*given).to(gy.dtype), tensors, gy),
        "own": partial(step, lambda *given: kernels(given), tensors, gy),
        "bytes": inputs + gy.nbytes + 2 * inputs + gy.nbytes,
    }


def of_heads(dtype: torch.dtype, batch: int, tokens: int, heads: int, head: int) -> dict[str, Any]:
    """Cases of queries and keys, whose angles are float32 under autocast: the result is what attention reads."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    tensors = [torch.randn(batch, tokens, heads, head).to(NARROW).requires_grad_() for _ in "qk"]
    gy = torch.randn(2, batch, heads, tokens, head).to(NARROW)
    angles = torch.randn(2, 1, tokens, head).to(dtype)
    kernel = rotary.KERNELS.kernels[1]
    fused = FusedAttention(nn.Linear(1, 1), apply_rotary_pos_emb)
    assert kernel.name == "native-cpp"

    def turned(function: Callable[..., Any], q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", NARROW):
            found = function(q.transpose(1, 2), k.transpose(1, 2), *angles)
        return torch.stack([each.to(NARROW) for each in found])

    return {
        "torch": partial(step, partial(turned, apply_rotary_pos_emb), tensors, gy),
        "own": partial(step, partial(turned, fused.embed), tensors, gy),
        "bytes": 4 * 2 * tensors[0].nbytes,
    }


def of_logits(tokens: int, words: int) -> dict[str, Any]:
    """Cases of the loss of a causal language model, from bfloat16 logits."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    layer = nn.Sequential(nn.Linear(32, 32))
    ng.convert(layer, "bf16")
    logits = torch.randn(1, tokens, words).to(NARROW).requires_grad_()
    labels = torch.randint(words, (1, tokens))

    def loss(function: Callable[..., Tensor]) -> None:
        torch.autograd.grad(function(logits=logits, labels=labels, vocab_size=words), logits)

    return {
        "torch": partial(loss, ForCausalLMLoss),
        "own": partial(loss, FusedLoss(ForCausalLMLoss, layer[0])),  # type: ignore[arg-type]
        "bytes": 3 * logits.nbytes,
    }


def of_cast(rows: int, columns: int) -> dict[str, Any]:
    """Cases of the cast of an INT8 Linear, codes of x and of x.T, against its definition in torch."""
    cast = ng.recipes.INT8_ROW.output.lhs
    assert cast is not None
    x = torch.randn(rows, columns).to(NARROW)
    return {
        "torch": lambda: [definition.quantize(each, cast, None, None, None) for each in (x, x.T)],
        "own": partial(quantize_pair, x, cast),
        "bytes": x.nbytes + 2 * x.numel(),
    }


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for rows, columns in SHAPES:
        yield f"int8 cast bfloat16 {rows} x {columns}", of_cast(rows, columns)
    for rows, columns in SHAPES:
        for name, dtype in (*NORMS, *((each, NARROW) for each in ACTIVATIONS)):
            if (columns == 1024) == name.endswith("norm"):
                words = f"{name} {str(dtype)[6:]} {rows} x {columns}"
                yield words, of_rows(name, dtype, rows, columns)
    for batch in (2, 12):
        yield f"rotary bfloat16 {batch} x 512 x 16 x 64", of_heads(FLOAT, batch, 512, 16, 64)
    for words in (2048, 32000):
        yield f"cross-entropy bfloat16 1024 x {words}", of_logits(1024, words)


def functions(only: str) -> list[dict[str, Any]]:
    """Rows of the cases whose names begin with `only`."""
    found = []
    for name, made in cases():
        if not name.startswith(only):
            continue
        size = made.pop("bytes")
        source, target = torch.ones(size // 8), torch.empty(size // 8)
        made["copy"] = partial(target.copy_, source)
        timings = harness.measure(made, rounds=ROUNDS, warmup=3, clock=processor_clock)
        share = harness.ratio(timings["copy"], timings["own"])
        print(
            f"{name}: {share.median:.0%} of a copy\n{harness.table(timings, 'torch')}", flush=True
        )
        found += [
            {"function": name, "bytes": size, **row}
            | ({"copy_share": list(vars(share).values())} if row["case"] == "own" else {})
            for row in harness.rows(timings, "torch")
        ]
    return found


def steps(width: int, layers: int) -> list[dict[str, Any]]:
    """Whole steps of a Llama under bfloat16 autocast, forward, backward and fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2816 * width // 1024 // 64 * 64}
    sizes |= {"num_attention_heads": width // 64, "num_hidden_layers": layers, "vocab_size": 2048}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512))
    ids = torch.randint(0, 2048, (2, 512))
    cases: dict[str, Callable[[], object]] = {}
    losses: dict[str, list[float]] = {}
    # "+fuse" keeps the attention of torch; "+attention" is all of `fuse=True`.
    forms = ("", "+fuse", "+fuse+attention")
    contenders = [("torch", None, "")]
    contenders += [
        (f"{recipe}{form}", recipe, form) for recipe in ("bf16", "int8") for form in forms
    ]
    for name, recipe, form in contenders:
        model = copy.deepcopy(base)
        if recipe is not None:
            ng.convert(model, recipe, fuse=bool(form))
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, FusedAttention) and form == "+fuse":
                forward.attends = False
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        losses[name] = []

        def train(model=model, optimizer=optimizer, converts=recipe is not None, name=name) -> None:
            with torch.autocast("cpu", NARROW):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if converts:
                ng.advance(model)
            losses[name].append(loss.item())

        cases[name] = train
    timings = harness.measure(cases, rounds=8, warmup=2, sample_s=0.0, clock=processor_clock)
    print(harness.table(timings, "torch"), flush=True)
    for name in ("bf16", "int8"):
        for form in forms[1:]:
            gain: Spread = harness.ratio(timings[name], timings[f"{name}{form}"])
            spread = f"half of rounds {gain.q1:.3f} .. {gain.q3:.3f}"
            print(f"{name}{form}: {gain.median:.3f} times as fast as {name}, {spread}")
    return [
        {"step": f"llama {width} x {layers}", "first_losses": losses[row["case"]][:3], **row}
        for row in harness.rows(timings, "torch")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_elementwise")
    parser.add_argument("--step", action="store_true", help="a whole step")
    parser.add_argument("--only", default="", help="functions whose names begin so, as int8")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file to append the rows to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = steps(options.width, options.layers) if options.step else functions(options.only)
    if options.json is not None:
        harness.record("cpu_elementwise", found, options.json)


if __name__ == "__main__":
    main()
