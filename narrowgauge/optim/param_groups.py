"""Parameter groups: groups of a model, checks of their options, and the format of each parameter.

torch accepts any option in a group, and errors appear in the step. Here options are checked when a
group is added.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import OptionError, SlowerWarning, closest, warn
from narrowgauge.optim import masters, rules, shards, states
from narrowgauge.optim.step import DTYPES, shape_of
from narrowgauge.structure import require_module

# Values of `state_format` for parameters whose states stay float32 for these reasons.
CUT, SHORT = "shards cut its tiles", "rows too short for a tile"
# Elements. Below, a quantized state saves too little for its error (the bound of bitsandbytes and
# torchao).
SMALLEST = 4096
_ADDED_BY_TORCH = ("params", "param_names", "initial_lr")
_OF_RULES = {option for rule in rules.RULES.values() for option in rule.options}
_KNOWN = _OF_RULES | {"params", "lr", "weight_decay"}
_INSTEAD = {
    "maximize": "Minimise the negated loss.",
    "foreach": "Its step is one kernel for many tensors already; leave it out.",
    "fused": "Its step is one kernel for many tensors already; leave it out.",
    "capturable": "For a CUDA graph take optimizer.replayable(), and leave it out.",
}
_EMBEDDING = re.compile(r"(^|\.)(embed\w*|\w*embeddings?|wte|wpe)(\.|$)")


def groups(
    model: nn.Module, *, weight_decay: float | None = None, embeddings: str = "fp32"
) -> list[dict[str, Any]]:
    """Return the trainable parameters of a model as named groups. A tied weight appears once.

    weight_decay  weight decay of matrices, if given; tensors of one axis (norms, biases) and
                  biases of experts [E, N] get 0 and their own group
    embeddings    "fp32": weights of an nn.Embedding, also if a head is tied to the weight, go
                  into groups with states="fp32"; "same": they stay with the others
    """
    require_module(model, "groups")
    _check_embeddings("groups", embeddings)
    found = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    sorted_out: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_embedding = embeddings == "fp32" and id(parameter) in found
            is_vector = weight_decay is not None and _is_vector(name, parameter)
            sorted_out.setdefault((is_embedding, is_vector), []).append((name, parameter))
    result = []
    for (is_embedding, is_vector), named in sorted(sorted_out.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {"params": named}
        if is_embedding:
            group |= {"states": "fp32", "why": "embedding"}
        # Module types are known here, so the name pattern must not be applied as well.
        else:
            group |= {"embeddings": "same"}
        if weight_decay is not None:
            group["weight_decay"] = 0.0 if is_vector else weight_decay
        result.append(group)
    return result


def _is_vector(name: str, parameter: Tensor) -> bool:
    """True for norms and biases, also for the biases [E, N] of experts ("gate_up_proj_bias")."""
    return parameter.ndim < 2 or (parameter.ndim == 2 and name.endswith("_bias"))


def asked(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Options of a group that decide the format of a state."""
    return group["states"], group["master"], group["embeddings"], group.get("rule")


def check(kind: str, group: Mapping[str, Any], known: Mapping[str, Any], rule: rules.Rule) -> None:
    """Raise ConfigError for an invalid number or option in a group. torch ignores both.

    kind   class name of the optimizer, for messages
    known  options that the group may contain
    """
    for name in ("lr", "weight_decay", "eps"):
        if name in group and (not _is_number(group[name]) or not 0 <= group[name] < math.inf):
            raise OptionError(
                f"{kind}: {name} = {group[name]!r}: must be a number of at least 0, and finite.",
                code="optim.not-negative",
            )
    # isinstance would accept True.
    if type(group["seed"]) is not int:
        raise OptionError(
            f"{kind}: seed = {group['seed']!r}: must be a whole number, of type int.",
            code="optim.seed",
        )
    for betas in (group.get("betas", (0.0, 0.0)), (group.get("momentum", 0.0),)):
        if not isinstance(betas, tuple | list) or not all(
            _is_number(beta) and 0 <= beta < 1 for beta in betas
        ):
            raise OptionError(
                f"{kind}: betas or momentum = {betas}: must be numbers of at least 0 and below 1.",
                code="optim.betas",
            )
    if "betas" in group and len(group["betas"]) != 2:
        raise OptionError(
            f"{kind}: betas = {group['betas']}: must be two numbers.", code="optim.betas-pair"
        )
    if "momentum" in group and group.get("nesterov") and not group["momentum"]:
        raise OptionError(
            f"{kind}: nesterov = True with momentum = 0: it looks ahead along the momentum. Give one, or leave it out.",
            code="optim.nesterov",
        )
    states.refuse(kind, group["states"], len(rule.moments))
    # `in` on a list compares by equality: a group may contain an unhashable value.
    if group["master"] not in list(masters.KINDS):
        given = [str(each) for each in masters.KINDS if each is not None]
        near = closest(str(group["master"]), given) or ", ".join(map(repr, given))
        raise OptionError(
            f"{kind}: no master {group['master']!r}. Closest: {near}.", code="optim.master"
        )
    _check_embeddings(kind, group["embeddings"])
    for name in group:
        if name in known or name in _ADDED_BY_TORCH:
            continue
        if reason := refuse_word(name, group[name], group):
            raise OptionError(
                f"{kind}: a group has {name} = {group[name]!r}, {reason}", code="optim.group-value"
            )
        if name in _OF_RULES:
            raise OptionError(
                f"{kind}: a group has {name!r}, which its rule does not know. Leave it out, or give a rule.",
                code="optim.rule-option",
            )
        if found := difflib.get_close_matches(str(name), known, 1, 0.8):
            raise OptionError(
                f"{kind}: a group has {name!r}, which is no option. Closest: {found[0]!r}.",
                code="optim.unknown-option",
            )


