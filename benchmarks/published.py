"""Times that others measured and published, as the operations that they are of: what `benchmarks.calibration` fits the rates of cards to.

TE         TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst: the 12 products of a layer (hidden 4096, FFN 16384, 15,872
           tokens), each a forward call of te.Linear with fast accumulation: casts of x for both orientations on Hopper, of w for one.
           NVFP4: of x a pass for the maxima, one for the codes and one for the rotated codes of x.T (NVFP4Quantizer of csrc/quantizer.cpp)
MAMF       stas00/ml-engineering, compute/accelerator/README.md: the fastest shape of many, which flatters a card
by size    zzc0721/torch-performance-test-data, threads 78 (RTX 4090) and 79 (H100): square products in bfloat16
FBGEMM     pytorch/FBGEMM, pull request 2546: H100 of 500 W, bfloat16, and FP8 with a scale per row
DeepGEMM   its first README (February 2025), H800, 4,096 rows: scales of 1 x 128 and 128 x 128
torchtune  README of 2024-11-18, Llama 3.2 3B, packed: 7,075 tokens/s on an A100; eager
te_llama   TransformerEngine, docs/examples/te_llama, the baseline without it: Llama 3 8B of transformers, 8 rows of at most 256 tokens on
           an H100: 270 ms; eager
torchtitan benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, 2 rows of 8,192 on each of 8 H100 (500 W, 2.4 TB/s), FSDP, selective
           checkpointing: 5,762 tokens/s each; compiled 6,667; with torchao's tensorwise FP8 8,532
torchao    docs/source/workflows/training.md: Llama 3 8B, one row of 8,192 on each of 8, FSDP, compiled, selective checkpointing: H100 6,150
           tokens/s in bfloat16, 7,689.5 tensorwise, 6,768 by rows; "power limited" B200 8,307.5, 10,417 and 8,640.5, MXFP8 9,969
COAT       arXiv 2410.19313, table 7: Llama 2 7B, 2 rows of 2,048 on each of 4 or 8 H100, FSDP, in bfloat16: 7,730 and 8,238 tokens/s; eager

Of FSDP the messages are taken as hidden, and of the update a rank has its share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.steps_of_llamas import LLAMA_8B, Run, llama_step
from benchmarks.steps_of_torchtune import Torchtune, torchtune_step
from narrowgauge.ops.timing.cards import Card, card
from narrowgauge.ops.timing.rates import Rates, seconds
from narrowgauge.ops.timing.work import Work
from narrowgauge.plan import Step, count
from narrowgauge.plan.tally import Tally, deeper, tally

Done = list[tuple[Any, float]]  # operations and how often
FEW = 3
LLAMA_2_7B = LLAMA_8B | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32}
H100, H200, B200, A100, RTX = (card(name) for name in ("h100", "h200", "b200", "a100", "rtx-4090"))
# NVIDIA's datasheets; peaks without sparsity.
NVL = replace(
    H200, name="H200 NVL", peak={"bf16": 835.5e12, "fp8": 1671e12, "fp16": 835.5e12}, reached=0.72
)  # fmt: skip
B300 = replace(B200, name="B300", bandwidth=8e12, reached=0.70)
assert H100.device is not None
# torchao measured it with torch 2.7, whose builds are of CUDA 12.8 at most: rows by CUTLASS.
SLOW_H100 = replace(
    H100, name="H100, 500 W", bandwidth=2.4e12, reached=0.60, device=replace(H100.device, cuda=(12, 8))
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One published time. of: product, layer (products and casts), eager or compiled (a step).

    apart  why the rates are not fitted to it, or "": it is predicted all the same, and its error told
    """

    case: str
    source: str
    of: str
    on: Card
    published_s: float
    done: Callable[[], Done]
    apart: str = ""

    def predicted(self, rates: Rates, reached: float) -> float:
        on = replace(self.on, reached=reached)
        longer = {"eager": rates.eager, "compiled": rates.compiled}.get(self.of, 1.0)
        return longer * sum(times * seconds(each, on, rates) for each, times in self.done())


