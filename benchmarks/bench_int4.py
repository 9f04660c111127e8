"""What a training step in 4-bit integers costs on the CPU, and what it keeps for backward, beside float32 and bfloat16.

    make bench-int4                        ARGS="--quick" for two rounds of one step each at small sizes

Speed: forward and backward of a Llama, quantization included, weights cast once per step, at several widths; at 1024 with few tokens
and with as many as below it, since casting the weights costs the same for both.

    fp32             the plain model in float32
    bf16             operands in bfloat16 through the recipe `bf16`; on a CPU without such instructions multiplied in float32
    autocast-bf16    torch's own bf16 autocast on the plain model (--autocast; many times slower on such a CPU)
    int4-hq-bs       4-bit integers, 4-bit product in C++ where `describe` says native-cpp
    int4-float       the same with the product in float32, the exact emulation: what the integer product adds

Products: float32, the 4-bit product in C++ (packing included) and torch._int_mm on matrices of each width.
Memory: bytes that saved-tensor hooks see per block, each storage once, parameters left out, of the whole block and of its
Linears alone (what layers of narrowgauge keep beyond the block's own tensors).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_emulation import VOCABULARY
from benchmarks.harness import RESULTS, Timing, measure, ratio, record, rows, table

SAVED = ("bf16", "fp8-current", "int8", "int4-hq-bs", "int4-hq-lss", "nvfp4", "mxfp4")


@dataclass(frozen=True)
class Size:
    """A Llama and its batch: one sequence of `tokens` per `batch`."""

    width: int
    inner: int
    layers: int
    batch: int
    tokens: int


KEPT = Size(384, 1024, 6, 8, 256)  # of which the kept bytes are counted
SIZES = (
    Size(128, 352, 6, 8, 256), Size(256, 704, 6, 8, 256), KEPT, Size(1024, 2816, 2, 2, 256), Size(1024, 2816, 2, 8, 256),
    Size(2048, 5632, 1, 4, 256),
)  # fmt: skip
QUICK = (Size(64, 160, 2, 2, 32), Size(128, 352, 1, 2, 32))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_int4", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=6, help="even")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="two rounds at small sizes: does it run, not how fast"
    )
    parser.add_argument("--autocast", action="store_true", help="torch's bf16 autocast too")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="cases of the step to leave out, but fp32 and bf16"
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="*",
        default=[],
        help="of the step; default: all, and the kept bytes",
    )
    parser.add_argument(
        "--note", default="", help="kept with the results: what else the machine was doing"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rounds = 2 if options.quick else options.rounds
    sizes = QUICK if options.quick else SIZES

    def keep(lines: list[dict[str, Any]]) -> None:
        if not options.quick:
            record(
                "int4", [{**line, "note": options.note} for line in lines], RESULTS / "int4.jsonl"
            )

    if not options.widths:
        keep(memory(QUICK[0] if options.quick else KEPT))
    found: dict[int, float] = {}
    for size in sizes:
        if options.widths and size.width not in options.widths:
            continue
        keep(products(size, rounds))
        lines = speed(size, rounds, options.autocast, options.skip)
        keep(lines)
        [found[size.width]] = [
            line["of_baseline"][0] for line in lines if line["case"] == "int4-hq-bs"
        ]
    width = crossing(found)
    words = (
        "crosses that of float32 nowhere"
        if width is None
        else f"crosses that of float32 near width {width:.0f}"
    )
    print(f"The time of a step with int4-hq-bs {words} (medians at {', '.join(map(str, found))}).")


def speed(size: Size, rounds: int, autocast: bool, skip: list[str]) -> list[dict[str, Any]]:
    """Rows of the steps at one width, with ratios to fp32 and bf16 round by round."""
    plain = llama(size)
    cases = {
        "fp32": step(copy.deepcopy(plain), size, under_autocast=False),
        "bf16": converted(plain, size, "bf16"),
    }
    if autocast:
        cases["autocast-bf16"] = step(copy.deepcopy(plain), size, under_autocast=True)
    cases["int4-hq-bs"] = converted(plain, size, "int4-hq-bs")
    cases["int4-float"] = in_float(converted(plain, size, "int4-hq-bs"))
    cases = {
        name: case for name, case in cases.items() if name in ("fp32", "bf16") or name not in skip
    }
    timings = measure(cases, rounds=rounds, warmup=1)
    work = dict.fromkeys(timings, (float(size.batch * size.tokens), "tokens"))
    print(f"step, width {size.width}, {size.layers} layers, {size.batch * size.tokens} tokens")
    print(table(timings, baseline="bf16", work=work), end="\n\n")
    return with_ratios(timings, size, "step")


def crossing(found: dict[int, float]) -> float | None:
    """Where the ratio, by width, first falls to 1, a straight line of the logarithm of the width between neighbours; None: nowhere."""
    pairs = sorted(found.items())
    for (low, above), (high, below) in pairwise(pairs):
        if above > 1 >= below:
            return low * (high / low) ** ((above - 1) / (above - below))
    return None


def products(size: Size, rounds: int) -> list[dict[str, Any]]:
    """Rows of one bit-split product [tokens, width] x [width, width]."""
    from narrowgauge.ops.cpp.int4 import LIBRARY
    from narrowgauge.ops.mm import cpp

    tokens, width = size.batch * size.tokens, size.width
    a = torch.randint(-98, 99, (tokens, width), dtype=torch.int8)
    b = torch.randint(-7, 8, (width, width), dtype=torch.int8)
    af, bf, one = a.float(), b.float(), torch.ones(1, 1)
    cases: dict[str, Callable[[], object]] = {"fp32": lambda: torch.mm(af, bf.T)}
    if not LIBRARY.missing and cpp.has_gemm():
        cases["native-cpp"] = lambda: cpp.gemm(a, b, one, one, False, 98)
    cases["torch._int_mm"] = lambda: torch._int_mm(a, b.T)
    timings = measure(cases, rounds=rounds, warmup=1)
    work = dict.fromkeys(timings, (2.0 * tokens * width * width, "op"))
    print(f"product [{tokens}, {width}] x [{width}, {width}]")
    print(table(timings, baseline="fp32", work=work), end="\n\n")
    return with_ratios(timings, size, "product")


def with_ratios(timings: dict[str, Timing], size: Size, kind: str) -> list[dict[str, Any]]:
    lines = rows(timings, baseline="fp32")
    for line in lines:
        line |= {
            "kind": kind,
            "width": size.width,
            "layers": size.layers,
            "tokens": size.batch * size.tokens,
        }
        if "bf16" in timings:
            spread = ratio(timings[line["case"]], timings["bf16"])
            line["of_bf16"] = [spread.median, spread.q1, spread.q3]
    return lines


def memory(size: Size) -> list[dict[str, Any]]:
    """Rows of bytes kept per block."""
    plain, found = llama(size), []
    print(f"{'kept per block':<16}{'bytes/token':>14}{'its Linears':>14}")
    for name in ("fp32", *SAVED):
        model = copy.deepcopy(plain)
        if name != "fp32":
            prepared(model, name)
        block, linears = kept(model, size, under_autocast=name != "fp32")
        tokens = size.batch * size.tokens
        print(f"{name:<16}{block / tokens:>14.1f}{linears / tokens:>14.1f}")
        found.append(
            {
                "kind": "memory", "case": name, "width": size.width, "tokens": tokens,
                "block_bytes_per_token": block / tokens, "linear_bytes_per_token": linears / tokens,
            }
        )  # fmt: skip
    return found


def kept(model: Any, size: Size, *, under_autocast: bool) -> tuple[float, float]:
    """Bytes kept for backward in the first block: of all its operations, and of its seven Linears alone."""
    saved: dict[int, int] = {}
    by_linears: dict[int, int] = {}
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    holds: list[Tensor] = []
    inside = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            holds.append(tensor)
            saved[storage.data_ptr()] = storage.nbytes()
            if inside[0]:
                by_linears[storage.data_ptr()] = storage.nbytes()
        return tensor

    block = model.model.layers[0]
    for module in block.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda *given: inside.__setitem__(0, inside[0] + 1))
            module.register_forward_hook(lambda *given: inside.__setitem__(0, inside[0] - 1))
    hooks: list[Any] = []

    def enter(*given: object) -> None:
        hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        hooks[-1].__enter__()

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(lambda *given: hooks.pop().__exit__(None, None, None))
    step(model, size, under_autocast=under_autocast)()
    return float(sum(saved.values())), float(sum(by_linears.values()))


def llama(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(sizes)


def prepared(model: Any, recipe: str) -> None:
    import narrowgauge as ng
    from narrowgauge.ops.registry import device_facts
    from narrowgauge.train.attention import use_float32_attention

    if not device_facts("cpu", None).bf16_gemm:
        use_float32_attention(model)
    ng.convert(model, {"*": recipe, "lm_head": "bf16"})
    ng.advance(model)


def converted(plain: Any, size: Size, recipe: str) -> Callable[[], None]:
    model = copy.deepcopy(plain)
    prepared(model, recipe)
    return step(model, size, under_autocast=True)


def in_float(run: Callable[[], None]) -> Callable[[], None]:
    """The step as it would run where the 4-bit product refuses."""
    from narrowgauge.ops.mm import cpp

    def without() -> None:
        before, cpp.has_gemm = cpp.has_gemm, lambda: False
        try:
            run()
        finally:
            cpp.has_gemm = before

    return without


def step(model: Any, size: Size, *, under_autocast: bool) -> Callable[[], None]:
    """Forward, backward, and what ends a step."""
    import narrowgauge as ng

    shape = (size.batch, size.tokens)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))

    def run() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=under_autocast):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)
        ng.advance(model)

    return run


if __name__ == "__main__":
    main()
