"""Modules that hold all experts of a layer in one parameter, and how they are converted.

transformers 5 decorates them with `use_experts_implementation`. Their attributes say the layout:

    gate_up_proj [E, 2 I, K], or up_proj [E, I, K] without has_gate; down_proj [E, K, I]
    is_transposed         the last two axes are exchanged: [E, K, 2 I] and [E, I, K]
    has_bias              gate_up_proj_bias [E, 2 I], down_proj_bias [E, K]
    _apply_gate           [S, 2 I] -> [S, I], concatenated or interleaved
    has_post_expert_norm  post_expert_norm of each expert's output
    num_experts           E; the index E stands for an expert of another rank

Llama 4 has a forward of its own, in which each expert multiplies every token.

`adopt` changes the class of the module and adds an ExpertLinear for each matrix, at
`experts.E.gate_up_proj` and `experts.E.down_proj`. The parameters, their names and the state dict
stay as they are. `give_back` undoes it. Source of the contract: transformers 5,
integrations/moe.py, whose functions "eager", "grouped_mm" and "batched_mm" all compute the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from narrowgauge.addresses import is_compiling
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.nn import frozen_experts, step_end
from narrowgauge.nn.coded_weight import plain
from narrowgauge.nn.grouped_function import kernel_of
from narrowgauge.nn.grouped_linear import (
    ExpertLinear,
    Routing,
    RowCounts,
    Slice,
    grouped_linear,
)

# Functions of transformers that compute what a GroupedExperts computes, in the weights' dtype.
SAME = (None, "eager", "grouped_mm", "batched_mm")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STACKED = "Llama4TextExperts"
KEPT_BECAUSE = (
    "_narrowgauge_kept_because"  # in the `__dict__` of an experts module: why `convert` left it
)


class Stacks(NamedTuple):
    """Names of a module's parameters: the first product and the second one."""

    first: str
    second: str


