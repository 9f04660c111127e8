"""Every published gain of FP8, MXFP8 and NVFP4 over bfloat16 on H100 to GB200, beside its prediction.

    python -m benchmarks.gains        seconds; rows appended to benchmarks/results/gains.jsonl

A gain is the time of a step or a layer in bfloat16 over the narrow one. `left out` is predicted by rates that were fitted without the
narrow line (`benchmarks.calibration`); `package` by those of `narrowgauge.ops.timing.rates`. Fitted to what: narrow, fp4, blocks, mx and
copied to lines of TransformerEngine, FBGEMM and by size, with what each card reaches; compiled to the steps on H100; rows to the one step
on an H100 that multiplied by CUTLASS; rows_later to the B200's step by rows, which is no prediction in the column `package`. Taken from
their sources as they stand: split, promoted, triton. The steps on B200 and GB200 are fitted to nothing.

TE        its layer of 12 products, `benchmarks.published`
torchao   docs/source/workflows/training.md: Llama 3 8B on 8 H100 of 500 W, or 8 power-limited B200, one row of 8,192
torchtitan benchmarks/llama3_h100_202412_torchtitan.md, two rows of 8,192
Crusoe    pytorch.org/blog, "Accelerating 2K scale pre-training up to 1.28x with TorchAO, MXFP8 and TorchTitan": Llama 3 70B on B200, 1.22
          to 1.28 [the middle]. One row of 8,192 and selective checkpointing [assumed]
Scout     pytorch.org/blog, "MXFP8 Training for MoEs": Llama 4 Scout on 256 GB200, one row of 8,192, all recomputed; Linears but wk, wv,
          router and head, and routed experts in MXFP8: 1.302. Messages between experts are left out here

Not predicted: Quartet II (arXiv 2601.22813), kernels "up to" 4.2 of a bfloat16 Linear, a largest of many shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.calibration import Fit, card_of
from benchmarks.harness import RESULTS, record
from benchmarks.published import (
    B200,
    VOCABULARY,
    Done,
    Figure,
    attention,
    compiled,
    figures,
    moving,
    product,
)
from narrowgauge.ops.timing.rates import RATES, Rates

LIMIT, MEDIAN = 0.20, 0.07
Sides = tuple[list[Figure], list[Figure]]


@dataclass(frozen=True)
class Gain:
    """A published gain; sides: the lines of bfloat16 and the narrow ones, which are summed."""

    case: str
    source: str
    published: float
    sides: Sides

    @property
    def card(self) -> str:
        return self.sides[0][0].on.name

    def predicted(self, rates: Rates, reached: Callable[[Figure], float]) -> float:
        plain, narrow = (
            sum(each.predicted(rates, reached(each)) for each in side) for side in self.sides
        )
        return plain / narrow

    def left_out(self) -> float:
        """Predicted without its narrow lines; rows on Blackwell by the rate of the H100."""
        known = [each for each in _known() if not each.apart and each not in self.sides[1]]
        fit = Fit(known, sorted({card_of(each) for each in _known()}))
        rates = replace(fit.rates, rows_later=fit.rates.rows)
        return self.predicted(rates, lambda each: fit.values[card_of(each)])

    def by_package(self) -> float:
        return self.predicted(RATES, lambda each: _reached()[card_of(each)])


@cache
def _known() -> list[Figure]:
    return [each for each in figures() if each.of != "eager"]


@cache
def _reached() -> dict[str, float]:
    """Card -> what it reaches, fitted; the package has those of its own cards alone."""
    fitted = [each for each in _known() if not each.apart]
    return Fit(fitted, sorted({card_of(each) for each in _known()})).values


def gains() -> list[Gain]:
    return [*_layers(), *_steps(), *_later_steps()]


def _layers() -> Iterator[Gain]:
    lines: dict[tuple[str, str], list[Figure]] = {}
    for each in (each for each in _known() if each.source == "TE"):
        lines.setdefault(
            (each.on.name, each.case.split(", ", 1)[1].rpartition(", ")[0]), []
        ).append(each)
    for (on, name), narrow in lines.items():
        if name != "bf16":
            plain = lines[on, "bf16"]
            alone = {"B300": 13.102, "H200 NVL": 31.968}[on] if "alone" in name else 0.0
            seconds = 1e3 * sum(each.published_s for each in plain)
            published = (alone or seconds) / (1e3 * sum(each.published_s for each in narrow))
            yield Gain(f"12 products, {name}", "TE", published, (plain, narrow))


def _steps() -> Iterator[Gain]:
    lines: dict[tuple[str, str], dict[str, Figure]] = {}
    for each in (each for each in _known() if each.of == "compiled"):
        lines.setdefault((each.source, each.on.name), {})[each.case.rpartition(", ")[2]] = each
    for (source, _), found in lines.items():
        for name, each in found.items():
            if name != "bf16":
                gain = found["bf16"].published_s / each.published_s
                yield Gain(each.case, source, gain, ([found["bf16"]], [each]))


# --- Steps that nobody has counted: the layer in bfloat16, whose products torchao casts ---


def with_mx(done: Done, kept: Callable[[int, int, int], bool]) -> Done:
    """The same step with MXFP8 of torchao: a kernel for each orientation of each operand, 3 bytes per element."""
    found = Done()
    for each, times in done:
        k = each.flops // (2 * each.rows * each.columns) if each.rows else 0
        if each.kind != "products" or kept(each.rows, each.columns, k):
            found.append((each, times))
            continue
        found.append((product(each.rows, each.columns, k, "fp8", "mx"), times))
        found += [(moving(3 * k * side, "casts"), times) for side in (each.rows, each.columns)]
    return found


def _is_head(vocabulary: int) -> Callable[[int, int, int], bool]:
    return lambda *sizes: vocabulary in sizes


def _wider(done: Done, sizes: dict[int, int], wider: float) -> Done:
    """The counted layer of 8B with other widths; what is no product grows with the hidden width."""
    found = Done()
    for each, times in done:
        if each.kind == "products":
            k = each.flops // (2 * each.rows * each.columns)
            m, n, k = (sizes.get(size, size) for size in (each.rows, each.columns, k))
            found.append((product(m, n, k, each.operands, each.sums), times))
        else:
            found.append(
                (
                    replace(each, flops=int(wider * each.flops), nbytes=int(wider * each.nbytes)),
                    times,
                )
            )
    return found


def scout() -> Done:
    """Llama 4 Scout: 48 layers of hidden 5,120; attention, a shared and one routed FFN of 8,192."""
    tokens, hidden, wide, keys, layers, vocabulary = 8192, 5120, 8192, 1024, 48, 202048
    linears = [(hidden, hidden, 2), (keys, hidden, 2), (wide, hidden, 4), (hidden, wide, 2)]
    done: Done = []
    for n, k, times in linears:
        forward, gradients = (
            product(tokens, n, k, "bf16"),
            (product(tokens, k, n, "bf16"), product(n, k, tokens, "bf16")),
        )
        done += [(forward, 2 * layers * times), *((each, layers * times) for each in gradients)]
    done += [
        (product(*sizes, "bf16"), 1)
        for sizes in (
            (tokens, vocabulary, hidden),
            (tokens, hidden, vocabulary),
            (vocabulary, hidden, tokens),
        )
    ]
    done.append((attention(int(4.5 * 2 * tokens * tokens * hidden)), layers))
    others = compiled("bf16", layers=1, tokens=tokens, row=tokens, vocabulary=VOCABULARY)
    beside = sum(
        times * each.nbytes
        for each, times in others
        if each.kind == "elementwise" and each.nbytes < 2 * tokens * VOCABULARY
    )
    wider = (hidden + 2 * wide) / (4096 + 14336)
    # A third of a layer's passes are of forward, which runs twice; experts permute rows twice each way.
    done.append((moving(wider * 4 / 3 * beside + 12 * 2 * tokens * hidden), layers))
    return done


def _later_steps() -> Iterator[Gain]:
    def figure(case: str, source: str, done: Done) -> Figure:
        return Figure(
            case, source, "compiled", B200, 0.0, lambda: done, "counted in no step of torchao's"
        )

    def gain(
        case: str, source: str, published: float, plain: Done, kept: Callable[[int, int, int], bool]
    ) -> Gain:
        sides = [figure(case, source, plain)], [figure(case, source, with_mx(plain, kept))]
        return Gain(case, source, published, sides)

    small = compiled("bf16", tokens=8192, row=8192, vocabulary=128256, ranks=8, again=0.5)
    yield gain(
        "Llama 3 8B, 1 x 8,192, torchao-mxfp8", "torchao", 9969 / 8307.5, small, _is_head(128256)
    )
    large = compiled(
        "bf16", layers=80, tokens=8192, row=8192, vocabulary=128256, ranks=512, again=0.5
    )
    large = _wider(large, {4096: 8192, 14336: 28672}, 2.0)
    yield gain("Llama 3 70B, 1 x 8,192, torchao-mxfp8", "Crusoe", 1.25, large, _is_head(128256))
    narrow_keys = lambda *sizes: 202048 in sizes or 1024 in sizes  # noqa: E731
    yield gain("Llama 4 Scout, 1 x 8,192, torchao-mxfp8", "Scout", 1.302, scout(), narrow_keys)


def fitted_rows_later() -> float:
    """What `Rates.rows_later` must be for the published step by rows on B200."""
    step = next(each for each in gains() if each.card == "B200" and "rowwise" in each.case)
    low, high = 1.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        found = step.predicted(
            replace(RATES, rows_later=middle), lambda each: _reached()[card_of(each)]
        )
        low, high = (middle, high) if found > step.published else (low, middle)
    return low


def main() -> None:
    rows = []
    for each in gains():
        left_out, package = each.left_out(), each.by_package()
        error = left_out / each.published - 1
        rows.append(
            {
                "case": each.case, "source": each.source, "card": each.card, "published": round(each.published, 3),
                "left_out": round(left_out, 3), "left_out_error": round(error, 3), "package": round(package, 3),
            }
        )  # fmt: skip
        print(
            f"{each.source:10} {each.card:12} {each.case:44} {each.published:6.2f} {left_out:6.2f} {100 * error:+5.0f} % {package:6.2f}"
        )
    errors = sorted(abs(row["left_out_error"]) for row in rows)
    median = statistics.median(errors)
    higher = statistics.median(row["left_out_error"] for row in rows if "Llama" in row["case"])
    told = f"{len(rows)} gains: median error {100 * median:.1f} %, worst {100 * errors[-1]:.0f} %"
    print(f"{told}; of whole steps {100 * higher:+.0f} % in the middle")
    rows.append(
        {
            "case": "all",
            "median_error": median,
            "worst_error": errors[-1],
            "steps_too_high": higher,
            "rows_later": round(fitted_rows_later(), 3),
        }
    )
    record("gains", rows, RESULTS / "gains.jsonl")


if __name__ == "__main__":
    main()
