"""The options of a parameter group, and what is refused of them: torch takes whatever a group says, and a step finds out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConfigError, closest
from narrowgauge.optim import masters, moments

_ADDED_BY_TORCH = ("params", "param_names", "initial_lr")


def asked(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides about the form of a state."""
    return group["states"], group["master"], group["embeddings"], group.get("rule")


def check(kind: str, group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number that cannot be, and for what looks like an option and is none: torch passes over both."""
    for name in ("lr", "weight_decay", "eps"):
        if name in group and (not _is_number(group[name]) or not group[name] >= 0):
            raise ConfigError(f"{kind}: {name} = {group[name]!r}: must be a number of at least 0.")
    for betas in (group.get("betas", (0.0, 0.0)), (group.get("momentum", 0.0),)):
        if not isinstance(betas, tuple | list) or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{kind}: betas or momentum = {betas}: must be numbers of at least 0 and below 1.")
    if "betas" in group and len(group["betas"]) != 2:
        raise ConfigError(f"{kind}: betas = {group['betas']}: must be two numbers.")
    if group.get("nesterov") and not group["momentum"]:
        raise ConfigError(
            f"{kind}: nesterov = True with momentum = 0: it looks ahead along the momentum. Give one, or leave it out."
        )
    for option, names in (("states", moments.STATES), ("master", masters.KINDS)):
        if group[option] not in names:
            given = [str(each) for each in names if each is not None]
            near = closest(str(group[option]), given) or ", ".join(map(repr, given))
            raise ConfigError(f"{kind}: no {option} {group[option]!r}. Closest: {near}.")
    if group["embeddings"] not in ("fp32", "same"):
        raise ConfigError(f"{kind}: embeddings = {group['embeddings']!r}; it is 'fp32' or 'same'.")
    for name in group:
        found = [] if name in known or name in _ADDED_BY_TORCH else difflib.get_close_matches(str(name), known, 1, 0.8)
        if found:
            raise ConfigError(f"{kind}: a group has {name!r}, which is no option. Closest: {found[0]!r}.")


def _is_number(value: object) -> bool:
    """A learning rate may be a tensor, as torch's schedulers allow."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
