"""What is changed in torch, Triton and narrowgauge over the empty CUDA runtime, by the name of the module that is imported.

    torch                      cuDNN off: it needs a driver of its own
    Triton, Inductor           before each launch a line with the bytes that its tensors span; silence while kernels are timed
    narrowgauge                kernels are taken by their word, and what a norm or a head computes is proved without the GPU: nothing is
                               computed there that could prove it; a line with the bytes of tensors whose addresses lie in a table

How bytes are counted: each tensor argument once as a read if the kernel loads through it, or once for each loop that does, one after
the other; once as a write if it stores.

    Inductor's kernels    argument names say which; of a tensor with more elements than the kernel's loops have iterations (an
                          embedding table, a slice) as many elements as iterations. Several slices of one tensor count as one there,
                          which Inductor's own figure (kernel_num_gb) counts right; that one leaves out buffers that are used again
                          under another name. The larger of the two is taken.
    other Triton kernels  the Triton IR says which (`accesses`); the whole tensor counts, also where only a part of it is touched.
                          What happens under an `if` is counted apart (conditional)
    addresses in a table  (the optimizer's step): as `launch` is told; of a tensor that is named twice the second time is the write

Elements that are read twice in one loop (tiles of a GEMM), or by one of Inductor's kernels, count once: it is what must come from memory,
not what a bad access order costs. A largest magnitude and then a cast in one kernel count twice, as in two launches, although the
second time part of it is in the cache. Beside it stands `spanned`, the plainest count: every tensor argument once and whole.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu_dry_run.accesses import accesses

_here = threading.local()  # .inside: Inductor's launcher is at work, and has told the bytes already
# Constants of narrowgauge's kernels that say how many elements a program has at a time: the first whose sides are all there.
PIECES = (("ROWS", "COLUMNS"), ("TILE", "TILES"), ("RUN",), ("BLOCK",))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libempty_cuda.so")


def note(**event: object) -> None:
    """A line of the log."""
    _library().empty_cuda_note(json.dumps(event).encode())


def muted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with nothing logged by this thread while it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _library().empty_cuda_mute(1)
        try:
            return function(*args, **kwargs)
        finally:
            _library().empty_cuda_mute(-1)

    return run


# ---- torch ----


def _torch(torch: Any) -> None:
    torch.backends.cudnn.enabled = False
    torch._C._set_sdp_use_cudnn(False)
    # Where nothing is computed a script can end while autograd's thread still waits for Python's lock, to drop what it held. It gets
    # the lock here; once Python ends it would abort the process ("terminate called without an active exception").
    atexit.register(time.sleep, 0.2)


# ---- Inductor ----


def _inductor(module: Any) -> None:
    autotuner = module.CachingAutotuner
    autotuner.benchmark_all_configs = muted(autotuner.benchmark_all_configs)
    autotuner.coordinate_descent_tuning = muted(autotuner.coordinate_descent_tuning)
    launch = autotuner.run

    @functools.wraps(launch)
    def run(self: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> Any:
        gigabytes = self.inductor_meta.get("kernel_num_gb")
        if (
            gigabytes is None
        ):  # a Triton kernel that somebody wrote, launched by compiled code: counted as any other
            return launch(self, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
        arguments = dict(zip(self.fn.arg_names, args, strict=False))
        numels = [count for name, count in arguments.items() if name.endswith("numel")]
        spans = _spans(
            _accesses_of_names(self.fn.arg_names), arguments, math.prod(numels) if numels else None
        )
        spans["read"] = max(spans["read"], round(gigabytes * 1e9) - spans["written"])
        note(e="bytes", name=self.fn.__name__, **spans, spanned=_spanned(arguments))
        _here.inside = True
        try:
            return launch(self, *args, stream=stream, benchmark_run=benchmark_run, **kwargs)
        finally:
            _here.inside = False

    autotuner.run = run


def _inductor_benchmarks(module: Any) -> None:
    """What measures templates of products (max-autotune) against each other."""
    for kind in vars(module).values():
        if isinstance(kind, type):
            for name in ("benchmark", "benchmark_gpu"):
                if name in vars(kind):
                    setattr(kind, name, muted(vars(kind)[name]))


def _accesses_of_names(names: Any) -> dict[str, str]:
    """Inductor's names say what an argument is for; of other kernels nothing is known, and all are taken as read."""
    kinds = {"in_ptr": "r", "out_ptr": "w", "in_out_ptr": "rw"}
    return {
        name: next((kind for start, kind in kinds.items() if name.startswith(start)), "r")
        for name in names
    }


# ---- Triton ----


def _triton(module: Any) -> None:
    prepare = module.CompiledKernel._init_handles

    @functools.wraps(prepare)
    def _init_handles(self: Any) -> None:
        is_new = self.module is None
        prepare(self)
        if is_new:  # the last call in Python before a launch, however it was asked for
            self._run.launch = _told(
                self._run.launch, self.name, accesses(self.asm["ttir"]), _piece(self.src)
            )

    module.CompiledKernel._init_handles = _init_handles


