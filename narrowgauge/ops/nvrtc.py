"""Compile CUDA C++ of the package with NVRTC, and launch it through the driver.

This is for kernels that Triton cannot express. NVRTC comes with torch's CUDA builds (pip puts it
into a folder beside torch), and libcuda with the driver. The user needs no compiler, CUDA toolkit
or header. torch.cuda._compile_kernel is similar, but it is private and looks for a toolkit's
headers.

A binary is cached in the folder of `ops.cpp`. Its file name contains a hash of the source, the
options, the compute capability and NVRTC's version, and a hash of the binary itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import address, dry_run_on
from narrowgauge.errors import BackendError
from narrowgauge.ops.cpp.build import BUILT, cache_folder, is_whole
from narrowgauge.ops.cpp.prebuilt import digest
from narrowgauge.ops.registry import constant_while_compiling
from narrowgauge.storage import publish, reading, temporary, write_synced

# No fused multiply-add: results must be bit-identical to a definition that rounds twice.
OPTIONS = ("--std=c++17", "--fmad=false")


@constant_while_compiling
@cache
def unavailable() -> str:
    """Return a clause that says why nothing can be compiled or launched here, or ''."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    for name, load in (
        ("NVRTC, which torch's CUDA builds bring,", _compiler),
        ("the driver's library", _driver_library),
    ):
        try:
            load()
        except OSError as error:
            return f"{name} cannot be loaded: {error}"
    return ""


@cache
def _compiler() -> ctypes.CDLL:
    """Load libnvrtc of torch's CUDA version.

    The wheel's folder is nvidia/cu13/lib or nvidia/cuda_nvrtc/lib beside torch. If it does not
    exist, the loader's search path decides.
    """
    # Two libraries by name, not libcaffe2_nvrtc.so: that one binds every symbol at once, and fails
    # if one is missing.
    file = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    beside = sorted((Path(torch.__file__).parents[1] / "nvidia").glob(f"*/lib/{file}"))
    return ctypes.CDLL(str(beside[0]) if beside else file)


@cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compiled(
    name: str, source: str, capability: tuple[int, int], options: Sequence[str] = OPTIONS
) -> tuple[bytes, str]:
    """Compile a source for a compute capability. Returns (cubin, compiler log).

    Raises BackendError with the compiler's log if the source does not compile.
    """
    library, program = _compiler(), ctypes.c_void_p()
    given = [
        option.encode()
        for option in (f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *options)
    ]
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
    )
    try:
        status = library.nvrtcCompileProgram(
            program, len(given), (ctypes.c_char_p * len(given))(*given)
        )
        words = (
            _read_output(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode()
        )
        if status:
            raise BackendError(
                f"nvrtc: {name} does not compile for compute capability {capability[0]}.{capability[1]}: {words.strip()}. "
                "Report this, with the version of torch; backend='reference' computes the same.",
                code="nvrtc.compile",
            )
        return _read_output(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), words
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read_output(size_of: Any, write: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(write(program, text))
    return text.raw


def _check(status: int) -> None:
    if status:
        text = _compiler().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise BackendError(
            f"nvrtc: {text(status).decode()}. Reinstall torch: NVRTC is a part of its CUDA builds.",
            code="nvrtc.missing",
        )


def _check_driver(status: int, what: str) -> None:
    if status:
        words = ctypes.c_char_p()
        _driver_library().cuGetErrorString(status, ctypes.byref(words))
        reason = words.value.decode() if words.value else f"error {status}"
        raise BackendError(
            f"CUDA: {what} failed: {reason}. Update the driver, or choose another backend.",
            code="cuda.failed",
        )


@dataclass(frozen=True)
class CudaSource:
    """One CUDA C++ file of the package; its kernels are extern "C" functions."""

    package: str
    file: str

    @property
    def text(self) -> str:
        return resources.files(self.package).joinpath(self.file).read_text(encoding="utf-8")

    def binary(self, capability: tuple[int, int]) -> bytes:
        """Return the cubin for this compute capability.

        Compiling takes some seconds. The cubin of an earlier process is reused.
        """
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(_compiler().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        facts = (self.text, *OPTIONS, str(capability), f"{major.value}.{minor.value}")
        stem = (
            f"{Path(self.file).stem}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:32]}"
        )
        place = cache_folder()
        if (
            found := next(filter(is_whole, sorted(place.glob(f"{stem}-*.cubin"))), None)
        ) is not None:
            return reading.bytes_of(found, BUILT)
        made, _ = compiled(self.file, self.text, capability)
        target = place / f"{stem}-{digest(made)}.cubin"
        # Written under a name of this process alone and renamed: several processes may compile the
        # kernel at once, and none may read half a file.
        draft = temporary(target)
        try:
            write_synced(draft, made)
            # Explicit, whatever the umask: `is_whole` refuses files that others may write to.
            draft.chmod(0o600)
            publish(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        return made

    def launch(
        self,
        kernel: str,
        programs: int,
        threads: int,
        device: torch.device,
        *arguments: Tensor | int | None,
    ) -> None:
        """Launch `kernel` on the current stream of `device`.

        Tensors are passed by address, None as a null pointer, and integers as int32.
        """
        if dry_run_on() is not None:
            return
        values = [
            ctypes.c_int(x) if isinstance(x, int) else ctypes.c_void_p(address(x))
            for x in arguments
        ]
        # cuLaunchKernel takes an array of pointers to the arguments; `values` must stay alive until
        # it returns.
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        with torch.cuda.device(device):  # cuLaunchKernel uses the current context
            function = _function(self, kernel, torch.cuda.current_device())
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            launched = _driver_library().cuLaunchKernel(
                function, programs, 1, 1, threads, 1, 1, 0, stream, pointers, None
            )
        _check_driver(launched, f"the launch of {kernel}")


@cache
def _function(source: CudaSource, kernel: str, index: int) -> ctypes.c_void_p:
    """Load a kernel into the context of device `index`, which must be current."""
    function = ctypes.c_void_p()
    _check_driver(
        _driver_library().cuModuleGetFunction(
            ctypes.byref(function), _module(source, index), kernel.encode()
        ),
        f"the search for {kernel} in {source.file}",
    )
    return function


@cache
def _module(source: CudaSource, index: int) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    made = source.binary(torch.cuda.get_device_capability(index))
    _check_driver(
        _driver_library().cuModuleLoadData(ctypes.byref(module), made),
        f"the loading of {source.file}",
    )
    return module
