"""A frozen Parameter that is stored as codes alone and dequantizes when code reads it.

    layer.weight.norm(dim=1)        reads the dequantized weight, in the dtype of the Parameter
    F.linear(x, layer.weight)       likewise: PEFT's DoRA, exporters and loggers read weights so
    layer.weight.data += delta      the sum becomes an ordinary weight; the codes are dropped

torch calls `__torch_function__` for every operation that has such a Parameter among its operands.
Operations on metadata (shape, dtype, device) answer for the Parameter itself. All other operations
receive a dequantized copy, [out_features, in_features], which lives as long as its reader holds it.
A write to the copy, or to a view of the copy, raises its version. The copy then replaces the
layer's weight, so no write is lost. That weight stays frozen: requires_grad is False as before.
Later writes through the same copy, or through another that is still held, reach that weight too.

Two kinds of read hand out memory without a version counter. NumPy arrays are
made read-only. A raw pointer (`data_ptr`, DLPack) stays valid until the
layer's next forward pass, and a write through it is lost. The storage of the
Parameter is the placeholder, so memory measurements count no 16-bit weight.

Rejected: a subclass with `__torch_dispatch__`. It sees every operator, but a Parameter cannot
become one in place, and `.to` swaps it. Decoding state dicts at once: saving an adapter would
decode the whole base model. Storing codes alone in files: plain torch cannot load them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports Dynamo at once
from torch.utils._pytree import tree_map

from narrowgauge.errors import ConfigError

Function = Callable[..., Any]

# Properties are metadata except these, which return the values. Methods in _DESCRIBE are metadata.
_NUMBERS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"))
_DESCRIBE = frozenset(
    (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed", "is_inference",
        "is_conj", "is_neg", "_is_zerotensor", "get_device", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        "retain_grad", "__hash__", "__len__", "is_pinned", "is_shared", "is_same_size", "has_names", "_is_view", "is_distributed",
        "_has_symbolic_sizes_strides", "dim_order", "is_coalesced",
    )
)  # fmt: skip
_LAYOUT = frozenset(("stride", "is_contiguous", "storage_offset"))  # of the dequantized tensor
_STORAGES = frozenset(("untyped_storage", "storage", "_typed_storage"))
_POINTERS = frozenset(("data_ptr", "__dlpack__", "__cuda_array_interface__"))


class Codes(Protocol):
    """The codes of a weight. `nn.frozen.FrozenWeight` implements it."""

    def original(self, weight: Tensor) -> Tensor: ...


# A weak reference to the module that holds the weight, and a function (module, weight, copy) that gives the
# module a written copy. It returns False if the module holds other numbers by now.
Owner = tuple[weakref.ref[Any], Callable[[Any, "CodedWeight", Tensor], bool]]


class CodedWeight(nn.Parameter):
    """A Parameter whose values come from codes. See the module docstring.

    `hold` turns an ordinary Parameter into one in place, so every reference to it stays valid.

    _codes   source of the values
    _owner   its module, which receives a written copy
    _lent    a dequantized copy that is reused: for an entry of a state dict from its first read on,
             for others while a raw pointer may be in use
    _stays   True for an entry of a state dict
    """

    _codes: Codes
    _owner: Owner
    _lent: Tensor | None = None
    _stays = False

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Build an ordinary Parameter: libraries that move weights call `type(old)(new_data)`."""
        return nn.Parameter(data, requires_grad)

    def decoded(self) -> Tensor:
        """[out_features, in_features] in the Parameter's dtype: a new copy, or `_lent`."""
        if self._lent is not None:
            return self._lent
        placeholder = plain(self)
        # A tensor made in inference mode could not be saved for backward by a later training step.
        with torch.inference_mode(False), torch.no_grad():
            found = self._codes.original(placeholder)
        if self._stays:
            # safetensors reads the tensor twice, the second time for the end of its memory.
            self._lent = found
        return found

    def take_over(self, whole: Tensor) -> None:
        """Make `whole` the weight of the module, or of this Parameter alone if no module holds it."""
        owner, replace = self._owner[0](), self._owner[1]
        if owner is None or not replace(owner, self, whole):
            release(self)
            self.data = whole

    def entry(self) -> CodedWeight:
        """Return a second view of the same codes for a state dict.

        It is decoded at its first read and keeps the decoded tensor.
        """
        found = hold(
            nn.Parameter(plain(self).view_as(plain(self)), requires_grad=False),
            self._codes,
            self._owner,
        )
        found._stays = True
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.decoded().clone(), plain(self).requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the dequantized tensor, which plain torch loads."""
        if self._stays:
            return self.decoded().__reduce_ex__(protocol)
        return nn.Parameter(self.decoded(), plain(self).requires_grad).__reduce_ex__(protocol)

    @classmethod
    # Dynamo traces into `__torch_function__` and fails in its own guard on
    # strides (torch 2.13), so reads run in eager mode.
    @_disable_dynamo
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _called(func, args, kwargs or {})


class LentWeight(Tensor):
    """A view of a dequantized copy. It reports a write to its CodedWeight."""

    _weight: Tensor  # a CodedWeight, until a write gives it memory
    _whole: Tensor

    @classmethod
    @_disable_dynamo
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _called(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), plain(self).clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def hold(weight: Tensor, codes: Codes, owner: Owner) -> CodedWeight:
    """Turn a Parameter into a CodedWeight in place and return it."""
    weight.__class__ = CodedWeight
    assert isinstance(weight, CodedWeight)
    weight._codes, weight._owner, weight._lent = codes, owner, None
    return weight


def release(weight: Tensor) -> None:
    """Turn a CodedWeight into an ordinary Parameter in place, with the values in its own memory."""
    weight.__class__ = nn.Parameter
    for name in ("_codes", "_owner", "_lent", "_stays"):
        weight.__dict__.pop(name, None)


def codes_of(weight: Tensor | None) -> Codes | None:
    """Return the codes of a CodedWeight; None for a weight with memory."""
    return weight._codes if isinstance(weight, CodedWeight) else None


def plain(weight: Tensor) -> Tensor:
    """Return the memory of a CodedWeight (a placeholder of NaN) or a LentWeight as a Tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.as_subclass(Tensor)


