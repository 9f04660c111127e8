"""Calls that launch kernels, made again for other tensors of the same form with the least of Python.

What such a call does follows from the form of its tensors alone: shapes, strides, types, and whether addresses are multiples of 16. So the
second call of a form is recorded: what it allocates, which kernels it launches with what, which tensors it returns. Later ones allocate,
launch and return the same, and work nothing out.

`kernel[grid](...)` returns the `CompiledKernel`, which Triton's tutorial of the fused softmax starts by `compiled[grid](*arguments)`: that
looks nothing up. What it calls in turn, `compiled.run` with `function` and `packed_metadata`, is what is called here, as Inductor does,
unless a hook of Triton's wants each launch described. Where no CompiledKernel is returned (Triton's interpreter), or the version is not
one of TRIED, launches stay the ordinary ones.

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

TRIED = (3, 6), (3, 7)  # the first and the last version of Triton whose CompiledKernel was launched so
ALIGNED = 16  # bytes; Triton compiles apart for addresses and numbers that are multiples of it
MOST = 64  # forms that are kept, of one kind of call
RECORDING: ContextVar[Recording | None] = ContextVar("narrowgauge_recording", default=None)
# As Inductor's code allocates, on the current device, in half the time of torch.empty.
_EMPTY_CUDA = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
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
    offset: int = 0  # bytes from where the base begins

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
        self.makers: dict[int, Callable[[], Tensor]] = {}
        self.launches: list[Launch] = []
        self.missed = self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._is_paused:  # Triton's interpreter copies tensors as it launches
            return made
        if func in (_EMPTY, _ZEROS):
            if func is _ZEROS:
                self.zeroed.add(len(self.bases))
            self.bases.append(made)
        else:
            parts = made if isinstance(made, list | tuple) else (made,)
            known = all(isinstance(x, Tensor) and (x.numel() == 0 or self.base(x) is not None) for x in parts)
            self.missed |= func._schema.is_mutable or not known
        return made

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._is_paused = True
        compiled = kernel[(programs,)](*arguments, **options)
        self._is_paused = False
        self.launches.append(Launch(kernel, programs, arguments, options, compiled))

    def made(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is neither given nor new, made by what gives it at every call."""
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
        """The number of the tensor at whose address x begins, or, of what was not given, in whose memory."""
        place = x.data_ptr()
        for i, each in enumerate(self.bases):
            if each is not None and place != 0:
                start, length = each.data_ptr(), 1 if i < self.given else each.nbytes
                if start <= place < start + length:
                    return i
        return None

    def form(self, x: Tensor) -> Form:
        """Of what a kernel is given, or the call returns."""
        if (base := self.base(x)) is None:
            self.missed = True
        else:
            self.read.add(base)
        known = None if base is None else self.bases[base]
        offset = 0 if known is None else x.data_ptr() - known.data_ptr()
        return Form(-1 if base is None else base, tuple(x.shape), x.stride(), x.dtype, offset)


Pick = Callable[[list[Any]], Any]


class Parts(NamedTuple):
    """A QTensor with Forms in place of its tensors."""

    data: Form
    scale: Form
    cast: Any
    inner: int
    global_scale: Form | None


