"""AdamW for a run: weight decay on matrices only, in the form that the precision's rung needs."""

from __future__ import annotations

from typing import Any

import torch
from narrowgauge.train.config import TrainConfig
from torch import nn

from narrowgauge.optim import MasterWeights, Precision, StochasticAdamW


def build_optimizer(config: TrainConfig, model: nn.Module, rung: Precision) -> Any:
    """torch's fused AdamW, on master weights, or the stochastic one. Norms and biases (one axis) are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if rung.update == "stochastic":
        groups = _groups(config, parameters)
        return StochasticAdamW(groups, **_settings(config), seed=config.seed)
    if rung.update == "master":
        return MasterWeights(parameters, lambda masters: _fused(config, masters))
    return _fused(config, parameters)


def _fused(config: TrainConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(config, parameters), **_settings(config), fused=True)


def _settings(config: TrainConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}


def _groups(config: TrainConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
