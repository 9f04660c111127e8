"""Checks and conversion of saved optimizer states before `load_state_dict` changes anything.

States of another format and states with non-finite numbers are refused. States of earlier versions
are converted, and DTensors receive this rank's part of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import holds_numbers
from narrowgauge.errors import CheckpointError, Reason
from narrowgauge.optim import masters, moments, old_states, param_groups, shards, states
from narrowgauge.optim.rules import SGD, Rule

NewState = Callable[[Tensor, dict[str, Any]], Mapping[str, Tensor]]


def refuse_state(
    kind: str,
    state_dict: Mapping[str, Any],
    own: list[dict[str, Any]],
    rule: str,
    new_state: NewState,
) -> None:
    """Raise CheckpointError if an optimizer cannot continue from `state_dict`.

        kind       class name of the optimizer
        own        parameter groups of the optimizer
        rule       name of the rule of groups that name none
        new_state  new_state(parameter, group): the state that the optimizer would create, as meta
                   tensors

    All ranks of a mesh agree: if one rank refuses its part, all refuse.
    """
    parameters = [parameter for group in own for parameter in group["params"]]
    reason = next(_reasons(kind, state_dict, own, rule, new_state), Reason("", ""))
    # A collective: every rank must reach it, also a rank that has already found a reason.
    for sharded in shards.meshes_of(parameters):
        bad = torch.tensor(float(bool(reason)), device=shards.local(sharded).device)
        if shards.sum_over_mesh(bad, sharded) > 0:
            reason = reason or Reason(
                "optim.state",
                f"{kind}: another rank refused its part of the saved state, and says why.",
            )
    if reason:
        raise CheckpointError(str(reason), code=reason.code)


def _reasons(
    kind: str,
    state_dict: Mapping[str, Any],
    own: list[dict[str, Any]],
    rule: str,
    new_state: NewState,
) -> Iterator[Reason]:
    for reason in _other_groups(state_dict, own):
        yield Reason("optim.state", f"{kind}: {reason}")
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], own, strict=True)):
        for reason in _other_options(kind, saved, group, rule):
            yield Reason("optim.state", f"{kind}: group {number} was saved with {reason}")
        for place, parameter in zip(saved["params"], group["params"], strict=True):
            if place in state_dict["state"]:
                for reason in _other_tensors(
                    state_dict["state"][place], new_state(parameter, group)
                ):
                    yield Reason("optim.state", f"{kind}: parameter {place}: {reason}")
                for reason in _other_placements(state_dict["state"][place], parameter):
                    yield Reason("optim.state-placement", f"{kind}: parameter {place}: {reason}")


def full_state_dict(optimizer: torch.optim.Optimizer, *, rank: int | None = None) -> dict[str, Any]:
    """Return `state_dict()` with whole CPU tensors instead of DTensors.

        rank  global rank that keeps the states; "state" is empty on the others. None: all ranks
              keep them

    The result is the state that one process would save. Every rank has to call. Device memory: the
    whole of one tensor at a time. `load_state_dict` accepts the result on any mesh and without one.
    """
    found = optimizer.state_dict()
    keeps = (
        rank is None
        or not torch.distributed.is_initialized()
        or torch.distributed.get_rank() == rank
    )
    state: dict[Any, dict[str, Any]] = {}
    for place, kept in found["state"].items():
        whole = {}
        for name, x in kept.items():
            x = shards.gathered(x).cpu() if isinstance(x, Tensor) else x
            if keeps:
                whole[name] = x
        if keeps:
            state[place] = whole
    return {**found, "state": state}


def placed(x: Tensor, parameter: Tensor) -> Tensor:
    """Copy a saved tensor to the parameter's device.

    A DTensor parameter gets its part of a whole tensor as a DTensor.
    """
    if shards.is_sharded(parameter) and not shards.is_sharded(x):
        own = shards.local_part(x.detach(), parameter).clone().to(parameter.device)
        return shards.wrapped(own, parameter, x.shape)
    # Kernels read contiguous tensors. torch's own optimizers save moments with the parameter's
    # strides.
    return x.detach().clone(memory_format=torch.contiguous_format).to(parameter.device)


def upgraded(
    state_dict: Mapping[str, Any],
    own: list[dict[str, Any]],
    rule_of: Callable[[Mapping[str, Any]], Rule],
) -> Mapping[str, Any]:
    """Convert a saved state to the present form, if its numbers can stay the same.

        8-bit moments     earlier forms are converted (`old_states`)
        scaled masters    of parameters of one axis become float32
        step count        a Python number becomes a tensor
        torch.optim.SGD   counts no steps; the count begins at 0

    rule_of: maps a group of this optimizer to its rule.
    """
    if next(_other_groups(state_dict, own), None) is not None:
        return state_dict
    state, groups = dict(state_dict["state"]), []
    for saved, group in zip(state_dict["param_groups"], own, strict=True):
        is_old, rule = old_states.is_old(saved), rule_of(group)
        for place, parameter in zip(saved["params"], group["params"], strict=True):
            found = state.get(place)
            if not found:
                continue
            found = dict(found)
            if rule is SGD and "step" not in found:
                if found.get("momentum_buffer") is None:
                    del state[place]
                    continue
                found["step"] = 0.0
            step = found.get("step")
            if isinstance(step, int | float) and not isinstance(step, bool):
                found["step"] = torch.tensor(float(step), dtype=torch.float32)
            if (
                parameter.ndim < 2
                and "master_scale" in found
                and not shards.is_sharded(found["master"])
            ):
                found["master"] = masters.decode_vector(found["master"], found.pop("master_scale"))
            state[place] = old_states.converted(found, saved, rule) if is_old else found
        groups.append({**saved, "form": moments.FORM} if is_old else saved)
    return {**state_dict, "state": state, "param_groups": groups}


def forms_of(state: Mapping[str, Any]) -> dict[str, str]:
    """dtype and shape of each state tensor, by name."""
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        for name, x in tensors.items()
    }


def _other_groups(state_dict: Mapping[str, Any], own: list[dict[str, Any]]) -> Iterator[str]:
    if not {"state", "param_groups"} <= set(state_dict):
        given = ", ".join(map(repr, state_dict)) or "nothing"
        yield (
            f"what was saved has {given}, and no 'state' and 'param_groups'. Pass what state_dict() of an optimizer returned."
        )
    saved_groups = state_dict["param_groups"]
    sizes, here = ([len(group["params"]) for group in groups] for groups in (saved_groups, own))
    if sizes != here:
        yield (
            f"the saved state has groups of {sizes} parameters, this optimizer {here}. Build it with the groups that were saved: "
            "model.parameters() is one group; a model, or ng.optim.groups(model), has another one for its embeddings."
        )
    if strangers := set(state_dict["state"]) - {
        place for group in saved_groups for place in group["params"]
    }:
        yield (
            f"the saved state has tensors of parameter {next(iter(strangers))!r}, which none of its groups holds. "
            "It is damaged: pass what state_dict() returned, with whole numbers as keys, or start with a fresh state."
        )


def _other_options(
    kind: str, saved: Mapping[str, Any], group: Mapping[str, Any], rule: str
) -> Iterator[str]:
    if "4bit" in str(saved.get("states")) and saved.get("form", 1) < 2:
        yield "states='4bit' of an earlier version, whose codes stood for other numbers. Start with a fresh state."
    was, here = saved.get("rule", rule), group.get("rule", rule)
    if was != here:
        yield (
            f"the rule {was!r}, here it has {here!r}. Build it with the rule that was saved, or start with a fresh state."
        )
    for option in ("states", "master"):
        was, here = saved.get(option, group[option]), group[option]
        if was != here and not (option == "states" and states.same(was, here)):
            yield (
                f"{option}={was!r}, this optimizer has {option}={here!r}. Build it with {option}={was!r}, or start with a fresh state."
            )
    norm = saved.get("norm_before", 0.0)
    if not isinstance(norm, float) or not 0 <= norm < float("inf"):
        yield (
            f"norm_before={norm!r}, which is no norm of a gradient. The state is damaged: load another checkpoint, or start with a fresh "
            "state."
        )
    rate = saved.get("previous_lr", 0.0)
    if not isinstance(rate, float) or not 0 <= rate < float("inf"):
        yield (
            f"previous_lr={rate!r}, which is no learning rate. The state is damaged: load another checkpoint, or start with a fresh state."
        )
    for name, value in saved.items():
        if reason := param_groups.refuse_word(name, value, saved):
            yield f"{name}={value!r}, {reason}"


def _other_tensors(saved: Mapping[str, Any], expected: Mapping[str, Tensor]) -> Iterator[str]:
    was, here = forms_of(saved), forms_of(expected)
    if different := [name for name in was | here if was.get(name) != here.get(name)]:
        words = "; ".join(
            f"{n} is {was.get(n, 'missing')}, here {here.get(n, 'unknown')}" for n in different[:3]
        )
        yield (
            f"the saved state has another form: {words}. Build the optimizer with the states, master and parameters that were "
            "saved, or start with a fresh state."
        )
    local = {name: shards.local(x) if isinstance(x, Tensor) else x for name, x in saved.items()}
    # Integer tensors hold codes, whose scales are float tensors in the same state.
    for name, x in local.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or not holds_numbers(x):
            continue
        # isfinite is not available for float8 dtypes.
        wide = x.to(torch.bfloat16) if x.element_size() == 1 else x
        count = x.numel() - int(wide.isfinite().sum())
        if count:
            yield (
                f"{name} is not finite in {count:,} of {x.numel():,} places; a step would make weights NaN. Load an earlier "
                "checkpoint, or start with a fresh state."
            )
        if name == "step" and not float(x) >= 0:
            yield (
                f"its step count is {float(x):g}. The state is damaged: load another checkpoint, or start with a fresh state."
            )


def _other_placements(saved: Mapping[str, Any], parameter: Tensor) -> Iterator[str]:
    sharded = [x for x in saved.values() if isinstance(x, Tensor) and shards.is_sharded(x)]
    if sharded and not shards.is_sharded(parameter):
        yield (
            "the saved state is sharded, the parameter here is whole. Save full_state_dict(optimizer), or load by "
            "torch.distributed.checkpoint, which reshards."
        )
    elif any(not shards.same_placement(x, parameter) for x in sharded):
        yield (
            "the saved state lies on another mesh, or in other shards, than the parameter. Load by torch.distributed.checkpoint, which "
            "reshards, or save full_state_dict(optimizer)."
        )
