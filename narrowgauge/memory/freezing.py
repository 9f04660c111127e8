"""Freezing: which parameters train.

    freeze(model, "embed*,layers.0-3")      these do not train, the others stay as they are
    train_only(model, "lm_head,*.norm")     these train, all others do not

A pattern (see `narrowgauge.structure`) names parameters, or modules with everything below them. Freeze before the optimizer is
built, and give the optimizer the trainable parameters alone.

A frozen parameter has no gradient and no optimizer state; a frozen Linear computes no grad_weight and keeps no input for it.
Backward stops at the lowest trainable layer: below it there is no grad_input either, and nothing is kept.

    freeze(model, "layers.*", codes=True)      and their converted Linears keep codes alone, no 16-bit weight (nn/frozen.py)
    thaw(model, "layers.*")                    gives these 16-bit weights again, what the codes decode to
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn

from narrowgauge.conversion.warned import is_read_by_owner
from narrowgauge.errors import ConfigError, closest
from narrowgauge.nn.coded_weight import plain
from narrowgauge.nn.frozen import FrozenWeight, give_back, refuse
from narrowgauge.nn.linear import QLinear
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
    coded: int = 0  # layers whose weight is kept as codes alone
    weight_bytes_saved: int = 0  # by that: 16-bit weights less codes and scales
    wide: tuple[tuple[str, str], ...] = ()  # with codes=True: frozen Linears that keep their weight, and why

    def __str__(self) -> str:
        gradients, states = self.gradient_bytes_saved / 2**20, self.optimizer_bytes_saved / 2**20
        head = (
            f"{self.trainable:,} of {self.parameters:,} parameters train; the others save {gradients:.3g} MiB of gradients "
            f"and {states:.3g} MiB of optimizer state"
        )
        if self.coded:
            saved = f"{self.weight_bytes_saved / 2**20:.3g} MiB of weights"
            head += f"\n{self.coded} weights are kept as codes, without a copy in 16 bits, which saves {saved}"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.wide:
            reasons.setdefault(reason, []).append(name)
        more = [f"kept as they are: {names[0]} and {len(names) - 1} more, {why}" for why, names in reasons.items()]
        return "\n".join(
            [head, *more, *(f"tied, so frozen or trained together: {' and '.join(each)}" for each in self.tied)]
        )


def freeze(
    model: nn.Module,
    patterns: Patterns,
    *,
    optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES,
    codes: bool = False,
) -> FreezeReport:
    """Stops the parameters that `patterns` name from training, in place; all others stay as they are.

    patterns         one string, commas between patterns, or several strings
    optimizer_bytes  for the report: bytes of optimizer state per element, or a function of a parameter such as
                     `ng.optim.state_bytes(ng.optim.AdamW(model, states="8bit")).of`
    codes            the frozen weights of converted Linears are kept as the codes of their forward cast alone, for good: 1 byte per
                     weight instead of 2, of 4-bit formats half a byte. Forward computes the same bits; see nn/frozen.py for backward and
                     for what a state dict holds. What cannot be kept so stays as it is, and the report says why

    Raises ConfigError, before anything is changed, if a pattern matches nothing, if nothing would be left to train, or, with codes=True,
    if there is no weight to keep as codes.
    """
    named = _named(model, patterns, "freeze")
    trains = {parameter for parameter in model.parameters() if parameter.requires_grad} - named
    if not trains:
        raise ConfigError(f"freeze: {patterns!r} leaves no parameter of {type(model).__name__} to train. Freeze fewer.")
    coded, wide = _found_for_codes(model, named) if codes else ([], {})
    if codes and not coded:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(wide.items())[:3]) or "the patterns name no Linear"
        raise ConfigError(
            f"freeze: codes=True, but no weight can be kept as codes ({why}). Convert the model to an 8-bit or 4-bit recipe first, or "
            "leave codes out."
        )
    report = _apply(model, named, trains, optimizer_bytes)
    saved = sum(_keep_codes(layer) for layer in coded)
    return replace(report, coded=len(coded), weight_bytes_saved=saved, wide=tuple(wide.items()))


def thaw(model: nn.Module, patterns: Patterns = "*") -> int:
    """Gives frozen weights that are kept as codes (`freeze(codes=True)`) a 16-bit weight again, in place; returns how many.

    It is what the codes decode to, not what was frozen: its rounding stays. It does not train until `requires_grad_` says so. The codes
    of one layer and its weight are in memory together, those of others are not. ConfigError if `patterns` name no such weight.
    """
    named = _named(model, patterns, "thaw")
    layers = [
        each
        for each in model.modules()
        if isinstance(each, QLinear) and each.frozen is not None and each.weight in named
    ]
    if not layers:
        raise ConfigError(
            f"thaw: {patterns!r} names no weight that is kept as codes. freeze(..., codes=True) makes them."
        )
    for layer in layers:
        give_back(layer, layer.frozen.original(plain(layer.weight)))
    return len(layers)


def _found_for_codes(model: nn.Module, named: set[nn.Parameter]) -> tuple[list[QLinear], dict[str, str]]:
    """(the layers whose weight, one of these, can be kept as codes; name -> why another Linear's cannot)."""
    holders: dict[nn.Parameter, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(owner)
    found: list[QLinear] = []
    wide = {}
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        if weight is None or weight not in named or (isinstance(layer, QLinear) and layer.frozen is not None):
            continue
        others = [each for each in holders[weight] if each != name]
        reason = refuse(layer) if isinstance(layer, QLinear) else "no recipe casts it"
        if others:
            reason = f"tied to {others[0]}"
        elif not reason and is_read_by_owner(model, name):
            reason = "the module that holds it multiplies by its weight without calling it"
        if reason:
            wide[name] = reason
        else:
            assert isinstance(layer, QLinear)
            found.append(layer)
    return found, wide


def _keep_codes(layer: QLinear) -> int:
    """Codes in the place of the layer's weight; returns the bytes that this saves."""
    layer.empty_cache()
    before = layer.weight.nbytes
    layer.frozen = FrozenWeight(layer)
    layer.frozen.hold(layer)
    return before - layer.frozen.nbytes


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
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and layer.frozen is not None and layer.weight in trains:
            raise ConfigError(
                f"train_only: the weight of {name!r} is kept as codes, which do not train. Call "
                f"narrowgauge.memory.thaw(model, {name!r}) first."
            )
    return _apply(model, named, trains, optimizer_bytes)


def _named(model: nn.Module, patterns: Patterns, verb: str) -> set[nn.Parameter]:
    """The parameters that are named. A number of a range that matches nothing is an error as well."""
    require_module(model, verb)
    texts = (
        [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Iterable) else [patterns]
    )
    if strange := [each for each in texts if not isinstance(each, str)]:
        raise ConfigError(
            f'{verb}: {strange[0]!r} is no pattern. Name parameters or modules, as in "embed*,layers.0-3".'
        )
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