class Replay:
    """A recorded call, to be made again: `replay(*tensors)`. It holds kernels and forms, no tensor.

    is_whole  whether it does all that the call did
    """

    def __init__(self, recording: Recording, result: Any) -> None:
        formed = _with_forms(result, recording)
        self._forms = [
            None if x is None else Form(i, tuple(x.shape), x.stride(), x.dtype) for i, x in enumerate(recording.bases)
        ]
        for form in _forms_in(formed):
            base = self._forms[form.base]
            is_new = form.base >= recording.given and form.base not in recording.makers
            if base is not None and is_new and form.offset == 0 and _bytes(form) == _bytes(base):
                self._forms[form.base] = form  # what is returned is allocated as it is returned
        self._device = next(x.device for x in recording.bases if x is not None)
        self._is_alone = (
            self._device.index is None or torch.cuda.device_count() == 1
        )  # no other device can be the current one
        self._stream: Callable[[Any], int] | None = None  # asked once for all launches; None: launched the ordinary way
        if all(each.compiled is not None for each in recording.launches) and TRIED[0] <= version() <= TRIED[1]:
            from triton import knobs
            from triton.runtime import driver

            self._stream, self._knobs = driver.active.get_current_stream, knobs.runtime
        # A kernel's argument, and what is returned, is one of a pool or a tuple of some: bases, constants, other views of bases.
        self._constants: list[Any] = []
        self._views: list[Form] = []
        self._launches = [self._prepared(each, recording) for each in recording.launches]
        self._is_tuple = isinstance(formed, tuple) and not isinstance(formed, Form | Parts)
        self._results = [self._returned(each, recording) for each in (formed if self._is_tuple else (formed,))]
        self._allocate = [
            recording.makers.get(base) or _allocation(form, base in recording.zeroed, self._device)
            if base in recording.read
            else _nothing
            for base, form in enumerate(self._forms[recording.given :], recording.given) if form is not None
        ]  # fmt: skip
        self.is_whole = not recording.missed

    def __call__(self, *tensors: Tensor | None) -> Any:
        if self._is_alone or self._device.index == torch.cuda.current_device():
            return self._made(tensors)
        with torch.cuda.device(self._device):
            return self._made(tensors)

    def _made(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """On the current device."""
        pool: list[Any] = [*tensors, *[allocate() for allocate in self._allocate], *self._constants]
        for form in self._views:
            pool.append(_view(pool[form.base], form))
        self._launch(pool)
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
            if hooked:  # a profiler that wants each launch described
                start(*arguments, stream=stream)
            elif takes_tuple:
                run(programs, 1, 1, stream, *settings, tuple(arguments))
            else:
                run(programs, 1, 1, stream, *settings, *arguments)

    def _prepared(self, launch: Launch, recording: Recording) -> tuple[Callable[..., Any], Any, list[Pick]]:
        """(what starts it, how that starts it, what picks each argument out of the pool)."""
        kernel, programs, arguments, options, compiled = launch
        if self._stream is None:
            return (
                partial(kernel[(programs,)], **options),
                None,
                [self._pick(each, recording, True) for each in arguments],
            )
        named = [options[name] for name in kernel.arg_names[len(arguments) :]]
        picks = [self._pick(each, recording, False) for each in (*arguments, *named)]
        start = compiled[(programs, 1, 1)]  # loads the binary, which the others are of
        return start, (*_starts(compiled), programs), picks

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
        return self._seen(form) if typed or form.offset else form.base

    def _seen(self, form: Form) -> int:
        """The place in the pool of a tensor of this form."""
        base = self._forms[form.base]
        if base is not None and base[1:] == form[1:]:
            return form.base
        if form not in self._views:
            self._views.insert(0, form)  # counted from the end, the first one last
        return self._views.index(form) - len(self._views)

    def _returned(self, part: Any, recording: Recording) -> Callable[[list[Any]], Any]:
        """What takes a part of the result out of the pool."""
        if isinstance(part, Form):
            return itemgetter(self._seen(part))
        if not isinstance(part, Parts):
            recording.missed |= part is not None
            return _nothing
        whole = None if part.global_scale is None else itemgetter(self._seen(part.global_scale))
        data, scale, cast, inner = self._seen(part.data), self._seen(part.scale), part.cast, part.inner
        of_parts = QTensor.of_parts
        if whole is None:
            return lambda pool: of_parts(pool[data], pool[scale], cast, inner)
        return lambda pool: of_parts(pool[data], pool[scale], cast, inner, whole(pool))


def _starts(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """(what starts a CompiledKernel, what it takes between stream and arguments, whether these are one tuple).

    Triton 3.7's `run` asks for scratch memory and hands on to `run.launch`, which is called here for kernels that want no scratch.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if not hasattr(run, "arg_annotations") or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, packed, None, None, None), False
    settings = run.launch_cooperative_grid, run.launch_pdl, packed, None, None, None, None, None
    return run.launch, (function, *settings, run.arg_annotations, run.kernel_signature), True


def _view(x: Tensor, form: Form) -> Tensor:
    x = x if x.dtype == form.dtype else x.view(form.dtype)
    if form.offset:
        return x.as_strided(form.shape, form.stride, x.storage_offset() + form.offset // x.element_size())
    return x if (x.shape, x.stride()) == form[1:3] else x.as_strided(form.shape, form.stride)


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


def _nothing(*_: Any) -> None:
    """In place of memory that the call allocates and nobody reads, and of a result that is none."""


def _allocation(form: Form, zeroed: bool, device: torch.device) -> Callable[[], Tensor]:
    if zeroed:
        return partial(torch.zeros, form.shape, dtype=form.dtype, device=device)
    if device.type == "cuda" and _EMPTY_CUDA is not None:
        return partial(_EMPTY_CUDA, form.shape, form.stride, form.dtype)
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
        form = tuple(
            [
                None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % ALIGNED)
                for x in tensors
            ]
        )
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
