"""What is read of the operands of a step: rows are tokens and channels are features (exact)."""

from __future__ import annotations

import torch

import narrowgauge as ng
from narrowgauge.train.tensor_stats import watched


def test_spreads_are_over_the_tokens_of_a_gradient_and_the_features_of_an_input():
    """48 tokens, 32 features in and 64 out. The product for the weight reads the transposed gradient."""
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(32, 64)), "fp8-row")
    with watched(model) as events:
        model(torch.randn(48, 32, requires_grad=True)).square().sum().backward()
    spreads = {role: fields for (_, role), (kind, fields) in events.items() if kind == "spread"}
    assert spreads["spread of gy"]["rows"]["count"] == 48
    assert spreads["spread of x"]["channels"]["count"] == 32
    tensors = {fields["role"] for kind, fields in events.values() if kind == "tensor"}
    assert tensors == {"x", "w", "gy"}
