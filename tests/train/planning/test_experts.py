"""`narrowgauge plan` of models with fused experts, whose products torch's own fake implementation refuses in float32 (exact)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.ops.registry import Device
from narrowgauge.optim.precision import PRECISIONS
from narrowgauge.plan.trace import recording
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.planning import command, counts
from tests.raising import raises

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 300, "max_position_embeddings": 64, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "n_group": 1,
    "topk_group": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
}  # fmt: skip
FUSED = (
    "afmoe", "cohere2_moe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "llama4_text", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "qwen3_5_moe_text",
)  # fmt: skip


def planned(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in mapping:
        pytest.skip(f"this transformers has no {kind}")
    known = inspect.signature(mapping[kind].__init__).parameters
    mapping[kind](**{key: value for key, value in SIZES.items() if key in known}).save_pretrained(
        folder
    )
    settings = {
        "model": str(folder),
        "from_scratch": True,
        "device": "cpu",
        "batch_size": 2,
        "sequence_length": 32,
        **changes,
    }
    config = resolved(TrainConfig(**settings))
    return command.answered(
        config, "", "", table=False, full=True, measure=False, tell=lambda *_: None
    )


@pytest.fixture(autouse=True)
def _no_kept_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plans"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "fp8-delayed"])
def test_a_mixture_of_experts_is_planned_in_the_default_precision(
    tmp_path: Path, recipe: str
) -> None:
    found = planned("mixtral", tmp_path, recipe=recipe)
    assert found["allocated_bytes"] > 0
    [note] = [each for each in found["notes"] if "experts" in each]
    where = (
        "4 parameters (the first: model.layers.0.mlp.experts.gate_up_proj, 4 experts of 96 x 32)"
    )
    assert (where in note) == (recipe == "none")
    assert note.endswith("counted in float32") == (recipe == "none")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUSED)
def test_every_mixture_of_experts_is_planned(kind: str, tmp_path: Path) -> None:
    assert planned(kind, tmp_path, recipe="fp8-delayed")["allocated_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mixture_of_experts_is_planned_in_every_precision(precision: str, tmp_path: Path) -> None:
    found = planned("mixtral", tmp_path, recipe="fp8-current", precision=precision)
    assert found["allocated_bytes"] > 0


def test_a_model_that_takes_no_step_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose sizes do not fit each other, of which transformers raises whatever its products do."""

    def fails(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\n(64x32 and 48x32)")

    monkeypatch.setattr(counts, "forecast", fails)
    with raises(ConfigError, "plan.step-fails"):
        planned("llama", tmp_path, recipe="bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outer", ["rows", "contracted", "batch"])
def test_a_grouped_product_has_the_form_of_the_real_one(dtype: torch.dtype, outer: str) -> None:
    """Rows of groups by a matrix for each, their weights' gradient, and a batch: shape, type and strides of torch's CPU kernel."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    lhs = {"rows": (24, 32), "contracted": (16, 24), "batch": (3, 8, 32)}[outer]
    rhs = {"rows": (3, 32, 16), "contracted": (24, 32), "batch": (3, 32, 16)}[outer]
    ends = None if outer == "batch" else [8, 16, 24]

    def product() -> torch.Tensor:
        offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(
            torch.ones(lhs, dtype=dtype), torch.ones(rhs, dtype=dtype), offs=offsets
        )

    with recording(Device("cpu", (0, 0))):
        counted = product()
        form = counted.shape, counted.dtype, counted.stride()
    real = product()
    assert form == (real.shape, real.dtype, real.stride())