def _told(
    launch: Callable[..., Any], name: str, kinds: dict[str, str], piece: int
) -> Callable[..., Any]:
    """The launch, with a line before it of the bytes that its tensors span."""

    def run(*args: Any) -> Any:
        if not getattr(_here, "inside", False):
            # Pointers of the IR are the tensors in their order, those in tuples too; what is None is in neither. Triton's own come first.
            tensors = list(_tensors(args))[-len(kinds) :] if kinds else []
            arguments = dict(zip(kinds, tensors, strict=False))
            spans = _spans(kinds, arguments) | {"spanned": _spanned(arguments)}
            note(e="bytes", name=name, **spans, piece=piece, unknown=len(kinds) - len(tensors))
        return launch(*args)

    return run


def _piece(source: Any) -> int:
    """Elements that a program has at a time, by the kernel's constants; 0: they do not say."""
    constants = getattr(source, "constants", {})
    names = getattr(getattr(source, "fn", None), "arg_names", [])
    own = {
        names[place[0]]: value
        for place, value in constants.items()
        if len(place) == 1 and place[0] < len(names)
    }
    known = dict(_named(own))
    for sides in PIECES:
        if all(isinstance(known.get(side), int) for side in sides):
            return math.prod(known[side] for side in sides)
    return 0


def _named(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of constants that are several too."""
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            yield from _named(
                {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            )
        else:
            yield name.upper(), value


def _triton_autotuner(module: Any) -> None:
    module.Autotuner._bench = muted(module.Autotuner._bench)


def _tensors(values: Any) -> Iterator[Any]:
    """Those among them, in tuples and behind descriptors too."""
    for value in values:
        if _is_tensor(value):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif _is_tensor(getattr(value, "base", None)):
            yield value.base


def _spans(
    kinds: dict[str, str], arguments: dict[str, Any], iterations: int | None = None
) -> dict[str, int]:
    """Bytes of the tensors that are read, that are written, and that are read or written under a condition alone."""
    read = written = conditional = 0
    for name, kind in kinds.items():
        tensor = arguments.get(name)
        if _is_tensor(tensor):
            size = min(tensor.numel(), iterations or tensor.numel()) * tensor.element_size()
            read += size * kind.count("r")
            written += size * ("w" in kind)
            conditional += size * (("R" in kind) + ("W" in kind))
    return {"read": read, "written": written, "conditional": conditional}


def _spanned(arguments: dict[str, Any]) -> int:
    """Bytes of all tensors, each once and whole, read or written or both."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in arguments.values()
        if _is_tensor(tensor)
    )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "element_size") and hasattr(value, "numel")


# ---- narrowgauge ----


def _selfcheck(module: Any) -> None:
    module.examine = lambda *call, large=False: module.CheckResult(None, 0.0, 0.0)


def _proofs(module: Any) -> None:
    """What is proved by computing: on the CPU, or by storages, as for tensors without numbers."""
    module.holds_numbers = lambda _: False


def _reached(module: Any) -> None:
    """Tensors whose addresses a kernel finds in a table: `launch` is told them, twice those that are read and written."""
    launch = module.launch

    @functools.wraps(launch)
    def run(
        kernel: Any, programs: int, *arguments: Any, reached: Callable[[], Any] = list, **rest: Any
    ) -> None:
        tensors = list(reached()) if programs else []
        again, seen = 0, {}
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            again += size if id(tensor) in seen else 0
            seen[id(tensor)] = size
        once = sum(seen.values())
        if tensors:
            note(
                e="bytes",
                name=kernel.__name__,
                read=once,
                written=again,
                conditional=0,
                spanned=once,
            )
        launch(kernel, programs, *arguments, reached=reached, **rest)

    module.launch = run


def _layouts(module: Any) -> None:
    """Asked by comparing products; `takes_every_layout` has asked for the kind of GPU before."""
    module._reads_views = lambda index: True


NARROWGAUGE = {
    "narrowgauge.ops.mm.cublas": _layouts,
    "narrowgauge.ops.selfcheck": _selfcheck,
    "narrowgauge.fuse.probe": _proofs,
    "narrowgauge.train.loss": _proofs,
}
AFTER = {
    "torch": _torch,
    **NARROWGAUGE,
    "narrowgauge.ops.triton.launch": _reached,
    "torch._inductor.runtime.triton_heuristics": _inductor,
    "torch._inductor.runtime.benchmarking": _inductor_benchmarks,
    "triton.compiler.compiler": _triton,
    "triton.runtime.autotuner": _triton_autotuner,
}
if "EMPTY_CUDA_LOG" not in os.environ:  # nothing is counted, the host's time alone
    AFTER = {"torch": _torch, **NARROWGAUGE}
