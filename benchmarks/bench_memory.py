"""What each memory technique saves and costs: a 6-layer, 384-wide Llama of 4096 tokens vocabulary, forward, loss and backward in float32.

    make bench-memory

Cases, all in one run and interleaved; the loss is chunked in all but the baseline, so that each row shows its own technique:

    plain             everything kept, whole logits
    chunked-loss      logits in chunks of tokens
    full, every-2, sqrt, selective
                      blocks computed again in backward, the last one left out
    compressed        what blocks keep, in E4M3 by groups of 128
    compressed-full   inputs of recomputed blocks in E4M3
    frozen-half       embedding and layers 0 to 2 do not train

`saved_bytes`: what forward and loss keep for backward, each storage once, parameters not counted. `gradient_sqnr_db`: of all
gradients together against `plain`; infinite (left out) where they are equal to the last bit.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_emulation import VOCABULARY, llama
from benchmarks.harness import RESULTS, measure, record, rows, table

CASES = (
    "plain",
    "chunked-loss",
    "full",
    "every-2",
    "sqrt",
    "selective",
    "compressed",
    "compressed-full",
    "frozen-half",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_memory", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=6, help="even")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    ids = torch.randint(
        0, VOCABULARY, (options.batch, options.tokens), generator=torch.Generator().manual_seed(1)
    )
    plain = llama().train()
    models = {name: prepared(name, copy.deepcopy(plain)) for name in CASES}
    reference = gradients(models["plain"], whole_logits, ids)
    facts = {name: measured(name, model, ids, reference) for name, model in models.items()}
    for fact in facts.values():
        fact["of_plain_bytes"] = fact["saved_bytes"] / facts["plain"]["saved_bytes"]
    timings = measure(
        {name: step(model, loss_of(name), ids) for name, model in models.items()},
        rounds=options.rounds,
        warmup=1,
    )
    lines = [row | facts[row["case"]] for row in rows(timings, baseline="plain")]
    for line in lines:
        line |= {"batch": options.batch, "tokens": options.tokens}
        print(
            f"{line['case']:<16} {line['saved_bytes'] / 2**20:8.1f} MiB kept, {line['of_plain_bytes']:.3f} of plain's"
        )
    print(
        table(
            timings, baseline="plain", work=dict.fromkeys(timings, (float(ids.numel()), "tokens"))
        )
    )
    record("memory", lines, RESULTS / "memory.jsonl")


def prepared(name: str, model: Any) -> Any:
    from narrowgauge import memory

    if name in ("full", "every-2", "sqrt", "selective", "compressed-full"):
        memory.checkpoint(model, name.removeprefix("compressed-"))
    if name.startswith("compressed"):
        memory.compress_activations(model)
    if name == "frozen-half":
        memory.freeze(model, "embed*,layers.0-2")
    return model


def loss_of(name: str) -> Callable[[Any, Tensor], Tensor]:
    return whole_logits if name == "plain" else chunked


def whole_logits(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def chunked(model: Any, ids: Tensor) -> Tensor:
    from narrowgauge.memory import chunked_cross_entropy

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    loss, count = chunked_cross_entropy(hidden, model.lm_head.weight, ids)
    return loss / count


class Loss(torch.nn.Module):
    """The model and its loss as one module, for `saved_bytes`."""

    def __init__(self, model: Any, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.model, ids)


def measured(name: str, model: Any, ids: Tensor, reference: dict[str, Tensor]) -> dict[str, Any]:
    """Bytes kept, and how near the gradients are to the plain model's."""
    from narrowgauge.memory import saved_bytes

    kept = saved_bytes(Loss(model, loss_of(name)), ids).total
    found = gradients(model, loss_of(name), ids)
    noise = sum(float((found[key] - reference[key]).double().square().sum()) for key in found)
    signal = sum(float(reference[key].double().square().sum()) for key in found)
    sqnr_db = 10 * math.log10(signal / noise) if noise else None
    return {"saved_bytes": kept, "gradient_sqnr_db": sqnr_db}


def gradients(model: Any, loss: Callable[[Any, Tensor], Tensor], ids: Tensor) -> dict[str, Tensor]:
    loss(model, ids).backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def step(model: Any, loss: Callable[[Any, Tensor], Tensor], ids: Tensor) -> Callable[[], None]:
    def run() -> None:
        loss(model, ids).backward()
        model.zero_grad(set_to_none=True)

    return run


if __name__ == "__main__":
    main()
