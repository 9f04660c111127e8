"""What `load_state_dict` refuses, before anything is changed: a state of another form, and numbers that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers
from narrowgauge.errors import CheckpointError

Groups = list[dict[str, Any]]


def refuse_state(
    kind: str,
    state_dict: Mapping[str, Any],
    own: Groups,
    rule: str,
    new_state: Callable[[Tensor, dict[str, Any]], Mapping[str, Tensor]],
) -> None:
    """Raises CheckpointError if an optimizer cannot go on from `state_dict`.

    kind, rule  of the optimizer: its class, the rule of groups that name none
    own         its groups; new_state(parameter, group): what it would keep of a parameter, as tensors without memory
    """
    _refuse_other_groups(kind, state_dict, own)
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], own, strict=True)):
        _refuse_other_options(f"{kind}: group {number} was saved with", kind, saved, group, rule)
        for place, parameter in zip(saved["params"], group["params"], strict=True):
            if place in state_dict["state"]:
                where = f"{kind}: parameter {place}"
                _refuse_other_tensors(where, state_dict["state"][place], new_state(parameter, group))
                _refuse_no_numbers(where, state_dict["state"][place])


def _refuse_other_groups(kind: str, state_dict: Mapping[str, Any], own: Groups) -> None:
    if not {"state", "param_groups"} <= set(state_dict):
        raise CheckpointError(
            f"{kind}: what was saved has {', '.join(map(repr, state_dict)) or 'nothing'}, and no 'state' and 'param_groups'. "
            "Pass what state_dict() of an optimizer returned."
        )
    saved_groups = state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (saved_groups, own)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{kind}: the saved state has groups of {sizes[0]} parameters, this optimizer {sizes[1]}. "
            "Build it with the groups that were saved."
        )
    if strangers := set(state_dict["state"]) - {place for group in saved_groups for place in group["params"]}:
        raise CheckpointError(
            f"{kind}: the saved state has tensors of parameter {next(iter(strangers))!r}, which none of its groups holds. "
            "It is damaged: pass what state_dict() returned, with whole numbers as keys, or start with a fresh state."
        )


def _refuse_other_options(was: str, kind: str, saved: Mapping[str, Any], group: Mapping[str, Any], rule: str) -> None:
    if saved.get("states") == "4bit" and saved.get("form", 1) != group["form"]:
        raise CheckpointError(
            f"{was} states='4bit' of an earlier version, whose codes stood for other numbers. Start with a fresh state."
        )
    rules = saved.get("rule", rule), group.get("rule", rule)
    if rules[0] != rules[1]:
        raise CheckpointError(
            f"{was} the rule {rules[0]!r}, here it has {rules[1]!r}. Build it with the rule that was saved, or start with a fresh state."
        )
    for option in ("states", "master"):
        if option in saved and saved[option] != group[option]:
            raise CheckpointError(
                f"{was} {option}={saved[option]!r}, this optimizer has {option}={group[option]!r}. Build it with "
                f"{option}={saved[option]!r}, or start with a fresh state."
            )
    if saved.get("maximize"):
        raise CheckpointError(
            f"{was} maximize=True, which {kind} does not know. Minimise the negated loss, with a fresh state."
        )


def forms_of(state: Mapping[str, Any]) -> dict[str, str]:
    """The types and shapes of a state's tensors, by name."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in tensors.items()}


def _refuse_other_tensors(where: str, saved: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    forms = forms_of(saved), forms_of(expected)
    if forms[0] != forms[1]:
        different = [name for name in forms[0] | forms[1] if forms[0].get(name) != forms[1].get(name)]
        words = "; ".join(
            f"{n} is {forms[0].get(n, 'missing')}, here {forms[1].get(n, 'unknown')}" for n in different[:3]
        )
        raise CheckpointError(
            f"{where}: the saved state has another form: {words}. Build the optimizer with the states, master and "
            "parameters that were saved, or start with a fresh state."
        )


def _refuse_no_numbers(where: str, saved: Mapping[str, Any]) -> None:
    """Of floats all are looked at; whole numbers are codes, whose scales are among the floats."""
    for name, x in saved.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or not holds_numbers(x):
            continue
        wide = x.to(torch.bfloat16) if x.element_size() == 1 else x
        count = x.numel() - int(wide.isfinite().sum())
        if count:
            raise CheckpointError(
                f"{where}: {name} is not finite in {count:,} of {x.numel():,} places; a step would make weights NaN. Load an earlier "
                "checkpoint, or start with a fresh state."
            )
        if name == "step" and not float(x) >= 0:
            raise CheckpointError(
                f"{where}: its step count is {float(x):g}. The state is damaged: load another checkpoint, or start with a fresh state."
            )