def product(
    m: int, n: int, k: int, operands: str, sums: str = "fast", kind: str = "products"
) -> Work:
    size = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "fp32": 4.0}[operands]
    nbytes = int(size * (m * k + n * k)) + 2 * m * n
    return Work(0, "mm", kind, 2 * m * n * k, nbytes, operands, sums=sums, rows=m, columns=n)


def moving(nbytes: float, kind: str = "elementwise", elements: float = 0) -> Work:
    return Work(0, "move", kind, 0, int(nbytes), elements=int(elements))


def _te() -> Iterator[Figure]:
    tokens, hidden, wide = 15872, 4096, 16384
    forward = [
        (tokens, 3 * hidden, hidden),
        (tokens, hidden, hidden),
        (tokens, wide, hidden),
        (tokens, hidden, wide),
    ]
    shapes = {
        "fprop": forward,
        "dgrad": [(m, k, n) for m, n, k in forward],
        "wgrad": [(k, n, m) for m, n, k in forward],
    }
    # Bytes of a cast per element of the first and second operand.
    hopper: dict[str, tuple[float, float]] = {
        "current": (6, 5),
        "delayed": (4, 3),
        "block": (4, 3),
        "current, products alone": (0, 0),
    }
    blackwell: dict[str, tuple[float, float]] = {
        "current": (5, 5),
        "delayed": (3, 3),
        "mx": (4, 3),
        "current, products alone": (0, 0),
        "mx, products alone": (0, 0),
        "nvfp4": (7.125, 4.5625),
        "nvfp4, products alone": (0, 0),
    }
    published: list[tuple[Card, dict[str, tuple[float, float]], dict[str, tuple[float, float, float]]]] = [
        (NVL, hopper, {
            "bf16": (10.653, 10.813, 10.548), "current": (6.503, 6.795, 6.987), "delayed": (6.188, 6.306, 6.484),
            "block": (7.425, 7.636, 7.821), "current, products alone": (5.577, 5.661, 5.547),
        }),
        (B300, blackwell, {
            "bf16": (4.196, 4.290, 4.272), "current": (2.879, 3.063, 3.205), "delayed": (2.486, 2.621, 2.695),
            "mx": (2.847, 3.045, 3.092), "current, products alone": (2.158, 2.329, 2.325), "mx, products alone": (2.365, 2.397, 2.400),
            "nvfp4": (1.932, 2.189, 2.331), "nvfp4, products alone": (1.254, 1.305, 1.205),
        }),
    ]  # fmt: skip
    for on, casts, columns in published:
        for recipe, times in columns.items():
            for (phase, products), ms in zip(shapes.items(), times, strict=True):
                kind = recipe.split(",")[0]
                sums = {"block": "blocks", "mx": "mx", "nvfp4": "mx"}.get(kind, "fast")
                operands = {"bf16": "bf16", "nvfp4": "fp4"}.get(kind, "fp8")
                done: Done = []
                for m, n, k in products:
                    done.append((product(m, n, k, operands, sums), 1))
                    for elements, nbytes in zip(
                        (m * k, n * k), casts.get(recipe, (0, 0)), strict=True
                    ):
                        done += [(moving(nbytes * elements, "casts"), 1)] if nbytes else []
                of = "layer" if casts.get(recipe, (0, 0))[0] else "product"
                yield Figure(
                    f"12 products, {recipe}, {phase}", "TE", of, on, ms / 1e3, _given(done)
                )


def _given(done: Done) -> Callable[[], Done]:
    return lambda: done