def _called(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation with a CodedWeight or a LentWeight among its operands."""
    name, accessor = func.__name__, ""
    # A property arrives as the slot wrapper of its descriptor, which holds the property's name.
    if name in ("__get__", "__set__", "__delete__"):
        name, accessor = func.__self__.__name__, name  # type: ignore[attr-defined]
    if name in _DESCRIBE or (accessor and name not in _NUMBERS):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first = args[0] if args else None
    if type(first) is CodedWeight:
        if name in _LAYOUT:
            # The placeholder has strides of zero. The dequantized tensor is contiguous.
            return func(
                torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs
            )
        # state_dict calls detach on every Parameter.
        if name == "detach":
            return first.entry()
        if name == "data" and accessor == "__set__":
            first.take_over(_readable(args[1]))
            return None
        # Measurements of memory look at storages, and must find the placeholder.
        if name in _STORAGES and not first._stays:
            return func(plain(first), *args[1:], **kwargs)
        if name in _POINTERS:
            first._lent = first.decoded()
    if type(first) is LentWeight and accessor == "__set__":
        with torch._C.DisableTorchFunctionSubclass():
            return func(first, *(_readable(each) for each in args[1:]))
    return _computed(func, args, kwargs)


def _readable(value: Any) -> Any:
    """Return a value without the classes of this module: CodedWeight is dequantized."""
    if type(value) is CodedWeight:
        return value.decoded()
    return plain(value) if type(value) is LentWeight else value


def _computed(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on dequantized copies, then detect writes and wrap views of a copy."""
    # id -> (operand, its weight, the whole copy, the tensor passed on, its version before)
    read: dict[int, tuple[Tensor, Tensor, Tensor, Tensor, int]] = {}

    def opened(value: Any) -> Any:
        if type(value) not in (CodedWeight, LentWeight):
            return value
        if id(value) not in read:
            tensor = _live(value) if type(value) is LentWeight else _readable(value)
            source = (
                (value, tensor) if type(value) is CodedWeight else (value._weight, value._whole)
            )
            read[id(value)] = (value, *source, tensor, tensor._version)
        return read[id(value)][3]

    args, kwargs = tree_map(opened, args), tree_map(opened, kwargs)
    found = func(*args, **kwargs)
    for _, weight, whole, tensor, version in read.values():
        # An earlier write made this memory the weight's own.
        if tensor._version == version or _same_memory(tensor, plain(weight)):
            continue
        if not isinstance(weight, CodedWeight):
            raise ConfigError(
                f"A view of a weight {list(whole.shape)} that was stored as codes was written, and the weight has had 16 bits since "
                "another write. Read the weight again, and write to that.",
                code="freeze.old-view",
            )
        weight.take_over(whole)

    def closed(value: Any) -> Any:
        for given, weight, whole, tensor, version in read.values():
            # An in-place operation returns its operand: return the Parameter, not the copy.
            if value is tensor and (type(given) is LentWeight or tensor._version != version):
                return given
            if isinstance(value, Tensor) and type(value) is Tensor and _same_memory(value, whole):
                # A view shares the copy's version, so a later write through it is detected as well.
                lent = value.as_subclass(LentWeight)
                lent._weight, lent._whole = weight, whole
                return lent
            if type(value).__module__ == "numpy" and hasattr(value, "setflags"):
                value.setflags(write=False)
        return value

    return tree_map(closed, found)


def _live(lent: LentWeight) -> Tensor:
    """The tensor that an operation on a view of a copy gets.

    Once the weight has memory, the same elements there. The copy, if it is that memory, if the weight
    is still codes, or if the weight lies in another order.
    """
    copied, weight, whole = plain(lent), lent._weight, lent._whole
    if isinstance(weight, CodedWeight) or _same_memory(plain(weight), whole):
        return copied
    own: Tensor = weight.data
    if (own.shape, own.stride(), own.dtype) != (whole.shape, whole.stride(), copied.dtype):
        return copied
    start = own.storage_offset() + copied.storage_offset() - whole.storage_offset()
    return own.as_strided(copied.shape, copied.stride(), start)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.layout == other.layout == torch.strided
        and one.device == other.device
        and one.device.type != "meta"
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )
