"""The self-check of attention in E4M3 notices kernels that are wrong in one place (exact)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops import attention
from narrowgauge.ops.selfcheck import examine

KIND = ((torch.bfloat16,) * 3, 64, 64, "", False)


def without_the_last_key(q, k, v, *rest):
    return attention.reference(q, k[..., :-1, :], v[..., :-1, :], *rest)


def scale_of_a_block_off(q, k, v, *rest):
    v = torch.cat([v[..., : attention.BLOCK, :], 1.05 * v[..., attention.BLOCK :, :]], dim=-2)
    return attention.reference(q, k, v, *rest)


def keys_of_another_head(q, k, v, *rest):
    return attention.reference(q, k.flip(1), v, *rest)


@pytest.mark.parametrize("run", [without_the_last_key, scale_of_a_block_off, keys_of_another_head])
def test_a_wrong_kernel_is_noticed(run):
    result = examine("attention", run, attention.CHECK, KIND, torch.device("cpu"))
    assert result.reason is not None and result.worst > 1


def test_the_definition_passes():
    result = examine("attention", attention.reference, attention.CHECK, KIND, torch.device("cpu"))
    assert result.reason is None and result.worst == 0