def _by_shape() -> Iterator[Figure]:
    """(card, operands, sums, m, n, k, TFLOP/s)."""
    listed: dict[str, list[tuple[Card, str, str, int, int, int, float]]] = {
        "MAMF": [
            (A100, "bf16", "fast", 1024, 10240, 5120, 271.2), (H100, "bf16", "fast", 2048, 2048, 13312, 794.5),
            (B300, "bf16", "fast", 12288, 18432, 1024, 1769), (B200, "bf16", "fast", 1792, 16128, 3072, 1745),
            (B200, "fp8", "fast", 15360, 4096, 3072, 3432.5), (B300, "fp8", "fast", 3072, 6144, 7168, 3353.3),
            (H200, "fp8", "fast", 1280, 4096, 12032, 1453.4), (H100, "fp8", "fast", 1024, 9216, 14336, 1402.6),
        ],
        "by size": [
            (H100, "bf16", "fast", 2048, 2048, 2048, 676.59), (H100, "bf16", "fast", 4096, 4096, 4096, 788.72),
            (H100, "bf16", "fast", 8192, 8192, 8192, 797.51), (RTX, "bf16", "fast", 2048, 2048, 2048, 164.81),
            (RTX, "bf16", "fast", 4096, 4096, 4096, 151.50), (RTX, "bf16", "fast", 8192, 8192, 8192, 160.17),
        ],
        "FBGEMM": [
            (SLOW_H100, "bf16", "fast", 8192, 8192, 8192, 585.23), (SLOW_H100, "fp8", "fast", 8192, 8192, 8192, 1125.51),
            (SLOW_H100, "bf16", "fast", 65536, 8192, 7168, 575.12), (SLOW_H100, "fp8", "fast", 65536, 8192, 7168, 1082.75),
            (SLOW_H100, "bf16", "fast", 65536, 3584, 8192, 546.31), (SLOW_H100, "fp8", "fast", 65536, 3584, 8192, 1141.38),
        ],
    }  # fmt: skip
    for source, figures in listed.items():
        for on, operands, sums, m, n, k, tera in figures:
            done = [(product(m, n, k, operands, sums), 1)]
            apart = "the fastest shape of many" if source == "MAMF" and on is not A100 else ""
            case = f"{m} x {n} x {k}, {operands}"
            yield Figure(
                case, source, "product", on, 2 * m * n * k / tera / 1e12, _given(done), apart
            )


def deep(step: Callable[[int], Callable[[], Step]], layers: int, on: Card) -> Tally:
    """The work of a model with so many layers, from 3 and 4."""
    assert on.device is not None
    few, more = (tally(count(step(number), on.device)) for number in (FEW, FEW + 1))
    return deeper(few, more, layers - FEW)


def llama(run: Run) -> Callable[[int], Callable[[], Step]]:
    return lambda layers: llama_step(replace(run, model=run.model | {"num_hidden_layers": layers}))


def _counted(
    step: Callable[[int], Callable[[], Step]], layers: int, on: Card, ranks: int = 1
) -> Callable[[], Done]:
    """Counted once. ranks: that share the update."""

    @cache
    def done() -> Done:
        work = deep(step, layers, on)
        return [
            (each, times / ranks if each.phase == "step" else times) for each, times in work.items()
        ]

    return done


def _torchtune(layers: int) -> Callable[[], Step]:
    return torchtune_step(replace(Torchtune(), layers=layers))


def _eager() -> Iterator[Figure]:
    yield Figure(
        "Llama 3.2 3B, packed",
        "torchtune",
        "eager",
        A100,
        8192 / 7075,
        _counted(_torchtune, 28, A100),
    )
    te_llama = llama(Run(rows=8, tokens=256))
    yield Figure(
        "Llama 3 8B, 8 x 256", "te_llama", "eager", H100, 0.270, _counted(te_llama, 32, H100)
    )
    titan = llama(Run(rows=2, tokens=8192, checkpointing="selective"))
    yield Figure(
        "Llama 3.1 8B, 2 x 8,192",
        "torchtitan",
        "eager",
        SLOW_H100,
        16384 / 5762,
        _counted(titan, 32, SLOW_H100, 8),
    )
    coat = llama(Run(rows=2, tokens=2048, model=LLAMA_2_7B))
    for ranks, rate in ((4, 7730), (8, 8238)):
        yield Figure(
            f"Llama 2 7B, 2 x 2,048, {ranks} ranks",
            "COAT",
            "eager",
            H100,
            4096 / rate,
            _counted(coat, 32, H100, ranks),
        )


# --- Compiled steps, of the layer that was counted over the empty runtime ---

