"""C++ kernels of the operators on the CPU: the sources, and the class that builds and calls them.

build.py compiles the sources, threads.py runs them on torch's threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import PLAIN, address, dry_run_on
from narrowgauge.errors import BackendError
from narrowgauge.ops.registry import Refusal

NUMBERS = (ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_float, ctypes.c_double)
ELEMENTS_PER_THREAD = 1 << 16  # with less work per thread, the thread costs more than it saves


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
    def functions(self) -> dict[str, Callable[..., None]]:
        """{NAME: call(first, last, ...)}."""
        return {name: getattr(self.loaded, f"narrowgauge_{name}") for name in self.signatures}

    @cached_property
    def on_threads(self) -> dict[str, tuple[tuple[int, ...], Callable[..., None]]]:
        """{NAME: (places of addresses among the arguments, call(shares, rows, ...))}."""
        from narrowgauge.ops.cpp.threads import on_threads

        found = {}
        for name, arguments in self.signatures.items():
            function = self.functions[name]
            run = on_threads(function, arguments) or partial(_in_shares, function)
            places = (place for place, kind in enumerate(arguments) if kind not in NUMBERS)
            found[name] = tuple(places), run
        return found

    @cached_property
    def missing(self) -> str:
        """Reason why the library cannot be built or loaded here, or ''."""
        try:
            assert self.loaded is not None
        except BackendError as error:
            return str(error)
        return ""

    def refuse(self, device: str, in_operator: bool = False) -> Refusal | None:
        """Return the reason why the library is unusable on this type of device, or None.

        in_operator  True if compiled code calls the library through an operator
        """
        if torch.compiler.is_compiling() and not in_operator:
            # Dynamo cannot trace ctypes calls, and Inductor fuses the definition itself.
            return Refusal("compiling", "torch.compile cannot look into it")
        if device != "cpu":
            return Refusal("device", "for the CPU alone")
        return Refusal("toolchain", self.missing) if self.missing else None

    def call(self, name: str, rows: int, elements: int, *given: Any) -> None:
        """Run function NAME over all rows, with as many threads as `elements` justify.

        Tensors, structures and arrays of ctypes are passed by address. A dry run calls nothing.
        """
        if dry_run_on() is not None:
            return
        values = list(given)
        places, run = self.on_threads[name]
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
        run(1 if is_short else max(min(parts(elements), rows), 1), rows, *values)


def _in_shares(function: Callable[..., None], count: int, rows: int, *values: Any) -> None:
    """Call function(first, last, ...) where torch's threads cannot be used."""
    if count == 1:
        function(0, rows, *values)
        return
    from narrowgauge.ops.cpp.build import in_shares

    in_shares(count, lambda k: function(rows * k // count, rows * (k + 1) // count, *values))
