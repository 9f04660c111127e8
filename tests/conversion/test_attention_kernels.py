"""Kernels of attention: torch's own choice on this device, and the cause of a slower one (exact)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.conversion.attention_kernels import AttentionCall, sentence
from narrowgauge.conversion.coverage import coverage

TOKENS, WIDTH, HEADS = 6, 32, 4
CAUSAL = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)


class SelfAttention(nn.Module):
    """Attention over [batch, tokens, width] with given settings, or written out."""

    def __init__(
        self, is_written_out: bool = False, learns_mask: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        self.qkv, self.is_written_out, self.settings = (
            nn.Linear(WIDTH, 3 * WIDTH),
            is_written_out,
            settings,
        )
        if learns_mask:
            self.bias = nn.Parameter(CAUSAL.clone())

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        if self.is_written_out:
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        mask = getattr(self, "bias", self.settings.get("attn_mask"))
        given = self.settings | {"attn_mask": mask}
        return F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).flatten(2)


def told(**settings: Any) -> str:
    model = nn.Sequential(SelfAttention(**settings), SelfAttention(**settings))
    return coverage(ng.convert(model, "fp8-current"), torch.randn(2, TOKENS, WIDTH)).attention


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def computed_by(**settings: Any) -> str:
    """The kernel that computes such attention, seen by its operators."""
    model = SelfAttention(**settings)
    with Operators() as seen:
        model(torch.randn(2, TOKENS, WIDTH))
    is_flash = "_scaled_dot_product_flash_attention_for_cpu" in seen.names
    assert is_flash != ("_safe_softmax" in seen.names or "_softmax" in seen.names)
    return "flash" if is_flash else "math"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "torch's flash in 2 calls"),
        ({"is_causal": True}, "torch's flash in 2 calls"),
        ({"attn_mask": CAUSAL}, "torch's flash in 2 calls"),
        ({"dropout_p": 0.1}, "torch's math in 2 calls, since dropout excludes flash"),
        ({"learns_mask": True}, "torch's math in 2 calls, since the mask excludes flash"),
        (
            {"learns_mask": True, "dropout_p": 0.1},
            "torch's math in 2 calls, since the mask and dropout exclude flash",
        ),
        ({"is_written_out": True}, "separate products in 2 modules of SelfAttention"),
    ],
    ids=[
        "plain",
        "causal",
        "mask",
        "dropout",
        "learned mask",
        "learned mask and dropout",
        "written out",
    ],
)
def test_the_kernel_that_computes_attention_is_named(
    settings: dict[str, Any], expected: str
) -> None:
    assert told(**settings) == f"Attention: {expected}"
    if "is_written_out" not in settings:
        assert f"torch's {computed_by(**settings)} in" in expected


def test_a_kernel_that_is_switched_off_is_not_named() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert told() == "Attention: torch's math in 2 calls"


def test_describe_and_run_json_say_it() -> None:
    model = ng.convert(SelfAttention(dropout_p=0.1), "fp8-current")
    table = ng.describe(model, batch=torch.randn(2, TOKENS, WIDTH))
    assert table.coverage is not None
    words = "Attention: torch's math in 1 call, since dropout excludes flash"
    assert f"{words}." in " ".join(str(table).split())
    assert json.loads(json.dumps(table.coverage.as_dict()))["attention"] == words


def test_no_attention_is_not_mentioned() -> None:
    model = ng.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8-current")
    table = ng.describe(model, batch=torch.randn(2, WIDTH))
    assert table.coverage is not None and table.coverage.attention == ""
    assert "Attention" not in str(table)


def test_the_type_under_autocast_decides() -> None:
    q = torch.randn(1, HEADS, TOKENS, WIDTH)
    given = {"query": q, "key": q, "value": q, "attn_mask": CAUSAL}
    with torch.autocast("cpu", torch.bfloat16):
        call = AttentionCall.of(given)
    assert call.dtype == torch.bfloat16 and call.mask == (2, torch.bfloat16, False)
    assert AttentionCall.of(given).dtype == torch.float32


def test_grouped_queries_keep_their_sharing() -> None:
    q, k = torch.randn(2, 8, TOKENS, WIDTH), torch.randn(2, 2, TOKENS, WIDTH)
    call = AttentionCall.of({"query": q, "key": k, "value": k, "enable_gqa": True})
    assert call.sharing == 4 and call.kernel == "flash"


def test_a_device_without_kernels_is_not_asked() -> None:
    q = torch.empty(1, HEADS, TOKENS, WIDTH, device="meta")
    call = AttentionCall.of({"query": q, "key": q, "value": q})
    assert call.kernel is None
    assert (
        sentence(nn.Identity(), [call], [])
        == "Attention: torch's attention by a kernel that is not known in 1 call"
    )


def test_a_kernel_of_another_package_is_named_by_the_setting() -> None:
    model = nn.Identity()
    model.config = type("Config", (), {"_attn_implementation": "flash_attention_2"})()
    assert (
        sentence(model, [], []) == "Attention: flash_attention_2, as the model's configuration asks"
    )
