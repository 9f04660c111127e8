"""What keeping activations in 8 bits does to gradients and to training: `save` "fp8" and "int8" of `convert(fuse=True)`, beside "exact".

    python -m benchmarks.saved_in_fp8                     gradients, and 1,000 steps of three seeds
    python -m benchmarks.saved_in_fp8 --only gradients    some minutes
    python -m benchmarks.saved_in_fp8 --only training --width 64 --text FILE    0.2 million parameters on the bytes of a file
    python -m benchmarks.saved_in_fp8 --quick             to see that it works; nothing is recorded

gradients  A Llama of 4 layers, 256 wide, trained in float32 for WARM steps, then SQNR in dB of the gradients of one batch beside
           those of the float32 model, by kind of parameter and seed. The forward pass is the same in both, so are the losses.
training   A Llama of 4 layers, 128 wide or 64, 1,000 steps of 8 x 64 tokens: validation loss in nats per byte, as a pair of each seed,
           the deviation between seeds, and the verdict of `narrowgauge.diagnose.seeds` on each `save` beside "exact" (margin 0.25 %).

Bytes of Python's standard library, or of a file; products by the recipe, all else in float32. Finished runs are kept in OUTPUT and not
repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record
from benchmarks.optimizer_convergence import corpus
from benchmarks.paired import Experiment, Figures, summarize
from narrowgauge.diagnose import seeds_text
from narrowgauge.diagnose.seeds import Runs, SeedComparison, judge_all

SAVES = ("exact", "fp8", "int8")
BASELINE = SAVES[0]
KINDS = {
    "embeddings": ("embed_tokens", "lm_head"), "norms": ("norm",), "q, k, v": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"), "down": ("down_proj",),
}  # fmt: skip
LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4}
SIZES = {
    128: {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4},
    64: {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4},
}
WARM, LEARNING_RATE = 150, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.saved_in_fp8", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--only", choices=["gradients", "training"])
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "int8"],
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--width", type=int, choices=list(SIZES), default=128, help="of the models that are trained"
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="train on the bytes of this file instead of Python's standard library",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/saved_in_fp8"))
    parser.add_argument("--results", type=Path, default=RESULTS / "saved_in_fp8.jsonl")
    parser.add_argument("--quick", action="store_true", help="nothing is recorded")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds, options.recipes = 20, [0], ["fp8-current"]
    if options.only != "training":
        rows = list(gradients(options.recipes, options.seeds, 10 if options.quick else WARM))
        for row in rows:
            print(row)
        if not options.quick:
            record("saved-in-fp8-gradients", rows, options.results)
    if options.only != "gradients":
        text = str(options.text or "")
        folder = options.output / "-".join(
            [f"{options.steps}-steps", str(options.width), Path(text).stem or "stdlib"]
        )
        settings = {"steps": options.steps, "width": options.width, "text": text}
        found = Experiment(train, SAVES, options.seeds, settings, folder).results(options.jobs)
        same = {
            "steps": options.steps,
            "sizes": SIZES[options.width],
            "text": Path(text).name or "standard library",
        }
        lines = [line | same for line in summarize(found, ["loss"], BASELINE)]
        judged = verdicts(found)
        for line in [*lines, *map(seeds_text.sentences, judged)]:
            print(line)
        if not options.quick:
            record("saved-in-fp8-training", lines, options.results)
            record(
                "saved-in-fp8-verdicts", [each.numbers() | same for each in judged], options.results
            )


def verdicts(found: list[Figures]) -> list[SeedComparison]:
    """On each `save` beside "exact", over seeds."""
    runs = [
        Runs(
            name=save,
            values={each["seed"]: each["loss"] for each in found if each["recipe"] == save},
        )
        for save in SAVES
    ]
    return judge_all(runs, "loss")


def gradients(names: list[str], seeds: list[int], warm: int) -> Iterator[dict[str, Any]]:
    """For each recipe and kind of parameter: SQNR in dB of each `save`, the mean over seeds, and the most that it loses in one."""
    import narrowgauge as ng

    torch.set_num_threads(1)
    text = corpus()
    found: dict[tuple[str, str, str], list[float]] = {}
    for seed in seeds:
        model = language_model(LARGE, seed)
        for _ in optimized(model, text, warm, seed):
            pass
        batch = batch_of(text, torch.Generator().manual_seed(1000 + seed))
        truth = gradient(model, batch)
        state = model.state_dict()
        for name in names:
            losses = set()
            for save in SAVES:
                narrow = language_model(LARGE, seed)
                narrow.load_state_dict(state)
                ng.convert(narrow, name, fuse=True, save=save)
                for _ in range(2):  # a window knows the amax of the step before
                    got = gradient(narrow, batch)
                    losses.add(float(loss(narrow, batch).detach()))
                    ng.advance(narrow)
                for kind, words in KINDS.items():
                    found.setdefault((name, kind, save), []).append(sqnr_db(truth, got, words))
            assert len(losses) <= 2, losses  # those of a window's two steps, the same for both
    for name in names:
        for kind in KINDS:
            values = {save: found[name, kind, save] for save in SAVES}
            lost = {
                f"{save}_most_lost_db": round(
                    max(a - b for a, b in zip(values["exact"], values[save], strict=True)), 2
                )
                for save in SAVES[1:]
            }
            means = {f"{save}_db": round(statistics.mean(each), 2) for save, each in values.items()}
            yield {"recipe": name, "parameters": kind, "seeds": seeds, **means, **lost}


def sqnr_db(truth: dict[str, Tensor], got: dict[str, Tensor], words: tuple[str, ...]) -> float:
    chosen = [name for name in truth if any(word in name for word in words)]
    signal = sum(float(truth[name].double().square().sum()) for name in chosen)
    noise = sum(
        float((got[name].double() - truth[name].double()).square().sum()) for name in chosen
    )
    return 10 * math.log10(signal / noise)


def gradient(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, batch).backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def train(name: str, seed: int, steps: int, width: int, text: str) -> dict[str, float]:
    """One run of `fp8-current` with save=name."""
    import narrowgauge as ng

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ids = torch.tensor(list(Path(text).read_bytes())) if text else corpus()
    held_out, training = ids[: len(ids) // 20], ids[len(ids) // 20 :]
    model = language_model(SIZES[width], seed)
    ng.convert(model, "fp8-current", fuse=True, save=name)  # type: ignore[arg-type]
    for _ in optimized(model, training, steps, seed):
        ng.advance(model)
    with torch.no_grad():
        batches = held_out[: 64 * 8 * 64].view(-1, 8, 64)
        return {"loss": statistics.mean(float(loss(model, batch)) for batch in batches)}


def language_model(sizes: dict[str, int], seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, num_hidden_layers=4, use_cache=False, **sizes)
    )


def optimized(model: nn.Module, text: Tensor, steps: int, seed: int) -> Iterator[int]:
    """AdamW, warm-up over a tenth and half a cosine, gradients clipped at norm 1; yields after each step."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(
                (step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        loss(model, batch_of(text, draw)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step


def batch_of(text: Tensor, draw: torch.Generator) -> Tensor:
    places = torch.randint(0, len(text) - 64, (8,), generator=draw)
    return torch.stack([text[place : place + 64] for place in places.tolist()])


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


if __name__ == "__main__":
    main()
