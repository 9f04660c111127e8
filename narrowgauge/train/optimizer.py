"""Trainable parameters, memory options and optimizer of a run, built from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge import memory
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.checks import refuse_silent_failures
from narrowgauge.optim.optimizers import OPTIMIZERS
from narrowgauge.optim.param_groups import groups
from narrowgauge.optim.shards import is_sharded, local, local_gradient
from narrowgauge.optim.size import state_bytes
from narrowgauge.train.config.settings import TrainConfig, numbers_of_rule

if TYPE_CHECKING:
    from narrowgauge.optim.precision import Precision

_MASTERS = {"plain": None, "master": "fp32", "stochastic": "stochastic"}


def apply_memory_options(
    config: TrainConfig, model: Any, precision: Precision, probe: Callable[[], dict[str, Any]]
) -> list[str]:
    """Applies the settings that save memory to the model, in place. Returns one sentence for each.

    probe  returns inputs of the first step's largest micro-batch; a checkpointing budget is
           measured with them, without advancing generators

    Call it before the optimizer is built.
    """
    notes = []
    if config.freeze:
        # Estimate with our AdamW: torch's has states of the same size, but creates them in its
        # first step. Nothing is allocated here.
        kept = state_bytes(_narrow(config, model, precision))
        notes.append(str(memory.freeze(model, config.freeze, optimizer_bytes=kept.of)))
    if config.compress_activations:
        technique = memory.compress_activations(model)
        assert technique is not None
        notes.append(f"What blocks keep for backward is stored as {technique.cast}.")
    if config.checkpointing != "none":
        inputs = probe()
        with precision.context(next(iter(inputs.values())).device.type):
            report = memory.checkpoint(
                model, config.checkpointing, batch=inputs, loss=lambda output: output[0].sum()
            )
        if config.compile and report.segments:
            # Compile each block: a checkpointed segment is recomputed block by block
            memory.compile_blocks(model)
        notes.append(str(report))
    return notes


def build_optimizer(
    config: TrainConfig, model: nn.Module, precision: Precision
) -> torch.optim.Optimizer:
    """Builds the optimizer of a run.

    Weight decay applies to matrices only, not to norms and biases (one axis).

    AdamW with float32 states, no master weights and ordinary gradients is torch's fused AdamW. All
    other combinations come from `narrowgauge.optim`.

    Raises ConfigError for combinations that would silently learn less than they should (see
    `narrowgauge.optim.checks`).
    """
    is_plain = (
        config.optimizer == "adamw"
        and config.states == "fp32"
        and _master(config, precision) is None
    )
    if is_plain and config.held_gradients == "16bit":
        parts = groups(model, weight_decay=config.weight_decay, embeddings="same")
        plain = [
            {"params": [p for _, p in part["params"]], "weight_decay": part["weight_decay"]}
            for part in parts
        ]
        # With pipeline or tensor parallelism, parameters lie on several meshes, or some on none.
        several = len({_mesh_of(each) for each in model.parameters()}) > 1
        made = LocalAdamW if several else torch.optim.AdamW
        optimizer: torch.optim.Optimizer = made(plain, **_adam_settings(config), fused=True)
    else:
        optimizer = _narrow(config, model, precision)
    refuse_silent_failures(optimizer)
    return optimizer


class LocalAdamW(torch.optim.AdamW):
    """torch's fused AdamW applied to the local shards of DTensors.

    torch's fused kernel accepts neither plain tensors beside DTensors nor DTensors of several
    meshes.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Replaces DTensors in the lists of parameters, gradients and moments by local shards."""
        has_complex: bool = super()._init_group(group, *lists)
        parameters, gradients, *others = lists
        # In place: torch's step uses these list objects after this call.
        gradients[:] = [
            gradient for each in parameters if (gradient := local_gradient(each)) is not None
        ]
        for each in (parameters, *others):
            each[:] = map(local, each)
        return has_complex


def _mesh_of(parameter: Tensor) -> Any:
    return parameter.device_mesh if is_sharded(parameter) else None  # type: ignore[attr-defined]


def _narrow(config: TrainConfig, model: nn.Module, precision: Precision) -> torch.optim.Optimizer:
    parts = groups(model, weight_decay=config.weight_decay, embeddings=config.embedding_states)
    shared: dict[str, Any] = {
        "states": config.states,
        "master": _master(config, precision),
        "seed": config.seed,
    }
    numbers = _adam_settings(config)
    settings = {**numbers, "momentum": numbers["betas"][0]}
    chosen = OPTIMIZERS[config.optimizer]
    known = {name: value for name, value in settings.items() if name in chosen.rule.options}
    return chosen(parts, lr=config.learning_rate, **known, **shared)


def _master(config: TrainConfig, precision: Precision) -> str | None:
    return config.master or _MASTERS[precision.update]


def _adam_settings(config: TrainConfig) -> dict[str, Any]:
    numbers = numbers_of_rule(config)
    return {
        "lr": config.learning_rate,
        "betas": numbers["betas"],
        "eps": numbers["epsilon"],
    }


def cast_in_step(config: TrainConfig, optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    """Makes the optimizer step cast weights for the next forward pass, where it can.

    Returns a reason otherwise, or ''.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return f"{type(optimizer).__name__} of torch writes the weights alone"
    if config.compile:
        return "compiled code casts them in the loops that read them"
    if config.cuda_graph:
        return "CUDA graphs cast them"
    optimizer.cast_weights(model)
    return ""


def cast_summary(optimizer: torch.optim.Optimizer, reason: str) -> list[str]:
    """Describes the weight casts that the optimizer step makes, with reasons for other layers.

    reason  from `cast_in_step`, for an optimizer of torch
    """
    casting = optimizer.casting if isinstance(optimizer, LowPrecisionOptimizer) else None
    return [f"none: {reason}"] if casting is None else casting.summary()
