"""Rotary embedding: the definition beside transformers' (exact, but the sign of zero), refusals, and on a GPU all bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.ops import rotary
from narrowgauge.ops.registry import Device
from narrowgauge.ops.selfcheck import examine
from tests.compare import assert_same
from tests.raising import coded, require

DTYPES = [
    (torch.float32,) * 4,
    (torch.bfloat16,) * 4,
    (torch.float16,) * 4,
    (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
]
each_dtypes = pytest.mark.parametrize(
    "dtypes", DTYPES, ids=lambda each: f"{each[0]}-{each[2]}".replace("torch.", "")
)


def turned_by_transformers(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    return llama.apply_rotary_pos_emb(q, k, cos, sin)


@each_dtypes
@pytest.mark.parametrize("transposed", [True, False])
def test_values_and_gradients_are_those_of_transformers(dtypes, transposed):
    q, k, cos, sin = rotary._sample(dtypes, 16, transposed)
    q, k = q.requires_grad_(), k.requires_grad_()
    expected = turned_by_transformers(q, k, cos, sin)
    wanted = (expected[0].dtype, expected[1].dtype)
    found = rotary.reference(q.detach(), k.detach(), cos, sin, wanted, inverse=False)
    assert all(map(torch.equal, found, expected)) and tuple(x.dtype for x in found) == wanted
    given = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
        for x in expected
    ]
    gradients = torch.autograd.grad(expected, (q, k), given)
    own = rotary.reference(*given, cos, sin, (q.dtype, k.dtype), inverse=True)
    assert all(map(torch.equal, own, gradients))


def test_turning_forth_and_back_by_true_angles_is_the_identity():
    q, k, cos, sin = rotary._sample(DTYPES[0], 32, False)
    angles = torch.rand(1, 9, 16)
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    there = rotary.reference(q, k, cos, sin, (torch.float32,) * 2, inverse=False)
    for x, back in zip(
        (q, k), rotary.reference(*there, cos, sin, (torch.float32,) * 2, inverse=True), strict=True
    ):
        torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(there[0].norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize(
    ("device", "dtypes", "head", "is_empty", "expected"),
    [
        (Device("cpu"), DTYPES[0], 64, False, coded("device", "cpu")),
        (Device("cuda", (7, 5)), DTYPES[0], 64, False, coded("capability", "7.5", "8.0")),
        (
            Device("cuda", (9, 0)),
            DTYPES[0],
            63,
            False,
            coded("shape", 512, 63),
        ),
        (
            Device("cuda", (9, 0)),
            DTYPES[0],
            1024,
            False,
            coded("shape", 512, 1024),
        ),
        (
            Device("cuda", (9, 0)),
            (torch.float64,) * 4,
            64,
            False,
            coded("dtype", torch.float64),
        ),
        (Device("cuda", (9, 0)), DTYPES[0], 64, True, coded("shape")),
    ],
)
def test_refusals_say_why(triton_installed, device, dtypes, head, is_empty, expected):
    refusal = rotary.refuse(rotary.RotarySpec(device, dtypes, head, is_empty))
    require(refusal, expected.code, *expected.values)


def test_a_gpu_takes_the_kernel(triton_installed):
    assert (
        rotary.KERNELS.choose(rotary.RotarySpec(Device("cuda", (9, 0)), DTYPES[1], 128)).kernel.name
        == "triton"
    )


@pytest.mark.gpu
@each_dtypes
@pytest.mark.parametrize("head", [8, 64, 80, 128, 256])
def test_the_kernel_passes_its_check(dtypes, head):
    assert (
        examine(
            "rotary", rotary.run_triton, rotary.CHECK, (dtypes, head), torch.device("cuda")
        ).reason
        is None
    )


@pytest.mark.gpu
def test_part_of_a_head_is_turned_and_the_rest_of_memory_stays():
    """Slices of longer heads, as of models that turn only the first quarter."""
    whole = [
        torch.randn(2, 7, heads, 64, device="cuda").bfloat16().transpose(1, 2) for heads in (4, 1)
    ]
    part = [x[..., :16] for x in whole]
    cos, sin = (torch.randn(2, 7, 16, device="cuda").bfloat16() for _ in range(2))
    dtypes = (torch.bfloat16, torch.bfloat16)
    found = rotary.run_triton(*part, cos, sin, dtypes, False)
    for got, x in zip(found, rotary.reference(*part, cos, sin, dtypes, False), strict=True):
        assert_same(got.contiguous(), x.contiguous())
