"""What `convert` alone does to the memory of a step: every recipe beside plain bfloat16, counted without a GPU (`narrowgauge.plan`).

    python -m benchmarks.recipe_memory                          every architecture, some layers of real width, every 8-bit and 4-bit recipe
    python -m benchmarks.recipe_memory --models llama-8b        32 layers, one sequence of 4,096 tokens: seconds a recipe
    python -m benchmarks.recipe_memory --frozen                 the same with a base that does not train, in 16 bits and as codes

bfloat16 weights, torch's fused AdamW, whole logits, nothing fused, no checkpointing: the peak of the second step, bytes as asked for.
Devices are pretended: an H100, for MX and NV formats a B200, which has units for them. A row holds the peak and its parts (weights,
codes, gradients, states, saved, head, batch, transient), and the same of bfloat16 beside it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge import recipes
from narrowgauge.ops.registry import Device
from narrowgauge.plan import Step, count
from narrowgauge.train.attention import use_attention_of_whole_rows

GIB = 2**30
Prepare = Callable[[Any], object]
DEVICES = {
    "h100": Device("cuda", (9, 0), cuda=(12, 9)),
    "b200": Device("cuda", (10, 0), cuda=(12, 9)),
}
TILES = (16, 32)  # of MX and NV formats: units of a B200


@dataclass(frozen=True, kw_only=True)
class Shape:
    """build: of so many layers. batch: what the model is called with, labels among it, of zeros."""

    build: Callable[[int], Any]
    batch: Callable[[], dict[str, Tensor]]
    layers: int


def _causal(config: str, layers: int, rows: int, tokens: int, **sizes: Any) -> Shape:
    def build(layers: int) -> Any:
        made = getattr(transformers, config)(**sizes, num_hidden_layers=layers, use_cache=False)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)

    return Shape(build=build, batch=lambda: _texts(rows, tokens), layers=layers)


def _bert(layers: int) -> Any:
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return transformers.AutoModelForMaskedLM.from_config(config, dtype=torch.bfloat16)


def _t5(layers: int) -> Any:
    """So many in the encoder and in the decoder."""
    config = transformers.T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=layers, num_decoder_layers=layers, num_heads=16,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)


def _vit(layers: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
    )
    with no_init_weights():  # its draw of the first positions looks at numbers
        return transformers.AutoModelForImageClassification.from_config(
            config, dtype=torch.bfloat16
        )


def _texts(rows: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _images(rows: int) -> dict[str, Tensor]:
    images = torch.zeros(rows, 3, 224, 224, dtype=torch.bfloat16)
    return {"pixel_values": images, "labels": torch.zeros(rows, dtype=torch.int64)}


def _llama(layers: int, tokens: int) -> Shape:
    return _causal(
        "LlamaConfig", layers, 1, tokens, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip


# Widths of Llama 3 8B, Qwen3 4B, Gemma 7B, Pythia 2.8B, BERT large, T5 v1.1 large and ViT large.
MODELS: dict[str, Shape] = {
    "llama": _llama(4, 4096),
    "qwen": _causal(
        "Qwen3Config", 4, 1, 4096, vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "gemma": _causal(
        "GemmaConfig", 4, 1, 4096, vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_attention_heads=16,
        num_key_value_heads=16, head_dim=256,
    ),
    "gpt-neox": _causal(
        "GPTNeoXConfig", 6, 2, 2048, vocab_size=50304, hidden_size=2560, intermediate_size=10240, num_attention_heads=32,
    ),
    "bert": Shape(build=_bert, batch=lambda: _texts(16, 512), layers=8),
    "t5": Shape(build=_t5, batch=lambda: _texts(8, 512), layers=4),
    "vit": Shape(build=_vit, batch=lambda: _images(64), layers=8),
}  # fmt: skip
LARGE: dict[str, Shape] = {"llama-8b": _llama(32, 4096), "llama-8b-8192": _llama(32, 8192)}
PLAIN = "none"
RECIPES = tuple(name for name in recipes.names() if name != "bf16")
# What trains beside a frozen base, and the loss: of whole logits, in chunks of tokens as `narrowgauge train` has it, or over slices.
FROZEN = ("adapters", "adapters, loss in chunks", "adapters, loss over slices", "head")


class Adapter(nn.Module):
    """A Linear with a low-rank product beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(rank, base.in_features, dtype=base.weight.dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def device_for(recipe: str) -> str:
    """The one that has units for its formats."""
    casts = (
        []
        if recipe == PLAIN
        else [c for pair in recipes.get(recipe).roles().values() for c in pair if c is not None]
    )
    return "b200" if any(cast.tile[1] in TILES for cast in casts) else "h100"


def step(
    shape: Shape,
    recipe: str,
    prepare: Prepare | None = None,
    loss_in: str = "whole",
    **options: Any,
) -> Callable[[], Step]:
    """The step that is counted. prepare: what is done with the model behind `convert`; loss_in: whole, chunks, slices."""

    def build() -> Step:
        model = shape.build(shape.layers).train()
        batch = shape.batch()
        if recipe != PLAIN:
            ng.convert(model, recipe, **options)
        if prepare is not None:
            prepare(model)
        use_attention_of_whole_rows(model, batch)
        optimizer = torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad], fused=True
        )

        def loss() -> Tensor:
            if loss_in == "whole":
                whole: Tensor = model(**batch).loss
                return whole
            hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
            targets = batch["labels"][:, 1:]
            total, tokens = ng.memory.chunked_cross_entropy(
                hidden[:, :-1],
                model.lm_head.weight,
                targets,
                slices=loss_in == "slices",
                checked=True,
            )
            return total / tokens

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            if recipe != PLAIN:
                ng.advance(model)

        def kept() -> list[Tensor]:
            return [
                each
                for state in optimizer.state.values()
                for each in state.values()
                if torch.is_tensor(each)
            ]

        return Step(model, loss, update, kept, batch)

    return build


