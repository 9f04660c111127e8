"""Freezing: which parameters train, and what the rest saves.

    freeze(model, "embed*,layers.0-3")      these do not train, the others stay as they are
    train_only(model, "lm_head,*.norm")     these train, all others do not

A pattern (see `narrowgauge.patterns`) names parameters, or modules with everything below them. Freeze before the optimizer is
built, and give the optimizer the trainable parameters alone.

What it saves: for each frozen parameter its gradient and its optimizer state; for each frozen Linear the product of
grad_weight and the input kept for it. Backward stops at the lowest trainable layer: below it there is no grad_input either, and
nothing is kept. Layers are taken in the order in which the model defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from narrowgauge.errors import ConfigError, closest
from narrowgauge.patterns import expanded, matches

ADAMW_STATE_BYTES = 8  # two float32 moments
OptimizerBytes = float | Callable[[nn.Parameter], int]
Patterns = str | Iterable[str]


@dataclass(frozen=True, kw_only=True)
class FreezeRow:
    """One numbered layer or one module of the model's own: parameters in all, and those that train."""

    name: str
    parameters: int
    trainable: int


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """What trains and what freezing saves; `print` it for a table.

    lowest_trainable        first numbered layer or module, in the model's order, with a parameter that trains
    gradient_bytes_saved    gradients of frozen parameters, in their dtype
    optimizer_bytes_saved   optimizer state of frozen parameters, by the `optimizer_bytes` that `freeze` was given
    optimizer_bytes         the same, per frozen parameter of a float type; 0 if there is none
    backward_share_saved    share of the multiplications of all Linears' grad_input and grad_weight that falls away; attention
                            and element-wise work is not counted
    ties                    sentences on parameters that have several names
    """

    rows: tuple[FreezeRow, ...]
    parameters: int
    trainable: int
    lowest_trainable: str
    gradient_bytes_saved: int
    optimizer_bytes_saved: int
    optimizer_bytes: float
    backward_share_saved: float
    ties: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{row.name:<{width}}  {row.trainable:>14,} of {row.parameters:>14,} train" for row in self.rows]
        gradients, states = self.gradient_bytes_saved / 2**20, self.optimizer_bytes_saved / 2**20
        return "\n".join(
            [
                *lines,
                f"{'all':<{width}}  {self.trainable:>14,} of {self.parameters:>14,} train; lowest: {self.lowest_trainable}",
                f"saves {gradients:.1f} MiB of gradients, {states:.1f} MiB of optimizer state at {self.optimizer_bytes:.3g} bytes per "
                f"parameter, and {self.backward_share_saved:.0%} of the multiplications in backward",
                *self.ties,
            ]
        )


def freeze(
    model: nn.Module, patterns: Patterns, *, optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES
) -> FreezeReport:
    """Stops the parameters that `patterns` name from training, in place; all others stay as they are.

    patterns         one string, commas between patterns, or several strings
    optimizer_bytes  bytes of optimizer state per parameter, for the report, or a function that tells them of a parameter, as
                     `ng.optim.state_bytes(ng.optim.AdamW(model, states="8bit")).of` does: states and master

    Raises ConfigError, before anything is changed, if a pattern matches nothing or if nothing would be left to train.
    """
    chosen = _chosen(model, patterns, "freeze")
    trains = {id(parameter) for parameter in model.parameters() if parameter.requires_grad} - chosen
    if not trains:
        raise ConfigError(
            f"freeze: {_joined(patterns)!r} leaves no parameter of {type(model).__name__} to train. Freeze fewer layers."
        )
    return _apply(model, chosen, trains, optimizer_bytes)


def train_only(
    model: nn.Module, patterns: Patterns, *, optimizer_bytes: OptimizerBytes = ADAMW_STATE_BYTES
) -> FreezeReport:
    """Lets exactly the parameters train that `patterns` name, in place; see `freeze`.

    Parameters of integer types cannot train: naming only such is an error too.
    """
    chosen = _chosen(model, patterns, "train_only")
    trains = {id(parameter) for parameter in model.parameters() if parameter.is_floating_point()} & chosen
    if not trains:
        raise ConfigError(
            f"train_only: {_joined(patterns)!r} names integer parameters alone, which have no gradient. "
            "Name parameters of a float type."
        )
    return _apply(model, chosen, trains, optimizer_bytes)


def _split(patterns: Patterns) -> list[str]:
    texts = [patterns] if isinstance(patterns, str) else list(patterns)
    return [pattern.strip() for text in texts for pattern in text.split(",") if pattern.strip()]


