"""Linears and Llamas as each contender makes them: plain, converted by narrowgauge, converted by torchao."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import narrowgauge as ng
from benchmarks.gpu.bench import Bench


def converted(model: nn.Module, contender: str, bench: Bench, tokens: int) -> nn.Module:
    """The model as a contender has it.

    contender  "bf16" (as it is), "bf16-liger", "te-delayed" or "te-current" (of a list of Linears), "torchao-tensorwise",
               "torchao-rowwise", "auto", or a recipe of narrowgauge; one followed by "-fused" has norms and activations cast what they
               compute
    """
    if contender == "bf16":
        return model
    if contender == "bf16-liger":
        return _liger(model)
    if contender.startswith("te-"):
        return _transformer_engine(model)
    if contender.startswith("torchao-"):
        return _torchao(model, contender.removeprefix("torchao-"), bench)
    recipe = contender.removesuffix("-fused")
    return ng.convert(model, recipe, tokens=tokens, fuse=recipe != contender)


def _liger(model: nn.Module) -> nn.Module:
    """With liger-kernel's norm and SwiGLU in this model alone: it also replaces the classes that later models are built of."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    before = {name: getattr(modeling_llama, name) for name in ("LlamaRMSNorm", "LlamaMLP")}
    try:
        apply_liger_kernel_to_llama(
            rope=False,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
            rms_norm=True,
            swiglu=True,
            model=model,
        )
    finally:
        for name, kind in before.items():
            setattr(modeling_llama, name, kind)
    return model


def _transformer_engine(layers: nn.Module) -> nn.Module:
    import transformer_engine.pytorch as te

    found = []
    for layer in layers.children():
        assert isinstance(layer, nn.Linear)
        kind = layer.weight.dtype
        found.append(
            te.Linear(
                layer.in_features,
                layer.out_features,
                bias=False,
                params_dtype=kind,
                device=layer.weight.device,
            )
        )
    return nn.ModuleList(found)


def in_recipe(contender: str) -> AbstractContextManager[object]:
    """Around a forward pass: TransformerEngine is told its recipe there."""
    if not contender.startswith("te-"):
        return nullcontext()
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    chosen = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}[
        contender.removeprefix("te-")
    ]
    context: AbstractContextManager[object] = te.fp8_autocast(enabled=True, fp8_recipe=chosen())
    return context


def _torchao(model: nn.Module, name: str, bench: Bench) -> nn.Module:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(name)
    if bench.device.type != "cuda":
        config = replace(config, emulate=True)

    def wanted(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and not path.endswith("lm_head")

    return convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def llama(bench: Bench, layers: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Layers of the shape of Llama 3 8B (hidden 4096, MLP 14336, 32 heads, 8 of keys and values), a small vocabulary."""
    return _llama(
        bench,
        dtype,
        vocab_size=bench.size(32_000, 256),
        hidden_size=bench.size(4096, 64),
        intermediate_size=bench.size(14_336, 128),
        num_hidden_layers=bench.size(layers, 1),
        num_attention_heads=bench.size(32, 4),
        num_key_value_heads=bench.size(8, 2),
        max_position_embeddings=bench.size(8192, 64),
    )


def small_llama(bench: Bench) -> Any:
    """124 million parameters: hidden 768, MLP 2048, 12 layers of 12 heads, a vocabulary of 25,600; in bfloat16."""
    return _llama(
        bench,
        torch.bfloat16,
        vocab_size=bench.size(25_600, 256),
        hidden_size=bench.size(768, 64),
        intermediate_size=bench.size(2048, 128),
        num_hidden_layers=bench.size(12, 1),
        num_attention_heads=bench.size(12, 4),
        max_position_embeddings=bench.size(1024, 64),
    )


def _llama(bench: Bench, dtype: torch.dtype, **sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(bench.device):
        return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).to(dtype)
