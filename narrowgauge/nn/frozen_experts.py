"""Frozen experts stored as codes: the counterpart of `frozen` for a stack, one parameter [E, N, K].

Each expert's matrix has its own codes, a FrozenExpert, as the weight of a Linear has. The parameter
of the stack keeps its shape and dtype, and dequantizes all experts when code reads it as a whole
(`coded_weight`). A stack is stored as codes for all of its experts or for none.

A state dict has the stack, dequantized, and for each expert `E.NAME.frozen.codes` and its scales.
A product reads the codes of one expert at a time. A GPU's kernel for all experts reads them as one
matrix [E N, K]. It needs square tiles, whose codes transpose.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.nn import coded_weight
from narrowgauge.nn.coded_weight import CodedWeight
from narrowgauge.nn.frozen import FrozenWeight, cast_weight, empty, refuse, refuse_training

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

ExpertLinear = Any  # nn.grouped_linear imports this module
GroupedExperts = Any  # so does nn.experts


class FrozenExpert(FrozenWeight):
    """Codes of one expert's matrix [N, K]. The module with the stack holds and moves the parameter.

    is_transposed  the stack is [E, K, N]
    """

    def __init__(self, layer: ExpertLinear, found: QTensor | None = None) -> None:
        super().__init__(layer, found)
        self.is_transposed = layer.place.is_transposed

    @classmethod
    def of(cls, layer: ExpertLinear, matrix: Tensor) -> FrozenExpert:
        """The codes of a matrix [N, K] that becomes the expert's."""
        return cls(layer, cast_weight(layer, matrix))

    def original(self, weight: Tensor) -> Tensor:
        """[N, K] in the memory order of the stack: a product's last bit may depend on it."""
        found = super().original(weight)
        return found.t().contiguous().t() if self.is_transposed else found

    def hold(self, layer: ExpertLinear) -> None:
        """Do nothing: `hold` frees the memory of the stack."""

    def move(self, layer: ExpertLinear, moving: Callable[[], object]) -> None:
        moving()

    def copied(self, layer: ExpertLinear) -> dict[str, Any]:
        return {}

    def check(self, layer: ExpertLinear) -> None:
        """Drop the codes of this expert if the stack was replaced; see `FrozenWeight.check`."""
        stack = layer.parameter
        if type(stack) is CodedWeight:
            # A copy that was lent to a raw pointer is dropped, as for the weight of a Linear.
            stack._lent = None
            refuse_training(stack, self.cast)
            held = stack._codes
            is_held = isinstance(held, StackCodes) and held.experts[layer.place.index] is self
        else:
            is_held = stack is not None and not any(stack.stride())  # fake, in a memory estimate
        if not is_held:
            self.drop(layer)


class StackCodes:
    """The codes of all experts of a stack, as the source of its values (`coded_weight.Codes`).

    experts        their codes, in order
    is_transposed  the stack is [E, K, N]
    lent           id -> matrices that code still holds (`lent_matrix`)
    """

    def __init__(self, experts: Sequence[FrozenExpert], is_transposed: bool) -> None:
        self.experts, self.is_transposed = tuple(experts), is_transposed
        self.lent: weakref.WeakValueDictionary[int, CodedWeight] = weakref.WeakValueDictionary()
        self._joined: FrozenWeight | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        first = self.experts[0]
        own = first.codes.shape[0], first.columns
        return len(self.experts), *(own[::-1] if self.is_transposed else own)

    def original(self, weight: Tensor) -> Tensor:
        """The stack in the dtype of `weight`. Peak memory: the result and one matrix in float32."""
        refuse_training(weight, self.experts[0].cast)
        # Expert by expert: a list of all matrices would be a second copy of the stack.
        found = torch.empty(self.shape, dtype=weight.dtype, device=self.experts[0].codes.device)
        for slot, each in zip(found, self.experts, strict=True):
            slot.copy_(self._laid(each.decoded(weight.dtype)))
        return found

    @property
    def may_join(self) -> bool:
        """True if the experts' codes, below each other, form a matrix whose codes transpose."""
        first = self.experts[0]
        return first.cast.is_symmetric and not first.cast.is_per_tensor and not first.cast.has_global_scale  # fmt: skip

    def joined(self) -> FrozenWeight:
        """The codes of all experts as one matrix [E N, K]. `may_join` must be True.

        The experts' own codes become parts of its memory. It is made once, and again after the codes
        have moved, each time by a copy.
        """
        if self._joined is None or not self._is_one_memory(self._joined):
            names = ("codes", "scale")
            parts = {name: torch.cat([getattr(each, name) for each in self.experts]) for name in names}  # fmt: skip
            for name in names:
                pieces = parts[name].chunk(len(self.experts))
                for each, piece in zip(self.experts, pieces, strict=True):
                    setattr(each, name, piece)
            self._joined = self.experts[0].beside({**parts})
        return self._joined

    def _is_one_memory(self, joined: FrozenWeight) -> bool:
        """False once codes were moved, or replaced by `load_state_dict(assign=True)`."""
        size = joined.codes.numel() // len(self.experts)
        memory = joined.codes.untyped_storage()._cdata
        return all(
            each.codes.untyped_storage()._cdata == memory
            and each.codes.storage_offset() == index * size
            for index, each in enumerate(self.experts)
        )

    def _laid(self, matrix: Tensor) -> Tensor:
        return matrix.t() if self.is_transposed else matrix


