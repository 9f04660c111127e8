"""Where a tensor's numbers lie, for what reads memory by its address; and which tensors have no such place.

A tensor of a class with a `__torch_dispatch__` of its own (DTensor, FakeTensor, FunctionalTensor) computes in its own way, and its memory
is elsewhere or nowhere: `data_ptr()` is 0 or that of something else, and a kernel that is given it ends the process. The same holds
inside torch.func's transforms and torch.jit.trace, and while a mode makes tensors fake or traces them: then a kernel's own buffers are
wrappers too.

Nor does the memory of a view that torch negates as it reads it (`z.conj().imag`) hold the view's numbers, and a gradient that autograd
knows to be zero (that of `sgn`) has none.

    wrapper     asked where kernels are chosen (`ops.registry`): those that read memory refuse, torch's operators compute
    address     what every kernel takes addresses from, so that one that nobody refused raises instead of crashing
    identity    to tell tensors apart by their memory, without reading it
    in_memory   what a gradient passes through before a kernel reads it
    validity    to tell whether a tensor is the one of before, with the same numbers
    holds_numbers   whether there is data to look at
    cached      keeps constants, but never fake ones
    own         gives a tensor a memory of its own on the CPU, to be written to a file
    dry_run     a step of fake tensors that is only counted: kernels allocate what they return, and none runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from narrowgauge.errors import BackendError

Given = ParamSpec("Given")
Made = TypeVar("Made")

is_compiling = torch.compiler.is_compiling  # names of this module: asked at every call
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_is_traced = torch._C._is_tracing
_PLAIN = Tensor.__torch_dispatch__
_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # fake, proxy, functional: not what users define


Launched = Callable[[str, Iterable[Tensor]], None]
_DRY_RUN: ContextVar[Any] = ContextVar("narrowgauge_dry_run", default=None)
_LAUNCHED: ContextVar[Launched | None] = ContextVar("narrowgauge_launched", default=None)


@contextmanager
def dry_run(device: Any, launched: Launched | None = None) -> Iterator[None]:
    """For a step of fake tensors that is counted: they count as tensors on `device` (an `ops.registry.Device`), whatever they say.

    Kernels are chosen as on that device, allocate what they return, and run nothing. launched: is told of each that would be, its
    name and the tensors that it reads or writes.
    """
    tokens = _DRY_RUN.set(device), _LAUNCHED.set(launched)
    try:
        yield
    finally:
        _DRY_RUN.reset(tokens[0])
        _LAUNCHED.reset(tokens[1])


def tell_launch(kernel: str, tensors: Iterable[Tensor]) -> None:
    """In a dry run, in place of a launch. kernel: its module and name."""
    if (launched := _LAUNCHED.get()) is not None:
        launched(kernel, tensors)


def dry_run_on() -> Any:
    """The device of the dry run that is going on, or None."""
    return _DRY_RUN.get()


PIECE = 2**22  # numbers: definitions work on more of them piece by piece on a GPU (ops/pieces.py)


def type_of(device: torch.device) -> str:
    """The type of a device, as "cuda"; in a dry run the pretended one's, wherever fake tensors say that they are."""
    pretended = None if is_compiling() else dry_run_on()
    return device.type if pretended is None else str(pretended.type)


def number(x: Tensor) -> float:
    """What x [1] holds, for a kernel that takes it by value; of a fake one, in a dry run, any."""
    return float(x) if dry_run_on() is None else 1.0


def wrapper(*tensors: Tensor | None) -> str:
    """What hides the memory of these tensors, or of those made now: a class, a mode, or "" where nothing does. 0.2 us.

    "" under torch.compile, which sees no kernel.
    """
    if is_compiling():
        return ""
    for x in tensors:
        if x is not None and type(x).__torch_dispatch__ is not _PLAIN:
            return type(x).__name__
        if x is not None and x.is_neg():
            return "view that negates its numbers"
        if x is not None and x._is_zerotensor():
            return "tensor of zeros without memory"
    if _modes():
        for key in _TRACING:
            if (mode := torch._C._get_dispatch_mode(key)) is not None:
                return type(mode).__name__
    if _transforms():
        return "transform of torch.func"
    return "torch.jit.trace" if _is_traced() else ""


