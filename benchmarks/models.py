"""How much of each architecture a recipe reaches, and whether 20 steps stay finite: tiny models of random weights.

    python -m benchmarks.models                        fp8-current, all architectures: three minutes
    python -m benchmarks.models --recipes mxfp8        another recipe; --models Llama BERT   some architectures
    python -m benchmarks.models --page                 write docs/models.md from the newest committed rows, without running

Each model has its own attention, experts, norms and heads, and is two layers of width 64 on a batch of 2 x 32 tokens. At that width
heads and attention weigh otherwise than in a real model: the column `of all but attention and heads` carries over. Counted by
`narrowgauge.conversion.coverage` on the batch that trains; 20 steps of AdamW follow. Needs transformers, and no network.

Signal to noise of a step, in dB: the gradient g of the first step in float32 against that of the recipe from the same weights
and the same dropout, 10 log10(|g|^2 / |g - g_recipe|^2), over all parameters together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # transformers reads it when it is imported
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks.harness import RESULTS, record
from narrowgauge.conversion.coverage import Coverage, coverage

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
WIDTH, INNER, LAYERS, VOCABULARY, TOKENS = 64, 128, 2, 64, 32
STEPS = 20
REACH = 0.85
# Parts of the rest that no recipe is meant for: attention has no weight, heads and routers keep their precision on purpose.
HEADS = ("lm_head", "classifier", "decoder", "embed_out", "gate", "router", "text_projection")


@dataclass(frozen=True)
class Case:
    """An architecture. build: the model; batch: the arguments of its forward."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor | bool]]


def texts() -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (2, TOKENS))
    return {"input_ids": ids, "labels": ids}


def pairs() -> dict[str, Any]:
    return {"input_ids": texts()["input_ids"], "labels": texts()["input_ids"]}


def pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def of(model: str, config: str, batch: Callable[[], Any] = texts, **sizes: Any) -> Case:
    """A model class of transformers by its config."""

    def build() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return made

    return Case(build, batch)


BASE = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = BASE | {"num_key_value_heads": 2}
NARROW = GROUPED | {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}  # fmt: skip
MIXED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
}
TOKENS_OF = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BOTH = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER,
}  # fmt: skip
PATCHES = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def clip() -> nn.Module:
    config = transformers.CLIPConfig(text_config=BASE, vision_config=PATCHES, projection_dim=WIDTH)
    return transformers.CLIPModel(config)


def siglip() -> nn.Module:
    config = transformers.SiglipConfig(
        text_config=BASE | {"projection_size": WIDTH}, vision_config=PATCHES
    )
    return transformers.SiglipModel(config)


def both_inputs() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (2, TOKENS)),
        "pixel_values": torch.randn(2, 3, 32, 32),
        "return_loss": True,
    }


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, INNER, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, LAYERS)


