"""Does training with attention in FP8 end where bf16 ends? A tiny Llama, several seeds.

    python -m benchmarks.attention_convergence --data shakespeare.txt    1,000 steps, 3 seeds; any text file
    python -m benchmarks.attention_convergence                           the same on Python's standard library
    python -m benchmarks.attention_convergence --quick                   20 steps, one seed: to see that it works

Bytes are tokens. Rows are longer than one block of keys, so the running maximum moves. A seed decides weights and batches, so a
recipe and `bf16` of one seed are a pair. The verdict is `study`'s: t tests on the paired differences of the validation loss,
within 0.25 % of it. `bf16-nudged` is the control: `bf16` from weights that differ by one part in a million.

Attention outside of FP8, and backward everywhere, computes in the model's float32: what differs is FP8 alone. Of the trained
model on held-out bytes, with its attention in FP8 against the same weights without:

    logits_db     signal to noise of the logits
    gradient_db   of the gradient of all weights
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record
from benchmarks.mixture_convergence import NUDGE, cross_entropy, entropy
from benchmarks.optimizer_convergence import corpus
from benchmarks.paired import Experiment

REFERENCE, CONTROL, ATTENTION = "bf16", "bf16-nudged", "+attention"
RECIPES = (REFERENCE, "fp8-current", f"fp8-current{ATTENTION}", CONTROL)
BATCH, TOKENS, LEARNING_RATE = 2, 192, 2e-3
HELD_OUT = 40 * 4 * TOKENS  # bytes that a model is evaluated on


def main() -> None:
    options = _options()
    data = options.data.name if options.data else "Python's standard library"
    folder = (
        options.output / f"{options.data.stem if options.data else 'stdlib'}-{options.steps}-steps"
    )
    settings = {"steps": options.steps, "data": options.data and str(options.data.resolve())}
    runs = Experiment(train, options.recipes, options.seeds, settings, folder)
    rows = [
        row | {"data": data, "steps": options.steps, "batch": BATCH, "tokens": TOKENS}
        for row in judged(runs.results(options.jobs))
    ]
    print(markdown(rows))
    if not options.quick:
        record("attention-convergence", rows, options.results)


def build() -> Any:
    """Two layers of width 64, two heads of 32 that share one head of keys."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(recipe: str, seed: int, steps: int, data: str | None) -> dict[str, Any]:
    """One run: linear warm-up over a tenth, half a cosine to zero, gradients clipped at norm 1."""
    import narrowgauge as ng

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = torch.tensor(list(Path(data).read_bytes()[:2_000_000])) if data else corpus()
    held_out, training = text[-HELD_OUT:].view(-1, 4, TOKENS), text[:-HELD_OUT]
    torch.manual_seed(seed)
    model = build()
    if recipe == CONTROL:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(NUDGE)
    in_fp8 = recipe.endswith(ATTENTION)
    name = REFERENCE if recipe == CONTROL else recipe.removesuffix(ATTENTION)
    ng.convert(model, name, attention="fp8" if in_fp8 else None)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        share = min((step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
        places = torch.randint(0, len(training) - TOKENS, (BATCH,), generator=draw)
        batch = torch.stack([training[place : place + TOKENS] for place in places.tolist()])
        loss = cross_entropy(model(input_ids=batch).logits, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(model)
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        loss = statistics.fmean(
            float(cross_entropy(model(input_ids=batch).logits, batch)) for batch in held_out
        )
    return {
        "loss": loss,
        "losses": losses,
        "trivial": entropy(held_out[..., 1:]),
        "targets": held_out[..., 1:].numel(),
        **noise_of_attention(model, held_out[0]),
    }


def noise_of_attention(model: nn.Module, batch: Tensor) -> dict[str, float]:
    """Signal to noise of attention in FP8 in a trained model, Linears in bf16 both times."""
    import narrowgauge as ng

    found = []
    for attention in ("fp8", None):
        other = build()
        other.load_state_dict(model.state_dict())
        ng.convert(other, REFERENCE, attention=attention)
        logits = other(input_ids=batch).logits
        cross_entropy(logits, batch).backward()
        gradient = torch.cat([each.grad.flatten() for each in other.parameters()])
        found.append((logits.detach(), gradient))
    (narrow, own), (wide, exact) = found
    return {"logits_db": _db(narrow, wide), "gradient_db": _db(own, exact)}


def _db(found: Tensor, exact: Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (found - exact).norm()))


def judged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per recipe: losses, signal to noise, and the verdict with its numbers."""
    from narrowgauge.diagnose import seeds, seeds_text

    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for each in results:
        by_recipe.setdefault(each["recipe"], []).append(each)
    runs = [
        seeds.Runs(
            name=recipe,
            values={each["seed"]: each["loss"] for each in found},
            curves={each["seed"]: each["losses"] for each in found},
            trivial={"predictor": "token frequencies", "loss": found[0]["trivial"]},
            targets=found[0]["targets"],
        )
        for recipe, found in by_recipe.items()
    ]
    runs.sort(key=lambda each: each.name != REFERENCE)
    verdicts = {each.runs.name: each for each in seeds.judge_all(runs, "loss")}
    rows = []
    for recipe, found in by_recipe.items():
        row: dict[str, Any] = {
            "recipe": recipe,
            "loss": statistics.fmean(each["loss"] for each in found),
            "losses": {each["seed"]: each["loss"] for each in found},
            **{
                key: statistics.fmean(each[key] for each in found)
                for key in ("logits_db", "gradient_db")
            },
        }
        if (verdict := verdicts.get(recipe)) is not None:
            row |= {
                "verdict": verdict.name,
                "sentence": seeds_text.verdict(verdict).text(recipe),
                "numbers": verdict.numbers(),
            }
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| recipe | validation loss | by seed | verdict | logits, dB | gradient, dB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        by_seed = ", ".join(f"{value:.4f}" for value in row["losses"].values())
        lines.append(
            f"| `{row['recipe']}` | {row['loss']:.4f} | {by_seed} | {row.get('verdict', '')} | "
            f"{row['logits_db']:.1f} | {row['gradient_db']:.1f} |"
        )
    return "\n".join([*lines, "", *(row["sentence"] for row in rows if "sentence" in row)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.attention_convergence")
    parser.add_argument("--data", type=Path, default=None, help="a text file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/attention_convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS / "attention_convergence.jsonl")
    parser.add_argument("--quick", action="store_true", help="nothing is recorded")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 20, [0]
    if REFERENCE not in options.recipes:
        parser.error(f"--recipes must include {REFERENCE}, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
