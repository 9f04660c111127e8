"""Freezing: which parameters train.

    freeze(model, "embed*,layers.0-3")      these do not train, the others stay as they are
    train_only(model, "lm_head,*.norm")     these train, all others do not

A pattern (see `narrowgauge.structure`) names parameters, or modules with everything below them. Freeze before the optimizer is
built, and give the optimizer the trainable parameters alone.

A frozen parameter has no gradient and no optimizer state; a frozen Linear computes no grad_weight and keeps no input for it.
Backward stops at the lowest trainable layer: below it there is no grad_input either, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from narrowgauge.errors import ConfigError, closest
from narrowgauge.structure import expanded, matches, require_module

ADAMW_STATE_BYTES = 8  # two float32 moments
OptimizerBytes = float | Callable[[nn.Parameter], int]
Patterns = str | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """How many parameters train, and what those that do not would have taken; `print` it."""

    parameters: int
    trainable: int
    gradient_bytes_saved: int  # gradients of frozen parameters, in their dtype
    optimizer_bytes_saved: int  # optimizer state of frozen parameters, by the `optimizer_bytes` that `freeze` was given
    tied: tuple[tuple[str, ...], ...]  # names of each named parameter that has several: frozen, or trained, together

    def __str__(self) -> str:
        gradients, states = self.gradient_bytes_saved / 2**20, self.optimizer_bytes_saved / 2**20
        head = (
            f"{self.trainable:,} of {self.parameters:,} parameters train; the others save {gradients:.3g} MiB of gradients "
            f"and {states:.3g} MiB of optimizer state"
        )
        return "\n".join([head, *(f"tied, so frozen or trained together: {' and '.join(each)}" for each in self.tied)])


def freeze(
    model: nn.Module, patterns: Patterns, *, optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES
) -> FreezeReport:
    """Stops the parameters that `patterns` name from training, in place; all others stay as they are.

    patterns         one string, commas between patterns, or several strings
    optimizer_bytes  for the report: bytes of optimizer state per element, or a function of a parameter such as
                     `ng.optim.state_bytes(ng.optim.AdamW(model, states="8bit")).of`

    Raises ConfigError, before anything is changed, if a pattern matches nothing or if nothing would be left to train.
    """
    named = _named(model, patterns, "freeze")
    trains = {parameter for parameter in model.parameters() if parameter.requires_grad} - named
    if not trains:
        raise ConfigError(f"freeze: {patterns!r} leaves no parameter of {type(model).__name__} to train. Freeze fewer.")
    return _apply(model, named, trains, optimizer_bytes)


def train_only(
    model: nn.Module, patterns: Patterns, *, optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES
) -> FreezeReport:
    """Lets exactly the parameters train that `patterns` name, in place; see `freeze`. Integer types cannot train."""
    named = _named(model, patterns, "train_only")
    trains = {parameter for parameter in named if parameter.is_floating_point()}
    if not trains:
        raise ConfigError(
            f"train_only: {patterns!r} names integer parameters alone, which have no gradient. Name parameters of a float type."
        )
    return _apply(model, named, trains, optimizer_bytes)


def _named(model: nn.Module, patterns: Patterns, verb: str) -> set[nn.Parameter]:
    """The parameters that are named. A number of a range that matches nothing is an error as well."""
    require_module(model, verb)
    texts = [patterns] if isinstance(patterns, str) else patterns
    wanted = [pattern.strip() for text in texts for pattern in text.split(",") if pattern.strip()]
    if not wanted:
        raise ConfigError(f'{verb}: no pattern was given. Name parameters or modules, as in "embed*,layers.0-3".')
    below: dict[str, set[nn.Parameter]] = {}  # each parameter by its own name and those of the modules above it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            below.setdefault(".".join(parts[:depth]), set()).add(parameter)
    found: set[nn.Parameter] = set()
    for typed, pattern in ((each, one) for each in wanted for one in expanded(each)):
        meant = [parameters for name, parameters in below.items() if matches(name, pattern)]
        if not meant:
            ends = [".".join(name.split(".")[-1 - pattern.count(".") :]) for name in below]
            near = closest(pattern.replace("*", "").strip("."), [*ends, *below])
            first = f"The first parameter is {next(iter(below))!r}." if below else "The model has no parameters."
            hint = f"Closest: {near}." if near else first
            within = f"{pattern!r} of " if pattern != typed else ""
            raise ConfigError(f"{verb}: {within}pattern {typed!r} matched no parameter or module. {hint}")
        found = found.union(*meant)
    return found


def _apply(
    model: nn.Module, named: set[nn.Parameter], trains: set[nn.Parameter], optimizer_bytes: OptimizerBytes
) -> FreezeReport:
    """Lets the parameters in `trains` train, no others, and reports; `named` are those that the patterns name."""
    parameters = list(model.parameters())
    # Integers have neither gradient nor state.
    frozen = [parameter for parameter in parameters if parameter not in trains and parameter.is_floating_point()]
    of = optimizer_bytes if callable(optimizer_bytes) else (lambda each: each.numel() * optimizer_bytes)
    states = int(sum(of(parameter) for parameter in frozen))  # raises before anything is changed
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
        parameter.requires_grad_(parameter in trains)
    return FreezeReport(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trains),
        gradient_bytes_saved=sum(parameter.nbytes for parameter in frozen),
        optimizer_bytes_saved=states,
        tied=tuple(each for parameter, each in names.items() if len(each) > 1 and parameter in named),
    )