def _joined(patterns: Patterns) -> str:
    return ",".join(_split(patterns))


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every name of every parameter: a tied one has several."""
    return list(model.named_parameters(remove_duplicate=False))


def _chosen(model: nn.Module, patterns: Patterns, verb: str) -> set[int]:
    """The ids of the parameters that are named. A number of a range that matches nothing is an error as well."""
    pieces = _split(patterns)
    if not pieces:
        raise ConfigError(f'{verb}: no pattern was given. Name parameters or modules, as in "embed*,layers.0-3".')
    named = _named_parameters(model)
    if not named:
        raise ConfigError(f"{verb}: {type(model).__name__} has no parameters. Pass the model that trains.")
    found: set[int] = set()
    for pattern in pieces:
        for single in expanded(pattern):
            ids = {id(parameter) for name, parameter in named if any(matches(each, single) for each in _prefixes(name))}
            if not ids:
                raise ConfigError(_matched_nothing(verb, pattern, single, [name for name, _ in named]))
            found |= ids
    return found


def _prefixes(name: str) -> Iterator[str]:
    """The name and those of the modules above it."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))


def _matched_nothing(verb: str, pattern: str, single: str, names: list[str]) -> str:
    candidates = dict.fromkeys(prefix for name in names for prefix in _prefixes(name))
    ends = {".".join(each.split(".")[-1 - single.count(".") :]): each for each in candidates}
    near = closest(single.replace("*", "").strip("."), [*ends, *candidates])
    hint = f"Closest: {near}." if near else f"The first parameter is {names[0]!r}."
    which = f"pattern {pattern!r}" + (f" ({single!r} of its range)" if single != pattern else "")
    return f"{verb}: {which} matched no parameter or module. {hint}"


def _apply(model: nn.Module, chosen: set[int], trains: set[int], optimizer_bytes: OptimizerBytes) -> FreezeReport:
    """Lets the parameters train whose ids are in `trains`, no others, and reports; `chosen` are those that the patterns name."""
    parameters = list(model.parameters())
    # Integers have neither gradient nor state.
    frozen = [parameter for parameter in parameters if id(parameter) not in trains and parameter.is_floating_point()]
    of = optimizer_bytes if callable(optimizer_bytes) else (lambda each: each.numel() * optimizer_bytes)
    states = sum(of(parameter) for parameter in frozen)
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in trains)
    return FreezeReport(
        rows=tuple(_rows(model)),
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        lowest_trainable=next(row.name for row in _rows(model) if row.trainable),
        gradient_bytes_saved=sum(parameter.nbytes for parameter in frozen),
        optimizer_bytes_saved=int(states),
        optimizer_bytes=states / max(sum(parameter.numel() for parameter in frozen), 1),
        backward_share_saved=_backward_share_saved(model),
        ties=tuple(_ties(model, chosen)),
    )


def _rows(model: nn.Module) -> Iterator[FreezeRow]:
    """One for each numbered layer, and one for each module beside them."""
    counts: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        group = _group(name)
        whole, trains = counts.get(group, (0, 0))
        counts[group] = (whole + parameter.numel(), trains + parameter.numel() * parameter.requires_grad)
    return (FreezeRow(name=name, parameters=whole, trainable=trains) for name, (whole, trains) in counts.items())


def _group(name: str) -> str:
    """The numbered layer that a parameter belongs to, or the module that owns it."""
    parts = name.split(".")[:-1] or [name]
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _backward_share_saved(model: nn.Module) -> float:
    """A Linear of n weights multiplies n times per token for grad_weight and as often for grad_input.

    grad_input counts as needed where anything else in the same numbered layer trains, or anything in a layer before it.
    """
    trains: dict[str, set[int]] = {}  # in the order of the model
    for name, parameter in model.named_parameters():
        trains.setdefault(_group(name), set()).update([id(parameter)] if parameter.requires_grad else [])
    needed = whole = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        group = _group(f"{name}.weight".lstrip("."))
        before = list(trains).index(group) if group in trains else len(trains)  # a tied one belongs to an earlier layer
        others = trains.get(group, set()) - {id(parameter) for parameter in module.parameters(recurse=False)}
        needs_grad_input = bool(others) or any(list(trains.values())[:before])
        whole += 2 * module.weight.numel()
        needed += module.weight.numel() * (module.weight.requires_grad + needs_grad_input)
    return 1 - needed / whole if whole else 0.0


def _ties(model: nn.Module, chosen: set[int]) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    parameters = _named_parameters(model)
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    for parameter in model.parameters():
        shared = names[id(parameter)]
        if len(shared) > 1 and id(parameter) in chosen:
            state = "trains" if parameter.requires_grad else "is frozen"
            yield f"tied: {' and '.join(shared)} are one parameter, which {state} under every name"
