"""C++ kernels of the ops on the CPU: their sources, and `Library`, which builds and calls them (build.py)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import address, dry_run_on
from narrowgauge.errors import BackendError
from narrowgauge.ops.registry import Refusal


@dataclass(frozen=True, eq=False)
class Library:
    """The functions narrowgauge_NAME(first, last, ...) of C++ sources, each for rows of a result; built when first asked.

    signatures  NAME -> the types of the arguments after the rows
    package     whose folder has the sources
    instead     what a user does without it
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
    def missing(self) -> str:
        """Why there is no library here, or ''."""
        try:
            assert self.loaded is not None
        except BackendError as error:
            return str(error)
        return ""

    def refuse(self, device: str) -> Refusal | None:
        """Why it cannot be called for tensors on a device of this type, or None."""
        if torch.compiler.is_compiling():
            return Refusal("compiling", "torch.compile cannot look into it")
        if device != "cpu":
            return Refusal("device", "for the CPU alone")
        return Refusal("toolchain", self.missing) if self.missing else None

    def call(self, name: str, rows: int, elements: int, *given: Any) -> None:
        """NAME over all rows, on as many threads as the elements are worth. Tensors are given by their addresses."""
        from narrowgauge.ops.cpp.build import in_shares, parts

        if dry_run_on() is not None:
            return
        function = getattr(self.loaded, f"narrowgauge_{name}")
        values = [address(each) if each is None or isinstance(each, Tensor) else each for each in given]
        count = max(min(parts(elements), rows), 1)
        in_shares(count, lambda k: function(rows * k // count, rows * (k + 1) // count, *values))
