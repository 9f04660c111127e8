"""Which functions are found in the blocks of transformers (exact), and that their numbers stay (exact)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.fuse import fusions
from tests.compare import assert_same
from tests.selection import quick

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_kernel")  # test_values.py has the kernels of CPUs

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = SIZES | {
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
T5 = {
    "vocab_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
IDS = torch.arange(24).reshape(2, 12) % 64


def decoder(config: str, model: str, **more: Any) -> Callable[[], nn.Module]:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return lambda: getattr(transformers, model)(
        getattr(transformers, config)(**(DECODER | tokens | more))
    )


def neox() -> nn.Module:
    sizes = SIZES | {
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)
    )


def t5(**more: Any) -> Callable[[], nn.Module]:
    return lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**(T5 | {"decoder_start_token_id": 0} | more))
    )


# -> functions that are fused, and how many norms that no Linear reads: of queries and keys, between sublayers and their sums, at the end
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], int]] = {
    "qwen2": (
        decoder("Qwen2Config", "Qwen2ForCausalLM"),
        {"rms-norm": 4, "swiglu": 2, "rotary": 2},
        1,
    ),
    "qwen3": (
        decoder("Qwen3Config", "Qwen3ForCausalLM"),
        {"rms-norm": 4, "swiglu": 2, "rotary": 2},
        5,
    ),
    "gemma2": (
        decoder("Gemma2Config", "Gemma2ForCausalLM"),
        {"gemma-norm": 4, "geglu-tanh": 2, "rotary": 2},
        5,
    ),
    "gemma3": (
        decoder("Gemma3TextConfig", "Gemma3ForCausalLM"),
        {"gemma-norm": 4, "geglu-tanh": 2, "rotary": 2},
        9,
    ),
    "neox": (neox, {"layer-norm": 4, "gelu": 2}, 1),
    "vit": (vit, {"layer-norm": 4, "gelu": 2}, 1),
    "t5": (t5(), {"rms-norm": 10, "relu": 4}, 2),
    "t5-gated": (t5(feed_forward_proj="gated-gelu"), {"rms-norm": 10, "geglu-tanh": 4}, 2),
}


def built(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return ng.convert(model, "fp8-current", **options)


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    if isinstance(model, transformers.ViTForImageClassification):
        loss = model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss
    else:
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("name", quick(["gemma3", "t5-gated"], MODELS))
def test_functions_of_the_usual_blocks_are_found(name):
    found = fusions(built(name, fuse=True))
    wanted = {function: number for function, number in MODELS[name][1].items() if number}
    fused = Counter(each.function for each in found if not each.reason)
    fused.pop("attention"), fused.pop("rotary", None), wanted.pop("rotary", None)
    assert fused == wanted, "\n".join(map(str, found))
    unread = [each for each in found if getattr(each.reason, "code", "") == "no-reader"]
    assert len(unread) == MODELS[name][2], "\n".join(map(str, unread))


@pytest.mark.parametrize("name", quick(["neox", "t5"], MODELS))
def test_their_casts_are_read_and_their_numbers_stay(name):
    model = built(name, fuse=True)
    for a, b in zip(gradients(built(name)), gradients(model), strict=True):
        assert_same(a, b)
    assert all(
        each.unused_cast_share == 0 for each in fusions(model) if each.readers and not each.reason
    )


@pytest.mark.parametrize("name", quick(["gemma2"], MODELS))
@pytest.mark.parametrize("save", ["exact", "fp8", "int8"])
def test_they_train_with_either_save(name, save):
    """By the definition: within the roundings of float32 of the own code where saves are exact; near it in FP8."""
    expected, found = gradients(built(name)), gradients(built(name, fuse=True, save=save))
    assert float((found[0] - expected[0]).abs()) <= 1e-5 * float(expected[0])
    for a, b in zip(expected[1:], found[1:], strict=True):
        assert float((a - b).norm()) <= (0.02 if save == "exact" else 0.4) * float(a.norm()) + 1e-8


def test_a_dropout_between_a_function_and_its_reader_is_seen():
    torch.manual_seed(0)
    model = ng.convert(t5(dropout_rate=0.1)(), "fp8-current", fuse=True)
    reasons = {each.name: each.reason for each in fusions(model)}
    name = "encoder.block.0.layer.1.DenseReluDense"
    assert reasons[f"{name}.act"] == f"{name}.dropout lies between it and its reader"
