"""`checked`: a kernel that is examined on a device before it is first taken there (selfcheck.py, which is imported there alone)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from narrowgauge.ops.registry import Kernel, Refusal, constant_while_compiling

if TYPE_CHECKING:
    from narrowgauge.ops.selfcheck import Check, OnDevice

    Spec = TypeVar("Spec", bound=OnDevice)

# Whether torch.compile hands frozen dataclasses to functions whose results it takes as constants (`constant_while_compiling`).
TAKES_DATACLASSES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_CANNOT_NAME = (
    f"it cannot be checked while torch {torch.__version__} traces, for formats and scale rules that are not narrowgauge's own; "
    "torch 2.13 or eager mode can"
)


def checked(op: str, kernel: Kernel[Spec], load: Callable[[], Check[Spec]]) -> Kernel[Spec]:
    """The kernel, refused as well where it is wrong on the device at hand. load: the check, asked for there alone."""

    @constant_while_compiling
    def failure(device_type: str, index: int, *kind: Hashable) -> str | None:
        from narrowgauge.ops import selfcheck

        return selfcheck.failure(op, kernel, load(), kind, torch.device(device_type, index))

    def refuse(spec: Spec) -> Refusal | None:
        refusal = kernel.refuse(spec)
        if refusal is not None or spec.device.index is None:
            return refusal
        kind: Any = _kind(spec, load())
        if isinstance(kind, Refusal):
            return kind
        reason = None if kind is None else failure(spec.device.type, spec.device.index, *kind)
        return None if reason is None else Refusal("failed-check", reason)

    return replace(kernel, refuse=refuse, check=load)


def _kind(spec: Spec, check: Check[Spec]) -> tuple[Hashable, ...] | Refusal | None:
    if check.constant is None or TAKES_DATACLASSES or not torch.compiler.is_compiling():
        return check.kind(spec)
    return check.constant(spec) or Refusal("compiling", _CANNOT_NAME)
