"""narrowgauge: train Transformers on narrow numbers.

    import narrowgauge as ng
    ng.convert(model, "fp8-current")      # one line, any nn.Module
    print(ng.describe(model))             # what each Linear became, and why
    ...
    optimizer.step()
    ng.advance(model)                     # after each optimizer step

Importing configures nothing, reads no environment variable, and does not import torch until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge import formats, memory, optim, recipes
    from narrowgauge.conversion import advance, convert, suspended
    from narrowgauge.conversion.description import describe
    from narrowgauge.conversion.switching import switch
    from narrowgauge.nn.linear import QLinear, linear
    from narrowgauge.ops.mm import mm
    from narrowgauge.ops.quantize import dequantize, quantize
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast, Gemm, Recipe

__version__ = "0.1.0"

# Public name -> where it lives; a module lives in itself.
_HOMES = {
    "formats": "formats",
    "recipes": "recipes",
    "optim": "optim",
    "memory": "memory",
    "Cast": "recipe",
    "Gemm": "recipe",
    "Recipe": "recipe",
    "QTensor": "qtensor",
    "quantize": "ops.quantize",
    "dequantize": "ops.quantize",
    "mm": "ops.mm",
    "linear": "nn.linear",
    "QLinear": "nn.linear",
    "convert": "conversion",
    "describe": "description",
    "suspended": "conversion",
    "advance": "conversion",
    "switch": "switching",
}

__all__ = [
    "Cast",
    "Gemm",
    "QLinear",
    "QTensor",
    "Recipe",
    "advance",
    "convert",
    "dequantize",
    "describe",
    "formats",
    "linear",
    "memory",
    "mm",
    "optim",
    "quantize",
    "recipes",
    "suspended",
    "switch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    home = import_module(f"narrowgauge.{_HOMES[name]}")
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
