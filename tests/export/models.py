"""Tiny random models of transformers for tests of exports, and the operands of their forward passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge import QLinear, QTensor, dequantize, recipes

IDS = torch.arange(24).reshape(2, 12)
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
UNROTATED_MXFP4 = recipes.MXFP4.with_gemm(output=replace(recipes.MXFP4.output, rotate=None))


def llama(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def qwen2(**changes: Any) -> Any:
    """Biases in q, k and v, and a tied head."""
    import transformers

    torch.manual_seed(0)
    sizes = SIZES | {"tie_word_embeddings": True} | changes
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    for name, each in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(each)
    return model


def bert(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = transformers.BertConfig(**(sizes | {"num_labels": 3} | changes))
    return transformers.BertForSequenceClassification(config)


def mixtral(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 4} | changes
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def operands(model: Any) -> dict[str, Tensor]:
    """Name of each Linear with a recipe -> [N, K] float32 by which the whole model's forward multiplies."""
    found: dict[str, Tensor] = {}
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, QLinear) and each.recipe is not None
    }

    def looking(name: str) -> Any:
        def look(gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
            if (gemm, role) == ("output", "w"):
                found[name] = dequantize(operand) if isinstance(operand, QTensor) else operand

        return look

    for name, layer in layers.items():
        layer.observer = looking(name)
    with torch.no_grad():
        model.eval()(IDS)
    for layer in layers.values():
        layer.observer = None
    return found