def refuse_wrappers(*tensors: object) -> None:
    """Raises BackendError for what `address` refuses. For a kernel whose launcher takes the addresses itself."""
    if dry_run_on() is not None:
        return
    for x in tensors:
        if isinstance(x, Tensor) and (type(x).__torch_dispatch__ is not _PLAIN or x.is_neg() or x._is_zerotensor()):
            address(x)


def address(x: Tensor | None) -> int:
    """x's address for a kernel, 0 for None. Raises BackendError for a wrapper, and for a tensor with elements but no memory."""
    if x is None:
        return 0
    found = x.data_ptr() if type(x).__torch_dispatch__ is _PLAIN else 0
    if (found == 0 or x.is_neg()) and x.numel() and dry_run_on() is None:
        why = "whose memory holds the negatives of its numbers" if found else "whose memory is elsewhere"
        raise BackendError(
            f"A kernel was given a {type(x).__name__} of {list(x.shape)} on {x.device}, {why}. "
            "Pass plain tensors, or take the backend of plain torch.",
            code="kernel.no-memory",
        )
    return found


def in_memory(x: Tensor) -> Tensor:
    """x, or a copy where its memory does not hold its numbers: of a view that torch negates, and of zeros without memory."""
    if x._is_zerotensor():
        return x.clone()
    return x.resolve_neg() if x.is_neg() else x


def holds_numbers(x: Tensor) -> bool:
    """False on meta and for fake tensors, which have a shape alone: what depends on their data cannot be decided."""
    return not x.is_meta and not wrapper(x).startswith("FakeTensor")


def cached(build: Callable[Given, Made]) -> Callable[Given, Made]:
    """functools.cache for a function that makes constant tensors. A fake one, of which later calls could not compute, is not kept."""
    keeping = cache(build)

    @wraps(build)
    def get(*given: Given.args, **named: Given.kwargs) -> Made:
        return build(*given, **named) if wrapper() else keeping(*given, **named)  # type: ignore[arg-type]

    get.cache_clear = keeping.cache_clear  # type: ignore[attr-defined]
    return get


def identity(x: Tensor) -> int:
    """x's address; of a wrapper the object's own identity, in a dry run that of the memory that it stands for."""
    if type(x).__torch_dispatch__ is _PLAIN:
        return x.data_ptr()
    return id(x) if dry_run_on() is None else x.untyped_storage()._cdata + x.storage_offset() * x.element_size()


Key = tuple[Any, ...]


def validity(tensor: Tensor) -> Key | None:
    """The one key by which casts of a tensor are kept: of weights, inputs and gradients, and those that an optimizer's step leaves.

    Differs from an earlier one if the tensor was written, moved or replaced since; None: it has no version to go by. What is made in
    inference mode cannot be saved for backward, so the mode is a part of it. It does not see what is written through a raw pointer or
    `.data`; and memory that was freed may come back, so whoever compares keys holds the tensor.
    """
    if tensor.is_inference():
        return None
    place = tensor.device, identity(tensor), tensor.dtype, tensor.shape, tensor.stride()
    return (tensor._version, *place, torch.is_inference_mode_enabled())


def own(tensor: Tensor, taken: set[int]) -> Tensor:
    """Dense, on the CPU, and alone in a storage, which joins `taken`: files of tensors refuse those that share one."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    place = dense.untyped_storage()
    is_alone = place.nbytes() == dense.numel() * dense.element_size() and place.data_ptr() not in taken
    alone = dense if is_alone else dense.clone()
    taken.add(alone.untyped_storage().data_ptr())
    return alone
