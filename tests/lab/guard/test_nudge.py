"""A nudge moves weights by one unit in the last place, and no other tensor (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowgauge.lab.guard.check import nudge


@pytest.mark.parametrize(("dtype", "every"), [(torch.float32, 2), (torch.bfloat16, 64)])
def test_every_so_many_weights_move_by_one_unit_in_the_last_place(dtype, every):
    model = nn.Sequential(nn.Linear(128, 64), nn.BatchNorm1d(64)).to(dtype)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    nudge(model)
    for name, parameter in model.named_parameters():
        expected = before[name].clone()
        expected[..., ::every] = torch.nextafter(
            expected[..., ::every], torch.tensor(torch.inf, dtype=dtype)
        )
        assert torch.equal(parameter, expected) and not torch.equal(parameter, before[name])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
