"""Transfer an optimizer state and its weights to an optimizer with other state formats.

    w, m, v = decoded values of the old state (`moments`, `masters`), in float32
    new state = their codes, rounded to nearest

A parameter whose formats do not change keeps its tensors bit for bit. Rounding is to nearest,
although a training step rounds stochastically. The transfer happens once, and the nearest code has
half the error. The reported loss compares the new values with the decoded old values. Both
optimizers need the same rule and plain tensors; DTensors are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.optim import masters, param_groups, rules, states
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.moments import NEAREST, States
from narrowgauge.optim.step import ParamStep, as_tiles, decode_rows, new_state, write_rows

if TYPE_CHECKING:
    from narrowgauge.optim.rules import Rule


@dataclass(frozen=True)
class StateFormat:
    """Format of one parameter in an optimizer: rule, moment formats and master."""

    rule: Rule
    states: States
    master: masters.Master


@dataclass
class Loss:
    """Rounding loss of one quantity (the weights or one moment) over all tensors.

    tensors        number of tensors
    changed        number of tensors with at least one changed value
    signal, noise  sums of squares of the old values and of the differences, for the error in dB
    """

    tensors: int = 0
    changed: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def see(self, before: Tensor, after: Tensor) -> None:
        before, after = before.double(), after.double().to(before.device)
        self.tensors += 1
        self.changed += not torch.equal(before, after)
        self.signal += float(before.square().sum())
        self.noise += float((before - after).square().sum())

    def __str__(self) -> str:
        if not self.changed:
            return "exact"
        ratio = (
            f", {10 * math.log10(self.signal / self.noise):.0f} dB"
            if self.signal and self.noise
            else ""
        )
        return f"rounded in {self.changed} of {self.tensors} tensors{ratio}"


@dataclass
class Transferred:
    """Result of `transfer`.

    losses        Loss of the weights and of each moment, by name
    states        number of parameters that had a state
    unchanged  number of parameters whose weight and state were copied bit for bit
    """

    losses: dict[str, Loss] = field(default_factory=dict)
    states: int = 0
    unchanged: int = 0

    def see(self, name: str, before: Tensor, after: Tensor) -> None:
        self.losses.setdefault(name, Loss()).see(before, after)

    def words(self) -> list[str]:
        """One clause for each quantity."""
        return [f"{name} {loss}" for name, loss in self.losses.items()]


def format_of(
    optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any]
) -> StateFormat:
    """Return the format in which `optimizer` stores `parameter`.

    Optimizers of torch are taken for AdamW with float32 moments and float32 weights.
    """
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return StateFormat(rules.ADAMW, states.named("fp32"), None)
    rule = rules.get(group["rule"], {}) if "rule" in group else optimizer.rule
    kept = states.named(param_groups.state_format(parameter, group)[0])
    master = (
        None
        if parameter.dtype == torch.float32
        else param_groups.master_of(parameter, group, kept.tile)
    )
    return StateFormat(rule, kept, master)


@torch.no_grad()
def transfer(
    source: torch.optim.Optimizer,
    target: torch.optim.Optimizer,
    pairs: Iterable[tuple[Tensor, Tensor]],
) -> Transferred:
    """Copy weights to new parameters and convert their states from `source` to `target`.

    pairs: (parameter of source, parameter of target), with equal shapes.
    Raises ConfigError if the rules differ, because moments of two rules have different meanings.
    """
    found = Transferred()
    before, after = (_groups(optimizer) for optimizer in (source, target))
    for old, new in pairs:
        old_format, new_format = (
            format_of(source, old, before[old]),
            format_of(target, new, after[new]),
        )
        if old_format.rule.name != new_format.rule.name:
            raise ConfigError(
                f"transfer: the state of {old_format.rule.name!r} means nothing to {new_format.rule.name!r}. Keep the rule.",
                code="optim.other-rule",
            )
        # The correction of first moments compares the next step's rate with it.
        if "previous_lr" in before[old] and "previous_lr" in after[new]:
            after[new]["previous_lr"] = before[old]["previous_lr"]
        kept = source.state.get(old, {})
        found.states += bool(kept)
        if old_format == new_format and old.dtype == new.dtype:
            new.copy_(old)
            if kept:
                target.state[new] = {name: _copied(name, x, new) for name, x in kept.items()}
                found.unchanged += 1
            found.see("weights", old, new)
            continue
        values = _decoded(old, old_format, kept) if kept else {"weights": old.detach().float()}
        made = _encoded(new, new_format, values, kept)
        if kept:
            target.state[new] = made
        # The loss includes the master and scale as stored, so the new state is decoded again.
        rounded = _decoded(new, new_format, made)
        for name, value in values.items():
            found.see(name, value, rounded[name])
    return found


def _groups(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def _copied(name: str, x: Any, parameter: Tensor) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().to("cpu" if name == "step" else parameter.device)


def _decoded(parameter: Tensor, form: StateFormat, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decode one parameter: float32 `weights` and moments, each of the parameter's shape."""
    step = ParamStep.of(parameter, form.rule, form.states, form.master, kept)
    rows, columns = step.weight.shape
    tiles, every = -(-columns // step.tile), slice(0, rows)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else as_tiles(x, tiles, step.tile)

    def whole(x: Tensor) -> Tensor:
        return x.flatten(1)[:, :columns].reshape(parameter.shape)

    cut_weight = cut(step.weight)
    assert cut_weight is not None
    weight = masters.load(step.master_kind, cut_weight, cut(step.master), step.master_scale)
    found = {"weights": whole(weight)}
    for name, moment in zip(form.rule.moments, (step.first, step.second), strict=False):
        found[name] = whole(decode_rows(moment, every, columns, tiles, step.tile, weight))
    return found


def _encoded(
    parameter: Tensor, form: StateFormat, values: dict[str, Tensor], kept: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Write the weight into `parameter` and return a new state with the moments in `values`.

    Moments missing in `values` stay zero.
    """
    made = new_state(parameter, form.rule, form.states, form.master, parameter.device)
    step = ParamStep.of(parameter, form.rule, form.states, form.master, made)
    rows, columns = step.weight.shape
    tiles, every = -(-columns // step.tile), slice(0, rows)

    def cut(x: Tensor) -> Tensor:
        return as_tiles(x.to(parameter.device).reshape(rows, columns), tiles, step.tile)

    weight, copy, scale = _stored(step.master_kind, cut(values["weights"]), parameter.dtype)
    parameter.copy_(weight.flatten(1)[:, :columns].reshape(parameter.shape))
    if step.master is not None and copy is not None:
        step.master.copy_(copy.flatten(1)[:, :columns])
    if step.master_scale is not None and scale is not None:
        step.master_scale.copy_(scale)
    for name, moment in zip(form.rule.moments, (step.first, step.second), strict=False):
        if name in values:
            x = cut(values[name])
            codes = moment.format.encode(
                x, torch.full(x.shape, NEAREST, dtype=torch.int32, device=x.device)
            )
            write_rows(moment, codes, every, columns, None)
    if "step" in kept:
        made["step"].copy_(kept["step"])
    return made


def _stored(
    kind: masters.Master, x: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Round like `masters.store`, but to nearest instead of stochastically."""
    if kind == "stochastic":
        return masters.rounded(x, dtype), None, None
    if kind == "fp16-scaled":
        # A constant 0.5 in place of the random number turns stochastic rounding into rounding to
        # nearest.
        codes, scale = masters.encode_scaled(x, torch.full_like(x, 0.5))
        return masters.rounded(masters.decode_scaled(codes, scale), dtype), codes, scale
    # The remaining kinds use neither the noise key (0) nor the element index (x).
    return masters.store(kind, x, dtype, 0, x)