def refuse_stack(module: GroupedExperts, name: str) -> str:
    """Return the reason why a stack cannot be stored as codes, a clause, or ''."""
    if module._parameters.get(name) is None:
        return "torch's parametrization computes it"
    for index, layer in enumerate(module.slices(name)):
        if reason := refuse(layer):
            return f"expert {index}: {reason}"
    return ""


@torch.no_grad()
def store_stack_as_codes(
    module: GroupedExperts, name: str, made: Sequence[FrozenExpert] | None = None
) -> int:
    """Replace a frozen stack by codes, in place; return their bytes. `refuse_stack` must be ''.

    made  codes of all experts, if they exist already; None: cast the stack

    Peak memory: the stack and its codes.
    """
    layers = module.slices(name)
    # All casts come first: where memory ends in between, no expert has lost its weight.
    made = [FrozenExpert(layer) for layer in layers] if made is None else made
    for layer, codes in zip(layers, made, strict=True):
        layer.empty_cache()
        layer.put_submodule("frozen", codes)
    hold(module, name)
    return sum(each.nbytes for each in made)


def is_coded(module: GroupedExperts, name: str) -> bool:
    return all(layer.frozen is not None for layer in module.slices(name))


def hold(module: GroupedExperts, name: str) -> None:
    """Free the memory of the stack and make it dequantize on read. All experts must have codes.

    Raises ConfigError if the stack requires a gradient.
    """
    codes, stack = _codes_of(module, name), module._parameters[name]
    if type(stack) is CodedWeight:
        coded_weight.release(stack)
    refuse_training(stack, codes.experts[0].cast)
    empty(stack, codes.shape)
    if type(stack) is nn.Parameter:  # not for fake parameters of a memory estimate
        coded_weight.hold(stack, codes, (weakref.ref(module), partial(_take_over, name)))


def move(module: GroupedExperts, names: Sequence[str], moving: Callable[[], object]) -> None:
    """Move these stacks to another device or dtype. The codes decode in the new dtype."""
    # torch would decode the stack, and move the values in place of the placeholder.
    lent = {}
    for name in names:
        if type(stack := module._parameters[name]) is CodedWeight:
            lent[name] = _lent_by(stack)
            coded_weight.release(stack)
    try:
        moving()
    finally:
        for name in names:
            hold(module, name)
            if isinstance(held := coded_weight.codes_of(module._parameters[name]), StackCodes):
                held.lent.update({id(each): each for each in lent.get(name, ())})


def check(module: GroupedExperts, name: str) -> bool:
    """True if the stack is stored as codes; drops the codes of experts whose stack was replaced."""
    layers = module.slices(name)
    for layer in layers:
        if layer.frozen is not None:
            layer.frozen.check(layer)
    return all(layer.frozen is not None for layer in layers)


def lent_matrix(layer: ExpertLinear, stack: CodedWeight) -> CodedWeight:
    """The weight of one expert, [N, K]: decoded by itself when code reads it."""
    # A view of the placeholder, with the shape and dtype of the matrix and no memory of its own.
    own = layer.place.matrix(coded_weight.plain(stack))
    owner = weakref.ref(layer), _take_over_matrix
    found = coded_weight.hold(nn.Parameter(own, requires_grad=False), layer.frozen, owner)
    if isinstance(held := stack._codes, StackCodes):
        held.lent[id(found)] = found
    return found


def give_back(module: GroupedExperts, name: str, whole: Tensor) -> None:
    """Give the module this stack in its dtype, and drop the codes of all experts.

    Held matrices (`lent_matrix`) become parts of the stack, and later writes to them reach it.
    """
    stack, lent = module._parameters[name], []
    if type(stack) is CodedWeight:
        lent = _lent_by(stack)
        coded_weight.release(stack)
    stack.data = whole
    for each in lent:
        layer = each._owner[0]()
        coded_weight.release(each)
        if layer is not None:
            each.data = layer.place.matrix(stack.data)
    for layer in module.slices(name):
        if layer.frozen is not None:
            layer.frozen.drop(layer)


def _lent_by(stack: CodedWeight) -> list[CodedWeight]:
    held = stack._codes
    return [*held.lent.values()] if isinstance(held, StackCodes) else []


def thaw(module: GroupedExperts, name: str) -> None:
    """Dequantize the stack for good."""
    stack = module._parameters[name]
    give_back(module, name, _codes_of(module, name).original(coded_weight.plain(stack)))


def _codes_of(module: GroupedExperts, name: str) -> StackCodes:
    layers = module.slices(name)
    return StackCodes([each.frozen for each in layers], layers[0].place.is_transposed)


def _take_over(name: str, module: GroupedExperts, written: CodedWeight, whole: Tensor) -> bool:
    """Give the module a copy of its decoded stack that a user wrote to."""
    # Codes that were dropped in between must not bring back the stack of that time.
    if coded_weight.codes_of(module._parameters.get(name)) is not written._codes:
        return False
    give_back(module, name, whole)
    return True


def _take_over_matrix(layer: ExpertLinear, written: CodedWeight, whole: Tensor) -> bool:
    """Give the module the decoded stack with the copy of one matrix that a user wrote to."""
    stack = layer.parameter
    if layer.frozen is not written._codes or type(stack) is not CodedWeight:
        return False
    # The copy shares no version with `decoded`, so the write below is not taken over twice.
    both = stack.decoded().clone()
    layer.place.matrix(both).copy_(whole)
    stack.take_over(both)
    return True