CASES: dict[str, Case] = {
    "GPT-2": of("GPT2LMHeadModel", "GPT2Config", **GPT, bos_token_id=1, eos_token_id=2),
    "Llama": of("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "Mistral": of("MistralForCausalLM", "MistralConfig", **GROUPED),
    "Qwen2": of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "Qwen3": of("Qwen3ForCausalLM", "Qwen3Config", **NARROW),
    "Qwen3-MoE": of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **NARROW, **EXPERTS),
    "Qwen3-Next": of(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", **NARROW, **EXPERTS, **MIXED, shared_expert_intermediate_size=64
    ),
    "Qwen3.5": of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **NARROW, **MIXED),
    "Qwen2-MoE": of(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **GROUPED, **EXPERTS, shared_expert_intermediate_size=64
    ),
    "Mixtral": of("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "OLMoE": of(
        "OlmoeForCausalLM", "OlmoeConfig", **BASE, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2
    ),
    "OLMo-2": of("Olmo2ForCausalLM", "Olmo2Config", **BASE, num_key_value_heads=4),
    "gpt-oss": of(
        "GptOssForCausalLM", "GptOssConfig", **NARROW, num_local_experts=4, num_experts_per_tok=2
    ),
    "DeepSeek-V3": of(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **BASE, **ROUTED, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
    ),
    "Llama 4": of(
        "Llama4ForCausalLM", "Llama4TextConfig", **NARROW, intermediate_size_mlp=INNER, num_local_experts=4,
        interleave_moe_layer_step=1,
    ),
    "Granite-MoE": of("GraniteMoeForCausalLM", "GraniteMoeConfig", **GROUPED, num_local_experts=4),
    "GLM4-MoE": of("Glm4MoeForCausalLM", "Glm4MoeConfig", **NARROW, **ROUTED),
    "Phi-MoE": of("PhimoeForCausalLM", "PhimoeConfig", **GROUPED, num_local_experts=4),
    "Gemma 2": of("Gemma2ForCausalLM", "Gemma2Config", **NARROW),
    "Gemma 3": of("Gemma3ForCausalLM", "Gemma3TextConfig", **NARROW),
    "Phi": of("PhiForCausalLM", "PhiConfig", **BASE),
    "Phi-3": of("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "GPT-NeoX": of("GPTNeoXForCausalLM", "GPTNeoXConfig", **BASE),
    "GPT-J": of("GPTJForCausalLM", "GPTJConfig", **GPT, rotary_dim=8, bos_token_id=1, eos_token_id=2),
    "Falcon": of(
        "FalconForCausalLM", "FalconConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2,
    ),
    "OPT": of(
        "OPTForCausalLM", "OPTConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=WIDTH, **TOKENS_OF,
    ),
    "BLOOM": of("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=4),
    "StarCoder2": of("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED),
    "SmolLM3": of("SmolLM3ForCausalLM", "SmolLM3Config", **GROUPED),
    "Cohere 2": of("Cohere2ForCausalLM", "Cohere2Config", **NARROW),
    "Mamba": of(
        "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8,
        **TOKENS_OF,
    ),
    "Mamba-2": of(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=16,
        num_heads=8, head_dim=16, n_groups=1, chunk_size=16, **TOKENS_OF,
    ),
    "Jamba": of(
        "JambaForCausalLM", "JambaConfig", **GROUPED, num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8,
    ),
    "BERT": of("BertForMaskedLM", "BertConfig", **BASE),
    "ELECTRA": of("ElectraForMaskedLM", "ElectraConfig", **BASE, embedding_size=32),
    "RoBERTa": of("RobertaForMaskedLM", "RobertaConfig", **BASE),
    "ModernBERT": of("ModernBertForMaskedLM", "ModernBertConfig", **BASE),
    "DeBERTa-v2": of(
        "DebertaV2ForMaskedLM", "DebertaV2Config", **BASE, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "T5": of(
        "T5ForConditionalGeneration", "T5Config", pairs, vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=INNER,
        num_layers=LAYERS, num_heads=4, decoder_start_token_id=0,
    ),
    "BART": of(
        "BartForConditionalGeneration", "BartConfig", pairs, **BOTH, max_position_embeddings=128, **TOKENS_OF,
        decoder_start_token_id=2, forced_eos_token_id=None,
    ),
    "ViT": of("ViTForImageClassification", "ViTConfig", pictures, **PATCHES),
    "DINOv2": of(
        "Dinov2ForImageClassification", "Dinov2Config", pictures, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, image_size=32, patch_size=8,
    ),
    "Swin": of(
        "SwinForImageClassification", "SwinConfig", pictures, image_size=32, patch_size=4, embed_dim=32, depths=[1, 1],
        num_heads=[2, 4], window_size=4,
    ),
    "CLIP": Case(clip, both_inputs),
    "SigLIP": Case(siglip, both_inputs),
    "Whisper": of(
        "WhisperForConditionalGeneration", "WhisperConfig",
        lambda: {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(3, VOCABULARY, (2, 16))},
        **BOTH, **TOKENS_OF, num_mel_bins=16, max_source_positions=32, max_target_positions=64, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "wav2vec 2": of(
        "Wav2Vec2ForCTC", "Wav2Vec2Config",
        lambda: {"input_values": torch.randn(2, 800), "labels": torch.randint(3, VOCABULARY, (2, 6))},
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=INNER,
        conv_dim=[32, 32], conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        pad_token_id=0, mask_time_prob=0.0, layerdrop=0.0,
    ),
    "nn.TransformerEncoder": Case(encoder, lambda: {"src": torch.randn(2, TOKENS, WIDTH)}),
    "nn.Transformer": Case(
        lambda: nn.Transformer(WIDTH, 4, LAYERS, LAYERS, INNER, batch_first=True, dropout=0.0),
        lambda: {"src": torch.randn(2, TOKENS, WIDTH), "tgt": torch.randn(2, TOKENS, WIDTH)},
    ),
}  # fmt: skip


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or the mean square of its output."""
    loss: Tensor | None = getattr(output, "loss", None)
    return output.float().square().mean() if loss is None else loss


def of_weights(found: Coverage) -> float:
    """Share of the products that a recipe is meant for: all but attention, heads and routers."""
    apart = sum(
        share
        for parts in found.wide.values()
        for part, share in parts.items()
        if part == "attention" or part.split(" ")[0] in HEADS
    )
    return found.share / (1 - apart) if apart < 1 else 0.0


def gradient(model: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient by name) of one step. Dropout draws the same in each call."""
    torch.manual_seed(2)
    loss = loss_of(model(**batch))
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return float(loss.detach()), found


def signal_to_noise_db(signal: dict[str, Tensor], other: dict[str, Tensor]) -> float | None:
    """None if the two are equal, or one is not finite."""
    power = sum(float(each.double().square().sum()) for each in signal.values())
    noise = sum(
        float((each.double() - other[name].double()).square().sum())
        for name, each in signal.items()
    )
    is_known = math.isfinite(noise) and math.isfinite(power) and power > 0 and noise > 0
    return 10 * math.log10(power / noise) if is_known else None


def run(name: str, recipe: str) -> dict[str, Any]:
    """One row. Losses that are not finite are None."""
    case, begun = CASES[name], time.perf_counter()
    torch.manual_seed(0)
    model = case.build().train()
    torch.manual_seed(1)
    batch = case.batch()
    wide, signal = gradient(model, batch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ng.convert(model, recipe)
        found = coverage(model, batch)
    gradient_db = signal_to_noise_db(signal, gradient(model, batch)[1])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    finite = all(math.isfinite(each) for each in losses)
    return {
        "model": name,
        "recipe": recipe,
        "share": found.share,
        "of_weights": of_weights(found),
        "sentence": str(found),
        "wide": {kind: dict(parts) for kind, parts in found.wide.items()},
        "loss_wide": wide,
        "gradient_db": gradient_db,
        "losses": [each if math.isfinite(each) else None for each in losses],
        "finite": finite,
        "warnings": sorted({getattr(each.message, "code", "") for each in told} - {""}),
        "transformers": transformers.__version__,
        "seconds": time.perf_counter() - begun,
    }


def page(rows: list[dict[str, Any]]) -> str:
    """docs/models.md of the newest row of each model and recipe."""
    newest = {(row["model"], row["recipe"]): row for row in rows}
    recipes = list(dict.fromkeys(recipe for _, recipe in newest))
    first = [newest[name, recipes[0]] for name in CASES if (name, recipes[0]) in newest]
    reached = sum(row["of_weights"] >= REACH for row in first)
    below = [
        f"{row['model']} ({row['of_weights']:.2f})" for row in first if row["of_weights"] < REACH
    ]
    lines = [
        "# Models",
        "",
        f"This page measures the part of a model that a recipe reaches, on {len(first)} architectures. The models are tiny, with",
        f"random weights (transformers {first[0]['transformers']}). The tables have two shares of the matrix-product operations of a",
        "training step:",
        "",
        "- **share**: operations in low precision, of all operations.",
        "- **of all but attention and heads**: the same without attention, heads and routers, which keep their precision on purpose.",
        f"  {reached} of {len(first)} are at {REACH} or more there. Below are {', '.join(below) or 'none'}, because of scans and",
        "  convolutions over time.",
        "",
        "The chunks of linear attention count as attention. A real model is wider, so its attention and head weigh less.",
        "",
        "Signal to noise, in dB, compares the gradient of the first step with the float32 gradient, over all parameters together. Random",
        "weights show the rounding error of a recipe, not whether a model learns.",
        "",
        "`python -m benchmarks.models` measures and writes this page in three minutes; `--recipes` names other recipes.",
        "[Rows](../benchmarks/results/models.jsonl); [how operations are counted](recipes.md#how-much-is-in-low-precision).",
        "",
    ]
    for recipe in recipes:
        found = [newest[name, recipe] for name in CASES if (name, recipe) in newest]
        finite = sum(row["finite"] for row in found)
        lines += [
            f"## {recipe}",
            "",
            f"{finite} of {len(found)} train {len(found[0]['losses'])} steps of AdamW with finite losses.",
            "",
            "| model | share | of all but attention and heads | what stays | signal to noise | in float32 | first, last step | finite |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in found]
        lines.append("")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    parts = [(share, part) for each in row["wide"].values() for part, share in each.items()]
    left = ", ".join(
        f"{part} {share:.2f}" for share, part in sorted(parts, reverse=True)[:4] if share >= 0.005
    )
    ends = (row["losses"][0], row["losses"][-1])
    losses = ", ".join("not finite" if each is None else f"{each:.4f}" for each in ends)
    decibels = "" if row["gradient_db"] is None else f"{row['gradient_db']:.1f}"
    return (
        f"| {row['model']} | {row['share']:.2f} | {row['of_weights']:.2f} | {left} | {decibels} | {row['loss_wide']:.4f} | {losses} | "
        f"{'yes' if row['finite'] else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(CASES))
    parser.add_argument("--recipes", nargs="*", default=["fp8-current"])
    parser.add_argument("--page", action="store_true", help="write the page from the rows alone")
    given = parser.parse_args()
    path = RESULTS / "models.jsonl"
    if not given.page:
        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        for recipe in given.recipes:
            rows = []
            for name in given.models:
                row = run(name, recipe)
                rows.append(row)
                print(
                    f"{name:22s} {recipe:12s} {row['share']:.2f} {row['of_weights']:.2f} {row['gradient_db']} {row['seconds']:.1f} s",
                    flush=True,
                )
            record("models", rows, path)
    written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    PAGE.write_text(page(written), encoding="utf-8")


if __name__ == "__main__":
    main()
