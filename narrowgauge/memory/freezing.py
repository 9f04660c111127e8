"""Freezing: select the parameters that train.

    freeze(model, "embed*,layers.0-3")   freeze these, leave the others as they are
    train_only(model, "lm_head,*.norm")  train these, freeze all others

A pattern (see `narrowgauge.structure`) matches parameters, or modules with everything below them.
Freeze before creating the optimizer, and give it the trainable parameters alone.

A frozen parameter has no gradient and no optimizer state. A frozen Linear computes no grad_weight
and saves no input for it. Below the lowest trainable layer there is no backward at all, and nothing
is saved.

    freeze(model, "layers.*", codes=True)  also replace 16-bit weights by codes (nn/frozen.py)
    thaw(model, "layers.*")                dequantize these codes to 16-bit weights again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from narrowgauge.conversion.bypassed import is_read_by_owner
from narrowgauge.errors import ConfigError, closest
from narrowgauge.nn import frozen_experts
from narrowgauge.nn.coded_weight import CodedWeight, plain
from narrowgauge.nn.experts import GroupedExperts, grouped_experts, stacks
from narrowgauge.nn.frozen import FrozenWeight, give_back, refuse
from narrowgauge.nn.frozen_experts import is_coded, refuse_stack, store_stack_as_codes
from narrowgauge.nn.linear import QLinear
from narrowgauge.structure import expanded, matches, require_module

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

# Bytes per element: two float32 moments.
ADAMW_STATE_BYTES = 8
OptimizerBytes = float | Callable[[nn.Parameter], int]
Patterns = str | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """Number of trainable parameters and the memory saved; `print` it.

    parameters             elements of all parameters
    trainable              elements of trainable parameters
    gradient_bytes_saved   gradients of the frozen parameters, in their dtype
    optimizer_bytes_saved  optimizer state of the frozen parameters, by `optimizer_bytes` of
                           `freeze`
    tied                   per selected parameter with several names: these names
    coded                  number of layers whose weight is stored as codes alone
    weight_bytes_saved     bytes of their 16-bit weights minus codes and scales
    kept_16bit             with codes=True: (name, reason) of frozen Linears that keep their 16-bit
                           weight
    """

    parameters: int
    trainable: int
    gradient_bytes_saved: int
    optimizer_bytes_saved: int
    tied: tuple[tuple[str, ...], ...]
    coded: int = 0
    weight_bytes_saved: int = 0
    kept_16bit: tuple[tuple[str, str], ...] = ()

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
        for name, reason in self.kept_16bit:
            reasons.setdefault(reason, []).append(name)
        more = [
            f"kept as they are: {names[0]} and {len(names) - 1} more, {why}"
            for why, names in reasons.items()
        ]
        return "\n".join(
            [
                head,
                *more,
                *(
                    f"tied, so frozen or trained together: {' and '.join(each)}"
                    for each in self.tied
                ),
            ]
        )


def freeze(
    model: nn.Module,
    patterns: Patterns,
    *,
    optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES,
    codes: bool = False,
) -> FreezeReport:
    """Freeze the parameters that match `patterns`, in place; leave all others as they are.

    patterns         a string with patterns separated by commas, or several strings
    optimizer_bytes  for the report: bytes of optimizer state per element, or a function of a
                     parameter such as `ng.optim.state_bytes(ng.optim.AdamW(model,
                     states="8bit")).of`
    codes            replace the frozen weights of converted Linears and experts permanently by the
                     codes of their forward cast: 1 byte per weight instead of 2, half a byte for 4-bit
                     formats. The forward result is bit-identical; see nn/frozen.py for backward and
                     state dicts. The report lists weights that cannot be stored as codes, with the
                     reason

    Raises ConfigError, before any change, if a pattern matches nothing, if nothing would be left to
    train, or if codes=True applies to no weight.
    """
    named = _named(model, patterns, "freeze")
    trains = {parameter for parameter in model.parameters() if parameter.requires_grad} - named
    if not trains:
        raise ConfigError(
            f"freeze: {patterns!r} leaves no parameter of {type(model).__name__} to train. Freeze fewer.",
            code="freeze.nothing-left",
        )
    coded, kept_16bit = _candidates_for_codes(model, named) if codes else ([], {})
    if codes and not coded:
        why = (
            "; ".join(f"{name}: {reason}" for name, reason in list(kept_16bit.items())[:3])
            or "the patterns name no Linear"
        )
        raise ConfigError(
            f"freeze: codes=True, but no weight can be kept as codes ({why}). Convert the model to an 8-bit or 4-bit recipe first, or "
            "leave codes out.",
            code="freeze.no-codes",
        )
    report = _apply(model, named, trains, optimizer_bytes)
    return replace(
        report,
        coded=sum(each.weights for each in coded),
        weight_bytes_saved=sum(each.nbytes - each.store() for each in coded),
        kept_16bit=tuple(kept_16bit.items()),
    )


def thaw(model: nn.Module, patterns: Patterns = "*") -> int:
    """Dequantize weights frozen as codes (`freeze(codes=True)`) to 16 bits, in place.

    patterns  the weights to convert
    ->        the number of converted layers

    The result is the dequantized weight, not the original: the rounding error stays. The weight is
    still frozen until `requires_grad_` is called. Peak memory: codes and weight of one layer at a
    time. Raises ConfigError if no matching weight is stored as codes.
    """
    named = _named(model, patterns, "thaw")
    layers = [
        each
        for each in model.modules()
        if isinstance(each, QLinear)
        and not each.is_expert
        and each.frozen is not None
        and each.weight in named
        and type(each.weight) is CodedWeight  # not one that replaced it
    ]
    coded = [
        (module, stack)
        for _, module in grouped_experts(model)
        for stack in module.coded_stacks()
        if module._parameters[stack] in named and type(module._parameters[stack]) is CodedWeight
    ]
    if not layers and not coded:
        raise ConfigError(
            f"thaw: {patterns!r} names no weight that is kept as codes. freeze(..., codes=True) makes them.",
            code="thaw.no-codes",
        )
    for layer in layers:
        give_back(layer, layer.frozen.original(plain(layer.weight)))
    for module, stack in coded:
        frozen_experts.thaw(module, stack)
    return len(layers) + sum(len(module.slices(stack)) for module, stack in coded)


class _Candidate(NamedTuple):
    """A parameter that can be stored as codes.

    parameter  it
    weights    number of matrices in it
    store      stores it as codes and returns their bytes
    """

    parameter: nn.Parameter
    weights: int
    store: Callable[[], int]

    @property
    def nbytes(self) -> int:
        return self.parameter.nbytes


def _candidates_for_codes(
    model: nn.Module, named: set[nn.Parameter]
) -> tuple[list[_Candidate], dict[str, str]]:
    """Return (parameters that can be stored as codes, {other Linear's name: reason})."""
    holders: dict[nn.Parameter, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(owner)
    found: list[_Candidate] = []
    kept_16bit = {}
    for name, module, stack in _stacks_of(model, named):
        parameter = module.get_parameter(stack)
        others = [each for each in holders[parameter] if each != name]
        if reason := f"tied to {others[0]}" if others else refuse_stack(module, stack):
            kept_16bit[f"{name}.{stack}".lstrip(".")] = reason
        else:
            store = partial(store_stack_as_codes, module, stack)
            found.append(_Candidate(parameter, len(module.slices(stack)), store))
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if isinstance(layer, nn.Linear) else None
        if (
            weight is None
            or weight not in named
            or (isinstance(layer, QLinear) and layer.frozen is not None)
        ):
            continue
        others = [each for each in holders[weight] if each != name]
        # Another module reads the same parameter in 16 bits.
        reason = f"tied to {others[0]}" if others else code_refusal(model, layer, name)
        if reason:
            kept_16bit[name] = reason
        else:
            assert isinstance(layer, QLinear)
            found.append(_Candidate(weight, 1, partial(store_as_codes, layer)))
    return found, kept_16bit


def _stacks_of(
    model: nn.Module, named: set[nn.Parameter]
) -> Iterator[tuple[str, GroupedExperts, str]]:
    """Iterate over (module name, module, parameter name) of the named stacks without codes."""
    for name, module in grouped_experts(model):
        for stack in stacks(module):
            if module._parameters.get(stack) in named and not is_coded(module, stack):
                yield name, module, stack


def code_refusal(model: nn.Module, layer: nn.Module, name: str) -> str:
    """Return the reason why a Linear's weight cannot be held as codes, a clause, or ''.

    name  name of the layer in the model
    """
    if not isinstance(layer, QLinear):
        return "no recipe casts it"
    if reason := refuse(layer):
        return reason
    # Such an owner reads `weight` without calling the layer, so the codes would never be used.
    if is_read_by_owner(model, name):
        return "the module that holds it multiplies by its weight without calling it"
    return ""


def store_as_codes(layer: QLinear, found: QTensor | None = None) -> int:
    """Replace the layer's frozen weight by codes, in place; return the bytes of the codes.

    found  codes of the layer's own cast, if they exist already; None: cast the weight

    `code_refusal` must be ''.
    """
    # Casts of the 16-bit weight are obsolete from here on.
    layer.empty_cache()
    frozen = FrozenWeight(layer, found)
    layer.put_submodule("frozen", frozen)
    frozen.hold(layer)
    return frozen.nbytes


def train_only(
    model: nn.Module, patterns: Patterns, *, optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES
) -> FreezeReport:
    """Train exactly the parameters that match `patterns`, in place, and freeze all others.

    Arguments, result and errors are as in `freeze`. Integer parameters cannot train.
    """
    named = _named(model, patterns, "train_only")
    # Integer parameters have no gradient.
    trains = {parameter for parameter in named if parameter.is_floating_point()}
    if not trains:
        raise ConfigError(
            f"train_only: {patterns!r} names integer parameters alone, which have no gradient. Name parameters of a float type.",
            code="train-only.integers",
        )
    for name, layer in model.named_modules():
        if isinstance(layer, QLinear) and layer.frozen is not None and layer.parameter in trains:
            own = layer.names(name)[-1]
            raise ConfigError(
                f"train_only: the weight of {own!r} is kept as codes, which do not train. Call "
                f"narrowgauge.memory.thaw(model, {own!r}) first.",
                code="train-only.codes",
            )
    return _apply(model, named, trains, optimizer_bytes)


def _named(model: nn.Module, patterns: Patterns, verb: str) -> set[nn.Parameter]:
    """Return the parameters that match.

    Raises ConfigError for a pattern, or a number in its range, that matches nothing.
    """
    require_module(model, verb)
    texts = (
        [patterns]
        if isinstance(patterns, str)
        else list(patterns)
        if isinstance(patterns, Iterable)
        else [patterns]
    )
    if strange := [each for each in texts if not isinstance(each, str)]:
        raise ConfigError(
            f'{verb}: {strange[0]!r} is no pattern. Name parameters or modules, as in "embed*,layers.0-3".',
            code="pattern.not-a-string",
        )
    wanted = [pattern.strip() for text in texts for pattern in text.split(",") if pattern.strip()]
    if not wanted:
        raise ConfigError(
            f'{verb}: no pattern was given. Name parameters or modules, as in "embed*,layers.0-3".',
            code="pattern.none",
        )
    # Each parameter, under its own name and the names of all modules above it.
    below: dict[str, set[nn.Parameter]] = {}
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
            first = (
                f"The first parameter is {next(iter(below))!r}."
                if below
                else "The model has no parameters."
            )
            hint = f"Closest: {near}." if near else first
            within = f"{pattern!r} of " if pattern != typed else ""
            raise ConfigError(
                f"{verb}: {within}pattern {typed!r} matched no parameter or module. {hint}",
                code="pattern.no-match",
            )
        found = found.union(*meant)
    return found


def _apply(
    model: nn.Module,
    named: set[nn.Parameter],
    trains: set[nn.Parameter],
    optimizer_bytes: OptimizerBytes,
) -> FreezeReport:
    """Set requires_grad for exactly the parameters in `trains`, and report.

    named  the parameters that match the user's patterns
    """
    parameters = list(model.parameters())
    # Integer parameters have neither gradient nor optimizer state.
    frozen = [
        parameter
        for parameter in parameters
        if parameter not in trains and parameter.is_floating_point()
    ]
    of = (
        optimizer_bytes
        if callable(optimizer_bytes)
        else (lambda each: each.numel() * optimizer_bytes)
    )
    # Calls the user's function, which may raise: do it before any change.
    states = int(sum(of(parameter) for parameter in frozen))
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
        parameter.requires_grad_(parameter in trains)
    return FreezeReport(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trains),
        gradient_bytes_saved=sum(parameter.nbytes for parameter in frozen),
        optimizer_bytes_saved=states,
        tied=tuple(
            each for parameter, each in names.items() if len(each) > 1 and parameter in named
        ),
    )
