"""Generators of the current GPU, with CPU generators in place of those of two GPUs (exact)."""

from __future__ import annotations

import torch

from narrowgauge.ops.rng import seed_of


def test_a_device_without_an_index_is_the_current_gpu(monkeypatch):
    seeded = [torch.Generator() for _ in range(2)]
    for index, generator in enumerate(seeded):
        generator.manual_seed(10 + index)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(seeded))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert seed_of(torch.device("cuda")) == 11
    assert [seed_of(torch.device("cuda", index)) for index in range(2)] == [10, 11]
    assert seed_of(torch.device("cpu")) == torch.initial_seed()