class GroupedExperts(nn.Module):
    """Base class of converted experts modules; the class of the model stands behind it.

    `grouped_from` is that class.
    """

    grouped_from: type[nn.Module]
    has_bias: bool

    def slices(self, name: str) -> list[ExpertLinear]:
        """The matrices of parameter `name`, in the order of the experts."""
        experts = (each for key, each in self._modules.items() if key.isdigit())
        found: list[Any] = [each._modules[name] for each in experts]  # type: ignore[union-attr]
        if any(not isinstance(each, ExpertLinear) for each in found):
            self._refuse_wrapped(name, found)
        return found

    def _refuse_wrapped(self, name: str, found: list[Any]) -> None:
        index, other = next((i, x) for i, x in enumerate(found) if not isinstance(x, ExpertLinear))
        raise ConfigError(
            f"{self.grouped_from.__name__}: {name} of expert {index} was replaced by a {type(other).__name__}, as peft does, but its "
            "weight is a part of one parameter. Leave these matrices out, in peft by "
            r"LoraConfig(exclude_modules=r'.*\.experts\.\d+\..*'): it then adapts the parameter.",
            code="experts.wrapped",
        )

    def product(self, name: str, x: Tensor, counts: RowCounts) -> Tensor:
        """Multiply x [S, K] by the matrices of parameter `name`, as grouped_linear."""
        return grouped_linear(self.slices(name), x, counts, *self._tensors(name))

    def _tensors(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Parameter `name` and its bias, or None."""
        # By attribute: parametrizations (PEFT), pruning and DataParallel's replicas keep the tensor
        # out of `_parameters`.
        bias = self.slices(name)[0].place.bias
        return getattr(self, name), getattr(self, bias) if bias else None

    def why_looped(self) -> Reason | None:
        """Why the experts of a parameter are multiplied one after another; None if none is."""
        found = (self.kernel_of(name) for name in stacks(self))
        return next((each for each in found if isinstance(each, Reason)), None)

    def kernel_of(self, name: str) -> str | Reason:
        """The kernel of parameter `name`, or why there is none for all experts."""
        return kernel_of(self.slices(name), *self._tensors(name))

    def forward(self, *given: Any, **named: Any) -> Tensor:
        found: Tensor = (self._eagerly if is_compiling() else self._computed)(*given, **named)
        return found

    @_disable_dynamo
    def _eagerly(self, *given: Any, **named: Any) -> Tensor:
        """Compute between two compiled graphs: a graph cannot split rows by their values."""
        return self._computed(*given, **named)

    def _computed(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """hidden_states [T, K], experts [T, k] and their weights [T, k] -> [T, K]."""
        module: Any = self
        _refuse_other_implementation(module)
        first, second = stacks(module)
        routing = Routing.of(top_k_index, module.num_experts)
        y = self.product(first, routing.gather(hidden_states), routing.counts)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = self.product(second, y, routing.counts)
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y)
        y = y * routing.weights(top_k_weights)
        return routing.combine(y.to(hidden_states.dtype))

    def __repr__(self) -> str:
        """As nn.Module, with one line for all slices."""
        names = stacks(self)
        recipes = {
            "none" if each.recipe is None else each.recipe.name: None
            for name in names
            for each in self.slices(name)
        }
        lines = []
        for name in names:
            first, *others = self.slices(name)
            own = first.weight_shape[::-1] if first.place.is_transposed else first.weight_shape
            lines.append(f"{name}={[1 + len(others), *own]}")
        lines += [f"recipe={', '.join(recipes)}"]
        lines += [
            f"({name}): {each!r}" for name, each in self._modules.items() if not name.isdigit()
        ]
        inner = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {inner}\n)"

    def coded_stacks(self) -> list[str]:
        """Names of the parameters that are stored as codes (`frozen_experts`)."""
        return [name for name in stacks(self) if frozen_experts.is_coded(self, name)]

    def _still_coded(self) -> list[str]:
        """`coded_stacks`, after the codes of stacks that were replaced are dropped."""
        return [name for name in stacks(self) if frozen_experts.check(self, name)]

    def _apply(self, fn: Any, recurse: bool = True) -> GroupedExperts:
        """Move or convert the module, as by model.to(...)."""
        frozen_experts.move(self, self._still_coded(), partial(super()._apply, fn, recurse))
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._still_coded()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        from narrowgauge.nn.state_loading import load_stacks

        self._still_coded()
        load_stacks(self, stacks(self), super()._load_from_state_dict, state_dict, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time, so a pickle names the class of the model."""
        self._still_coded()  # `__setstate__` would empty a stack that was replaced
        return _blank, (self.grouped_from,), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedExperts:
        """As any module's; the copy has codes where this one has, and no decoded stack."""
        for name in self._still_coded():
            # A CodedWeight copies what it decodes to. `__setstate__` gives this one its shape.
            own = plain(self._parameters[name])  # type: ignore[arg-type]
            memo[id(self._parameters[name])] = nn.Parameter(own.new_empty(0), False)
        found: Any = _blank(self.grouped_from)
        # The experts below refer to this module's dictionary of parameters.
        memo[id(self)] = found
        found.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.coded_stacks():
            frozen_experts.hold(self, name)


class StackedExperts(GroupedExperts):
    """Llama 4: each expert has all tokens, which the router has weighted before."""

    def _computed(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """hidden_states [E T, K], expert by expert -> [E T, K]."""
        module: Any = self
        experts = len(self.slices("down_proj"))
        counts = RowCounts.equal(hidden_states.shape[0], experts, hidden_states.device)
        gate, up = self.product("gate_up_proj", hidden_states, counts).chunk(2, dim=-1)
        return self.product("down_proj", up * module.act_fn(gate), counts)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # class of a model -> its grouped class


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        base = StackedExperts if _is_stacked(kind) else GroupedExperts
        own = {"grouped_from": kind, "__module__": kind.__module__}
        _CLASSES[kind] = type(f"Grouped{kind.__name__}", (base, kind), own)
    return _CLASSES[kind]


def _blank(kind: type[nn.Module]) -> nn.Module:
    """An object without attributes, for copies and pickles."""
    grouped = _class_of(kind)
    return grouped.__new__(grouped)


def stacks(module: nn.Module) -> Stacks:
    """The parameters of an experts module that holds them in a known layout."""
    gated = _is_stacked(type(module)) or module.has_gate
    return Stacks("gate_up_proj" if gated else "up_proj", "down_proj")


def _is_stacked(kind: type[nn.Module]) -> bool:
    """True for Llama 4's experts, whose forward takes rows of all experts."""
    return any(each.__name__ == _STACKED for each in kind.__mro__)


def is_known(module: nn.Module) -> bool:
    """True for the experts of Llama 4, and those of `use_experts_implementation`."""
    own = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    decorated = hasattr(type(module), "_apply_gate") and all(hasattr(module, each) for each in own)
    return decorated or _is_stacked(type(module))


def refuse(module: nn.Module) -> Reason | None:
    """Why experts in one parameter cannot be converted; None if they can, or are already."""
    if isinstance(module, GroupedExperts):
        return None
    kind = type(module).__name__
    is_stacked = _is_stacked(type(module))
    if not is_known(module):
        return Reason(
            "experts",
            f"the experts share one parameter, and the layout of {kind} is unknown: give each an nn.Linear",
        )
    if nn.utils.parametrize.is_parametrized(module):
        return Reason("experts-parametrized", "the experts are parametrized: convert them first")
    if "forward" in module.__dict__:
        return Reason("experts-forward", f"another library replaced the forward of {kind}")
    asked = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not is_stacked and asked not in SAME:
        return Reason(
            "experts-kernel",
            f"the configuration asks for the experts of {asked!r}: load the model with experts_implementation='eager'",
        )
    if not is_stacked and not hasattr(type(module).forward, "__wrapped__"):
        return Reason("experts-forward", f"{kind} has a forward of its own")
    return _refuse_parameters(module, is_stacked)


def _refuse_parameters(module: Any, is_stacked: bool) -> Reason | None:
    """Why the parameters are not those of the layout; None if they are."""
    first, second = (module._parameters.get(name) for name in stacks(module))
    if first is None or second is None or first.ndim != 3 or second.ndim != 3:
        return Reason(
            "experts-layout",
            f"{type(module).__name__} lacks {' or '.join(stacks(module))} [E, N, K]",
        )
    transposed = is_stacked or module.is_transposed
    outer, inner = (2, 1) if transposed else (1, 2)
    if (
        first.shape[0] != second.shape[0]
        or first.shape[0] != module.num_experts
        or first.shape[inner] != second.shape[outer]
    ):
        return Reason(
            "experts-layout",
            f"its parameters are {list(first.shape)} and {list(second.shape)}, which do not fit {module.num_experts} experts",
        )
    if first.dtype not in _FLOATS or second.dtype not in _FLOATS:
        return Reason("experts-dtype", f"its parameters are {first.dtype} and {second.dtype}")
    if any(each.shape[0] > 1 and each.stride(0) == 0 for each in (first, second)):
        return Reason("experts-shared", "its experts share one matrix")
    if any(type(each).__name__ == "DTensor" for each in (first, second)):
        return Reason("experts-sharded", "ranks share it: convert the model before it is sharded")
    return None


def _refuse_other_implementation(module: Any) -> None:
    asked = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if asked not in SAME:
        raise ConfigError(
            f"{module.grouped_from.__name__}: experts_implementation={asked!r} was chosen after convert, and its kernels know no recipe. "
            "Set it back to 'eager', or leave the experts as they are: narrowgauge.convert(model, {'*.experts': None}).",
            code="experts.implementation",
        )


# --- Adoption ---


def adopt(module: nn.Module) -> GroupedExperts:
    """Turn an experts module into a GroupedExperts in place, with slices that have no recipe.

    Call `refuse` before.
    """
    transposed = _is_stacked(type(module)) or bool(module.is_transposed)
    biased = not _is_stacked(type(module)) and bool(module.has_bias)
    names = stacks(module)
    module.__class__ = _class_of(type(module))
    assert isinstance(module, GroupedExperts)
    for index in range(module._parameters[names.first].shape[0]):  # type: ignore[union-attr]
        places = {
            name: Slice(
                module._parameters, name, f"{name}_bias" if biased else "", index, transposed
            )
            for name in names
        }
        expert = nn.ModuleDict({name: ExpertLinear(place) for name, place in places.items()})
        module._modules[str(index)] = expert.train(module.training)
    return module


def give_back(module: GroupedExperts) -> None:
    """Turn it into the model's own class again, in place, and drop the slices."""
    for name in stacks(module):
        for each in module.slices(name):
            step_end.forget(each)
    for name in [name for name in module._modules if name.isdigit()]:
        del module._modules[name]
    module.__class__ = module.grouped_from  # type: ignore[assignment]


def grouped_experts(model: nn.Module) -> Iterator[tuple[str, GroupedExperts]]:
    return (
        (name, each) for name, each in model.named_modules() if isinstance(each, GroupedExperts)
    )


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Inside the block, all experts that can have a recipe are GroupedExperts.

    Afterwards, those of which no slice has a recipe are as the model made them, and keep the reason
    of the first slice for `describe`.
    """
    for module in list(model.modules()):
        if is_known(module) and refuse(module) is None:
            if not isinstance(module, GroupedExperts):
                adopt(module)
            module.__dict__.pop(KEPT_BECAUSE, None)
    try:
        yield
    finally:
        close(model)


def close(model: nn.Module) -> None:
    """Give back the experts of which no slice has a recipe."""
    for _, module in list(grouped_experts(model)):
        layers = [each for name in stacks(module) for each in module.slices(name)]
        if all(each.recipe is None for each in layers):
            if reason := layers[0].reason:
                module.__dict__[KEPT_BECAUSE] = reason
            give_back(module)
