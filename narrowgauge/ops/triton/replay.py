"""Record a call that launches kernels, and replay it for other tensors with little Python.

The work of such a call depends only on the form of its tensors: shapes, strides, dtypes, and the
alignment of addresses to 16 bytes. The first call of a form runs normally. The second one is
recorded: its allocations, the launches with their arguments, and the tensors that it returns. Later
calls repeat these steps and compute nothing else on the host.

`kernel[grid](...)` returns a `CompiledKernel`. Triton's tutorial of the fused softmax launches it
by `compiled[grid](*arguments)`, which skips the lookup. This module calls the next level,
`compiled.run` with `function` and `packed_metadata`, as Inductor does. `kernel[grid]` takes 6 to 7
us, `compiled[grid]` 2.3 us and `compiled.run` 1.2 us. Launches are normal ones in three cases: a
launch hook of Triton is set, no CompiledKernel is returned (Triton's interpreter), or the version
of Triton is outside of TESTED_VERSIONS.

Between allocations and launches only views are supported. A call that computes or copies by torch
operators is never replayed. Nor is a call that passes a kernel a tensor which is neither an
argument nor allocated in the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.addresses import dry_run_on, refuse_wrappers
from narrowgauge.ops.triton import version
from narrowgauge.ops.triton.grids import free_by_device, why_no_grids
from narrowgauge.ops.triton.workspaces import drop
from narrowgauge.qtensor import QTensor, SwizzledQTensor

# First and last version of Triton with which this way to launch was tried.
TESTED_VERSIONS = (3, 6), (3, 7)
ALIGNED = 16  # bytes; Triton specializes binaries on addresses and integers that are multiples
MOST = 64  # recorded forms per kind of call
RECORDING: ContextVar[Recording | None] = ContextVar("narrowgauge_recording", default=None)
# Inductor's allocator, on the current device, in half the time of torch.empty.
_EMPTY_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_EMPTY, _ZEROS = torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default


class Launch(NamedTuple):
    """One recorded launch.

    options   num_warps and constants of the kernel, by name
    compiled  the CompiledKernel, or None
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    compiled: Any


