"""narrowgauge: train Transformers in low precision (FP8, INT8, 4-bit).

    import narrowgauge as ng
    ng.convert(model, "fp8-current")      # one line, any nn.Module
    print(ng.describe(model))             # the recipe of each Linear, or the reason for 16 bits
    ...
    optimizer.step()
    ng.advance(model)                     # after each optimizer step

Importing configures nothing and reads no environment variable. torch is imported at the first use
of a public name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge import distributed, export, formats, memory, optim, recipes
    from narrowgauge.conversion import advance, convert, suspended
    from narrowgauge.conversion.description import describe
    from narrowgauge.conversion.like import convert_like
    from narrowgauge.conversion.pretrained_folder import save_pretrained
    from narrowgauge.conversion.switching import switch
    from narrowgauge.distributed import distribute
    from narrowgauge.lab.guard.loop import Guard
    from narrowgauge.nn.linear import QLinear, linear
    from narrowgauge.ops.mm import mm
    from narrowgauge.ops.quantize import dequantize, quantize
    from narrowgauge.plan.functions import plan
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast, Gemm, Recipe

__version__ = "0.1.0"

__all__ = [
    "Cast", "Gemm", "Guard", "QLinear", "QTensor", "Recipe", "advance", "convert", "convert_like", "dequantize", "describe",
    "distribute", "distributed", "export", "formats", "linear", "memory", "mm", "optim", "plan", "quantize", "recipes",
    "save_pretrained", "suspended", "switch",
]  # fmt: skip

# Module -> the public names that it defines. Public modules (formats, optim, ...) are not listed
# here.
_HOMES = {
    "recipe": ("Cast", "Gemm", "Recipe"),
    "qtensor": ("QTensor",),
    "ops.quantize": ("quantize", "dequantize"),
    "ops.mm": ("mm",),
    "nn.linear": ("linear", "QLinear"),
    "conversion": ("convert", "suspended", "advance"),
    "conversion.description": ("describe",),
    "conversion.like": ("convert_like",),
    "conversion.pretrained_folder": ("save_pretrained",),
    "conversion.switching": ("switch",),
    "lab.guard.loop": ("Guard",),
    "distributed": ("distribute",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), name)
    found = import_module(f"narrowgauge.{home}")
    # Stored as a global, so that this function runs once for each name.
    globals()[name] = value = found if home == name else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
