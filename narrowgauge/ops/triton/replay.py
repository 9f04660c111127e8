"""Calls that launch kernels, made again for other tensors of the same form with the least of Python.

What such a call does follows from the form of its tensors alone: shapes, strides, types, and whether addresses are multiples of 16. So the
second call of a form is recorded: what it allocates, which kernels it launches with what, which tensors it returns. Later ones allocate,
launch and return the same, and work nothing out. A launch is then `compiled[grid](*arguments)`, the way to start a `CompiledKernel` that
Triton's tutorial of the fused softmax shows, for what `kernel[grid](...)` returned; it looks nothing up. Where that is none (Triton's
interpreter, a version that is not among TRIED) launches stay the ordinary ones.

Of the work between allocations and launches only views are understood. A call that computes, copies, or gives a kernel a tensor that it
was not given itself is not replayed, but made as ever each time.
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
from narrowgauge.qtensor import QTensor

TRIED = (3, 6), (3, 9)  # the first and the last version of Triton whose CompiledKernel was launched so
ALIGNED = 16  # bytes; Triton compiles apart for addresses and numbers that are multiples of it
MOST = 64  # forms that are kept, of one kind of call
RECORDING: ContextVar[Recording | None] = ContextVar("narrowgauge_recording", default=None)
_EMPTY, _ZEROS = torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default


class Launch(NamedTuple):
    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]  # by name: warps, and constants of the kernel
    compiled: Any


class Form(NamedTuple):
    """Of a tensor that is allocated or returned. base: its number among the tensors that are given, then allocated."""

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        sizes = [size for size in self.shape if size != 1]
        strides = [stride for size, stride in zip(self.shape, self.stride, strict=True) if size != 1]
        return strides == [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


class Recording(TorchDispatchMode):
    """What one call does. A mode, so that no work of torch's operators goes unnoticed.

    bases   the tensors given, then those allocated: held, so that no address comes twice
    zeroed, read    which of them are zero at first; which are given to a kernel or returned
    missed  whether it did more than can be replayed
    """

    def __init__(self, given: tuple[Tensor | None, ...]) -> None:
        super().__init__()
        self.bases: list[Tensor | None] = list(given)
        self.given = len(given)
        self.zeroed: set[int] = set()
        self.read: set[int] = set()
        self.launches: list[Launch] = []
        self.missed = self._is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._is_launching:  # Triton's interpreter copies tensors
            return made
        if func in (_EMPTY, _ZEROS):
            if func is _ZEROS:
                self.zeroed.add(len(self.bases))
            self.bases.append(made)
        elif not isinstance(made, Tensor) or func._schema.is_mutable or self.base(made) is None:
            self.missed = True
        return made

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._is_launching = True
        compiled = kernel[(programs,)](*arguments, **options)
        self._is_launching = False
        self.launches.append(Launch(kernel, programs, arguments, options, compiled))

    def base(self, x: Tensor) -> int | None:
        """The number of the tensor at whose address x begins."""
        place = x.data_ptr()
        found = (i for i, each in enumerate(self.bases) if each is not None and each.data_ptr() == place != 0)
        return next(found, None)

    def form(self, x: Tensor) -> Form:
        """Of what a kernel is given, or the call returns."""
        if (base := self.base(x)) is None:
            self.missed = True
        else:
            self.read.add(base)
        return Form(-1 if base is None else base, tuple(x.shape), x.stride(), x.dtype)


Pick = Callable[[list[Any]], Any]


class Parts(NamedTuple):
    """A QTensor with Forms in place of its tensors, or the numbers of bases that are these."""

    data: Form | int
    scale: Form | int
    cast: Any
    inner: int
    global_scale: Form | int | None


class Replay:
    """A recorded call, to be made again: `replay(*tensors)`. It holds kernels and forms, no tensor.

    is_whole  whether it does all that the call did
    """

    def __init__(self, recording: Recording, result: Any) -> None:
        formed = _with_forms(result, recording)
        self._forms = [None if x is None else Form(i, tuple(x.shape), x.stride(), x.dtype) for i, x in enumerate(recording.bases)]
        for form in _forms_in(formed):
            base = self._forms[form.base]
            if base is not None and form.base >= recording.given and _bytes(form) == _bytes(base):
                self._forms[form.base] = form  # what is returned is allocated as it is returned
        for form in _forms_in(formed):
            base = self._forms[form.base]
            recording.missed |= base is None or base.dtype != form.dtype
        self._result = self._as_allocated(formed)
        self._device = next(x.device for x in recording.bases if x is not None)
        # A kernel's argument is one of these, or a tuple of some: bases, then constants; from the end, bases seen as another type.
        self._constants: list[Any] = []
        self._views: list[Form] = []
        self._stream: Callable[[Any], int] | None = None  # asked once for all launches; None: launched the ordinary way
        if all(each.compiled is not None for each in recording.launches) and TRIED[0] <= version() <= TRIED[1]:
            from triton.runtime import driver

            self._stream = driver.active.get_current_stream
        self._launches = [self._prepared(each, recording) for each in recording.launches]
        self._allocate = [
            _allocation(form, base in recording.zeroed, self._device) if base in recording.read else _nothing
            for base, form in enumerate(self._forms[recording.given :], recording.given) if form is not None
        ]  # fmt: skip
        self.is_whole = not recording.missed

    def __call__(self, *tensors: Tensor | None) -> Any:
        pool: list[Any] = [*tensors, *[allocate() for allocate in self._allocate], *self._constants]
        pool += [pool[form.base].view(form.dtype) for form in self._views]
        if self._device.index is None or self._device.index == torch.cuda.current_device():
            self._launch(pool)
        else:
            with torch.cuda.device(self._device):
                self._launch(pool)
        return _filled(self._result, pool)

    def _launch(self, pool: list[Any]) -> None:
        options = {} if self._stream is None else {"stream": self._stream(self._device.index)}
        for start, picks in self._launches:
            start(*[pick(pool) for pick in picks], **options)

    def _prepared(self, launch: Launch, recording: Recording) -> tuple[Callable[..., Any], list[Pick]]:
        """(what starts it, what picks each argument out of the pool)."""
        kernel, programs, arguments, options, compiled = launch
        if self._stream is None:
            return partial(kernel[(programs,)], **options), [self._pick(each, recording, True) for each in arguments]
        named = [options[name] for name in kernel.arg_names[len(arguments) :]]
        return compiled[(programs, 1, 1)], [self._pick(each, recording, False) for each in (*arguments, *named)]

    def _pick(self, argument: Any, recording: Recording, typed: bool) -> Pick:
        """typed: the launch looks at types and names. A compiled kernel takes an address from whatever has one."""
        if not isinstance(argument, tuple):
            return itemgetter(self._place(argument, recording, typed))
        places = [self._place(each, recording, typed) for each in argument]
        if typed or len(places) == 1:
            make = getattr(type(argument), "_make", tuple)
            return lambda pool: make([pool[place] for place in places])
        return itemgetter(*places)

    def _place(self, argument: Any, recording: Recording, typed: bool) -> int:
        if not isinstance(argument, Tensor):
            recording.missed |= isinstance(argument, tuple) and any(isinstance(each, Tensor) for each in argument)
            self._constants.append(argument)
            return len(self._forms) + len(self._constants) - 1
        form = recording.form(argument)
        base = self._forms[form.base]
        if not typed or base is None or base.dtype == form.dtype:
            return form.base
        self._views.insert(0, form)  # counted from the end, the first one last
        return -len(self._views)

    def _as_allocated(self, result: Any) -> Any:
        """The result, with the number of a base in place of a Form that is the base's own."""
        if isinstance(result, Form):
            return result.base if result == self._forms[result.base] else result
        if isinstance(result, Parts):
            data, scale, cast, inner, whole = result
            return Parts(self._as_allocated(data), self._as_allocated(scale), cast, inner, self._as_allocated(whole))
        return tuple(map(self._as_allocated, result)) if isinstance(result, tuple) else result