class TensorForm(NamedTuple):
    """Form of a tensor that is allocated or returned.

    base    index of its base: first the arguments, then the allocated tensors
    offset  bytes from the start of the base
    """

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def is_contiguous(self) -> bool:
        """True if the tensor is contiguous; strides of axes of length 1 do not count."""
        sizes = [size for size in self.shape if size != 1]
        strides = [
            stride for size, stride in zip(self.shape, self.stride, strict=True) if size != 1
        ]
        return strides == [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


class Recording(TorchDispatchMode):
    """Record one call. It is a dispatch mode, so that no work of torch operators is missed.

    bases     the arguments, then the allocated tensors; held, so that no address is reused
    given     number of arguments
    zeroed    indices of bases that are allocated as zeros
    read      indices of bases that a kernel reads or the call returns
    makers    {index: function} of bases that are neither arguments nor allocated
    launches  the recorded launches
    missed    True if the call did more than can be replayed
    """

    def __init__(self, given: tuple[Tensor | None, ...]) -> None:
        super().__init__()
        self.bases: list[Tensor | None] = list(given)
        self.given = len(given)
        self.zeroed: set[int] = set()
        self.read: set[int] = set()
        self.makers: dict[int, Callable[[], Tensor]] = {}
        self.launches: list[Launch] = []
        self.missed = self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._is_paused:  # Triton's interpreter copies tensors at a launch
            return made
        if func in (_EMPTY, _ZEROS):
            if func is _ZEROS:
                self.zeroed.add(len(self.bases))
            self.bases.append(made)
        else:
            parts = made if isinstance(made, list | tuple) else (made,)
            known = all(
                isinstance(x, Tensor) and (x.numel() == 0 or self.base(x) is not None)
                for x in parts
            )
            self.missed |= func._schema.is_mutable or not known
        return made

    def launch(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._is_paused = True
        try:
            compiled = kernel[(programs,)](*arguments, **options)
        finally:  # the caller may catch the error and go on by torch operators
            self._is_paused = False
        self.launches.append(Launch(kernel, programs, arguments, options, compiled))

    def made(self, make: Callable[[], Tensor]) -> Tensor:
        """Record a tensor that is neither an argument nor new. make() returns it at every call."""
        self._is_paused, token = True, RECORDING.set(None)
        try:
            x = make()
        finally:
            self._is_paused = False
            RECORDING.reset(token)
        self.makers[len(self.bases)] = make
        self.bases.append(x)
        return x

    def base(self, x: Tensor) -> int | None:
        """Return the index of the tensor that contains x, or None.

        An argument matches only if x starts at its address.
        """
        place = x.data_ptr()
        for i, each in enumerate(self.bases):
            if each is not None and place != 0:
                start, length = each.data_ptr(), 1 if i < self.given else each.nbytes
                if start <= place < start + length:
                    return i
        return None

    def form(self, x: Tensor) -> TensorForm:
        """Return the form of a kernel's argument or of a result, and mark its base as read."""
        if (base := self.base(x)) is None:
            self.missed = True
        else:
            self.read.add(base)
        known = None if base is None else self.bases[base]
        offset = 0 if known is None else x.data_ptr() - known.data_ptr()
        return TensorForm(-1 if base is None else base, tuple(x.shape), x.stride(), x.dtype, offset)


Pick = Callable[[list[Any]], Any]


class QTensorForm(NamedTuple):
    """A QTensor with Forms in place of its tensors."""

    data: TensorForm
    scale: TensorForm
    cast: Any
    inner: int
    global_scale: TensorForm | None
    is_swizzled: bool  # scale: `QTensor.units`


class Replay:
    """A recorded call: `replay(*tensors)` repeats it. It holds kernels and forms, and no tensor.

    is_whole  True if it repeats everything that the call did
    has_grid  True if it launches a cooperative grid
    """

    def __init__(self, recording: Recording, result: Any) -> None:
        self.has_grid = any(
            "launch_cooperative_grid" in each.options for each in recording.launches
        )
        formed = _with_forms(result, recording)
        self._forms = [
            None if x is None else TensorForm(i, tuple(x.shape), x.stride(), x.dtype)
            for i, x in enumerate(recording.bases)
        ]
        for form in _forms_in(formed):
            base = self._forms[form.base]
            is_new = form.base >= recording.given and form.base not in recording.makers
            if base is not None and is_new and form.offset == 0 and _bytes(form) == _bytes(base):
                # Allocate a returned tensor directly in its returned form, without a view.
                self._forms[form.base] = form
        self._device = next(x.device for x in recording.bases if x is not None)
        # With one device the current device need not be checked at each call.
        self._is_alone = self._device.index is None or torch.cuda.device_count() == 1
        # Returns the current stream, queried once per call; None: launch normally.
        self._stream: Callable[[Any], int] | None = None
        if (
            all(each.compiled is not None for each in recording.launches)
            and TESTED_VERSIONS[0] <= version() <= TESTED_VERSIONS[1]
        ):
            from triton import knobs
            from triton.runtime import driver

            self._stream, self._knobs = driver.active.get_current_stream, knobs.runtime
        # Arguments of kernels and results are indices into a pool, or tuples of indices. The pool
        # holds bases, then constants, then other views of bases.
        self._constants: list[Any] = []
        self._views: list[TensorForm] = []
        self._launches = [self._prepared(each, recording) for each in recording.launches]
        self._is_tuple = isinstance(formed, tuple) and not isinstance(
            formed, TensorForm | QTensorForm
        )
        self._results = [
            self._returned(each, recording) for each in (formed if self._is_tuple else (formed,))
        ]
        self._allocate = [
            recording.makers.get(base) or _allocation(form, base in recording.zeroed, self._device)
            if base in recording.read
            else _nothing
            for base, form in enumerate(self._forms[recording.given :], recording.given) if form is not None
        ]  # fmt: skip
        self.is_whole = not recording.missed

    @property
    def index(self) -> int | None:
        return self._device.index

    def __call__(self, *tensors: Tensor | None) -> Any:
        if self._is_alone or self._device.index == torch.cuda.current_device():
            return self._made(tensors)
        with torch.cuda.device(self._device):
            return self._made(tensors)

    def _made(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Repeat the call on the current device."""
        pool: list[Any] = [*tensors, *[allocate() for allocate in self._allocate], *self._constants]
        for form in self._views:
            pool.append(_view(pool[form.base], form))
        try:
            self._launch(pool)
        except BaseException:
            drop()  # its first launch may have left maxima for its second
            raise
        results = [take(pool) for take in self._results]
        return tuple(results) if self._is_tuple else results[0]

    def _launch(self, pool: list[Any]) -> None:
        if self._stream is None:
            for start, _, picks in self._launches:
                start(*[pick(pool) for pick in picks])
            return
        stream, knobs = self._stream(self._device.index), self._knobs
        hooked = knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls
        for start, (run, settings, takes_tuple, programs), picks in self._launches:
            arguments = [pick(pool) for pick in picks]
            if hooked:  # a profiler wants every launch described, which the fast way skips
                start(*arguments, stream=stream)
            elif takes_tuple:
                run(programs, 1, 1, stream, *settings, tuple(arguments))
            else:
                run(programs, 1, 1, stream, *settings, *arguments)

    def _prepared(
        self, launch: Launch, recording: Recording
    ) -> tuple[Callable[..., Any], Any, list[Pick]]:
        """Return (launch function, its fixed arguments, functions that pick the others).

        The others come from the pool.
        """
        kernel, programs, arguments, options, compiled = launch
        if self._stream is None:
            return (
                partial(kernel[(programs,)], **options),
                None,
                [self._pick(each, recording, True) for each in arguments],
            )
        named = [options[name] for name in kernel.arg_names[len(arguments) :]]
        picks = [self._pick(each, recording, False) for each in (*arguments, *named)]
        # Also loads the binary, which sets the attributes that `_starts` reads.
        start = compiled[(programs, 1, 1)]
        return start, (*_starts(compiled), programs), picks

    def _pick(self, argument: Any, recording: Recording, typed: bool) -> Pick:
        """Return a function that picks an argument from the pool.

        typed  True if the launch inspects types and names. A compiled kernel takes any object that
               has an address
        """
        if not isinstance(argument, tuple):
            return itemgetter(self._place(argument, recording, typed))
        places = [self._place(each, recording, typed) for each in argument]
        if typed or len(places) == 1:
            make = getattr(type(argument), "_make", tuple)
            return lambda pool: make([pool[place] for place in places])
        return itemgetter(*places)

    def _place(self, argument: Any, recording: Recording, typed: bool) -> int:
        if not isinstance(argument, Tensor):
            recording.missed |= isinstance(argument, tuple) and any(
                isinstance(each, Tensor) for each in argument
            )
            self._constants.append(argument)
            return len(self._forms) + len(self._constants) - 1
        form = recording.form(argument)
        return self._seen(form) if typed or form.offset else form.base

    def _seen(self, form: TensorForm) -> int:
        """Return the index in the pool of a tensor of this form."""
        base = self._forms[form.base]
        if base is not None and base[1:] == form[1:]:
            return form.base
        if form not in self._views:
            # Indices count from the end, so earlier ones stay valid; the first view is last.
            self._views.insert(0, form)
        return self._views.index(form) - len(self._views)

    def _returned(self, part: Any, recording: Recording) -> Callable[[list[Any]], Any]:
        """Return a function that picks a part of the result from the pool."""
        if isinstance(part, TensorForm):
            return itemgetter(self._seen(part))
        if not isinstance(part, QTensorForm):
            recording.missed |= part is not None
            return _nothing
        whole = _nothing if part.global_scale is None else itemgetter(self._seen(part.global_scale))
        data, scale, cast, inner = (
            self._seen(part.data),
            self._seen(part.scale),
            part.cast,
            part.inner,
        )
        of_parts = SwizzledQTensor.of_units if part.is_swizzled else QTensor.of_parts
        return lambda pool: of_parts(pool[data], pool[scale], cast, inner, whole(pool))


def _starts(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """Return (launch function of a CompiledKernel, its settings, True if it takes one tuple).

    The settings are the arguments between the stream and the kernel's arguments, which may have to
    be one tuple.

    Triton 3.7's `run` allocates scratch memory and calls `run.launch`. Kernels without scratch
    memory call `run.launch` directly.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if not hasattr(run, "arg_annotations") or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, packed, None, None, None), False
    settings = run.launch_cooperative_grid, run.launch_pdl, packed, None, None, None, None, None
    return run.launch, (function, *settings, run.arg_annotations, run.kernel_signature), True


def _view(x: Tensor, form: TensorForm) -> Tensor:
    x = x if x.dtype == form.dtype else x.view(form.dtype)
    if form.offset:
        return x.as_strided(
            form.shape, form.stride, x.storage_offset() + form.offset // x.element_size()
        )
    return x if (x.shape, x.stride()) == form[1:3] else x.as_strided(form.shape, form.stride)


def _with_forms(result: Any, recording: Recording) -> Any:
    """Replace tensors by Forms in tensors, QTensors, None, and tuples."""
    if isinstance(result, QTensor):
        whole = None if result.global_scale is None else recording.form(result.global_scale)
        return QTensorForm(
            recording.form(result.data),
            recording.form(result.scale if result.units is None else result.units),
            result.cast,
            result.inner,
            whole,
            result.units is not None,
        )
    if isinstance(result, tuple):
        return tuple(_with_forms(each, recording) for each in result)
    return recording.form(result) if isinstance(result, Tensor) else None


def _forms_in(result: Any) -> Iterator[TensorForm]:
    if isinstance(result, TensorForm):
        yield result
    elif isinstance(result, tuple):
        for each in result:
            yield from _forms_in(each)


def _bytes(form: TensorForm) -> int:
    return math.prod(form.shape) * form.dtype.itemsize


def _nothing(*_: Any) -> None:
    """Stands for memory that the call allocates and nobody reads, and for a result that is None."""


def _allocation(form: TensorForm, zeroed: bool, device: torch.device) -> Callable[[], Tensor]:
    if zeroed:
        return partial(torch.zeros, form.shape, dtype=form.dtype, device=device)
    if device.type == "cuda" and _EMPTY_CUDA is not None:
        return partial(_EMPTY_CUDA, form.shape, form.stride, form.dtype)
    if form.is_contiguous:
        return partial(torch.empty, form.shape, dtype=form.dtype, device=device)
    return partial(torch.empty_strided, form.shape, form.stride, dtype=form.dtype, device=device)


class Replays:
    """Replay `call` where possible: `replays(*tensors)`.

    There is one instance per kind of call, whose other arguments never change.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._found: dict[Hashable, Callable[..., Any] | None] = {}  # None: seen once
        self._free = free_by_device()

    def __call__(self, *tensors: Tensor | None) -> Any:
        if dry_run_on() is not None:
            return self._call(*tensors)
        refuse_wrappers(*tensors)
        if self._free is not (free := free_by_device()):  # recorded grids have other sizes
            self._found.clear()
            self._free = free
        form = tuple(
            [
                None
                if x is None
                else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % ALIGNED)
                for x in tensors
            ]
        )
        if (found := self._found.get(form)) is not None:
            # Recorded before the process group was there: record the two launches instead.
            if isinstance(found, Replay) and found.has_grid and why_no_grids(found.index):
                return self._recorded(form, tensors)
            return found(*tensors)
        if form in self._found:
            return self._recorded(form, tensors)
        if len(self._found) >= MOST:
            self._found.clear()
        self._found[form] = None
        return self._call(*tensors)

    def _recorded(self, form: Hashable, tensors: tuple[Tensor | None, ...]) -> Any:
        with Recording(tensors) as recording:
            token = RECORDING.set(recording)
            try:
                result = self._call(*tensors)
            finally:
                RECORDING.reset(token)
        replay = None if recording.missed else Replay(recording, result)
        self._found[form] = replay if replay is not None and replay.is_whole else self._call
        return result
