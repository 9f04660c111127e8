"""Memory addresses of tensors: checks for kernels that read raw pointers, and cache keys.

`data_ptr()` does not always point at the values of a tensor:

    tensor subclasses    a class with its own `__torch_dispatch__` (DTensor, FakeTensor,
                         FunctionalTensor) stores its values elsewhere or nowhere. data_ptr() is 0
                         or unrelated; a kernel that dereferences it crashes the process
    transforms, tracing  inside torch.func transforms, torch.jit.trace, or a mode that makes tensors
                         fake or traces them, the buffers that a kernel allocates are wrappers too
    negated views        `z.conj().imag` is negated by torch on every read; memory holds the other
                         sign
    zero tensors         a gradient that autograd knows to be zero (from `sgn`) has no memory

    wrapper         reason why memory is hidden. `ops.registry` skips raw-pointer kernels then and
                    falls back to torch operators
    address         data_ptr() with a check: a kernel that was not skipped raises an error in place
                    of a crash
    identity        identifies a tensor by its memory without reading it
    in_memory       materializes a gradient before a kernel reads it
    validity        cache key: changes when the tensor is written, moved or replaced
    holds_numbers   False for meta and fake tensors
    cached          functools.cache for constant tensors that never caches fake ones
    own             copies a tensor into its own CPU storage, for writing to a file
    dry_run         traces a step on fake tensors: kernels allocate their results and run nothing
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

is_compiling = torch.compiler.is_compiling  # bound here, because they are read at every call
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_is_traced = torch._C._is_tracing
PLAIN = Tensor.__torch_dispatch__  # of a class whose data_ptr() points at its values
# Torch's own modes: fake, proxy and functional.
_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())


Launched = Callable[[str, Iterable[Tensor]], None]
_DRY_RUN: ContextVar[Any] = ContextVar("narrowgauge_dry_run", default=None)
_LAUNCHED: ContextVar[Launched | None] = ContextVar("narrowgauge_launched", default=None)


@contextmanager
def dry_run(device: Any, launched: Launched | None = None) -> Iterator[None]:
    """Trace a step on fake tensors as if they were on `device` (an `ops.registry.Device`).

    Kernels are chosen as on that device, allocate their results, and run nothing. The planner
    estimates memory this way.

    launched   called as launched(kernel, tensors) for each kernel that would be launched, with the
               kernel's name and the tensors that it reads or writes
    """
    tokens = _DRY_RUN.set(device), _LAUNCHED.set(launched)
    try:
        yield
    finally:
        _DRY_RUN.reset(tokens[0])
        _LAUNCHED.reset(tokens[1])


def tell_launch(kernel: str, tensors: Iterable[Tensor]) -> None:
    """Report a skipped kernel launch to the active dry run. kernel: its module and name."""
    if (launched := _LAUNCHED.get()) is not None:
        launched(kernel, tensors)


# dry_run_on() is the device of the active dry run, or None. Bound here, because every kernel asks.
dry_run_on: Callable[[], Any] = _DRY_RUN.get


PIECE = 2**22  # elements. On a GPU, definitions process larger tensors in pieces (ops/chunking.py)


def type_of(device: torch.device) -> str:
    """Device type such as "cuda". In a dry run: the type of the pretended device."""
    pretended = None if is_compiling() else dry_run_on()
    return device.type if pretended is None else str(pretended.type)


TRANSFORM = "transform of torch.func"  # what `wrapper` returns inside one


def wrapper(*tensors: Tensor | None) -> str:
    """Name the class, mode or transform that hides the memory of the tensors; "" if nothing does.

    Without arguments, checks only the modes and transforms that affect newly created tensors. Costs
    0.2 us. Returns "" under torch.compile, which never sees a kernel.
    """
    if is_compiling():
        return ""
    for x in tensors:
        if x is not None and type(x).__torch_dispatch__ is not PLAIN:
            return type(x).__name__
        if x is not None and x.is_neg():
            return "view that negates its numbers"
        if x is not None and x._is_zerotensor():
            return "tensor of zeros without memory"
    # Only fake, proxy and functional modes matter: a user's own mode (a FLOP counter) still
    # has real memory behind its tensors.
    if _modes():
        for key in _TRACING:
            if (mode := torch._C._get_dispatch_mode(key)) is not None:
                return type(mode).__name__
    if _transforms():
        return TRANSFORM
    return "torch.jit.trace" if _is_traced() else ""


def refuse_wrappers(*tensors: object) -> None:
    """Raise BackendError if `address` would.

    For kernels whose launcher takes the addresses itself.
    """
    if dry_run_on() is not None:
        return
    for x in tensors:
        if isinstance(x, Tensor) and (
            type(x).__torch_dispatch__ is not PLAIN or x.is_neg() or x._is_zerotensor()
        ):
            address(x)


def address(x: Tensor | None) -> int:
    """Address of x for a kernel; 0 for None.

    Raises BackendError for a wrapper, and for a tensor that has elements but no memory.
    """
    if x is None:
        return 0
    found = x.data_ptr() if type(x).__torch_dispatch__ is PLAIN else 0
    if (found == 0 or x.is_neg()) and x.numel() and dry_run_on() is None:
        why, code = (
            ("whose memory holds the negatives of its numbers", "kernel.negated-view")
            if found
            else ("whose memory is elsewhere", "kernel.no-memory")
        )
        raise BackendError(
            f"A kernel was given a {type(x).__name__} of {list(x.shape)} on {x.device}, {why}. "
            "Pass plain tensors, or take the backend of plain torch.",
            code=code,
        )
    return found


def in_memory(x: Tensor) -> Tensor:
    """Return x, or a copy if its memory does not hold its values.

    Copies negated views, and zero tensors without memory.
    """
    if x._is_zerotensor():
        return x.clone()
    return x.resolve_neg() if x.is_neg() else x


def holds_numbers(x: Tensor) -> bool:
    """False for meta and fake tensors, whose values cannot be inspected."""
    return not x.is_meta and not wrapper(x).startswith("FakeTensor")


def cached(build: Callable[Given, Made]) -> Callable[Given, Made]:
    """functools.cache for a function that builds constant tensors; fake results are never cached.

    A table that was cached under FakeTensorMode would stay fake and break every later real run.
    """
    keeping = cache(build)

    @wraps(build)
    def get(*given: Given.args, **named: Given.kwargs) -> Made:
        return build(*given, **named) if wrapper() else keeping(*given, **named)  # type: ignore[arg-type]

    get.cache_clear = keeping.cache_clear  # type: ignore[attr-defined]
    return get


def identity(x: Tensor) -> int:
    """Address of x.

    The id of the Python object for a wrapper; the storage's address in a dry run.
    """
    if type(x).__torch_dispatch__ is PLAIN:
        return x.data_ptr()
    # In a dry run each view of a fake tensor is another Python object, so id() would not match a
    # gradient with its cached casts: 13 GiB of casts then looked alive (decisions/memory.md).
    return (
        id(x)
        if dry_run_on() is None
        else x.untyped_storage()._cdata + x.storage_offset() * x.element_size()
    )


Key = tuple[Any, ...]


def validity(tensor: Tensor) -> Key | None:
    """Cache key of a tensor: casts made from it are reused while the key is unchanged.

    The key changes if the tensor is written in place, moved or replaced. None for inference
    tensors, which have no version counter. Inference mode is part of the key, because tensors
    created in inference mode cannot be saved for backward.

    Limits: writes through a raw pointer or `.data` do not change the key. Freed memory can be
    reused at the same address, so the holder of a key must keep the tensor alive.
    """
    if tensor.is_inference():
        return None
    place = tensor.device, identity(tensor), tensor.dtype, tensor.shape, tensor.stride()
    return (tensor._version, *place, torch.is_inference_mode_enabled())


def own(tensor: Tensor, taken: set[int]) -> Tensor:
    """Dense CPU copy of a tensor, alone in its storage; adds the storage's address to `taken`.

    safetensors refuses to write tensors that share a storage.
    """
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    place = dense.untyped_storage()
    is_alone = (
        place.nbytes() == dense.numel() * dense.element_size() and place.data_ptr() not in taken
    )
    alone = dense if is_alone else dense.clone()
    taken.add(alone.untyped_storage().data_ptr())
    return alone