def _filled(part: Any, pool: list[Any]) -> Any:
    """The result of a call, from all that it has."""
    if part is None:
        return None
    kind = type(part)
    if kind is int:
        return pool[part]
    if kind is Parts:
        data, scale, cast, inner, whole = part
        return QTensor.of_parts(_filled(data, pool), _filled(scale, pool), cast, inner, _filled(whole, pool))
    if kind is Form:
        return pool[part.base].as_strided(part.shape, part.stride)
    return tuple([_filled(each, pool) for each in part])


def _with_forms(result: Any, recording: Recording) -> Any:
    """Tensors, QTensors, None, and tuples of such, with Forms in place of tensors."""
    if isinstance(result, QTensor):
        whole = None if result.global_scale is None else recording.form(result.global_scale)
        return Parts(recording.form(result.data), recording.form(result.scale), result.cast, result.inner, whole)
    if isinstance(result, tuple):
        return tuple(_with_forms(each, recording) for each in result)
    return recording.form(result) if isinstance(result, Tensor) else None


def _forms_in(result: Any) -> Iterator[Form]:
    if isinstance(result, Form):
        yield result
    elif isinstance(result, tuple):
        for each in result:
            yield from _forms_in(each)


def _bytes(form: Form) -> int:
    return math.prod(form.shape) * form.dtype.itemsize


def _nothing() -> None:
    """In place of memory that the call allocates and nobody reads."""


def _allocation(form: Form, zeroed: bool, device: torch.device) -> Callable[[], Tensor]:
    if zeroed:
        return partial(torch.zeros, form.shape, dtype=form.dtype, device=device)
    if form.is_contiguous:
        return partial(torch.empty, form.shape, dtype=form.dtype, device=device)
    return partial(torch.empty_strided, form.shape, form.stride, dtype=form.dtype, device=device)


class Replays:
    """`call`, replayed where that can be: `replays(*tensors)`. Once for each kind of call, whose other arguments never change."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._found: dict[Hashable, Callable[..., Any] | None] = {}  # None: seen once

    def __call__(self, *tensors: Tensor | None) -> Any:
        if dry_run_on() is not None:
            return self._call(*tensors)
        refuse_wrappers(*tensors)
        key: list[Any] = []
        for x in tensors:
            if x is not None:
                key += x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % ALIGNED
        form = tuple(key)
        if (found := self._found.get(form)) is not None:
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
