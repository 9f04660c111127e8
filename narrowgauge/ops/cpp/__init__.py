"""C++ kernels of the operators on the CPU: the sources, and the class that builds and calls them.

build.py compiles the sources, threads.py runs them on torch's threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import PLAIN, address, dry_run_on
from narrowgauge.errors import BackendError
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.cpp.threads import PackedCall

ELEMENTS_PER_THREAD = 1 << 16  # with less work per thread, the thread costs more than it saves


_builds_nothing = ContextVar("_builds_nothing", default=False)


@contextmanager
def without_building() -> Iterator[None]:
    """Build no library in this block: with a compiler, one that is not loaded yet is not refused."""
    token = _builds_nothing.set(True)
    try:
        yield
    finally:
        _builds_nothing.reset(token)


def counts_unbuilt() -> bool:
    """Return True within `without_building` if a compiler is installed."""
    if not _builds_nothing.get():
        return False
    from narrowgauge.ops.cpp.build import has_compiler

    return has_compiler()


def parts(elements: int) -> int:
    """Return the number of threads that this much work justifies, at least 1."""
    return max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD))


@dataclass(frozen=True, eq=False)
class Library:
    """Functions of C++ sources that compute rows `first` to `last` of a result.

    The exported symbol of NAME is narrowgauge_NAME(first, last, ...). The library is built when it
    is first used.

    sources     files in `package`; the first is compiled, the others are included by it
    purpose     text for error messages
    signatures  {NAME: ctypes types of the arguments that follow `first` and `last`}
    package     Python package that contains the sources
    instead     text for error messages: the alternative without a compiler
    """

    sources: tuple[str, ...]
    purpose: str
    signatures: dict[str, tuple[Any, ...]]
    package: str = "narrowgauge.ops.cpp"
    instead: str = "use the reference, which is slower"

    @cached_property
    def loaded(self) -> ctypes.CDLL:
        from narrowgauge.ops.cpp.build import library

        found = library(self.package, self.sources, self.purpose, self.instead)
        for name, arguments in self.signatures.items():
            function = getattr(found, f"narrowgauge_{name}")
            function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64, *arguments), None
        return found

    @cached_property
    def calls(self) -> dict[str, PackedCall]:
        """{NAME: how it is called}."""
        from narrowgauge.ops.cpp.threads import PackedCall

        return {
            name: PackedCall.of(getattr(self.loaded, f"narrowgauge_{name}"), arguments)
            for name, arguments in self.signatures.items()
        }

    @cached_property
    def missing(self) -> str:
        """Reason why the library cannot be built or loaded here, or ''."""
        try:
            assert self.loaded is not None
        except BackendError as error:
            return str(error)
        return ""

    @property
    def is_unbuilt(self) -> bool:
        """True within `without_building` if the library could be built and nobody asked for it yet."""
        return counts_unbuilt() and "missing" not in self.__dict__

    def refuse(self, device: str, in_operator: bool = False) -> Refusal | None:
        """Return the reason why the library is unusable on this type of device, or None.

        in_operator  True if compiled code calls the library through an operator
        """
        if torch.compiler.is_compiling() and not in_operator:
            # Dynamo cannot trace ctypes calls, and Inductor fuses the definition itself.
            return Refusal("compiling", "torch.compile cannot look into it")
        if device != "cpu":
            return Refusal("device", "for the CPU alone")
        if self.is_unbuilt:
            return None
        return Refusal("toolchain", self.missing) if self.missing else None

    def call(self, name: str, rows: int, elements: int, *given: Any) -> None:
        """Run function NAME over all rows, with as many threads as `elements` justify.

        Tensors, structures and arrays of ctypes are passed by address. A dry run calls nothing.
        """
        if dry_run_on() is not None:
            return
        values, (places, order, pack, run) = list(given), self.calls[name]
        for place in places:
            each = given[place]
            if isinstance(each, Tensor):
                start = each.data_ptr() if type(each).__torch_dispatch__ is PLAIN else 0
                # `address` raises if the values of the tensor are not at its address.
                values[place] = address(each) if start == 0 or each.is_neg() else start
            elif each is None:
                values[place] = 0
            elif isinstance(each, ctypes.Structure | ctypes.Array):
                values[place] = ctypes.addressof(each)
        # Equal shares of whole rows: results do not depend on the number of threads.
        # More threads than rows would get empty ranges.
        is_short = elements < 2 * ELEMENTS_PER_THREAD
        run(pack(1 if is_short else max(min(parts(elements), rows), 1), rows, *order(values)))
