"""Do mixtures of experts in low precision end where bf16 ends? A tiny Mixtral and a tiny DeepSeek-V3, several seeds.

    python -m benchmarks.mixture_convergence --data shakespeare.txt    1,000 steps, 3 seeds; any text file
    python -m benchmarks.mixture_convergence                           the same on Python's standard library
    python -m benchmarks.mixture_convergence --quick                   20 steps, one seed: to see that it works

Bytes are tokens. A seed decides weights and batches, so a recipe and `bf16` of one seed are a pair. The verdict is `study`'s:
t tests on the paired differences of the validation loss, within 0.25 % of it. Beside it, for each layer with a router:

    differ_trained  share of the router's choices that differ between the trained model and its pair, on held-out bytes
    differ_recipe   the same between the trained model and its own weights under `bf16`: the effect of the format alone
    least_used      share of the choices that the least used expert receives; 0.25 is even

Experts are balanced as the models' authors do: Mixtral by its auxiliary loss (0.02 of it, as in the released 8x7B), DeepSeek-V3
by a bias of the router (arXiv 2412.19437, 2.1.2), which moves by 0.01 a step here, since a run is short.

A choice differs if an expert of a token's top k is not in the other top k. `bf16-nudged` is the control: `bf16` from weights
that differ by one part in a million. Training amplifies any difference, so two trained routers differ anyway.
Finished runs are kept in OUTPUT and not repeated; `--finished` judges them and trains none.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record
from benchmarks.optimizer_convergence import corpus
from benchmarks.paired import Experiment

REFERENCE, CONTROL = "bf16", "bf16-nudged"
RECIPES = (REFERENCE, "fp8-current", "fp8-block", "mxfp8", "nvfp4", CONTROL)
MODELS = ("mixtral", "deepseek-v3")
BATCH, TOKENS, LEARNING_RATE = 4, 32, 2e-3
HELD_OUT = 32 * 8 * TOKENS  # bytes that a model is evaluated on
FEWEST_BYTES = 20 * HELD_OUT
NUDGE = 1 + 2.0**-20
AUXILIARY, BIAS_SPEED = 0.02, 0.01


def main() -> None:
    options = _options()
    if options.data and options.data.stat().st_size < FEWEST_BYTES:
        raise SystemExit(f"--data {options.data}: has fewer than {FEWEST_BYTES:,} bytes.")
    data = options.data.name if options.data else "Python's standard library"
    rows = []
    for model in options.models:
        folder = options.output / (options.data.stem if options.data else "stdlib")
        folder = folder / f"{model}-{options.steps}-steps"
        settings = {
            "model": model,
            "steps": options.steps,
            "data": options.data and str(options.data.resolve()),
            "folder": str(folder.resolve()),
        }
        runs = Experiment(train, options.recipes, options.seeds, settings, folder)
        results = runs.finished() if options.finished else runs.results(options.jobs)
        if not any(each["recipe"] == REFERENCE for each in results):
            raise SystemExit(f"{folder}: has no finished run of {REFERENCE}. Leave --finished out.")
        found = judged(results, folder)
        rows += [row | {"model": model, "data": data, "steps": options.steps} for row in found]
    print(markdown(rows))
    if not options.quick:
        record("mixture-convergence", rows, options.results)


def build(model: str) -> Any:
    """Two layers of width 64 with 4 experts, 2 for each token; DeepSeek's first layer is dense."""
    import transformers

    sizes = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": TOKENS, "use_cache": False,
    }  # fmt: skip
    if model == "mixtral":
        config: Any = transformers.MixtralConfig(
            **sizes, intermediate_size=96, num_key_value_heads=2, num_local_experts=4
        )
        return transformers.MixtralForCausalLM(config)
    config = transformers.DeepseekV3Config(
        **sizes, intermediate_size=128, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=64,
        first_k_dense_replace=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def train(
    recipe: str, seed: int, model: str, steps: int, data: str | None, folder: str
) -> dict[str, Any]:
    """One run: linear warm-up over a tenth, half a cosine to zero, gradients clipped at norm 1."""
    import narrowgauge as ng

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    text = torch.tensor(list(Path(data).read_bytes()[:2_000_000])) if data else corpus()
    held_out, training = text[-HELD_OUT:].view(-1, 8, TOKENS), text[:-HELD_OUT]
    torch.manual_seed(seed)
    made: nn.Module = build(model)
    if recipe == CONTROL:
        with torch.no_grad():
            made.get_input_embeddings().weight.mul_(NUDGE)  # type: ignore[operator]
    ng.convert(made, REFERENCE if recipe == CONTROL else recipe)
    optimizer = torch.optim.AdamW(made.parameters(), betas=(0.9, 0.95), fused=True)
    draw = torch.Generator().manual_seed(seed)
    asked = {"output_router_logits": True} if model == "mixtral" else {}
    losses = []
    for step in range(steps):
        share = min((step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
        places = torch.randint(0, len(training) - TOKENS, (BATCH,), generator=draw)
        batch = torch.stack([training[place : place + TOKENS] for place in places.tolist()])
        with _choices(made) as chosen:
            output = made(input_ids=batch, **asked)
        loss = cross_entropy(output.logits, batch)
        (loss + AUXILIARY * output.aux_loss if asked else loss).backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(made)
        if model == "deepseek-v3":
            balance(made, chosen)
        losses.append(float(loss.detach()))
    value, own = evaluated(made, held_out)
    plain = build(model)
    plain.load_state_dict(made.state_dict())
    ng.convert(plain, REFERENCE)
    torch.save(own, _choices_file(Path(folder), recipe, seed))
    return {
        "loss": value,
        "losses": losses,
        "trivial": entropy(held_out[..., 1:]),
        "targets": held_out[..., 1:].numel(),
        "differ_recipe": differing(own, evaluated(plain, held_out)[1]),
        "least_used": [
            float(torch.bincount(each.flatten(), minlength=4).min() / each.numel()) for each in own
        ],
    }


def balance(model: nn.Module, chosen: dict[str, list[Tensor]]) -> None:
    """Raise the bias of experts with fewer tokens than the mean, and lower it of those with more."""
    for name, (choices,) in chosen.items():
        gate: Any = model.get_submodule(name.removesuffix("experts") + "gate")
        bias: Tensor = gate.e_score_correction_bias
        load = torch.bincount(choices.flatten(), minlength=len(bias)).float()
        bias += BIAS_SPEED * (load.mean() - load).sign()


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean nats per byte."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluated(model: nn.Module, held_out: Tensor) -> tuple[float, Tensor]:
    """(mean loss, choices [layers, tokens, k] int64) in evaluation mode."""
    model.eval()
    with _choices(model) as chosen:
        value = statistics.fmean(
            float(cross_entropy(model(input_ids=batch).logits, batch)) for batch in held_out
        )
    return value, torch.stack([torch.cat(each) for each in chosen.values()])


@contextmanager
def _choices(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the experts that each token is sent to, by layer."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):

            def collect(module: nn.Module, given: Any, name: str = name) -> None:
                found.setdefault(name, []).append(given[1])

            hooks.append(module.register_forward_pre_hook(collect))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def differing(first: Tensor, second: Tensor) -> list[float]:
    """For each layer, the share of first [layers, tokens, k] that `second` lacks, token by token."""
    shared = (first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1)
    return [float(each) for each in 1 - shared.double().mean((1, 2))]


def entropy(targets: Tensor) -> float:
    """Loss of the best constant predictor, which knows the frequencies of the targets."""
    shares = torch.bincount(targets.flatten()).double() / targets.numel()
    return float(-torch.special.xlogy(shares, shares).sum())


def _choices_file(folder: Path, recipe: str, seed: int) -> Path:
    return folder / f"{recipe}-seed{seed}.pt"


def judged(results: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """A row per recipe: losses, the verdict with its numbers, and the shares of choices by layer."""
    from narrowgauge.diagnose import seeds, seeds_text

    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for each in results:
        by_recipe.setdefault(each["recipe"], []).append(each)
    runs = {
        recipe: seeds.Runs(
            name=recipe,
            values={each["seed"]: each["loss"] for each in found},
            curves={each["seed"]: each["losses"] for each in found},
            trivial={"predictor": "token frequencies", "loss": found[0]["trivial"]},
            targets=found[0]["targets"],
        )
        for recipe, found in by_recipe.items()
    }
    reference = runs.pop(REFERENCE)
    verdicts = {
        each.runs.name: each for each in seeds.judge_all([reference, *runs.values()], "loss")
    }
    rows = []
    for recipe, found in by_recipe.items():
        verdict = verdicts.get(recipe)
        row: dict[str, Any] = {
            "recipe": recipe,
            "loss": statistics.fmean(each["loss"] for each in found),
            "losses": {each["seed"]: each["loss"] for each in found},
            "differ_recipe": _means(each["differ_recipe"] for each in found),
            "least_used": _means(each["least_used"] for each in found),
        }
        if verdict is not None:
            pairs = [
                differing(
                    *(torch.load(_choices_file(folder, name, seed)) for name in (recipe, REFERENCE))
                )
                for seed in verdict.seeds
            ]
            row |= {
                "differ_trained": _means(pairs),
                "verdict": verdict.name,
                "sentence": seeds_text.verdict(verdict).text(recipe),
                "numbers": verdict.numbers(),
            }
        rows.append(row)
    return rows


def _means(lists: Any) -> list[float]:
    return [statistics.fmean(each) for each in zip(*lists, strict=True)]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | recipe | validation loss | verdict | choices that differ, trained | by the format alone | least used |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = [
            ", ".join(f"{each:.3f}" for each in row.get(name, ()))
            for name in ("differ_trained", "differ_recipe", "least_used")
        ]
        lines.append(
            f"| {row['model']} | `{row['recipe']}` | {row['loss']:.4f} | {row.get('verdict', '')} | {' | '.join(shares)} |"
        )
    return "\n".join([*lines, "", *(row["sentence"] for row in rows if "sentence" in row)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.mixture_convergence", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, default=None, help="a text file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/mixture_convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS / "mixture_convergence.jsonl")
    parser.add_argument("--finished", action="store_true", help="judge the runs that are there")
    parser.add_argument("--quick", action="store_true", help="nothing is recorded")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 20, [0]
    if REFERENCE not in options.recipes:
        parser.error(f"--recipes must include {REFERENCE}, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
