"""Does the guard find planted faults by the third check, and leave healthy runs alone? Small Llamas on bytes of text, trained in full.

    python -m benchmarks.guard_planted --data shakespeare.txt       60 runs, some fifteen seconds of one core each
    python -m benchmarks.guard_planted --data shakespeare.txt --runs nvfp4 dead-layer --seeds 0 1
    python -m benchmarks.guard_planted                              the table of what is finished, for the --runs and --seeds given

Every run is trained in its recipe, or with a fault of `planted_faults`, under `ng.Guard` with then=warn: after warm-up one check
follows the other. The truth beside it is a BF16 run of the same seed over all steps: what the run's validation loss, and its training
loss over the last sixth on the same batches, end above BF16's. One pair of so short runs differs by 0.01 from chance alone, so a recipe
or fault is worse in truth where both means over the seeds say so by 0.01. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record
from benchmarks.paired import Experiment, Figures
from benchmarks.planted_faults import FOUR_BITS, HEALTHY, SICK
from narrowgauge.diagnose.verdict import EQUIVALENT, GUARD, WORSE, outcome_of

SETTINGS: dict[str, Any] = {
    "steps": 400, "warmup": 40, "first": 80, "every": 40, "batch": 4, "length": 32, "rate": 3e-3, "hidden": 64, "layers": 2,
}  # fmt: skip
WORSE_IN_TRUTH = 0.01  # nats
ENDS = ("tail", "validation")
UNCHECKED = ("bf16", "bf16-in-halves")  # the truth, and how far chance alone moves it
KEPT = (
    "begun", "step", "difference", "control", "same", "noise", "wide", "margin", "scale", "weights", "slopes", "outside", "sick", "e_worse",
    "e_worse_stretch", "e_worse_same", "e_within", "verdict", "seen_on", "direction", "sentence", "unlike", "compared", "unseen", "plateau",
)  # of the event of a check  # fmt: skip


def main() -> None:
    options = _options()
    settings = SETTINGS | {"data": str(options.data)}
    names = ["bf16", *options.runs]
    experiment = Experiment(train, names, options.seeds, settings, options.output)
    results = experiment.results(options.jobs) if options.data else experiment.finished()
    rows = judged(results)
    print(markdown(rows))
    found = {**chance(results), **summary(rows)}
    print(*(f"{name}: {value}" for name, value in found.items()), sep="\n")
    record(
        "guard_planted",
        [row | {"settings": SETTINGS} for row in [*rows, {"run": "all", **found}]],
        options.results,
    )


def train(
    recipe: str,
    seed: int,
    *,
    data: str,
    steps: int,
    first: int,
    every: int,
    warmup: int,
    **sizes: Any,
) -> Figures:
    """One run with its checks, as the guard tells them, and how it ended."""
    import torch

    import narrowgauge as ng
    from benchmarks.planted_faults import plant

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = torch.frombuffer(bytearray(Path(data).read_bytes()), dtype=torch.uint8).long()
    held_out = len(text) // 10
    model = build(sizes)
    plant(model, recipe.removesuffix("-in-halves"))
    run = Run(model, sizes["rate"], warmup, steps, in_halves=recipe.endswith("-in-halves"))
    checks: list[dict[str, Any]] = []
    step: Callable[[Any], Any] = run.step
    if recipe not in UNCHECKED:
        words = f"every={every},steps={every},then=warn"
        step = ng.Guard(
            words,
            model,
            run.optimizer,
            run.step,
            also=[run.scheduler],
            warmup_steps=first,
            tell=checks.append,
        )
    losses = [float(step(ids)) for ids in batches(text[:-held_out], seed, steps, sizes)]
    tail = statistics.fmean(losses[-steps // 6 :])
    validation = run.validation(text[-held_out:], sizes["length"])
    return {
        "checks": [{key: check[key] for key in KEPT} for check in checks],
        "tail": tail,
        "validation": validation,
    }


def build(sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=sizes["hidden"], intermediate_size=3 * sizes["hidden"], num_attention_heads=4,
            num_hidden_layers=sizes["layers"], max_position_embeddings=sizes["length"],
        )
    )  # fmt: skip


def batches(text: Any, seed: int, steps: int, sizes: dict[str, Any]) -> Any:
    """ids [steps, batch, length], drawn from the text by the seed."""
    import torch

    source, length = torch.Generator().manual_seed(seed), sizes["length"]
    starts = torch.randint(len(text) - length, (steps, sizes["batch"]), generator=source)
    return text[starts[..., None] + torch.arange(length)]


class Run:
    """A model, and a loop's step with its optimizer. Linear warm-up, then a linear descent to a tenth of the rate.

    in_halves  the gradient is that of two halves of each batch, so that the sums are others
    norms      of the gradients of each step, before clipping
    """

    def __init__(
        self, model: Any, rate: float, warmup: int, steps: int, in_halves: bool = False
    ) -> None:
        import torch

        self.model, self.in_halves, self.norms = model, in_halves, list[float]()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, weight_decay=0.1, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warmup, 1 - 0.9 * max(step + 1 - warmup, 0) / steps),
        )

    def step(self, ids: Any) -> Any:
        """One step; its loss."""
        import torch

        parts, losses = ids.chunk(2) if self.in_halves else [ids], []
        for part in parts:
            loss = self.loss(part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return sum(losses)

    def loss(self, ids: Any) -> Any:
        import torch

        with torch.autocast("cpu", torch.bfloat16):
            return self.model(input_ids=ids, labels=ids).loss

    def validation(self, text: Any, length: int, sequences: int = 256) -> float:
        """Mean nats per byte of sequences that are evenly spread over the text, in narrow numbers."""
        import torch

        starts = torch.linspace(0, len(text) - length, sequences).long()
        ids = text[starts[:, None] + torch.arange(length)]
        with torch.no_grad():
            return statistics.fmean(float(self.loss(part)) for part in ids.split(32))


def judged(results: Sequence[Figures]) -> list[Figures]:
    """A row per run: what the guard said at each check, and the truth."""
    truth = {each["seed"]: each for each in results if each["recipe"] == "bf16"}
    checked = [
        each for each in results if each["recipe"] not in UNCHECKED and each["seed"] in truth
    ]
    above = {
        name: min(
            statistics.fmean(
                above_bf16(each, truth)[key] for each in checked if each["recipe"] == name
            )
            for key in ENDS
        )
        for name in {each["recipe"] for each in checked}
    }
    rows = []
    for each in checked:
        outcomes = [outcome_of(GUARD, check) for check in each["checks"]]
        alarmed = outcomes.index(WORSE) + 1 if WORSE in outcomes else None
        rows.append(
            {
                "run": each["recipe"], "seed": each["seed"], "over_bf16": above_bf16(each, truth),
                "worse_in_truth": above[each["recipe"]] >= WORSE_IN_TRUTH, "checks": each["checks"], "alarmed": alarmed,
                "seen_on": each["checks"][alarmed - 1]["seen_on"] if alarmed else "",
                "certified": outcomes.index(EQUIVALENT) + 1 if EQUIVALENT in outcomes else None,
            }
        )  # fmt: skip
    return rows


def above_bf16(figures: Figures, truth: dict[int, Figures]) -> dict[str, float]:
    """The ends of a run minus those of the BF16 run of its seed, nats."""
    return {key: figures[key] - truth[figures["seed"]][key] for key in ENDS}


def chance(results: Sequence[Figures]) -> dict[str, str]:
    """What halved batches alone change at the end of a BF16 run, by seed."""
    ends = {(each["recipe"], each["seed"]): each for each in results}
    changed = [
        (each, ends["bf16", seed])
        for (recipe, seed), each in ends.items()
        if recipe == "bf16-in-halves"
    ]
    return {
        f"{key} loss of bf16 in halves minus bf16": ", ".join(
            f"{ours[key] - theirs[key]:+.4f}" for ours, theirs in changed
        )
        for key in ENDS
    }


def summary(rows: Sequence[Figures]) -> dict[str, str]:
    """What the guard has to show, as counts."""
    worse, healthy = (
        [row for row in rows if row["worse_in_truth"]],
        [row for row in rows if row["run"] in HEALTHY],
    )
    sound = [row for row in healthy if not row["worse_in_truth"]]
    return {
        "worse in truth": f"{len(worse)} of {len(rows)} runs",
        "of these alarmed by the third check": _share(
            worse, lambda row: (row["alarmed"] or 99) <= 3
        ),
        "healthy recipes alarmed at any check": _share(
            healthy, lambda row: row["alarmed"] is not None
        ),
        "healthy and not worse in truth, alarmed": _share(
            sound, lambda row: row["alarmed"] is not None
        ),
        "healthy recipes certified by the eighth check": _share(
            healthy, lambda row: (row["certified"] or 99) <= 8
        ),
    }


def _share(rows: Sequence[Figures], holds: Callable[[Figures], bool]) -> str:
    return f"{sum(map(holds, rows))} of {len(rows)}"


def markdown(rows: Sequence[Figures]) -> str:
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[Figures]) -> Iterator[str]:
    titles = (
        "run",
        "seed",
        "above BF16: training, validation",
        "stretch, 1e-4 nats",
        "same weights",
        "slopes",
        "alarm",
        "seen on",
        "within",
    )
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in sorted(
        rows,
        key=lambda row: (row["run"] not in HEALTHY, row["run"] in SICK, row["run"], row["seed"]),
    ):
        stretch, same = (
            ", ".join(f"{1e4 * check[key]:+.0f}" for check in row["checks"])
            for key in ("difference", "same")
        )
        ends = [check["slopes"] for check in row["checks"] if check["slopes"]]
        slopes = (
            f"{min(low for low, _ in ends):.2f}, {max(high for _, high in ends):.2f}"
            if ends
            else "-"
        )
        truth = f"{row['over_bf16']['tail']:+.4f}, {row['over_bf16']['validation']:+.4f}"
        verdicts = f"{row['alarmed'] or '-'} | {row['seen_on'] or '-'} | {row['certified'] or '-'}"
        yield f"| `{row['run']}` | {row['seed']} | {truth} | {stretch} | {same} | {slopes} | {verdicts} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.guard_planted", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, help="any text file")
    parser.add_argument(
        "--runs", nargs="+", default=[*HEALTHY, *FOUR_BITS, *SICK, "bf16-in-halves"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/guard_planted"))
    parser.add_argument("--results", type=Path, default=RESULTS / "guard_planted.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