def counted(shape: Shape, recipe: str, device: str, **options: Any) -> dict[str, Any]:
    """{"peak": bytes, "parts": part -> bytes at the peak} of the second step."""
    found = count(step(shape, recipe, **options), DEVICES[device])
    peak, parts = found.peak(found.second)
    return {"peak": peak, "parts": parts}


def frozen(recipe: str, case: str, codes: bool) -> dict[str, Any]:
    """A Llama of 8 billion parameters, fused, of which a case of FROZEN trains: adapters of q and v, or the head."""

    def prepare(model: Any) -> None:
        if case == "head":
            ng.memory.freeze(model, "model.*", codes=codes)
            return
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        names = "embed_tokens,lm_head,norm,*_layernorm,*.base,k_proj,o_proj,*.mlp"
        ng.memory.freeze(model, names, codes=codes)

    device = device_for(recipe)
    loss_in = next((each for each in ("chunks", "slices") if each in case), "whole")
    return counted(LARGE["llama-8b"], recipe, device, prepare=prepare, loss_in=loss_in, fuse=True)


def row(
    name: str, shape: Shape, recipe: str, beside: dict[str, Any], device: str
) -> dict[str, Any]:
    """beside: what was counted of plain bfloat16."""
    found = counted(shape, recipe, device)
    return {
        "model": name, "layers": shape.layers, "recipe": recipe, "pretended": device, "peak_bytes": found["peak"], "parts": found["parts"],
        "bf16_peak_bytes": beside["peak"], "bf16_parts": beside["parts"], "of_bf16": round(found["peak"] / beside["peak"], 5),
    }  # fmt: skip


def main() -> None:
    known = MODELS | LARGE
    parser = argparse.ArgumentParser(
        prog="benchmarks.recipe_memory", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=list(known), default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument(
        "--frozen",
        action="store_true",
        help="a frozen base beside adapters, or below a head that trains",
    )
    parser.add_argument("--dry-run", action="store_true", help="print and write no rows")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if options.frozen:
        rows = []
        for recipe, case in itertools.product(options.recipes, FROZEN):
            whole, coded = (frozen(recipe, case, codes) for codes in (False, True))
            peaks = {
                "peak_bytes": coded["peak"],
                "peak_bytes_in_16_bits": whole["peak"],
                "parts": coded["parts"],
            }
            rows.append(
                {
                    "model": "llama-8b",
                    "recipe": recipe,
                    "pretended": device_for(recipe),
                    "trains": case,
                }
                | peaks
            )
            print(
                f"{recipe:15} {case:28} {coded['peak'] / GIB:7.3f} GiB, in 16 bits {whole['peak'] / GIB:7.3f}",
                flush=True,
            )
        if not options.dry_run:
            record("frozen_memory", rows, RESULTS / "recipe_memory.jsonl")
        return
    for name in options.models:
        beside = counted(known[name], PLAIN, "h100")
        print(f"{name:14} {'bfloat16':15} {beside['peak'] / GIB:8.3f} GiB", flush=True)
        rows = []
        for recipe in options.recipes:
            rows.append(row(name, known[name], recipe, beside, device_for(recipe)))
            print(as_text(rows[-1]), flush=True)
        if not options.dry_run:
            record("recipe_memory", rows, RESULTS / "recipe_memory.jsonl")


def as_text(found: dict[str, Any]) -> str:
    parts, beside = found["parts"], found["bf16_parts"]
    changes = [
        f"{name} {(parts[name] - beside[name]) / GIB:+.3f}"
        for name in parts
        if parts[name] != beside[name]
    ]
    return (
        f"{found['model']:14} {found['recipe']:15} {found['peak_bytes'] / GIB:8.3f} GiB on {found['pretended']}, "
        f"{found['of_bf16']:.4f} of bfloat16's; {', '.join(changes)}"
    )


if __name__ == "__main__":
    main()