def _check_embeddings(kind: str, embeddings: object) -> None:
    if embeddings not in ("fp32", "same"):
        raise OptionError(
            f"{kind}: embeddings = {embeddings!r}; it is 'fp32' or 'same'.", code="optim.embeddings"
        )


@cache
def _words_of_torch() -> frozenset[str]:
    """Option names of all optimizers in torch.optim."""
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    found = (
        inspect.signature(each).parameters
        for each in kinds
        if issubclass(each, torch.optim.Optimizer)
    )
    return frozenset(name for parameters in found for name in parameters)


def refuse_word(name: object, value: object, group: Mapping[str, Any]) -> str:
    """Reason why this group may not contain this option of torch.optim, or ''.

    Options of narrowgauge.optim are checked elsewhere. A value that disables the option (False,
    None, 0) is accepted, because groups saved by torch contain all of its options. Names unknown to
    torch.optim are labels of the caller.
    """
    if name in _KNOWN or name not in _words_of_torch():
        return ""
    if name == "decoupled_weight_decay":
        # Adam and RAdam of torch have False by default: their decay enters the moments.
        is_decoupled = "momentum" not in group  # SGD's is coupled
        if not group.get("weight_decay") or bool(value) == is_decoupled:
            return ""
        here = "decoupled" if is_decoupled else "coupled"
        return (
            f"with weight_decay = {group['weight_decay']}: the decay is {here} here. Set weight_decay = 0, or take the optimizer of "
            "torch.optim."
        )
    if value is None or (isinstance(value, bool | int | float) and not value):
        return ""
    hint = _INSTEAD.get(
        str(name), "Leave it out, or take the optimizer of torch.optim that has it."
    )
    return f"an option of torch.optim that narrowgauge.optim does not compute. {hint}"


def _is_number(value: object) -> bool:
    """Accept a 0-d tensor too: torch's schedulers allow a tensor as learning rate."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def refuse(parameter: Tensor, master: str | None) -> str:
    """Reason why a parameter cannot be trained with this master, or ''."""
    if _overlaps(shards.local(parameter)):
        return "some of its elements share memory, as those of expand() do. Give each its own: nn.Parameter(x.contiguous())."
    if parameter.dtype == torch.float32:
        return ""
    if parameter.dtype not in DTYPES:
        return "narrowgauge.optim trains float32, bfloat16 and float16. Convert it, or give it to an optimizer of torch."
    if master is None:
        return (
            f"an update below 1/{512 if parameter.dtype == torch.bfloat16 else 4096} of a weight would be lost in rounding. "
            "Choose master='bf16-remainder', 'fp32', 'fp16-scaled' or 'stochastic', or keep the weights in float32."
        )
    if parameter.dtype == torch.float16 and master == "bf16-remainder":
        return (
            "master='bf16-remainder' is for bfloat16. Choose master='fp32', 'fp16-scaled' or 'stochastic', or load the model in "
            "bfloat16."
        )
    return ""


def _overlaps(x: Tensor) -> bool:
    """Return True if elements share memory.

    They do if the stride of an axis is smaller than the span of the axes with smaller strides.
    """
    span = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < span:
            return x.numel() > 0
        span += stride * (size - 1)
    return False


def state_format(parameter: Tensor, group: Mapping[str, Any]) -> tuple[str, str]:
    """Return (states of a parameter, reason for them).

    The shape of the whole parameter decides, so all shardings get the same format.
    """
    asked = group["states"]
    if states.named(asked) == states.named("fp32"):
        return "fp32", group.get("why", "asked for")
    if parameter.ndim < 2:
        return "fp32", "one axis"
    if parameter.numel() < SMALLEST:
        return "fp32", f"fewer than {SMALLEST} elements"
    tile = states.named(asked).tile
    # Each row has scales of its own, so short rows pay two bytes for a few elements.
    if shape_of(parameter)[1] < tile // 8:
        return "fp32", SHORT
    if group["embeddings"] == "fp32" and "param_names" in group:
        place = next(i for i, each in enumerate(group["params"]) if each is parameter)
        if _EMBEDDING.search(group["param_names"][place]):
            return "fp32", "embedding"
    if not shards.fits(parameter, tile):
        return "fp32", CUT
    return asked, "asked for"


def master_of(parameter: Tensor, group: Mapping[str, Any], tile: int) -> masters.Master:
    """Return the master of a parameter.

    A scaled master becomes float32 if a shard would cut its tiles. So does the scaled master of
    every tensor of one axis: any shard could cut it, and one process must store the same format.
    """
    asked: masters.Master = group["master"]
    if asked == "fp16-scaled" and (parameter.ndim < 2 or not shards.fits(parameter, tile)):
        return "fp32"
    return asked


def warn_of_cut_tiles(kind: str, group: Mapping[str, Any]) -> None:
    """Warn of parameters that keep float32 states because column shards cut tiles.

    Only the first rank of their mesh warns.
    """
    found = [parameter for parameter in group["params"] if state_format(parameter, group)[1] == CUT]
    if found and not any(found[0].device_mesh.get_coordinate() or ()):
        tile = states.named(group["states"]).tile
        warn(
            f"{kind}: {len(found)} of {len(group['params'])} parameters keep float32 states: shards of their columns cut tiles of "
            f"{tile}, for example of {list(found[0].shape)} in {list(shards.local(found[0]).shape)}. Shard their rows, or into columns "
            "that are multiples of it.",
            code="optim.cut-tiles",
            stacklevel=2,
            category=SlowerWarning,
        )