TOKENS, HIDDEN, VOCABULARY, ROW = 8192, 4096, 32000, 4096  # of that layer
LAYER_WEIGHTS, DEEP = 218_112_000, 32


@cache
def compiled_rows() -> dict[str, dict[str, Any]]:
    """Contender -> its last row."""
    path = RESULTS / "compiled_work.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def compiled(
    name: str, layers: int = DEEP, tokens: int = TOKENS, row: int = ROW, vocabulary: int = VOCABULARY, ranks: int = 1,
    again: float = 0.0,
) -> Done:  # fmt: skip
    """A whole step of a contender: so many times its layer, one head, torch's fused AdamW in bfloat16.

    What reads or writes the logits belongs to the head, and grows with the vocabulary. again: share of the forward products that are
    computed again in backward. Attention is added by its formula, causal, backward 2.5 times forward.
    """
    found = compiled_rows()[name]
    scale, words, done = tokens / TOKENS, vocabulary / VOCABULARY, Done()
    for m, n, k, operands, sums, times in found["products"]:
        if "rowwise" in name and operands == "fp8":
            sums = {"fast": "rows", "split": "split rows"}[sums]
        head = VOCABULARY in (m, n, k)
        m, n, k = (
            round(size * (words if size == VOCABULARY else scale if size == TOKENS else 1))
            for size in (m, n, k)
        )
        is_forward = k not in (tokens, vocabulary) and not head
        repeats = 1 + again * (
            0.5 if is_forward else 0
        )  # products with K = hidden or FFN: forward and grad_input
        done.append((product(m, n, k, operands, sums), times * (1 if head else layers * repeats)))
    logits = 2 * TOKENS * VOCABULARY
    for nbytes, spanned, times in found["kernels"]:
        head = spanned >= logits
        done.append(
            (moving(nbytes * scale * (words if head else 1)), times * (1 if head else layers))
        )
    forward = 2 * tokens * row * HIDDEN  # half of 4, by the causal mask
    done.append((attention(forward + 5 * forward // 2), layers))  # kept by selective checkpointing
    weights = layers * LAYER_WEIGHTS + 2 * vocabulary * HIDDEN
    done.append((moving(14 * weights / ranks, "optimizer"), 1))
    done.append((moving(0), layers * found["other_launches"]))
    return done


def attention(flops: int) -> Work:
    return Work(0, "attention", "attention", flops, 0, "bf16")


def _compiled() -> Iterator[Figure]:
    listed: list[tuple[str, Any, int, dict[str, float]]] = [
        ("torchtitan", SLOW_H100, 2, {"bf16": 6667, "torchao-tensorwise": 8532}),
        (
            "torchao",
            SLOW_H100,
            1,
            {"bf16": 6150, "torchao-tensorwise": 7689.5, "torchao-rowwise": 6768},
        ),
        (
            "torchao",
            B200,
            1,
            {"bf16": 8307.5, "torchao-tensorwise": 10417, "torchao-rowwise": 8640.5},
        ),
    ]
    for source, on, rows, rates in listed:
        for name, rate in rates.items():
            if name in compiled_rows():
                tokens = rows * 8192
                done = compiled(
                    name, tokens=tokens, row=8192, vocabulary=128256, ranks=8, again=0.5
                )
                apart = (
                    "the B200 were limited in power, to how much is not said" if on is B200 else ""
                )
                case = f"Llama 3 8B, {rows} x 8,192, {name}"
                yield Figure(case, source, "compiled", on, tokens / rate, _given(done), apart)


def figures() -> list[Figure]:
    return [*_te(), *_by_shape(), *_eager(), *_compiled()]


def deepgemm() -> list[tuple[int, int, float]]:
    """(columns, contracted, TFLOP/s) of 4,096 rows: another kernel than cuBLAS', kept beside for what its table shows of shapes."""
    return [
        (2112, 7168, 1058),
        (24576, 1536, 990),
        (32768, 512, 590),
        (7168, 16384, 1358),
        (4096, 7168, 1304),
        (7168, 2048, 1025),
    ]
