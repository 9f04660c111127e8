"""Experts of a base that is read shard by shard: files hold each expert's matrices by themselves.

    the model   experts.gate_up_proj [E, 2 I, K], experts.down_proj [E, K, I]
    its files   experts.3.gate_proj.weight, experts.3.up_proj.weight, experts.3.down_proj.weight

Names differ between models, and follow from what transformers does when it saves the class
(`conversion.checkpoint_names`). A matrix is cast as soon as its tensors are there, so a stack that
becomes codes never exists in 16 bits. Tensors wait for each other where files are not sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.conversion.checkpoint_names import expert_names, reverted
from narrowgauge.errors import ConfigError
from narrowgauge.nn.experts import GroupedExperts
from narrowgauge.nn.frozen_experts import FrozenExpert, refuse_stack, store_stack_as_codes

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor


TIED = "tied to another weight"


class Held(NamedTuple):
    """How the weights of a Linear or of a stack of experts are held.

    reason   why it was not held as codes; '' if it was
    nbytes   bytes of its codes, or of its elements
    """

    reason: str
    nbytes: int


@dataclass(eq=False)
class ExpertStack:
    """One parameter of which the files hold parts.

    owner, own, name  its module, its name there, and its name in the model
    is_tied           it has several names
    parts             name in the files -> (expert, part of its rows)
    waiting           expert -> part -> (values, codes of the file) that were read
    missing           names that were not read yet
    made              codes of the experts that were read whole
    reason            why the stack stays wide; '' if it becomes codes; None before `begin`
    count             parts of an expert's matrix: two of gate and up
    """

    owner: nn.Module
    own: str
    name: str
    is_tied: bool
    parts: dict[str, tuple[int, int]]
    waiting: dict[int, dict[int, tuple[Tensor, QTensor | None]]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    made: dict[int, FrozenExpert] = field(default_factory=dict)
    reason: str | None = None

    def __post_init__(self) -> None:
        self.missing = set(self.parts)
        self.count = 1 + max(part for _, part in self.parts.values())

    @property
    def parameter(self) -> nn.Parameter:
        return self.owner.get_parameter(self.own)

    @property
    def shape(self) -> list[int]:
        """Shape of a tensor in the files."""
        _, rows, columns = self.parameter.shape
        return [rows // self.count, columns]

    @property
    def first(self) -> nn.Module | None:
        """The first expert of a stack that becomes codes: all have its cast."""
        if self.reason or not isinstance(self.owner, GroupedExperts):
            return None
        return self.owner.slices(self.own)[0]

    def begin(self, device: torch.device) -> None:
        """Find out, before the first tensor, whether the stack becomes codes."""
        if self.reason is not None:
            return
        before = self.parameter
        # Without memory, but on the device: what has a reason against codes is filled, not cast.
        hollow = torch.empty((), dtype=before.dtype, device=device).expand(before.shape)
        self._become(hollow)
        self.reason = TIED if self.is_tied else self._refusal()
        if self.reason:
            self._become(torch.empty(before.shape, dtype=before.dtype, device=device))

    def _become(self, values: Tensor) -> None:
        self.owner._parameters[self.own] = nn.Parameter(values, requires_grad=False)

    def _refusal(self) -> str:
        if not isinstance(self.owner, GroupedExperts):
            return "no recipe casts it"
        return refuse_stack(self.owner, self.own)

    def put(self, key: str, value: Tensor, codes: QTensor | None) -> tuple[int, int]:
        """Take one tensor of a file: (matrices held by the file's codes, matrices cast anew)."""
        expert, part = self.parts[key]
        self.missing.discard(key)
        pieces = self.waiting.setdefault(expert, {})
        pieces[part] = value, codes
        if len(pieces) < self.count:
            return 0, 0
        found = [each for _, each in sorted(self.waiting.pop(expert).items())]
        if self.reason:
            torch.cat([values for values, _ in found], out=self.parameter.data[expert])
            return 0, 0
        layer = self.owner.slices(self.own)[expert]  # type: ignore[operator]
        given = _joined([codes for _, codes in found])
        if given is None:
            whole = torch.cat([values for values, _ in found])
            self.made[expert] = FrozenExpert.of(layer, layer.place.matrix(whole))
            return 0, 1
        self.made[expert] = FrozenExpert(layer, given)
        return 1, 0

    def end(self) -> Held:
        """Hold the codes of all experts, once `missing` is empty."""
        if self.reason:
            return Held(self.reason, self.parameter.nbytes)
        made = [self.made[expert] for expert in sorted(self.made)]
        return Held("", store_stack_as_codes(self.owner, self.own, made))


def _joined(codes: list[QTensor | None]) -> QTensor | None:
    """The codes of a matrix from those of its parts, whose rows are whole blocks; else None."""
    if len(codes) == 1:
        return codes[0]
    found = [each for each in codes if each is not None]
    if len(found) < len(codes) or any(each.shape[0] % each.cast.tile[0] for each in found[:-1]):
        return None
    data, scale = (torch.cat([getattr(each, name) for each in found]) for name in ("data", "scale"))
    return replaced(found[0], data=data, scale=scale, checked=True)


def stacks_of(
    model: Any, places: Mapping[str, tuple[nn.Module, str]], tied: set[str]
) -> dict[str, ExpertStack]:
    """Name in the files -> the stack that it is a part of.

    places  name in the model -> (module, attribute), of what files do not hold by this name
    tied    names of parameters that have several
    """
    found: dict[str, ExpertStack] = {}
    for name, (owner, own) in places.items():
        parameter = owner._parameters.get(own)
        if parameter is None or parameter.ndim != 3:
            continue
        if parts := expert_names(model, name):
            stack = ExpertStack(owner, own, name, name in tied, parts)
            found |= dict.fromkeys(parts, stack)
    return found


def renamed(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Name in the files -> name in the model, of tensors that transformers saves by another name.

    names  those in the model
    """
    found = {}
    for name in names:
        try:
            made = reverted(model, {name: torch.zeros(1, 1)})
        except (RuntimeError, ValueError, IndexError):
            continue  # its layout is another one too: the caller says that no file holds it
        if len(made) == 1 and next(iter(made.values())).shape == (1, 1):
            found[next(iter(made))] = name
    return found


def refuse_incomplete(stacks: Mapping[str, ExpertStack], where: str) -> None:
    """Raise ConfigError for experts of which the files hold only some tensors."""
    missing = sorted({name for stack in stacks.values() for name in stack.missing})
    begun = [name for name in missing if stacks[name].reason is not None]
    if begun:
        more = f" and {len(begun) - 1} more" if len(begun) > 1 else ""
        raise ConfigError(
            f"model = {where!r}: no file holds {begun[0]!r}{more}, of the experts in {stacks[begun[0]].name!r}. Pass a folder with all "
            "shards of the model.",
            code="model.missing-weights",
        )
