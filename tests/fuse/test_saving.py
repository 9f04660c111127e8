"""Exact saves change no bit and keep each thing once (exact); those in FP8 stay near (bounded)."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import narrowgauge as ng
from narrowgauge.fuse import fuse
from narrowgauge.fuse.precast import FusedModule
from narrowgauge.memory.measure import saved_bytes
from narrowgauge.ops.mm import plan
from tests.compare import assert_same
from tests.fuse.test_fusing import IDS, MODELS, built, trained
from tests.selection import quick

pytestmark = pytest.mark.usefixtures("no_kernel")


@pytest.fixture
def codes_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: no operand is decoded before its product."""
    monkeypatch.setattr(
        "narrowgauge.nn.plan.plan", lambda gemm, device: replace(plan(gemm, device), expand=None)
    )


def saving(
    name: str, recipe: str, save: str, together: bool = False, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """together: what is kept twice where nothing is made again."""
    model = built(name, recipe, fused=False).to(dtype)
    fuse(model, save)
    if together:
        for module in model.modules():
            if isinstance(forward := module.__dict__.get("forward"), FusedModule):
                forward.save_policy = lambda operand: "both"
    return model


@pytest.mark.parametrize(
    ("name", "recipe", "policy"),
    quick(
        [("llama", "fp8-delayed", None), ("llama", "fp8-row", "full")],
        [(name, recipe, None) for name in MODELS for recipe in ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block")]
        + [("llama", recipe, None) for recipe in ("mxfp8", "int8", "nvfp4", "int4-hq-bs")]
        + [("llama", recipe, policy) for recipe in ("fp8-delayed", "fp8-row") for policy in ("full", "selective", "every-2")],
    ),
)  # fmt: skip
def test_what_is_made_again_has_the_bits_of_what_was_kept(
    name, recipe, policy, codes_are_multiplied
):
    results = []
    for together in (True, False):
        model = saving(name, recipe, "exact", together)
        ng.memory.checkpoint(model, policy, keep_last=False)
        results.append(trained(model))
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(("recipe", "bytes_each"), [("fp8-current", 1), ("fp8-row", 2)])
def test_what_is_kept_once_is_not_kept_twice(recipe, bytes_each, codes_are_multiplied):
    """Of a block: what two norms and an MLP hand to Linears: a tensor's codes with a scale, by rows 16 bits."""
    batch = {"input_ids": IDS}
    kept = [
        saved_bytes(saving("llama", recipe, "exact", each, torch.bfloat16), batch).total
        for each in (True, False)
    ]
    scales = 3 * 4 * (recipe == "fp8-current")
    assert kept[0] - kept[1] == 2 * (bytes_each * IDS.numel() * (64 + 64 + 96) + scales)


def test_what_was_kept_goes_with_the_backward_pass(codes_are_multiplied):
    """Without Python's collector of cycles."""
    model = saving("llama", "fp8-current", "exact")
    kept: list[StorageWeakRef] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(
        lambda layer, given, y: kept.append(StorageWeakRef(y.untyped_storage()))
    )
    gc.collect()
    gc.disable()
    try:
        loss = model(input_ids=IDS, labels=IDS).loss
        assert not kept[0].expired()
        loss.backward()
        del loss
        assert kept[0].expired()
    finally:
        gc.enable()
